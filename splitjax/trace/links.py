"""Links the dims of a flat step by the dim rules of its operations.

Operations go in; links between runs of dims come out, each with the operation that causes it, from which
`strengths.py` decides afterwards how binding it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from splitjax.errors import SplitjaxError, TraceError
from splitjax.primitives.dims import DimMap, DimRule, Label, Shapes
from splitjax.primitives.dims_elementwise import elementwise
from splitjax.trace.classes import DimRef
from splitjax.trace.flatten import FlatStep, Op


class RawLink(NamedTuple):
    """Links two runs of dims, and says what causes the link.

    - `left`, `right`: the runs, major first, as (value, dim).
    - `op`, `operand`: the operation and the operand that cause it; -1 between results, or outside any operation.
    - `contracted`: whether it is between operands only: no result has the label.
    """

    left: tuple[DimRef, ...]
    right: tuple[DimRef, ...]
    op: int
    operand: int
    contracted: bool = False


@dataclasses.dataclass(frozen=True)
class Linked:
    """Holds all links of a flat step.

    - `links`: the links in program order.
    - `shapes`: shapes of all values, and behind them of virtual values that stand for the factors of compound dims.
    - `maps`: per operation the labels of its dims; None without a rule.
    - `mixing`, `joins`: per operation whether it mixes dims, and whether it joins operands elementwise.
    - `unknown`: indices of operations without a rule.
    """

    links: tuple[RawLink, ...]
    shapes: tuple[tuple[int, ...], ...]
    maps: tuple[DimMap | None, ...]
    mixing: tuple[bool, ...]
    joins: tuple[bool, ...]
    unknown: tuple[int, ...]


def link(flat: FlatStep) -> Linked:
    """Applies its dim rule to every operation of `flat`.

    Raises `TraceError` where a rule does not fit its operation.
    """
    links: list[RawLink] = []
    shapes = list(flat.shapes)
    maps: list[DimMap | None] = []
    unknown = []
    alike = _Elementwise()
    for index, op in enumerate(flat.ops):
        rule = op.facts.dims
        if rule is None:
            unknown.append(index)
            maps.append(None)
            continue
        if rule is elementwise:
            dim_map, joined = alike.of(op, flat)
            maps.append(dim_map)
            values = (*op.outputs, *op.inputs)
            links += [
                RawLink(((values[t], d),), ((values[to], d),), index, operand)
                for t, d, to, operand in joined
                if values[t] != values[to]
            ]
            continue
        dim_map = _apply(rule, op, flat)
        maps.append(dim_map)
        links.extend(_links_of(index, op, dim_map, shapes))
    # What an unknown operation does is not known, so its result counts as a new representation.
    mixing = tuple(dim_map is None or dim_map.mixing for dim_map in maps)
    joins = tuple(dim_map is not None and dim_map.joins for dim_map in maps)
    return Linked(tuple(links), tuple(shapes), tuple(maps), mixing, joins, tuple(unknown))


# Of an elementwise operation the dims that are linked: (tensor, dim, tensor that it is linked to, operand), where
# tensors are numbered results first, and the operand is that of a `RawLink`.
Joined = tuple[tuple[int, int, int, int], ...]


class _Elementwise:
    """Keeps what is known of elementwise operations by their shapes, from which their labels and links follow: most
    operations of a step are of this kind, and few differ in their shapes. Lives for one call of `link`."""

    def __init__(self) -> None:
        self._by_shapes: dict[tuple[int, Shapes], tuple[DimMap, Joined]] = {}  # of the results, and the operands
        # Labels depend on which dims have size 1 alone.
        self._by_ones: dict[tuple[int, tuple[tuple[bool, ...], ...]], tuple[DimMap, Joined]] = {}

    def of(self, op: Op, flat: FlatStep) -> tuple[DimMap, Joined]:
        """Returns the labels of an elementwise operation of `flat`, and which of its dims are linked."""
        shapes = flat.shapes
        num_results, own = len(op.outputs), tuple([shapes[v] for v in (*op.outputs, *op.inputs)])
        known = self._by_shapes.get((num_results, own))
        if known is None:
            ones = num_results, tuple(tuple(size == 1 for size in shape) for shape in own)
            known = self._by_ones.get(ones)
            if known is None:
                dim_map = _apply(elementwise, op, flat)
                known = self._by_ones[ones] = dim_map, _joined(dim_map, own)
            self._by_shapes[num_results, own] = known
        return known


def _joined(dim_map: DimMap, shapes: Sequence[tuple[int, ...]]) -> Joined:
    """Returns which dims the labels of an elementwise operation link, each to the first that has its label, results
    first. `shapes`: of its results, and behind them of its operands."""
    anchor: dict[Label, tuple[int, int]] = {}
    joined: list[tuple[int, int, int, int]] = []
    for tensor, labels in enumerate((*dim_map.outputs, *dim_map.inputs)):
        for position, dim in enumerate(labels):
            if dim and shapes[tensor][position] != 1:
                first, at = anchor.setdefault(dim[0], (tensor, position))
                assert at == position, "dims of elementwise operations keep their place"
                if first != tensor:
                    joined.append((tensor, position, first, max(tensor - len(dim_map.outputs), -1)))
    return tuple(joined)


def _apply(rule: DimRule, op: Op, flat: FlatStep) -> DimMap:
    """Applies a rule to an operation; raises `TraceError` where it fails or its labels do not fit the ranks."""
    inputs = [flat.shapes[v] for v in op.inputs]
    outputs = [flat.shapes[v] for v in op.outputs]
    try:
        dim_map = rule(inputs, outputs, op.params)
        ranks = [len(t) for t in (*dim_map.inputs, *dim_map.outputs)]
        if ranks != [len(s) for s in (*inputs, *outputs)]:
            raise ValueError(f"labels for ranks {ranks}")
    except SplitjaxError:
        raise
    except Exception as error:
        raise TraceError(
            f"the dim rule of {op.primitive!r} does not fit: {error}",
            value=(inputs, outputs),
            place=op.source,
            remedy=f"correct it with splitjax.register_dims({op.primitive!r}, ...)",
        ) from error
    return dim_map


def _links_of(index: int, op: Op, dim_map: DimMap, shapes: list[tuple[int, ...]]) -> list[RawLink]:
    """Links the dims of one operation; adds the shape of a virtual value to `shapes` where dims are compound."""
    compound: dict[Label, DimRef] = {}
    if dim_map.sizes:
        factors = [label for t in (*dim_map.inputs, *dim_map.outputs) for dim in t if len(dim) > 1 for label in dim]
        compound = {label: (len(shapes), k) for k, label in enumerate(dict.fromkeys(factors))}
        if compound:
            shapes.append(tuple(dim_map.sizes[label] for label in compound))
    links: list[RawLink] = []
    anchor: dict[Label, DimRef] = dict(compound)
    kept = {label for labels in dim_map.outputs for dim in labels for label in dim} if dim_map.mixing else None
    # Results first: they are what an operand's dim is linked to, so that its strength can differ from its siblings'.
    tensors = [(-1, v, t) for v, t in zip(op.outputs, dim_map.outputs, strict=True)]
    tensors += [(k, v, t) for k, (v, t) in enumerate(zip(op.inputs, dim_map.inputs, strict=True))]
    for operand, value, labels in tensors:
        shape = shapes[value]
        for position, dim in enumerate(labels):
            if shape[position] == 1 or not dim:
                continue
            label = dim[0]
            contracted = kept is not None and label not in kept
            if len(dim) > 1:
                links.append(
                    RawLink(
                        ((value, position),), tuple([compound[factor] for factor in dim]), index, operand, contracted
                    )
                )
            elif label not in anchor:
                anchor[label] = (value, position)
            elif anchor[label] != (value, position):
                links.append(RawLink(((value, position),), (anchor[label],), index, operand, contracted))
    return links


def tie(pairs: Mapping[int, int] | Sequence[tuple[int, int]], shapes: Sequence[tuple[int, ...]]) -> list[RawLink]:
    """Links the dims of values of the same shape that are the same storage (a state leaf and its new value).

    `pairs` are of value numbers, and `shapes` has the shape of each value. Pairs of different shapes are left out.
    """
    items = pairs.items() if isinstance(pairs, Mapping) else pairs
    return [
        RawLink(((a, d),), ((b, d),), -1, -1)
        for a, b in items
        if a != b and shapes[a] == shapes[b]
        for d in range(len(shapes[a]))
    ]
