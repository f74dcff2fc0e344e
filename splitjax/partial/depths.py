"""Chooses how far back each worker differentiates.

The stages of a boundary and a request go in, `Depths` come out: the stages joined to segments between the chosen cuts,
and per slot the first segment that it differentiates. Slots are numbered 0..N-1, the last the deepest. Step by step
workers move through the slots (`Depths.slot`); after a *cycle* of `Depths.num_cycle_steps` steps the assignment
repeats. Source: Kumar et al., arXiv 2111.10672: worker i covers the last (i+1)/N; assignments rotate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from splitjax.errors import PartialError, Refusal
from splitjax.partial.optimal import optimal_contributors
from splitjax.partial.request import COUNT, LINEAR, OPTIMAL, SPATIAL, PartialBackprop
from splitjax.partial.stages import BackpropStages, Stage

_ENOUGH = 1e-9  # a share that falls short of a fraction by so little reaches it


@dataclasses.dataclass(frozen=True)
class Segment:
    """The stages between two cuts, which are differentiated by the same workers.

    - `stages`: input side first.
    """

    stages: tuple[Stage, ...]

    @property
    def operands(self) -> tuple[int, ...]:
        """The positions of its operands in the gradient boundary."""
        return tuple(position for stage in self.stages for position in stage.operands)

    @property
    def num_bytes(self) -> int:
        """The bytes of the gradients of its operands."""
        return sum(stage.num_bytes for stage in self.stages)

    @property
    def backward(self) -> float:
        """The time that going back through it adds, in the unit of the stages (flops or seconds)."""
        return sum(stage.backward for stage in self.stages)


@dataclasses.dataclass(frozen=True)
class Depths:
    """A depth schedule: which slot differentiates which segments, and which worker is in which slot.

    - `segments`: input side first.
    - `first`: by slot, the number of the first segment that it differentiates; never growing, 0 for all of them.
    - `forward`: time of the forward pass of an equal share of the batch; the `backward` times of the segments are for
      such a share, too.
    - `request`: the request that the depths were chosen for.
    """

    segments: tuple[Segment, ...]
    first: tuple[int, ...]
    forward: float
    request: PartialBackprop

    @property
    def num_slots(self) -> int:
        """The number of slots, which is that of the workers."""
        return len(self.first)

    @property
    def distinct(self) -> tuple[int, ...]:
        """The different depths, by the first segment of each, shallowest first."""
        return tuple(sorted(set(self.first), reverse=True))

    def contributors(self, segment: int) -> tuple[int, ...]:
        """Gives the slots that differentiate segment number `segment`."""
        return tuple(slot for slot, first in enumerate(self.first) if first <= segment)

    def slot(self, worker: int, cycle_step: int) -> int:
        """Gives the slot of worker number `worker` in step `cycle_step` of a cycle; in a temporal assignment all
        workers are in the same slot."""
        if self.request.assignment != SPATIAL:
            return cycle_step % self.num_slots if self.request.rotate else self.num_slots - 1
        return (worker + cycle_step) % self.num_slots if self.request.rotate else worker

    def slots(self, cycle_step: int) -> tuple[int, ...]:
        """Gives by worker the slot that it is in, in step `cycle_step` of a cycle."""
        return tuple(self.slot(worker, cycle_step) for worker in range(self.num_slots))

    @property
    def num_cycle_steps(self) -> int:
        """The number of steps after which the assignment repeats."""
        return self.num_slots if self.request.rotate else 1

    def scale(self, segment: int, shares: Sequence[float] | None = None) -> float:
        """Gives the factor that makes the sum of the contributions an estimate of the whole batch's gradient.

        **Arguments:** `segment`: the number of the segment whose gradient it is. `shares`: by slot its share of the
        examples, with a sum of 1; None: equal ones. Returns 0.0 for a segment without contributors.
        """
        if self.request.estimator != COUNT:
            return 1.0
        shares = shares or (1 / self.num_slots,) * self.num_slots
        covered = sum(shares[slot] for slot in self.contributors(segment))
        return 1 / covered if covered else 0.0

    def backward(self, slot: int) -> float:
        """Gives the time of the backward pass of slot number `slot`, for an equal share of the batch."""
        return sum(segment.backward for segment in self.segments[self.first[slot] :])

    @property
    def device_time(self) -> float:
        """The time of all workers over that of full backpropagation, forward passes included."""
        whole = self.forward + sum(segment.backward for segment in self.segments)
        return sum(self.forward + self.backward(slot) for slot in range(self.num_slots)) / (self.num_slots * whole)

    @property
    def is_full(self) -> bool:
        """Tells whether every slot differentiates everything."""
        return set(self.first) == {0}


def choose_depths(stages: BackpropStages, request: PartialBackprop, num_workers: int, place: str) -> Depths:
    """Chooses the depths of workers as they are asked for.

    **Arguments:**

    - `stages`: where the backward pass can end.
    - `request`: the rule, or the fractions of the backward pass's time.
    - `num_workers`: the workers, each with a slot of its own.
    - `place`: what an error names as its place.

    Raises `PartialError` for fewer than two workers or two stages, for fractions of another number of workers, and
    where no depths keep the budget.
    """
    depths = find_depths(stages, request, num_workers, place)
    if isinstance(depths, Refusal):
        raise depths.error()
    return depths


def find_depths(stages: BackpropStages, request: PartialBackprop, num_workers: int, place: str) -> Depths | Refusal:
    """Chooses the depths of workers as `choose_depths` does, with the same arguments: `stages`, `request`,
    `num_workers`, `place`. Returns a refusal, a `PartialError`, where it raises one."""
    if num_workers < 2:
        return Refusal(
            "partial backpropagation divides the backward pass among workers, and there is one",
            value=num_workers,
            place=place,
            remedy="use a mesh whose data axis has two devices or more, or backprop=None",
            kind=PartialError,
        )
    if len(stages.stages) < 2:
        only = stages.stages[0].name if stages.stages else "nothing"
        return Refusal(
            f"the backward pass has no legal cut: {only} is all that it differentiates",
            value=len(stages.stages),
            place=place,
            remedy="layers that one scan stacks are one stage: unroll it, or leave backprop=None",
            kind=PartialError,
        )
    if request.depths == OPTIMAL:
        counts = _optimal(stages, request, num_workers, place)
        if isinstance(counts, Refusal):
            return counts
        # The slot that is k-th from the deepest covers what at least k contribute to.
        ends = [next(j for j, count in enumerate(counts) if count >= num_workers - slot) for slot in range(num_workers)]
    else:
        # All of it is all of it, also where the first stages were measured to take no time.
        shares = [stages.share(j) for j in range(len(stages.stages))]
        reach = lambda fraction: (
            [0] if fraction >= 1 else [j for j, share in enumerate(shares) if share >= fraction - _ENOUGH]
        )
        fractions = _fractions(request, num_workers, place)
        if isinstance(fractions, Refusal):
            return fractions
        ends = [max(reach(fraction)) for fraction in fractions]
    return _joined(stages, ends, request)


def _fractions(request: PartialBackprop, num_workers: int, place: str) -> list[float] | Refusal:
    """Gives by slot the fraction of the backward pass's time that it covers at least, smallest first."""
    if isinstance(request.depths, str):
        assert request.depths == LINEAR, "PartialBackprop admits two names of depths"
        return [(slot + 1) / num_workers for slot in range(num_workers)]
    if len(request.depths) != num_workers:
        return Refusal(
            f"depths has {len(request.depths)} fractions for {num_workers} workers",
            value=request.depths,
            place=place,
            remedy=f"give {num_workers} fractions, one for every worker of the data axis",
            kind=PartialError,
        )
    return sorted(request.depths)


