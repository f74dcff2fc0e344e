"""Predicts what partial backpropagation sends: who differentiates what, and the bytes that are exchanged for it.

The decisions about a step, the collectives of its full backpropagation and the depths of its workers come in; the
segments of the plan and its collectives, with what is sent on average, come out.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

from splitjax.cost.ring import all_reduce_bytes
from splitjax.mesh import MeshShape
from splitjax.partial.contributors import in_groups, sent_bytes
from splitjax.plan import (
    GRADIENT_SUMS,
    Collective,
    LeafPlan,
    PartialPlan,
    Phase,
    Plan,
    Purpose,
    PurposeKind,
    SegmentPlan,
    spec_axes,
)
from splitjax.planning.partial_step import PartialStep
from splitjax.planning.ways import SumWithin

HANDED = "collective_permute"  # the operation that hands gradients to workers that did not compute them


@dataclasses.dataclass(frozen=True)
class PartialExchange:
    """Holds what a device sends on average for the gradient of a parameter.

    - `num_bytes`: of the gradient on one device, before it is split over the workers.
    - `summed`, `handed`: bytes to add it up over the workers, and to hand the sum on.
    - `share`: the share of the steps in which it is summed as in full backpropagation, in the same collectives; None
      where workers exchange it on their own.
    - `inside`, `first`: the axes over which a worker then adds it up by itself before, and the bytes of that.
    """

    num_bytes: int
    summed: float
    handed: float = 0.0
    share: float | None = None
    inside: tuple[str, ...] = ()
    first: float = 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class PartialCosts:
    """Predicts what partial backpropagation sends for each parameter, whatever the others are laid out like.

    - `step`: its depths. `mesh`: the shape of the mesh. `platform`: of its devices, such as `cpu`.
    - `pinned`: the partial plan that these depths come from; its times stay, which may have been measured.
    - `within`: by parameter, how its gradient is added up within a worker (`StepWays.sums_within`); for what it leaves
      out, together with those of all workers.
    """

    step: PartialStep
    mesh: MeshShape
    platform: str
    pinned: PartialPlan | None = None
    within: Mapping[str, SumWithin] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def segment_of(self) -> Mapping[str, int]:
        """The number of the segment of each parameter that the step differentiates."""
        segments = enumerate(self.step.depths.segments)
        return {self.step.params[position]: number for number, segment in segments for position in segment.operands}

    def exchange(
        self, param: str, leaf: LeafPlan | None, dense: Sequence[Collective], num_parts: int = 1
    ) -> PartialExchange | None:
        """Returns what is exchanged for the gradient of a parameter; None for one that the step does not
        differentiate.

        **Arguments:** `param`: its path. `leaf`: its layout; None where it is no leaf of the step. `dense`: the
        collectives of full backpropagation; those of other leaves do not count. `num_parts`: among how many devices of
        a worker its gradient lies in parts, where the parameter is whole."""
        number = self.segment_of.get(param)
        if number is None:
            return None
        sums = [collective for collective in dense if gradient_of(collective) == param]
        dense_bytes = sum(collective.bytes for collective in sums)
        axes = [axis for collective in sums for axis in collective.axis.split("+")]
        size, how = self._bytes(leaf) // num_parts, self.within.get(param, SumWithin.AT_ONCE)
        inside = tuple(axis for axis in axes if axis not in self.step.workers.axes)
        if self.step.is_temporal or (inside and how is SumWithin.AT_ONCE):
            share = self.step.share_of_steps(number) if self.step.is_temporal else 1.0
            return PartialExchange(size, dense_bytes * share, share=share)
        num_workers, taking_part = self.step.depths.num_slots, self._taking_part[number]
        summed, handed = sent_bytes(size, taking_part, num_workers)
        inside = inside if how is SumWithin.FIRST else ()
        first = all_reduce_bytes(self.mesh.size(inside), size) * taking_part / num_workers
        return PartialExchange(size, summed, handed, None, inside, first)

    def sent(self, dense: Sequence[Collective], exchanges: Mapping[str, PartialExchange]) -> tuple[Collective, ...]:
        """Returns what takes the place of collectives of full backpropagation (`dense`): those of gradients with what
        they send on average (`exchanges`, by parameter), all others as they are."""
        collectives, exchanged = [], set[str]()
        for collective in dense:
            param, purpose = gradient_of(collective), collective.purpose
            if param not in exchanges:
                # Stored weights of a spatial assignment are gathered once, in front of the branches.
                again = purpose.kind == PurposeKind.STORED_WEIGHT and purpose.phase == Phase.BACKWARD
                if self.step.is_temporal or not again:
                    collectives.append(collective)
            elif (share := exchanges[param].share) is not None:
                collectives.append(dataclasses.replace(collective, bytes=round(collective.bytes * share)))
            elif param not in exchanged:  # a further part of the sum is in the same exchange
                exchanged.add(param)
                collectives += _apart(collective, param, exchanges[param], "+".join(self.step.workers.axes))
        return tuple(collective for collective in collectives if collective.bytes)

    def plan(self, exchanges: Mapping[str, PartialExchange]) -> PartialPlan:
        """Returns the segments of the plan. `exchanges`: of every parameter that the step differentiates, by path."""
        step, request = self.step, self.step.request
        partial = PartialPlan(
            request.assignment,
            request.estimator,
            request.rotate,
            request.warmup_steps,
            request.execution,
            request.rebalance,
            request.statistics,
            "+".join(step.workers.axes),
            step.depths.first,
            step.depths.device_time,
            "predicted" if request.measured is None else "measured",
            tuple(_segments(step, exchanges)),
            step.examples,
        )
        if self.pinned is None:
            return partial
        timed = [
            dataclasses.replace(segment, backward=known.backward)
            for segment, known in zip(partial.segments, self.pinned.segments, strict=True)
        ]
        return dataclasses.replace(
            partial, segments=tuple(timed), device_time=self.pinned.device_time, times=self.pinned.times
        )

    @functools.cached_property
    def _taking_part(self) -> tuple[int, ...]:
        """By segment, the workers that take part in its sums."""
        depths, grouped = self.step.depths, in_groups(self.step.workers.axes, self.platform)
        counts = [len(depths.contributors(number)) for number in range(len(depths.segments))]
        return tuple(count if grouped or not count else depths.num_slots for count in counts)

    def _bytes(self, leaf: LeafPlan | None) -> int:
        """Returns the bytes of a parameter's gradient on one device, before it is split over the workers."""
        if leaf is None:
            return 0
        split = spec_axes(leaf.spec)
        return leaf.bytes_per_device * self.mesh.size(tuple(axis for axis in self.step.workers.axes if axis in split))


