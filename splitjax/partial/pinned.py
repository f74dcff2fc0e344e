"""Reads the depths that a plan wrote down: a pinned `PartialPlan` and a step's stages go in, its `Depths` come out.

A plan that is pinned must give the same program as before, whatever would be chosen today. So it is not chosen again,
only compared with the step.
"""

from __future__ import annotations

from splitjax.errors import PlanError
from splitjax.partial.depths import Depths, Segment
from splitjax.partial.request import PartialBackprop
from splitjax.partial.stages import BackpropStages
from splitjax.plan import PartialPlan


def pinned_request(pinned: PartialPlan) -> PartialBackprop:
    """Makes the request that asks for the partial backpropagation of the plan `pinned`, but for its depths."""
    return PartialBackprop(
        assignment=pinned.assignment,
        estimator=pinned.estimator,
        rotate=pinned.rotate,
        warmup_steps=pinned.warmup_steps,
        execution=pinned.execution,
        rebalance=pinned.rebalance,
        statistics=pinned.statistics,
    )


def pinned_depths(stages: BackpropStages, pinned: PartialPlan, request: PartialBackprop, num_workers: int) -> Depths:
    """Gives the depths of a pinned plan for a step.

    **Arguments:** `stages`: those of the step's boundary. `pinned`: the plan. `request`: from `pinned_request`.
    `num_workers`: the workers of the step. Raises `PlanError` with the first difference between plan and step.
    """
    if len(pinned.first) != num_workers:
        _fail(
            f"the plan has depths for {len(pinned.first)} workers, the step has {num_workers}",
            len(pinned.first),
            "plan=, partial.first",
        )
    unclaimed, segments = {stage.name: stage for stage in stages.stages}, []
    for number, segment in enumerate(pinned.segments):
        for layer in segment.layers:
            if layer not in unclaimed:
                _fail(
                    f"the plan differentiates a layer {layer!r} that the step lacks, or twice",
                    layer,
                    f"plan=, partial.segments[{number}].layers",
                )
        segments.append(Segment(tuple(unclaimed.pop(layer) for layer in segment.layers)))
    if unclaimed:
        _fail(
            f"the step differentiates a layer {min(unclaimed)!r} that is in no segment of the plan",
            min(unclaimed),
            "plan=, partial.segments",
        )
    return Depths(tuple(segments), pinned.first, stages.forward, request)


def _fail(message: str, value: object, place: str) -> None:
    raise PlanError(
        f"the pinned plan does not fit this step: {message}",
        value=value,
        place=place,
        remedy="make a new plan with step.plan(state, batch), or run the step that the plan was made for",
    )
