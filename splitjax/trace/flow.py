"""What depends on what: example-carrying values, roles of leaves, the update region, residual operands.

These decide how strong each link is (see `trace.graph`). The measurements behind the two cuts: one union-find ties half of
a Transformer's parameter dims together through its residual stream; dropping cotangent sums (`add_any`) and the skip operand
of a join leaves the groups that people shard by hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from splitjax.trace.classes import Atoms, Strength
from splitjax.trace.flatten import Flat
from splitjax.trace.links import Linked, RawLink


@dataclasses.dataclass(frozen=True)
class Argument:
    """What the caller knows of one flat argument of the step."""

    path: str
    is_state: bool
    is_batch: bool


@dataclasses.dataclass(frozen=True)
class Flow:
    """Per value: does it carry the example dim, and does it depend on the batch at all. Per leaf: is it a parameter."""

    carrying: tuple[bool, ...]
    data: tuple[bool, ...]
    is_param: tuple[bool, ...]


def example_labels(flat: Flat, arguments: Sequence[Argument], atoms: Atoms, soft: Sequence[int]) -> frozenset[int]:
    """The soft classes of the leading dims of all batch arguments."""
    found = set()
    for value, argument in zip(flat.inputs, arguments, strict=True):
        if argument.is_batch and flat.shapes[value]:
            found.update(soft[a] for a in atoms.dim(value, 0))
    return frozenset(found)


def forward(flat: Flat, seeds: Sequence[int], stop: Callable[[int], bool] = lambda v: False) -> list[bool]:
    """The values that depend on the seeds; a value for which `stop` holds does not pass the dependence on."""
    reached = [False] * len(flat.shapes)
    for value in seeds:
        reached[value] = True
    changed = True
    while changed:  # a second round carries what a loop hands to its next iteration
        changed = False
        for op in flat.ops:
            if any(reached[v] for v in op.inputs[:1 if op.primitive == "_carry_back" else None]):
                targets = op.inputs[1:] if op.primitive == "_carry_back" else op.outputs
                for v in targets:
                    if not reached[v] and not stop(v):
                        reached[v] = True
                        changed |= op.primitive == "_carry_back"
    return reached


def first_effect(flat: Flat, goal: Sequence[bool]) -> list[int | None]:
    """Per value the index of the first operation whose result is a goal value and that the value influences."""
    first: list[int | None] = [None] * len(flat.shapes)
    for _ in range(2 if flat.carried else 1):
        for index in range(len(flat.ops) - 1, -1, -1):
            op = flat.ops[index]
            if op.primitive == "_carry_back":
                later = [first[op.inputs[1]]]
                sources = op.inputs[:1]
            else:
                later = [index if goal[v] else first[v] for v in op.outputs]
                sources = op.inputs
            known = [i for i in later if i is not None]
            if known:
                for v in sources:
                    first[v] = min(known) if first[v] is None else min(first[v], min(known))
    return first


def analyse(flat: Flat, arguments: Sequence[Argument], atoms: Atoms, soft: Sequence[int], examples: frozenset[int]) -> Flow:
    """Finds example-carrying values and parameters.

    A parameter is a floating-point state array that influences some example-carrying value (optimizer state never does
    within one update), or that a gradient boundary differentiates. In a step with several plain updates the later forward
    passes make optimizer state influence examples too: of leaves with the same shape and path ending, only the one that does
    so first is the parameter.
    """
    num_real = len(flat.shapes)
    carrying = [any(soft[a] in examples for d in range(len(flat.shapes[v])) for a in atoms.dim(v, d)) for v in range(num_real)]
    data = forward(flat, [v for v, a in zip(flat.inputs, arguments, strict=True) if a.is_batch])
    first = first_effect(flat, carrying)
    differentiated = _upstream(flat, flat.differentiated, data)
    is_param = []
    for value, argument in zip(flat.inputs, arguments, strict=True):
        floating = _floating(flat.dtypes[value])
        reaches = first[value] is not None and bool(flat.shapes[value])
        is_param.append(argument.is_state and floating and not carrying[value] and (reaches or value in differentiated))
    if not flat.num_boundaries:
        is_param = _drop_late_twins(flat, arguments, is_param, first)
    return Flow(tuple(carrying), tuple(data), tuple(is_param))


def _floating(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "complex"))


def _upstream(flat: Flat, targets: frozenset[int], data: Sequence[bool]) -> set[int]:
    found = set(targets)
    for op in reversed(flat.ops):
        if op.primitive != "_gradient" and any(v in found and not data[v] for v in op.outputs):
            found.update(op.inputs)
    return found


def _drop_late_twins(flat, arguments, is_param, first):
    twins: dict[tuple, list[int]] = {}
    for index, (value, argument) in enumerate(zip(flat.inputs, arguments, strict=True)):
        if is_param[index]:
            tail = tuple(argument.path.split("/")[-2:])
            twins.setdefault((flat.shapes[value], tail), []).append(index)
    kept = list(is_param)
    for group in twins.values():
        start = min(first[flat.inputs[i]] for i in group)
        for index in group:
            # Twin leaves of one first forward pass lie close; optimizer state enters only behind a whole backward pass.
            if first[flat.inputs[index]] > start and _after_update(flat, group, index, first):
                kept[index] = False
    return kept


def _after_update(flat: Flat, group: list[int], index: int, first) -> bool:
    """Whether a leaf's first effect on examples comes through an operation that also reads one of its twins: an update."""
    lead = min(group, key=lambda i: first[flat.inputs[i]])
    reached = forward(flat, [flat.inputs[lead]])
    mine = forward(flat, [flat.inputs[index]])
    effect = flat.ops[first[flat.inputs[index]]]
    return any(mine[v] and reached[v] for v in effect.inputs)


