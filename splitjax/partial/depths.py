"""How far back each worker differentiates: stages joined to segments between the chosen cuts, and who contributes to
which.

Worker slots are numbered 0..N-1, the last the deepest. Step by step workers move through the slots (`Depths.slot`).
Source: Kumar et al., arXiv 2111.10672: worker i covers the last (i+1)/N; assignments rotate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from splitjax.errors import PartialError
from splitjax.partial.optimal import optimal_contributors
from splitjax.partial.request import COUNT, LINEAR, OPTIMAL, SPATIAL, PartialBackprop
from splitjax.partial.stages import Stage, Stages

_ENOUGH = 1e-9  # a share that falls short of a fraction by so little reaches it


@dataclasses.dataclass(frozen=True)
class Segment:
    """The stages between two cuts, which are differentiated by the same workers. Times in the unit of the stages."""

    stages: tuple[Stage, ...]

    @property
    def operands(self) -> tuple[int, ...]:
        """Positions of its operands in the gradient boundary."""
        return tuple(position for stage in self.stages for position in stage.operands)

    @property
    def num_bytes(self) -> int:
        return sum(stage.num_bytes for stage in self.stages)

    @property
    def backward(self) -> float:
        return sum(stage.backward for stage in self.stages)


@dataclasses.dataclass(frozen=True)
class Depths:
    """Who differentiates what.

    - `segments`: input side first. `first`: by slot, the number of the first segment that it differentiates; never
      growing, 0 for all of them.
    - `shares`: by slot, its share of the examples; equal unless balanced.
    - `forward`: time of the forward pass of an equal share of the batch, `backward` times of the segments likewise.
    """

    segments: tuple[Segment, ...]
    first: tuple[int, ...]
    forward: float
    request: PartialBackprop

    @property
    def num_slots(self) -> int:
        return len(self.first)

    @property
    def distinct(self) -> tuple[int, ...]:
        """The different depths, by the first segment of each, shallowest first."""
        return tuple(sorted(set(self.first), reverse=True))

    def contributors(self, segment: int) -> tuple[int, ...]:
        """The slots that differentiate a segment."""
        return tuple(slot for slot, first in enumerate(self.first) if first <= segment)

    def slot(self, worker: int, turn: int) -> int:
        """The slot of a worker in a step; of all workers alike in a temporal assignment."""
        if self.request.assignment != SPATIAL:
            return turn % self.num_slots if self.request.rotate else self.num_slots - 1
        return (worker + turn) % self.num_slots if self.request.rotate else worker

    @property
    def num_turns(self) -> int:
        """After so many steps the assignment repeats."""
        return self.num_slots if self.request.rotate else 1

    def scale(self, segment: int, shares: Sequence[float] | None = None) -> float:
        """What the sum of the contributions to the whole batch's gradient is multiplied by. `shares`: by slot, of the
        examples."""
        if self.request.estimator != COUNT:
            return 1.0
        shares = shares or (1 / self.num_slots,) * self.num_slots
        covered = sum(shares[slot] for slot in self.contributors(segment))
        return 1 / covered if covered else 0.0

    def backward(self, slot: int) -> float:
        """Time of a slot's backward pass, for an equal share of the batch."""
        return sum(segment.backward for segment in self.segments[self.first[slot] :])

    @property
    def device_time(self) -> float:
        """Time of all workers over that of full backpropagation, forward passes included."""
        whole = self.forward + sum(segment.backward for segment in self.segments)
        return sum(self.forward + self.backward(slot) for slot in range(self.num_slots)) / (self.num_slots * whole)

    @property
    def is_full(self) -> bool:
        """Whether everybody differentiates everything."""
        return set(self.first) == {0}


def choose_depths(found: Stages, request: PartialBackprop, num_workers: int, place: str) -> Depths:
    """The depths of `num_workers` workers. Raises `PartialError` where there is no cut or one worker, or where no
    depths keep the budget."""
    if num_workers < 2:
        raise PartialError(
            "partial backpropagation divides the backward pass among workers, and there is one",
            value=num_workers,
            place=place,
            remedy="use a mesh whose data axis has two devices or more, or backprop=None",
        )
    if len(found.stages) < 2:
        only = found.stages[0].name if found.stages else "nothing"
        raise PartialError(
            f"the backward pass has no legal cut: {only} is all that it differentiates",
            value=len(found.stages),
            place=place,
            remedy="layers that one scan stacks are one stage: unroll it, or leave backprop=None",
        )
    counts = None
    if request.depths == LINEAR:
        fractions: Sequence[float] = [(slot + 1) / num_workers for slot in range(num_workers)]
    elif request.depths == OPTIMAL:
        counts = _optimal(found, request, num_workers, place)
    else:
        fractions = sorted(request.depths)
        if len(fractions) != num_workers:
            raise PartialError(
                f"depths has {len(fractions)} fractions for {num_workers} workers",
                value=request.depths,
                place=place,
                remedy=f"give {num_workers} fractions, one for every worker of the data axis",
            )
    if counts is not None:  # the slot that is k-th from the deepest covers what at least k contribute to
        ends = [next(j for j, count in enumerate(counts) if count >= num_workers - slot) for slot in range(num_workers)]
    else:
        # All of it is all of it, also where the first stages were measured to take no time.
        reach = lambda fraction: (
            [0] if fraction >= 1 else [j for j in range(len(found.stages)) if found.share(j) >= fraction - _ENOUGH]
        )
        ends = [max(reach(fraction)) for fraction in fractions]
    return _joined(found, ends, request)


def _joined(found: Stages, ends: Sequence[int], request: PartialBackprop) -> Depths:
    """Depths from the first stage of every slot. Stages that nobody differentiates make a segment of their own in
    front."""
    cuts = sorted({0, *ends})
    segments = tuple(
        Segment(found.stages[start:end]) for start, end in zip(cuts, [*cuts[1:], len(found.stages)], strict=True)
    )
    return Depths(segments, tuple(cuts.index(end) for end in ends), found.forward, request)


def _optimal(found: Stages, request: PartialBackprop, num_workers: int, place: str) -> tuple[int, ...]:
    """Contributors by stage."""
    assert request.measured is not None
    noise = dict(zip(request.measured.layers, request.measured.noise, strict=True))
    missing = [stage.name for stage in found.stages if stage.name not in noise]
    if missing:
        raise PartialError(
            "the measured noise is of another step: it has no such layer",
            value=missing[0],
            place=place,
            remedy="call step.advise on this step, and pass its .measured",
        )
    costs = [stage.backward for stage in found.stages]
    costs[-1] += found.forward
    budget = request.budget
    if budget is None:
        linear = dataclasses.replace(request, depths=LINEAR)
        budget = choose_depths(found, linear, num_workers, place).device_time
    return optimal_contributors([noise[stage.name] for stage in found.stages], costs, num_workers, budget, place)
