"""Partial backpropagation in a plan: who differentiates what, and what it sends."""

from __future__ import annotations

import dataclasses

from splitjax.lower.partial.allreduce import in_groups, sent_bytes
from splitjax.lower.partial.step import PartialStep
from splitjax.plan import Collective, PartialPlan, Plan, SegmentPlan, spec_axes

HANDED = "collective_permute"


def with_partial(plan: Plan, step: PartialStep, platform: str, pinned: PartialPlan | None = None) -> Plan:
    """The plan of a step that is differentiated partially: the segments, and the exchange of their gradients among
    those who computed them. `platform`: of the mesh's devices. `pinned`: whose depths these are; its times stay, which
    may have been measured."""
    depths, axis = step.depths, "+".join(step.axes)
    num_workers, whole = depths.num_slots, sum(segment.backward for segment in depths.segments)
    sent: dict[str, tuple[float, float]] = {}  # by parameter
    whole_bytes = {gradient_of(one): one.bytes for one in plan.collectives if gradient_of(one)}
    wider = {gradient_of(one) for one in plan.collectives if one.axis != axis}
    segments = []
    for number, segment in enumerate(depths.segments):
        count = len(depths.contributors(number))
        params = [step.params[position] for position in segment.operands]
        sizes = {param: _bytes(plan, param, step.axes) for param in params}
        for param, size in sizes.items():
            if step.is_temporal:
                sent[param] = whole_bytes.get(param, 0) * step.share_of_steps(number), 0.0
            elif param in wider:  # summed beside layers that are split over the other axes, by all
                sent[param] = float(whole_bytes[param]), 0.0
            else:
                sent[param] = sent_bytes(
                    size, count if in_groups(step.axes, platform) or not count else num_workers, num_workers
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
    found = PartialPlan(
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
            dataclasses.replace(one, backward=known.backward)
            for one, known in zip(segments, pinned.segments, strict=True)
        ]
        found = dataclasses.replace(found, segments=tuple(timed), device_time=pinned.device_time, times=pinned.times)
    return dataclasses.replace(plan, partial=found, collectives=_collectives(plan, step, sent, axis))


def _bytes(plan: Plan, param: str, axes: tuple[str, ...]) -> int:
    """Bytes of a parameter's gradient on one device, before it is split over the workers."""
    leaf = next((leaf for leaf in plan.leaves if leaf.path == param), None)
    if leaf is None:
        return 0
    return leaf.bytes_per_device * plan.mesh.size(tuple(axis for axis in axes if axis in spec_axes(leaf.spec)))


def gradient_of(one: Collective) -> str:
    """The parameter whose gradient a collective sums; empty for none."""
    return one.why.removeprefix("gradient of ").partition(", onto")[0] if one.why.startswith("gradient of ") else ""


def _collectives(
    plan: Plan, step: PartialStep, sent: dict[str, tuple[float, float]], axis: str
) -> tuple[Collective, ...]:
    """The exchanges of gradients, with what they send on average; all others as they are."""
    found = []
    for one in plan.collectives:
        param = gradient_of(one)
        if param not in sent:
            # Stored weights of a spatial assignment are gathered once, in front of the branches.
            if step.is_temporal or not (one.why.startswith("backward: ") and one.why.endswith(" is stored in pieces")):
                found.append(one)
            continue
        summed, handed = sent[param]
        if round(summed):
            op = one.op if step.is_temporal or one.axis != axis else "all_reduce"
            found.append(dataclasses.replace(one, op=op, bytes=round(summed)))
        if round(handed):
            found.append(
                Collective(
                    HANDED, axis, round(handed), one.layer, f"{one.why}, handed to workers that did not compute it"
                )
            )
    return tuple(found)
