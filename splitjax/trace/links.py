"""Operations -> links between dims, by the rules of the registry; strengths are decided afterwards (`flow.py`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from splitjax import _compat
from splitjax.errors import SplitjaxError, TraceError
from splitjax.trace.classes import DimRef
from splitjax.trace.dims import DIM_RULES, DimMap, Label, Registry
from splitjax.trace.flatten import Flat, Op


@dataclasses.dataclass(frozen=True, slots=True)
class RawLink:
    """A link with the operation and operand (-1: between results, or outside any operation) that causes it."""

    left: tuple[DimRef, ...]
    right: tuple[DimRef, ...]
    op: int
    operand: int


@dataclasses.dataclass(frozen=True)
class Linked:
    """All links of a flat step. `shapes` also holds virtual values that stand for the factors of compound dims."""

    links: tuple[RawLink, ...]
    shapes: tuple[tuple[int, ...], ...]
    mixing: tuple[bool, ...]  # per operation
    joins: tuple[bool, ...]
    unknown: tuple[int, ...]  # operations without a rule


def link(flat: Flat, registry: Registry = DIM_RULES) -> Linked:
    """Applies the dim rule of every operation."""
    links: list[RawLink] = []
    shapes = list(flat.shapes)
    mixing, joins, unknown = [], [], []
    for index, op in enumerate(flat.ops):
        rule = registry.get(op.primitive)
        if rule is None:
            unknown.append(index)
            mixing.append(True)
            joins.append(False)
            continue
        dim_map = _apply(rule, op, flat)
        mixing.append(dim_map.mixing)
        joins.append(dim_map.joins)
        links.extend(_links_of(index, op, dim_map, shapes))
    return Linked(tuple(links), tuple(shapes), tuple(mixing), tuple(joins), tuple(unknown))


def _apply(rule, op: Op, flat: Flat) -> DimMap:
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
            f"the dim rule of {op.primitive!r} does not fit: {error}", value=(inputs, outputs),
            place=_compat.source_line(op.eqn) if op.eqn is not None else "",
            remedy=f"correct it with splitjax.register_dims({op.primitive!r}, ...)",
        ) from error
    return dim_map


def _links_of(index: int, op: Op, dim_map: DimMap, shapes: list[tuple[int, ...]]) -> list[RawLink]:
    compound: dict[Label, DimRef] = {}
    if dim_map.sizes:
        factors = [label for t in (*dim_map.inputs, *dim_map.outputs) for dim in t if len(dim) > 1 for label in dim]
        compound = {label: (len(shapes), k) for k, label in enumerate(dict.fromkeys(factors))}
        if compound:
            shapes.append(tuple(dim_map.sizes[label] for label in compound))
    links: list[RawLink] = []
    anchor: dict[Label, DimRef] = dict(compound)
    # Results first: they are what an operand's dim is linked to, so that its strength can differ from its siblings'.
    tensors = [(-1, v, t) for v, t in zip(op.outputs, dim_map.outputs, strict=True)]
    tensors += [(k, v, t) for k, (v, t) in enumerate(zip(op.inputs, dim_map.inputs, strict=True))]
    for operand, value, labels in tensors:
        for position, dim in enumerate(labels):
            here = ((value, position),)
            if shapes[value][position] == 1 or not dim:
                continue
            if len(dim) > 1:
                links.append(RawLink(here, tuple(compound[label] for label in dim), index, operand))
            elif dim[0] in anchor:
                if anchor[dim[0]] != here[0]:
                    links.append(RawLink(here, (anchor[dim[0]],), index, operand))
            else:
                anchor[dim[0]] = here[0]
    return links


def tie(pairs: Mapping[int, int] | Sequence[tuple[int, int]], shapes: Sequence[tuple[int, ...]]) -> list[RawLink]:
    """Links between values of the same shape that are the same storage (a state leaf and its new value)."""
    items = pairs.items() if isinstance(pairs, Mapping) else pairs
    return [
        RawLink(((a, d),), ((b, d),), -1, -1)
        for a, b in items
        if a != b and shapes[a] == shapes[b]
        for d in range(len(shapes[a]))
    ]