def predict_partial(
    decided: Plan, dense: Sequence[Collective], step: PartialStep, platform: str
) -> tuple[PartialPlan, tuple[Collective, ...]]:
    """Predicts a step that is differentiated partially. Returns its segments, and its collectives: gradients are
    exchanged among the workers that computed them.

    **Arguments:** `decided`: the plan, of which the layout is read. `dense`: the collectives of full backpropagation.
    `step`: its depths. `platform`: the platform of the mesh's devices, such as `cpu`."""
    costs = PartialCosts(step, decided.mesh, platform)
    leaves = {leaf.path: leaf for leaf in decided.leaves}
    sent: dict[str, list[Collective]] = collections.defaultdict(list)
    for collective in dense:
        sent[collective.purpose.leaf or ""].append(collective)
    found = {
        param: costs.exchange(param, leaves.get(param), sent[param], _num_parts(sent[param], decided.mesh))
        for param in costs.segment_of
    }
    exchanges = {param: exchange for param, exchange in found.items() if exchange is not None}
    return costs.plan(exchanges), costs.sent(dense, exchanges)


def _num_parts(sent: Sequence[Collective], mesh: MeshShape) -> int:
    """Returns among how many devices of a worker the gradient of a whole parameter lies in parts. `sent`: what is sent
    for it: parts are brought together, or stay parts for a state over more axes than the gradient is summed onto."""
    axes: dict[PurposeKind, set[str]] = collections.defaultdict(set)
    for each in sent:
        if each.op != "collective_permute":  # of parts that lie elsewhere in the state
            axes[each.purpose.kind].update(each.axis.split("+"))
    stay = axes[PurposeKind.NEW_VALUE] - axes[PurposeKind.GRADIENT_ONTO_STATE]
    return mesh.size(tuple(axes[PurposeKind.GRADIENT_GROUPS] or stay))


def _segments(step: PartialStep, exchanges: Mapping[str, PartialExchange]) -> Iterator[SegmentPlan]:
    """Yields the segments of a partial plan."""
    whole = sum(segment.backward for segment in step.depths.segments)
    for number, segment in enumerate(step.depths.segments):
        params = [step.params[position] for position in segment.operands]
        yield SegmentPlan(
            tuple(stage.name for stage in segment.stages),
            len(step.depths.contributors(number)),
            segment.backward / whole if whole else 0.0,
            sum({param: exchanges[param].num_bytes for param in params}.values()),
            round(sum(exchanges[param].summed + exchanges[param].first for param in params)),
            round(sum(exchanges[param].handed for param in params)),
        )


def gradient_of(collective: Collective) -> str:
    """Returns the path of the parameter whose gradient a planned `collective` sums; empty where it sums none."""
    return collective.purpose.leaf or "" if collective.purpose.kind in GRADIENT_SUMS else ""


def _apart(collective: Collective, param: str, exchange: PartialExchange, axis: str) -> tuple[Collective, ...]:
    """Returns what takes the place of a sum of the gradient of `param` in full backpropagation: its sum over the
    workers along `axis` that computed it, what hands that on, and its sum within a worker."""
    summed = dataclasses.replace(collective, op="all_reduce", axis=axis, bytes=round(exchange.summed))
    handed_on = Purpose(PurposeKind.GRADIENT_HANDED, Phase.BACKWARD, param)
    return (
        summed,
        Collective(HANDED, axis, round(exchange.handed), collective.layer, handed_on),
        dataclasses.replace(summed, axis="+".join(exchange.inside), bytes=round(exchange.first)),
    )
