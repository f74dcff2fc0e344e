"""Pairs planned and compiled collectives: which planned one each compiled one realises, and what the plan has that XLA
left out.

The evidence of a step's compiled collectives and the step's plan go in. Gradients, gathers of weights and new state are
paired by the leaf that they are of, however XLA realises them (an all-reduce where a reduce-scatter was planned).
Activations are paired by layer and phase of the step; where XLA names the operation of a neighbouring layer, by size.
Each planned collective is realised at most once, by one compiled collective or by several that add up to it: each then
stands beside its part of the planned bytes. A compiled collective may realise several sums of gradients
(`report.shared_sums`).
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence

from splitjax.cost.ring import carried_bytes
from splitjax.plan import Collective, PartialPlan, Purpose, PurposeKind
from splitjax.report.evidence import (
    BACKWARD,
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
from splitjax.report.shared_sums import Sums, further_axes, gathered_examples, summed_together

# What the evidence of a compiled collective says it is about, by the kind of the planned one; all others move values.
_ABOUT: Mapping[PurposeKind, str] = {
    PurposeKind.GRADIENT: GRADIENT,
    PurposeKind.GRADIENT_ONTO_STATE: GRADIENT,
    PurposeKind.GRADIENT_GROUPS: MOVED,
    PurposeKind.GRADIENT_HANDED: HANDED,
    PurposeKind.GRADIENT_ROWS: ROWS,
    PurposeKind.STORED_WEIGHT: WEIGHT,
    PurposeKind.NEW_VALUE: STATE,
}
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


def about(purpose: Purpose) -> str:
    """Says what a planned collective of this purpose is about, in the terms of `Evidence.about`."""
    return _ABOUT.get(purpose.kind, VALUE)


def pair(evidence: Sequence[Evidence], step: Step) -> tuple[tuple[tuple[Collective, ...], ...], tuple[Collective, ...]]:
    """Pairs the compiled collectives of a step with the plan's.

    **Arguments:**

    - `evidence`: what is known of each compiled collective.
    - `step`: the step, with its plan.

    Returns, for each compiled collective, the planned ones that it realises, as a rule one or none; and the planned
    ones that none realises.

    Branches of which a step takes only one are whole programs each: each is compared with the plan by itself, and what
    realises a planned collective in some of them shares its bytes, which are a mean over the steps of a cycle.
    """
    left = dict(enumerate(step.plan.collectives))
    branches: dict[str, list[int]] = collections.defaultdict(list)
    for position, compiled in enumerate(evidence):
        branches["" if compiled.about in (SUMMED, HANDED) else compiled.collective.branch].append(position)
    last = branches.pop("", [])
    realised: dict[int, list[int]] = collections.defaultdict(list)
    for positions in branches.values():
        for k, (number, _) in _pair(
            [_unshared(evidence[position], step.plan.partial) for position in positions], left, step
        ).items():
            realised[number].append(positions[k])
    paired: dict[int, Collective] = {}
    for number, positions in realised.items():
        paired |= _dealt(left.pop(number), positions, evidence)
    for k, (number, planned) in _pair([evidence[position] for position in last], left, step).items():
        paired[last[k]] = planned
        left.pop(number, None)
    realising = {position: [planned] for position, planned in paired.items()}
    for number, position in further_axes(evidence, realising, _sums(left)).items():
        realising[position].append(left.pop(number))
    free = [position for position in last if position not in realising or evidence[position].about == SUMMED]
    for position, numbers in summed_together(evidence, free, _sums(left), step.plan.mesh).items():
        realising.setdefault(position, []).extend(left.pop(number) for number in numbers)
    free = [position for position in last if position not in realising]
    for number, positions in gathered_examples(evidence, free, _sums(left), step.layers).items():
        realising |= {k: [part] for k, part in _dealt(left.pop(number), positions, evidence).items()}
    return tuple(tuple(realising.get(position, ())) for position in range(len(evidence))), tuple(left.values())


def _sums(left: Mapping[int, Collective]) -> Sums:
    """Returns the sums of gradients among planned collectives, with the parameters of these."""
    return {
        number: (planned.purpose.leaf or "", planned)
        for number, planned in left.items()
        if about(planned.purpose) == GRADIENT
    }


def _unshared(compiled: Evidence, partial: PartialPlan | None) -> Evidence:
    """Returns what is known of a collective as if every step took its branch, and with the examples of a mean
    worker."""
    collective, times = compiled.collective, 1.0
    if partial is not None and partial.examples and compiled.about == VALUE:
        times = sum(partial.examples) / len(partial.examples) / _examples(collective.branch, partial)
    bytes_alone = round(collective.bytes / (collective.share or 1.0) * times)
    return dataclasses.replace(compiled, collective=dataclasses.replace(collective, bytes=bytes_alone, share=1.0))


def _examples(branch: str, partial: PartialPlan) -> int:
    """Returns the number of examples of a worker that takes a branch, or runs a program of its own (in the first step
    worker i is in slot i)."""
    number = int(re.split("[ :]", branch)[-1])
    if branch.startswith("worker "):
        return partial.examples[number]
    # As `lower.partial.truncation` orders the branches: shallow ones first.
    return sorted(set(zip(partial.first, partial.examples, strict=True)), reverse=True)[number][1]


def _dealt(planned: Collective, positions: Sequence[int], evidence: Sequence[Evidence]) -> dict[int, Collective]:
    """Deals a planned collective out to those that realise it together, by position: each is beside its own bytes, and
    the largest beside what the others leave of the plan's."""
    sizes = {position: evidence[position].collective.bytes for position in positions}
    largest = max(positions, key=sizes.__getitem__)
    rest = planned.bytes - sum(size for position, size in sizes.items() if position != largest)
    return {
        position: dataclasses.replace(planned, bytes=max(rest, 0) if position == largest else size)
        for position, size in sizes.items()
    }


