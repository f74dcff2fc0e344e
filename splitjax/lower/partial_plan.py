"""Partial backpropagation in a plan: who differentiates what, and what it sends."""

from __future__ import annotations

import dataclasses

from splitjax.lower.contributors import sent_bytes
from splitjax.lower.partial_step import PartialStep
from splitjax.plan import Collective, PartialPlan, Plan, SegmentPlan, spec_axes

HANDED = "collective_permute"


def with_partial(plan: Plan, step: PartialStep) -> Plan:
    """The plan of a step that is differentiated partially: the segments, and the exchange of their gradients among those who computed them."""
    depths, axis = step.depths, "+".join(step.axes)
    num_workers, whole = depths.num_slots, sum(segment.backward for segment in depths.segments)
    sent: dict[str, tuple[float, float]] = {}  # by parameter
    segments = []
    for number, segment in enumerate(depths.segments):
        count = len(depths.contributors(number))
        params = [step.params[position] for position in segment.operands]
        sizes = {param: _bytes(plan, param) for param in params}
        for param, size in sizes.items():
            sent[param] = (
                tuple(2 * (num_workers - 1) * size / num_workers * share for share in (step.share_of_steps(number), 0)) if step.is_temporal
                else sent_bytes(size, count, num_workers)
            )  # fmt: skip
        segments.append(SegmentPlan(
            tuple(stage.name for stage in segment.stages), count, segment.backward / whole if whole else 0.0, sum(sizes.values()),
            round(sum(sent[param][0] for param in params)), round(sum(sent[param][1] for param in params)),
        ))  # fmt: skip
    request = step.request
    found = PartialPlan(
        request.assignment, request.estimator, request.rotate, request.warmup_steps, request.execution, request.rebalance, request.statistics, axis,
        depths.first, depths.device_time, "predicted" if request.measured is None else "measured", tuple(segments),
    )  # fmt: skip
    return dataclasses.replace(plan, partial=found, collectives=_collectives(plan, step, sent, axis))


def _bytes(plan: Plan, param: str) -> int:
    """Bytes of a parameter's gradient on one device, before it is split over the workers."""
    leaf = next((leaf for leaf in plan.leaves if leaf.path == param), None)
    if leaf is None:
        return 0
    over_workers = [axis for axis in plan.mesh.present(spec_axes(leaf.spec)) if axis in plan.batch_axes]
    return leaf.bytes_per_device * plan.mesh.size(tuple(over_workers))


def _collectives(plan: Plan, step: PartialStep, sent: dict[str, tuple[float, float]], axis: str) -> tuple[Collective, ...]:
    """The exchanges of gradients over the workers' axes, with what they send on average; all others as they are."""
    found = []
    for one in plan.collectives:
        param = one.why.removeprefix("gradient of ").partition(", onto")[0] if one.why.startswith("gradient of ") else None
        if param not in sent or one.axis != axis:
            found.append(one)
            continue
        summed, handed = sent[param]
        if round(summed):
            found.append(dataclasses.replace(one, bytes=round(summed)))
        if round(handed):
            found.append(Collective(HANDED, axis, round(handed), one.layer, f"{one.why}, handed to workers that did not compute it"))
    return tuple(found)