def _joined(stages: BackpropStages, ends: Sequence[int], request: PartialBackprop) -> Depths:
    """Makes depths from the number of the first stage of every slot, `ends`. Stages that nobody differentiates make a
    segment of their own in front."""
    cuts = sorted({0, *ends})
    segments = tuple(
        Segment(stages.stages[start:end]) for start, end in zip(cuts, [*cuts[1:], len(stages.stages)], strict=True)
    )
    return Depths(segments, tuple(cuts.index(end) for end in ends), stages.forward, request)


def _optimal(
    stages: BackpropStages, request: PartialBackprop, num_workers: int, place: str
) -> tuple[int, ...] | Refusal:
    """Gives the number of contributors by stage."""
    assert request.measured is not None, "PartialBackprop refuses optimal depths without measurements"
    noise = dict(zip(request.measured.layers, request.measured.noise, strict=True))
    missing = [stage.name for stage in stages.stages if stage.name not in noise]
    if missing:
        return Refusal(
            "the measured noise is of another step: it has no such layer",
            value=missing[0],
            place=place,
            remedy="call step.advise on this step, and pass its .measured",
            kind=PartialError,
        )
    costs = [stage.backward for stage in stages.stages]
    costs[-1] += stages.forward
    budget = request.budget
    if budget is None:
        linear = dataclasses.replace(request, depths=LINEAR)
        simple = find_depths(stages, linear, num_workers, place)
        if isinstance(simple, Refusal):
            return simple
        budget = simple.device_time
    return optimal_contributors([noise[stage.name] for stage in stages.stages], costs, num_workers, budget, place)
