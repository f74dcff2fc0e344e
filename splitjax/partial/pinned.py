"""Depths as a plan wrote them down."""

from __future__ import annotations

from splitjax.errors import PlanError
from splitjax.partial.depths import Depths, Segment
from splitjax.partial.request import PartialBackprop
from splitjax.partial.stages import Stages
from splitjax.plan import PartialPlan


def pinned_request(pinned: PartialPlan) -> PartialBackprop:
    """What asks for a pinned plan's partial backpropagation, but for its depths."""
    return PartialBackprop(
        assignment=pinned.assignment,
        estimator=pinned.estimator,
        rotate=pinned.rotate,
        warmup_steps=pinned.warmup_steps,
        execution=pinned.execution,
        rebalance=pinned.rebalance,
        statistics=pinned.statistics,
    )


def pinned_depths(found: Stages, pinned: PartialPlan, request: PartialBackprop, num_workers: int) -> Depths:
    """The depths of a pinned plan for a step with these stages. Raises `PlanError` with the first difference."""
    if len(pinned.first) != num_workers:
        _fail(
            f"the plan has depths for {len(pinned.first)} workers, the step has {num_workers}",
            len(pinned.first),
            "plan=, partial.first",
        )
    stages, segments = {stage.name: stage for stage in found.stages}, []
    for number, segment in enumerate(pinned.segments):
        for layer in segment.layers:
            if layer not in stages:
                _fail(
                    f"the plan differentiates a layer {layer!r} that the step lacks, or twice",
                    layer,
                    f"plan=, partial.segments[{number}].layers",
                )
        segments.append(Segment(tuple(stages.pop(layer) for layer in segment.layers)))
    if stages:
        _fail(
            f"the step differentiates a layer {min(stages)!r} that is in no segment of the plan",
            min(stages),
            "plan=, partial.segments",
        )
    return Depths(tuple(segments), pinned.first, found.forward, request)


def _fail(message: str, value: object, place: str) -> None:
    raise PlanError(
        f"the pinned plan does not fit this step: {message}",
        value=value,
        place=place,
        remedy="make a new plan with step.plan(state, batch), or run the step that the plan was made for",
    )