def _pair(
    evidence: Sequence[Evidence], collectives: Mapping[int, Collective], step: Step
) -> dict[int, tuple[int, Collective]]:
    """Maps the position of a compiled collective to the number of the planned one that it realises, and to that one
    with its share of the bytes. `collectives` are the planned ones by number."""
    left = dict(collectives)
    paired: dict[int, tuple[int, Collective]] = {}

    def match(fits: Callable[[Evidence, Collective], bool], cost: Callable[[Evidence, Collective], object]) -> None:
        """Pairs what is left, in order: each compiled collective with the cheapest planned one that fits."""
        for position, compiled in enumerate(evidence):
            if position in paired:
                continue
            fitting = [number for number, planned in left.items() if fits(compiled, planned)]
            if fitting:
                best = min(fitting, key=lambda number: (cost(compiled, left[number]), number))
                paired[position] = best, left.pop(best)

    def same(compiled: Evidence, planned: Collective) -> bool:
        return (compiled.collective.op, compiled.collective.axis) == (planned.op, planned.axis)

    def same_size(compiled: Evidence, planned: Collective) -> bool:
        """Tells whether both carry the same array, by whatever operation."""
        mine = carried_bytes(compiled.collective.op, compiled.collective.group_size, compiled.collective.bytes)
        theirs = carried_bytes(planned.op, step.plan.mesh.size(tuple(planned.axis.split("+"))), planned.bytes)
        return mine > 0 and any(math.isclose(mine * wider, theirs, rel_tol=0.01) for wider in _widths(compiled))

    def distance(compiled: Evidence, planned: Collective) -> int:
        return abs(step.order.get(compiled.layer, 0) - step.order.get(planned.layer, 0))

    for number, planned in list(left.items()):
        wanted = {ROWS: ROWS, GRADIENT: SUMMED, HANDED: HANDED}.get(about(planned.purpose))
        messages = [
            k
            for k, compiled in enumerate(evidence)
            if wanted is not None and (compiled.about, compiled.leaf) == (wanted, planned.purpose.leaf)
        ]
        if messages:
            del left[number]
            for k, part in _dealt(planned, messages, evidence).items():
                paired[k] = number, dataclasses.replace(part, op=evidence[k].collective.op) if wanted == ROWS else part

    by_leaf = lambda compiled, planned: (
        compiled.leaf != "" and (compiled.about, compiled.leaf) == (about(planned.purpose), planned.purpose.leaf)
    )
    match(
        lambda compiled, planned: (
            by_leaf(compiled, planned)
            and same(compiled, planned)
            and planned.purpose.phase in (compiled.phase, BACKWARD, UPDATE)
        ),
        _nothing,
    )
    match(
        lambda compiled, planned: (
            by_leaf(compiled, planned) and (compiled.about != WEIGHT or compiled.phase == planned.purpose.phase)
        ),
        _nothing,
    )
    match(by_leaf, _nothing)

    def activation(compiled: Evidence, planned: Collective) -> bool:
        sums = compiled.collective.op in ("all_reduce", "reduce_scatter")
        carries = bool(compiled.collective.shape) and (not sums or primitive(compiled.op_name) in _CARRIERS)
        moves = compiled.about in (VALUE, WEIGHT) and about(planned.purpose) == VALUE
        return moves and compiled.phase == planned.purpose.phase and carries

    def alike(compiled: Evidence, planned: Collective) -> bool:
        return same(compiled, planned) and any(
            compiled.collective.bytes * wider == planned.bytes for wider in _widths(compiled)
        )

    match(
        lambda compiled, planned: (
            activation(compiled, planned) and alike(compiled, planned) and compiled.layer == planned.layer
        ),
        _nothing,
    )
    for number, planned in list(left.items()):
        parts = _parts(evidence, paired, planned)
        if parts:
            del left[number]
            paired |= {
                position: (number, dataclasses.replace(planned, bytes=evidence[position].collective.bytes))
                for position in parts
            }
    match(
        lambda compiled, planned: (
            activation(compiled, planned) and same_size(compiled, planned) and compiled.layer == planned.layer
        ),
        _nothing,
    )
    match(
        lambda compiled, planned: activation(compiled, planned) and alike(compiled, planned) and bool(compiled.layer),
        distance,
    )
    match(
        lambda compiled, planned: (
            activation(compiled, planned)
            and same_size(compiled, planned)
            and compiled.collective.axis == planned.axis
            and bool(compiled.layer)
            and distance(compiled, planned) <= 2
        ),
        distance,
    )
    # Of an elementwise operation behind a product nothing tells the layer.
    match(
        lambda compiled, planned: (
            activation(compiled, planned)
            and alike(compiled, planned)
            and not compiled.layer
            and compiled.about == VALUE
        ),
        _nothing,
    )
    return paired


