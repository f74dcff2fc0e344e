"""Planned and compiled collectives, paired: which planned one a compiled one realises, and what the plan has that XLA
left out.

Gradients, gathers of weights and new state are paired by the leaf that they are of, however XLA realises them (an
all-reduce where a reduce-scatter was planned). Activations are paired by layer and phase of the step; where XLA names
the operation of a neighbouring layer, by size. Each planned collective is realised at most once, by one compiled
collective or by several that add up to it: each then stands beside its part of the planned bytes.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence

from splitjax.mesh import MeshShape
from splitjax.plan import Collective, PartialPlan
from splitjax.report.evidence import (
    BACKWARD,
    FORWARD,
    GRADIENT,
    HANDED,
    MOVED,
    ROWS,
    STATE,
    SUMMED,
    UPDATE,
    VALUE,
    WEIGHT,
    Evidence,
    Step,
    primitive,
)

_GRADIENT = re.compile(r"gradient of (.+?)(?:, onto its split optimizer state)?")
_HANDED = re.compile(r"gradient of (.+), handed to workers that did not compute it")
_GROUPS = re.compile(r"gradient of (.+), its groups put together")
_STORED = re.compile(r"(forward|backward): (.+) is stored in pieces")
_ROWS = re.compile(r"rows of the gradient of (.+), by \w+")
_NEW = re.compile(r"new value of (.+?)(?:, from its split optimizer state)?")
# Operations whose partial results a planned exchange of activations sums: not the statistics of a norm, say.
_CARRIERS = frozenset(
    {
        "dot_general",
        "conv_general_dilated",
        "gather",
        "scatter-add",
        "all_gather",
        "reduce_scatter",
        "psum",
        "psum_invariant",
        "all_to_all",
        "ragged_dot",
        "ragged_dot_general",
    }
)


@dataclasses.dataclass(frozen=True)
class Purpose:
    """What a planned collective is for, in the terms of `report.evidence`."""

    about: str
    phase: str
    leaf: str  # empty for activations


def purpose(planned: Collective) -> Purpose:
    """Reads the reason that `cost.collectives` gave."""
    if match := _HANDED.fullmatch(planned.why):
        return Purpose(HANDED, BACKWARD, match.group(1))
    if match := _GROUPS.fullmatch(planned.why):
        return Purpose(MOVED, BACKWARD, match.group(1))
    if match := _GRADIENT.fullmatch(planned.why):
        return Purpose(GRADIENT, BACKWARD, match.group(1))
    if match := _ROWS.fullmatch(planned.why):
        return Purpose(ROWS, BACKWARD, match.group(1))
    if match := _STORED.fullmatch(planned.why):
        return Purpose(WEIGHT, match.group(1), match.group(2))
    if match := _NEW.fullmatch(planned.why):
        return Purpose(STATE, UPDATE, match.group(1))
    return Purpose(VALUE, BACKWARD if planned.why.startswith("backward") else FORWARD, "")


def pair(found: Sequence[Evidence], step: Step) -> tuple[tuple[Collective | None, ...], tuple[Collective, ...]]:
    """Per compiled collective the planned one that it realises, or None; and the planned ones that none realises.

    Branches of which a step takes one are whole programs by turns: each is compared with the plan by itself, and what
    realises a planned collective in some of them shares its bytes, which are a mean over the turns."""
    left = dict(enumerate(step.plan.collectives))
    branches: dict[str, list[int]] = collections.defaultdict(list)
    for position, one in enumerate(found):
        branches["" if one.about in (SUMMED, HANDED) else one.collective.branch].append(position)
    last = branches.pop("", [])
    realised: dict[int, list[int]] = collections.defaultdict(list)
    for positions in branches.values():
        for k, (number, _) in _pair(
            [_unshared(found[position], step.plan.partial) for position in positions], left, step
        ).items():
            realised[number].append(positions[k])
    paired: dict[int, Collective] = {}
    for number, positions in realised.items():
        paired |= _dealt(left.pop(number), positions, found)
    for k, (number, planned) in _pair([found[position] for position in last], left, step).items():
        paired[last[k]] = planned
        left.pop(number, None)
    return tuple(paired.get(position) for position in range(len(found))), tuple(left.values())


def _unshared(one: Evidence, partial: PartialPlan | None) -> Evidence:
    """As in a step that takes its branch, whose examples are those of a mean worker."""
    collective, times = one.collective, 1.0
    if partial is not None and partial.examples and one.about == VALUE:
        times = sum(partial.examples) / len(partial.examples) / _examples(collective.branch, partial)
    bytes_alone = round(collective.bytes / (collective.share or 1.0) * times)
    return dataclasses.replace(one, collective=dataclasses.replace(collective, bytes=bytes_alone, share=1.0))


def _examples(branch: str, partial: PartialPlan) -> int:
    """How many a worker has that takes a branch, or runs a program of its own (in the first turn worker i is in slot
    i)."""
    number = int(re.split("[ :]", branch)[-1])
    if branch.startswith("worker "):
        return partial.examples[number]
    # As `lower.partial.truncation` orders the branches: shallow ones first.
    return sorted(set(zip(partial.first, partial.examples, strict=True)), reverse=True)[number][1]


def _dealt(planned: Collective, positions: Sequence[int], found: Sequence[Evidence]) -> dict[int, Collective]:
    """A planned collective among those that realise it together: each beside its own bytes, and the largest beside what
    the others leave of the plan's."""
    sizes = {position: found[position].collective.bytes for position in positions}
    largest = max(positions, key=sizes.__getitem__)
    rest = planned.bytes - sum(size for position, size in sizes.items() if position != largest)
    return {
        position: dataclasses.replace(planned, bytes=max(rest, 0) if position == largest else size)
        for position, size in sizes.items()
    }


