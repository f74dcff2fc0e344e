"""Predicts what partial backpropagation sends: who differentiates what, and the bytes that are exchanged for it.

The decisions about a step, the collectives of its full backpropagation and the depths of its workers come in; the
segments of the plan and its collectives, with what is sent on average, come out.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from splitjax.cost.ring import all_reduce_bytes
from splitjax.partial.contributors import in_groups, sent_bytes
from splitjax.plan import (
    GRADIENT_SUMS,
    Collective,
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


def predict_partial(
    decided: Plan,
    dense: Sequence[Collective],
    step: PartialStep,
    platform: str,
    pinned: PartialPlan | None = None,
    within: Mapping[str, SumWithin] | None = None,
) -> tuple[PartialPlan, tuple[Collective, ...]]:
    """Predicts a step that is differentiated partially. Returns its segments, and its collectives: gradients are
    exchanged among the workers that computed them.

    **Arguments:** `decided`: the plan, of which the layout is read. `dense`: the collectives of full backpropagation.
    `step`: its depths. `platform`: the platform of the mesh's devices, such as `cpu`. `pinned`: the partial plan that
    these depths come from; its times stay, which may have been measured. `within`: by parameter, how its gradient is
    added up within a worker (`StepWays.sums_within`); for what it leaves out, together with those of all
    workers."""
    exchanges = _exchanges(decided, dense, step, platform, within or {})
    partial = PartialPlan(
        step.request.assignment,
        step.request.estimator,
        step.request.rotate,
        step.request.warmup_steps,
        step.request.execution,
        step.request.rebalance,
        step.request.statistics,
        "+".join(step.workers.axes),
        step.depths.first,
        step.depths.device_time,
        "predicted" if step.request.measured is None else "measured",
        tuple(_segments(decided, step, exchanges)),
        step.examples,
    )
    if pinned is not None:
        timed = [
            dataclasses.replace(segment, backward=known.backward)
            for segment, known in zip(partial.segments, pinned.segments, strict=True)
        ]
        partial = dataclasses.replace(
            partial, segments=tuple(timed), device_time=pinned.device_time, times=pinned.times
        )
    return partial, _collectives(dense, step, exchanges)


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """Holds what a device sends on average for the gradient of a parameter.

    - `summed`, `handed`: bytes to add it up over the workers, and to hand the sum on.
    - `share`: the share of the steps in which it is summed as in full backpropagation, in the same collectives; None
      where workers exchange it on their own.
    - `inside`, `first`: the axes over which a worker then adds it up by itself before, and the bytes of that.
    """

    summed: float
    handed: float = 0.0
    share: float | None = None
    inside: tuple[str, ...] = ()
    first: float = 0.0


def _exchanges(
    decided: Plan,
    dense: Sequence[Collective],
    step: PartialStep,
    platform: str,
    within: Mapping[str, SumWithin],
) -> dict[str, _Exchange]:
    """Returns by parameter what is exchanged for its gradient. The arguments are those of `predict_partial`."""
    dense_bytes: dict[str, int] = collections.Counter()  # of its sums in full backpropagation, and their axes
    axes: dict[str, tuple[str, ...]] = collections.defaultdict(tuple)
    for collective in dense:
        if param := gradient_of(collective):
            dense_bytes[param] += collective.bytes
            axes[param] += tuple(collective.axis.split("+"))
    exchanges: dict[str, _Exchange] = {}
    num_workers = step.depths.num_slots
    for number, segment in enumerate(step.depths.segments):
        count = len(step.depths.contributors(number))
        taking_part = count if in_groups(step.workers.axes, platform) or not count else num_workers
        for param in (step.params[position] for position in segment.operands):
            inside = tuple(axis for axis in axes[param] if axis not in step.workers.axes)
            how = within.get(param, SumWithin.AT_ONCE)
            if step.is_temporal or (inside and how is SumWithin.AT_ONCE):
                share = step.share_of_steps(number) if step.is_temporal else 1.0
                exchanges[param] = _Exchange(dense_bytes[param] * share, share=share)
            else:
                size = _bytes(decided, param, step.workers.axes)
                summed, handed = sent_bytes(size, taking_part, num_workers)
                inside = inside if how is SumWithin.FIRST else ()
                first = all_reduce_bytes(decided.mesh.size(inside), size) * taking_part / num_workers
                exchanges[param] = _Exchange(summed, handed, None, inside, first)
    return exchanges


def _segments(decided: Plan, step: PartialStep, exchanges: Mapping[str, _Exchange]) -> Iterator[SegmentPlan]:
    """Yields the segments of a partial plan."""
    whole = sum(segment.backward for segment in step.depths.segments)
    for number, segment in enumerate(step.depths.segments):
        params = [step.params[position] for position in segment.operands]
        yield SegmentPlan(
            tuple(stage.name for stage in segment.stages),
            len(step.depths.contributors(number)),
            segment.backward / whole if whole else 0.0,
            sum({param: _bytes(decided, param, step.workers.axes) for param in params}.values()),
            round(sum(exchanges[param].summed + exchanges[param].first for param in params)),
            round(sum(exchanges[param].handed for param in params)),
        )


def _bytes(plan: Plan, param: str, axes: tuple[str, ...]) -> int:
    """Returns the bytes of a parameter's gradient on one device, before it is split over the workers."""
    leaf = next((leaf for leaf in plan.leaves if leaf.path == param), None)
    if leaf is None:
        return 0
    return leaf.bytes_per_device * plan.mesh.size(tuple(axis for axis in axes if axis in spec_axes(leaf.spec)))


def gradient_of(collective: Collective) -> str:
    """Returns the path of the parameter whose gradient a planned `collective` sums; empty where it sums none."""
    return collective.purpose.leaf or "" if collective.purpose.kind in GRADIENT_SUMS else ""


def _collectives(
    dense: Sequence[Collective], step: PartialStep, exchanges: Mapping[str, _Exchange]
) -> tuple[Collective, ...]:
    """Returns the collectives of a step: those of gradients in `dense` with what they send on average (`exchanges`, by
    parameter), all others as they are."""
    collectives, exchanged = [], set[str]()
    for collective in dense:
        param, purpose = gradient_of(collective), collective.purpose
        if param not in exchanges:
            # Stored weights of a spatial assignment are gathered once, in front of the branches.
            again = purpose.kind == PurposeKind.STORED_WEIGHT and purpose.phase == Phase.BACKWARD
            if step.is_temporal or not again:
                collectives.append(collective)
        elif (share := exchanges[param].share) is not None:
            collectives.append(dataclasses.replace(collective, bytes=round(collective.bytes * share)))
        elif param not in exchanged:  # a further part of the sum is in the same exchange
            exchanged.add(param)
            collectives += _apart(collective, param, exchanges[param], "+".join(step.workers.axes))
    return tuple(collective for collective in collectives if collective.bytes)


def _apart(collective: Collective, param: str, exchange: _Exchange, axis: str) -> tuple[Collective, ...]:
    """Returns what takes the place of a sum of the gradient of `param` in full backpropagation: its sum over the
    workers along `axis` that computed it, what hands that on, and its sum within a worker."""
    summed = dataclasses.replace(collective, op="all_reduce", axis=axis, bytes=round(exchange.summed))
    handed_on = Purpose(PurposeKind.GRADIENT_HANDED, Phase.BACKWARD, param)
    return (
        summed,
        Collective(HANDED, axis, round(exchange.handed), collective.layer, handed_on),
        dataclasses.replace(summed, axis="+".join(exchange.inside), bytes=round(exchange.first)),
    )
