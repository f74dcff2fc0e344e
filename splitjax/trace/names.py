"""Names the dims of parameters, from the operations that use them back through casts, reshapes, slices and scans.

Uses of weights with a name per dim ("in", "out", "vocab", ...) go in; names per dim of every parameter come out, by
which rules say which dim to shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from splitjax.primitives.dims import DimMap, Label
from splitjax.primitives.operation import Trait
from splitjax.trace.flatten import FlatStep, Op
from splitjax.trace.flow import ValueFacts
from splitjax.trace.links import Linked
from splitjax.trace.uses import RawUse

Names = tuple[str | None, ...]


def name_dims(
    flat: FlatStep, linked: Linked, flow: ValueFacts, uses: Sequence[RawUse], sources: Sequence[frozenset[int]]
) -> dict[int, Names]:
    """Names the dims of every parameter.

    **Arguments:**

    - `flat`, `linked`, `flow`: the flat step, its links, and facts about its values.
    - `uses`: all uses of weights in program order, with names of the weight operand's dims.
    - `sources`: per value the parameters (leaf indices) that it is made of.

    **Returns** leaf index -> name (or None) per dim. Where uses disagree, the first in the program decides (a table
    that is looked up and then multiplied by has a vocabulary); a backward pass only names what no forward use does.
    """
    named: dict[int, Names] = {}
    for backward in (False, True):
        seeds: dict[int, list[RawUse]] = {}
        for use in uses:
            if use.backward == backward:
                seeds.setdefault(use.op, []).append(use)
        of_values = _walk_back(flat, linked, flow, seeds, sources) if seeds else {}
        for index, is_param in enumerate(flow.is_param):
            names = of_values.get(flat.inputs[index])
            if is_param and names is not None and any(names) and index not in named:
                named[index] = names
    for index, is_param in enumerate(flow.is_param):
        if is_param:
            named[index] = _finish(named.get(index), flat.shapes[flat.inputs[index]])
    return named


def _walk_back(
    flat: FlatStep, linked: Linked, flow: ValueFacts, seeds: dict[int, list[RawUse]], sources: Sequence[frozenset[int]]
) -> dict[int, Names]:
    """Carries the names that uses (`seeds`: by operation) give back to the values that weights are made of."""
    names: dict[int, Names] = {}

    def add(value: int, dim_names: Sequence[str | None]) -> None:
        if any(dim_names):
            known = names.get(value, (None,) * len(dim_names))
            names[value] = tuple(new or old for new, old in zip(dim_names, known, strict=True))

    for index in range(len(flat.ops) - 1, -1, -1):
        op = flat.ops[index]
        for use in seeds.get(index, ()):
            add(op.inputs[use.weight], use.names)
        if op.primitive == "_scan_in" and sources[op.inputs[0]]:
            own = names.get(op.outputs[0], (None,) * len(flat.shapes[op.outputs[0]]))
            if flow.effective[op.outputs[0]]:
                add(op.inputs[0], ("stack", *own))
            continue
        dim_map = linked.maps[index]
        if op.primitive == "_carry_back" or dim_map is None:
            continue
        results = [names.get(v) for v in op.outputs]
        if not any(results):
            continue
        by_label = _label_names(dim_map, results)
        for k, v in enumerate(op.inputs):
            if sources[v]:
                add(v, _operand_names(op, dim_map, k, by_label, results, flat))
    return names


def _label_names(dim_map: DimMap, results: Sequence[Names | None]) -> dict[Label, str]:
    """Names the labels of an operation after the dims of its results."""
    by_label: dict[Label, str] = {}
    for labels, names in zip(dim_map.outputs, results, strict=True):
        for dim, name in zip(labels, names or (None,) * len(labels), strict=True):
            if name:
                for label in dim:
                    by_label.setdefault(label, name)
    return by_label


def _operand_names(
    op: Op, dim_map: DimMap, k: int, by_label: Mapping[Label, str], results: Sequence[Names | None], flat: FlatStep
) -> list[str | None]:
    """Names the dims of operand `k` after the labels, or the dims of which it is a part."""
    own = [next((by_label[label] for label in dim if label in by_label), None) for dim in dim_map.inputs[k]]
    # A part of a dim, and a dim made of parts, have the dim's name.
    if Trait.RESIZES in op.facts.traits and len(own) == len(flat.shapes[op.outputs[0]]):
        parts = [names for names in results if names]
        own = [name or next((names[d] for names in parts if names[d]), None) for d, name in enumerate(own)]
    return own


def _finish(names: Names | None, shape: tuple[int, ...]) -> Names:
    """Completes the names of a parameter's dims."""
    if names is None:
        return (None,) * len(shape)
    # Layers that are picked from a stack one by one leave its leading dim without a name.
    return tuple(
        "stack" if name is None and d == 0 and len(shape) > 2 and any(names[1:]) else name
        for d, name in enumerate(names)
    )