def _pair(
    found: Sequence[Evidence], planned_ones: Mapping[int, Collective], step: Step
) -> dict[int, tuple[int, Collective]]:
    """By position of a compiled collective the number of the planned one that it realises, and that with its share of
    the bytes."""
    left = dict(planned_ones)
    purposes = {number: purpose(one) for number, one in left.items()}
    paired: dict[int, tuple[int, Collective]] = {}

    def match(
        fits: Callable[[Evidence, Collective, Purpose], bool], cost: Callable[[Evidence, Collective], object]
    ) -> None:
        for position, one in enumerate(found):
            if position in paired:
                continue
            fitting = [number for number, planned in left.items() if fits(one, planned, purposes[number])]
            if fitting:
                best = min(fitting, key=lambda number: (cost(one, left[number]), number))
                paired[position] = best, left.pop(best)

    def same(one: Evidence, planned: Collective) -> bool:
        return (one.collective.op, one.collective.axis) == (planned.op, planned.axis)

    def same_size(one: Evidence, planned: Collective) -> bool:
        """Whether both carry the same array, by whatever operation."""
        mine = _carried(one.collective.op, one.collective.bytes, one.collective.group_size)
        theirs = _carried(planned.op, planned.bytes, _size(step.plan.mesh, planned.axis))
        return mine > 0 and any(math.isclose(mine * wider, theirs, rel_tol=0.01) for wider in _widths(one))

    def distance(one: Evidence, planned: Collective) -> int:
        return abs(step.order.get(one.layer, 0) - step.order.get(planned.layer, 0))

    for number, planned in list(left.items()):
        wanted = {ROWS: ROWS, GRADIENT: SUMMED, HANDED: HANDED}.get(purposes[number].about)
        messages = [
            k
            for k, one in enumerate(found)
            if wanted is not None and (one.about, one.leaf) == (wanted, purposes[number].leaf)
        ]
        if messages:
            del left[number]
            for k, one in _dealt(planned, messages, found).items():
                paired[k] = number, dataclasses.replace(one, op=found[k].collective.op) if wanted == ROWS else one

    by_leaf = lambda one, planned, why: one.leaf != "" and (one.about, one.leaf) == (why.about, why.leaf)
    match(
        lambda one, planned, why: (
            by_leaf(one, planned, why) and same(one, planned) and why.phase in (one.phase, BACKWARD, UPDATE)
        ),
        _nothing,
    )
    match(
        lambda one, planned, why: by_leaf(one, planned, why) and (why.about != WEIGHT or one.phase == why.phase),
        _nothing,
    )
    match(by_leaf, _nothing)

    def activation(one: Evidence, why: Purpose) -> bool:
        sums = one.collective.op in ("all_reduce", "reduce_scatter")
        carries = bool(one.collective.shape) and (not sums or primitive(one.op_name) in _CARRIERS)
        return one.about in (VALUE, WEIGHT) and why.about == VALUE and one.phase == why.phase and carries

    def alike(one: Evidence, planned: Collective) -> bool:
        return same(one, planned) and any(one.collective.bytes * wider == planned.bytes for wider in _widths(one))

    match(
        lambda one, planned, why: activation(one, why) and alike(one, planned) and one.layer == planned.layer, _nothing
    )
    for number, planned in list(left.items()):
        parts = _parts(found, paired, planned, purposes[number])
        if parts:
            del left[number]
            paired |= {
                position: (number, dataclasses.replace(planned, bytes=found[position].collective.bytes))
                for position in parts
            }
    match(
        lambda one, planned, why: activation(one, why) and same_size(one, planned) and one.layer == planned.layer,
        _nothing,
    )
    match(lambda one, planned, why: activation(one, why) and alike(one, planned) and bool(one.layer), distance)
    match(
        lambda one, planned, why: (
            activation(one, why)
            and same_size(one, planned)
            and one.collective.axis == planned.axis
            and bool(one.layer)
            and distance(one, planned) <= 2
        ),
        distance,
    )
    return paired


