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
import re
from collections.abc import Mapping, Sequence

from splitjax.plan import Collective, PartialPlan
from splitjax.report.evidence import HANDED, SUMMED, Evidence
from splitjax.report.in_parts import dealt
from splitjax.report.known_step import Step
from splitjax.report.matching import about, match
from splitjax.report.shared_sums import Sums, further_axes, gathered_examples, summed_together
from splitjax.report.subject import GRADIENT, VALUE


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
        for k, (number, _) in match(
            [_unshared(evidence[position], step.plan.partial) for position in positions], left, step
        ).items():
            realised[number].append(positions[k])
    paired: dict[int, Collective] = {}
    for number, positions in realised.items():
        paired |= dealt(left.pop(number), positions, evidence)
    for k, (number, planned) in match([evidence[position] for position in last], left, step).items():
        paired[last[k]] = planned
        left.pop(number, None)
    realising = {position: [planned] for position, planned in paired.items()}
    for number, position in further_axes(evidence, realising, _sums(left)).items():
        realising[position].append(left.pop(number))
    free = [position for position in last if position not in realising or evidence[position].about == SUMMED]
    for position, numbers in summed_together(evidence, free, _sums(left), step.plan.mesh).items():
        realising.setdefault(position, []).extend(left.pop(number) for number in numbers)
    free = [position for position in last if position not in realising]
    for number, positions in gathered_examples(evidence, free, _sums(left)).items():
        realising |= {k: [part] for k, part in dealt(left.pop(number), positions, evidence).items()}
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