def _parts(evidence: Sequence[Evidence], paired: Mapping[int, object], planned: Collective) -> tuple[int, ...]:
    """Returns the positions of collectives that together are a planned one: those in a loop, say, and the last beside
    it, of arrays of one shape. Their bytes add up to the byte, or there are none. Outside a derivative both passes read
    `update`, and come in the program's order."""
    by_shape: dict[tuple[int, ...], list[int]] = collections.defaultdict(list)
    for position, compiled in enumerate(evidence):
        fits = (
            position not in paired
            and about(planned.purpose) == VALUE == compiled.about
            and compiled.layer == planned.layer
            and compiled.phase in (planned.purpose.phase, UPDATE)
            and (compiled.collective.op, compiled.collective.axis) == (planned.op, planned.axis)
        )
        if fits:
            by_shape[compiled.collective.shape].append(position)
    for positions in by_shape.values():
        parts: list[int] = []
        missing_bytes = planned.bytes
        for position in positions:
            if evidence[position].collective.bytes <= missing_bytes:
                parts.append(position)
                missing_bytes -= evidence[position].collective.bytes
            if not missing_bytes:
                return tuple(parts)
    return ()


def difference(compiled: Evidence, realised: Sequence[Collective]) -> str:
    """Returns how a realised collective differs from its plan, in words; empty where it does not.

    **Arguments:**

    - `compiled`: what is known of the compiled collective.
    - `realised`: the planned collectives that it realises, at least one.
    """
    collective = compiled.collective
    if len(realised) > 1:
        kinds = dict.fromkeys(f"{planned.op} over {planned.axis}" for planned in realised)
        own = f"{collective.op} over {collective.axis}"
        several = f"one for {len(realised)} planned"
        return several if list(kinds) == [own] else f"{several}: {own} for {' and '.join(kinds)}"
    planned = realised[0]
    parts = []
    if collective.op != planned.op:
        parts.append(f"{collective.op} for {planned.op}")
    # A shift along several axes together moves some places along a few of them only: half the places of 2 x 2, along
    # the first.
    is_shift = collective.op == "collective_permute" and set(collective.axis.split("+")) <= set(planned.axis.split("+"))
    if collective.axis != planned.axis and not is_shift:
        parts.append(f"over {collective.axis} for {planned.axis}")
    # Means over steps and over workers are rounded, each by itself.
    rounding = (
        2 / collective.share if collective.share and (collective.share < 1 or compiled.about in (SUMMED, HANDED)) else 0
    )
    if not parts and abs(collective.bytes - planned.bytes) > rounding:
        parts.append("fewer bytes" if collective.bytes < planned.bytes else "more bytes")
    return ", ".join(parts)


def _widths(compiled: Evidence) -> tuple[int, ...]:
    """Returns the factors by which the step's own values may be wider than what is sent: a TPU's compiler sends float32
    as bfloat16 where a product rounds it anyway."""
    return (1, 2) if compiled.collective.dtype in ("bfloat16", "float16") else (1,)


def _nothing(compiled: Evidence, planned: Collective) -> int:
    """Costs the same for every pair: the first planned collective wins."""
    return 0