def _parts(
    found: Sequence[Evidence], paired: Mapping[int, object], planned: Collective, why: Purpose
) -> tuple[int, ...]:
    """The positions of explicit collectives that together are a planned one: turns in a loop, say, and the last beside
    it. Their bytes add up to the byte, or there are none. Outside a derivative both passes read `update`, and come in
    the program's order."""
    parts: list[int] = []
    missing_bytes = planned.bytes
    for position, one in enumerate(found):
        fits = (
            position not in paired
            and one.known_by == "scope"
            and one.layer == planned.layer
            and one.phase in (why.phase, UPDATE)
        )
        if fits and why.about == VALUE and (one.collective.op, one.collective.axis) == (planned.op, planned.axis):
            if one.collective.bytes <= missing_bytes:
                parts.append(position)
                missing_bytes -= one.collective.bytes
            if not missing_bytes:
                return tuple(parts)
    return ()


def difference(compiled: Evidence, planned: Collective) -> str:
    """How a realised collective differs from its plan, in words; empty where it does not."""
    one = compiled.collective
    parts = []
    if one.op != planned.op:
        parts.append(f"{one.op} for {planned.op}")
    # A shift along several axes together moves some places along a few of them only: half the places of 2 x 2, along
    # the first.
    is_shift = one.op == "collective_permute" and set(one.axis.split("+")) <= set(planned.axis.split("+"))
    if one.axis != planned.axis and not is_shift:
        parts.append(f"over {one.axis} for {planned.axis}")
    # Means over turns and over workers are rounded, each by itself.
    rounding = 2 / one.share if one.share and (one.share < 1 or compiled.about in (SUMMED, HANDED)) else 0
    if not parts and abs(one.bytes - planned.bytes) > rounding:
        parts.append("fewer bytes" if one.bytes < planned.bytes else "more bytes")
    return ", ".join(parts)


def _widths(one: Evidence) -> tuple[int, ...]:
    """By how much the step's own values may be wider than what is sent: a TPU's compiler sends float32 as bfloat16
    where a product rounds it anyway."""
    return (1, 2) if one.collective.dtype in ("bfloat16", "float16") else (1,)


def _nothing(one: Evidence, planned: Collective) -> int:
    return 0


def _size(mesh: MeshShape, axes: str) -> int:
    return mesh.size(tuple(axes.split("+")))


def _carried(op: str, sent_bytes: int, size: int) -> float:
    """Bytes of the array behind what a device sends by the ring formulas."""
    if size < 2:
        return 0.0
    share = (size - 1) / size
    return sent_bytes / (2 * share if op == "all_reduce" else share)
