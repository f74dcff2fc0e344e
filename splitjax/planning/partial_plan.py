"""Predicts what partial backpropagation sends: who differentiates what, and the bytes that are exchanged for it.

The decisions about a step, the collectives of its full backpropagation and the depths of its workers come in; the
segments of the plan and its collectives, with what is sent on average, come out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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

HANDED = "collective_permute"  # the operation that hands gradients to workers that did not compute them


def predict_partial(
    decided: Plan,
    dense: Sequence[Collective],
    step: PartialStep,
    platform: str,
    pinned: PartialPlan | None = None,
) -> tuple[PartialPlan, tuple[Collective, ...]]:
    """Predicts a step that is differentiated partially. Returns its segments, and its collectives: gradients are
    exchanged among the workers that computed them.

    **Arguments:** `decided`: the plan, of which the layout is read. `dense`: the collectives of full backpropagation.
    `step`: its depths. `platform`: the platform of the mesh's devices, such as `cpu`. `pinned`: the partial plan that
    these depths come from; its times stay, which may have been measured."""
    depths, axis = step.depths, "+".join(step.workers.axes)
    num_workers, whole = depths.num_slots, sum(segment.backward for segment in depths.segments)
    sent: dict[str, tuple[float, float]] = {}  # parameter -> bytes that are summed, bytes that are handed on
    sums = [collective for collective in dense if gradient_of(collective)]
    whole_bytes = {gradient_of(collective): collective.bytes for collective in sums}
    # The workers' axes at once, even where the plan sums over some of them onto parts, and the parts over the rest.
    own = set(step.workers.axes)
    wider = {gradient_of(collective) for collective in sums if not set(collective.axis.split("+")) <= own}
    segments = []
    for number, segment in enumerate(depths.segments):
        count = len(depths.contributors(number))
        params = [step.params[position] for position in segment.operands]
        sizes = {param: _bytes(decided, param, step.workers.axes) for param in params}
        for param, size in sizes.items():
            if step.is_temporal:
                sent[param] = whole_bytes.get(param, 0) * step.share_of_steps(number), 0.0
            elif param in wider:  # summed beside layers that are split over the other axes, by all
                sent[param] = float(whole_bytes[param]), 0.0
            else:
                sent[param] = sent_bytes(
                    size, count if in_groups(step.workers.axes, platform) or not count else num_workers, num_workers
                )
        segments.append(
            SegmentPlan(
                tuple(stage.name for stage in segment.stages),
                count,
                segment.backward / whole if whole else 0.0,
                sum(sizes.values()),
                round(sum(sent[param][0] for param in params)),
                round(sum(sent[param][1] for param in params)),
            )
        )
    request = step.request
    partial = PartialPlan(
        request.assignment,
        request.estimator,
        request.rotate,
        request.warmup_steps,
        request.execution,
        request.rebalance,
        request.statistics,
        axis,
        depths.first,
        depths.device_time,
        "predicted" if request.measured is None else "measured",
        tuple(segments),
        step.examples,
    )
    if pinned is not None:
        timed = [
            dataclasses.replace(segment, backward=known.backward)
            for segment, known in zip(segments, pinned.segments, strict=True)
        ]
        partial = dataclasses.replace(
            partial, segments=tuple(timed), device_time=pinned.device_time, times=pinned.times
        )
    return partial, _collectives(dense, step, sent, axis)


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
    dense: Sequence[Collective], step: PartialStep, sent: dict[str, tuple[float, float]], axis: str
) -> tuple[Collective, ...]:
    """Returns the collectives of a step: those of gradients in `dense` with what they send on average (`sent`: by
    parameter, the bytes that are summed and those that are handed on), all others as they are."""
    collectives, exchanged = [], set[str]()
    for collective in dense:
        param, purpose = gradient_of(collective), collective.purpose
        if param not in sent:
            # Stored weights of a spatial assignment are gathered once, in front of the branches.
            again = purpose.kind == PurposeKind.STORED_WEIGHT and purpose.phase == Phase.BACKWARD
            if step.is_temporal or not again:
                collectives.append(collective)
            continue
        summed, handed = sent[param]
        within = set(collective.axis.split("+")) <= set(step.workers.axes)
        if within and not step.is_temporal:
            if param in exchanged:  # a further part of a sum over the workers, which is one exchange
                continue
            exchanged.add(param)
            collective = dataclasses.replace(collective, op="all_reduce", axis=axis)
        if round(summed):
            collectives.append(dataclasses.replace(collective, bytes=round(summed)))
        if round(handed):
            handed_on = Purpose(PurposeKind.GRADIENT_HANDED, Phase.BACKWARD, param)
            collectives.append(Collective(HANDED, axis, round(handed), collective.layer, handed_on))
    return tuple(collectives)