def strengths(flat: Flat, linked: Linked, flow: Flow, arguments: Sequence[Argument]) -> Callable[[RawLink], Strength]:
    """How strong each link is: hard in the update region (what is downstream of non-scalar state that is not a parameter)
    and for gradients of the boundary; soft for residual operands, cotangent sums, carried values and updates that mix;
    local otherwise."""
    seeds = [
        value
        for value, argument, param in zip(flat.inputs, arguments, flow.is_param, strict=True)
        if argument.is_state and not param and flat.shapes[value] and _floating(flat.dtypes[value])
    ]
    update = forward(flat, seeds, stop=lambda v: flow.carrying[v])
    skips = residual_operands(flat, linked)

    def strength(link: RawLink) -> Strength:
        if link.op < 0:
            return Strength.HARD
        op = flat.ops[link.op]
        in_update = any(update[v] for v in op.inputs)
        if op.primitive == "_gradient":
            return Strength.HARD
        if op.primitive == "_carry_back":
            return Strength.HARD if in_update else Strength.SOFT
        if in_update:
            return Strength.SOFT if linked.mixing[link.op] else Strength.HARD
        if op.primitive == "add_any" or link.operand in skips.get(link.op, ()):
            return Strength.SOFT
        return Strength.LOCAL

    return strength


def residual_operands(flat: Flat, linked: Linked) -> dict[int, frozenset[int]]:
    """Per elementwise join, the operands that are upstream of another operand through a mixing operation."""
    uses = [0] * len(flat.shapes)
    for op in flat.ops:
        for v in set(op.inputs):
            uses[v] += 1
    # Only a value used twice can stand on both ways of a join; one bit each keeps the ancestor sets small.
    bit = {}
    for v, count in enumerate(uses):
        if count > 1 and flat.shapes[v]:
            bit[v] = 1 << len(bit)
    above = [0] * len(flat.shapes)  # ancestors, any way
    mixed = [0] * len(flat.shapes)  # ancestors through a mixing operation
    skips: dict[int, frozenset[int]] = {}
    for index, op in enumerate(flat.ops):
        if op.primitive == "_carry_back":
            continue
        if linked.joins[index] and len(op.inputs) > 1:
            found = [
                k for k, v in enumerate(op.inputs)
                if v in bit and any(mixed[other] & bit[v] for other in op.inputs if other != v)
            ]
            if found and len(found) < len(op.inputs):
                skips[index] = frozenset(found)
        every, through = 0, 0
        for v in op.inputs:
            every |= above[v] | bit.get(v, 0)
            through |= mixed[v]
        for v in op.outputs:
            above[v] = every
            mixed[v] = every if linked.mixing[index] else through
    return skips
