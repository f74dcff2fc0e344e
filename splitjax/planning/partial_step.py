"""Settles the partial backpropagation of a step: which boundary, which workers, which cuts, and what happens to the
state of layers that are skipped.

A request (or a pinned plan) and a traced step go in, a `PartialStep` comes out, from which programs are made. Layers
that no worker differentiates in a step keep their parameters and their optimizer state; counters that belong to no
parameter go on. Where every layer has a contributor, all state is updated as ever.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from splitjax.errors import PartialError
from splitjax.partial.balance import balanced_examples
from splitjax.partial.depths import Depths, choose_depths
from splitjax.partial.pinned import pinned_depths, pinned_request
from splitjax.partial.request import TEMPORAL, PartialBackprop
from splitjax.partial.stages import BackpropStages, find_stages, with_times
from splitjax.plan import PartialPlan, Plan
from splitjax.planning.workers import Workers, workers_of
from splitjax.primitives.walk import Site, boundaries, equation_at
from splitjax.step.boundary import boundary_of
from splitjax.trace.graph import Graph


@dataclasses.dataclass(frozen=True, eq=False)
class PartialStep:
    """The partial backpropagation of a signature of a step.

    - `graph`: of the traced step.
    - `site`: its gradient boundary.
    - `workers`: who differentiates to depths of their own.
    - `depths`: how far each slot differentiates.
    - `params`: by position of a differentiated operand of the boundary, the path of its parameter (or what the boundary
      calls it).
    - `examples`: by slot its number of examples, where shares are balanced; else empty.
    """

    graph: Graph
    site: Site
    workers: Workers
    depths: Depths
    params: Mapping[int, str]
    examples: tuple[int, ...] = ()

    @property
    def request(self) -> PartialBackprop:
        """The request that the depths were chosen for."""
        return self.depths.request

    @property
    def is_temporal(self) -> bool:
        """Tells whether all workers share a depth, which changes from step to step."""
        return self.request.assignment == TEMPORAL

    @property
    def num_examples(self) -> int:
        """The number of examples of the whole batch."""
        return _num_examples(self.graph)

    def segment_of(self) -> dict[int, int]:
        """Gives the number of the segment by the position of a differentiated operand."""
        return {
            position: number for number, segment in enumerate(self.depths.segments) for position in segment.operands
        }

    def segments_for(self, eqn: Any, more: Sequence[str] = ()) -> dict[int, int]:
        """Gives what `segment_of` gives for the boundary's equation `eqn`, which has further operands behind its own;
        these belong to the parameters `more`."""
        own = self.segment_of()
        by_param = {self.params[position]: segment for position, segment in own.items()}
        return own | {position: by_param[param] for position, param in self._further(eqn, more).items()}

    def params_for(self, eqn: Any, more: Sequence[str] = ()) -> dict[int, str]:
        """Gives the path of the parameter by the position of a differentiated operand. `eqn`, `more`: as for
        `segments_for`."""
        return {**self.params, **self._further(eqn, more)}

    def _further(self, eqn: Any, more: Sequence[str]) -> dict[int, str]:
        """Gives the parameter by the position of a further operand."""
        first = len(eqn.invars) - len(more)
        return {first + k: param for k, param in enumerate(more)}

    def skipped(self, first: int) -> frozenset[str]:
        """Gives the parameters that no worker differentiates where the deepest begins with segment `first`."""
        return frozenset(
            self.params[position] for segment in self.depths.segments[:first] for position in segment.operands
        )

    def kept_leaves(self, first: int) -> tuple[int, ...]:
        """Gives the flat arguments that stay what they are where the deepest worker begins with segment `first`:
        skipped parameters and the state that follows them."""
        gone = self.skipped(first)
        return tuple(
            leaf.index for leaf in self.graph.leaves if leaf.is_state and (leaf.path in gone or leaf.follows in gone)
        )

    def contributes(self, slots: Collection[int], cycle_step: int) -> list[bool]:
        """Tells of each example of the batch whether it belongs to a worker in one of `slots` in step `cycle_step` of a
        cycle."""
        depths = self.depths
        equal = self.num_examples // depths.num_slots
        is_in: list[bool] = []
        for worker in range(depths.num_slots):
            slot = depths.slot(worker, cycle_step)
            is_in += [slot in slots] * (self.examples[slot] if self.examples else equal)
        return is_in

    def share_of_steps(self, segment: int) -> float:
        """Gives the share of the steps of a temporal assignment in which segment number `segment` is differentiated."""
        slots = [self.depths.slot(0, cycle_step) for cycle_step in range(self.depths.num_cycle_steps)]
        return sum(self.depths.first[slot] <= segment for slot in slots) / len(slots)


def find_partial(
    request: PartialBackprop | None, pinned: PartialPlan | None, graph: Graph, jaxpr: Any, plan: Plan, place: str
) -> PartialStep | None:
    """Settles how a step is differentiated partially.

    **Arguments:**

    - `request`: what is asked for; None: nothing.
    - `pinned`: what a pinned plan says, which then counts instead; None: nothing.
    - `graph`, `jaxpr`, `plan`: the step's graph, its closed jaxpr and its plan.
    - `place`: what an error names as its place.

    Returns None where neither asks for it. Raises `PartialError` where the step cannot be differentiated partially,
    `PlanError` where the pinned plan is of another step, and `BatchError` where the examples cannot be balanced.
    """
    request = request if pinned is None else pinned_request(pinned)
    if request is None:
        return None
    site = find_boundary(graph, jaxpr, place)
    workers = workers_of(plan, gathers=True)
    stages, params = stages_of(graph, jaxpr, site, request)
    depths = (
        choose_depths(stages, request, workers.num_workers, place)
        if pinned is None
        else pinned_depths(stages, pinned, request, workers.num_workers)
    )
    if not request.rebalance:
        return PartialStep(graph, site, workers, depths, params)
    examples, unit = () if pinned is None else pinned.examples, workers.devices_each
    # the plan was made for another batch, or for none
    if sum(examples) != graph.num_examples or any(share % unit for share in examples):
        examples = balanced_examples(depths, _num_examples(graph), place, unit)
    return PartialStep(graph, site, workers, depths, params, examples)


def stages_of(
    graph: Graph, jaxpr: Any, site: Site, request: PartialBackprop | None = None
) -> tuple[BackpropStages, dict[int, str]]:
    """Finds the stages of a boundary.

    **Arguments:** `graph`, `jaxpr`: the step's graph and its closed jaxpr. `site`: of the boundary. `request`: its
    measured times replace the predicted ones, where it has some.

    Returns the stages, and by position of a differentiated operand the path of its parameter. Raises `PartialError`
    where the measured times are of another step.
    """
    boundary = boundary_of(equation_at(jaxpr, site).params)
    known = {(leaf.site, leaf.result): leaf.param for leaf in graph.gradients}
    layers = {param: layer.name for layer in graph.layers for param in layer.params}
    params = {position: known.get((site, result), boundary.names[position]) for result, position in boundary.gradients}
    stages = find_stages(
        boundary.forward, boundary.positions, {position: layers.get(param, param) for position, param in params.items()}
    )
    measured = None if request is None else request.measured
    if measured is not None:
        seconds = dict(zip(measured.layers, measured.backward_seconds, strict=True))
        missing = [stage.name for stage in stages.stages if stage.name not in seconds]
        if missing:
            raise PartialError(
                "the measured times are of another step: they have no such layer",
                value=missing[0],
                place=boundary.label,
                remedy="call step.advise on this step, and pass its .measured",
            )
        stages = with_times(stages, seconds, measured.forward_seconds)
    return stages, params


def find_boundary(graph: Graph, jaxpr: Any, place: str) -> Site:
    """Finds the only gradient boundary of a step.

    **Arguments:** `graph`, `jaxpr`: the step's graph and its closed jaxpr. `place`: what an error names as its place.

    Raises `PartialError` where the step has no boundary, several, or one in a loop, or has no batch.
    """
    if graph.num_boundaries == 0:
        raise PartialError(
            "the step takes its gradient with plain JAX, or none at all, so there is nothing to end early",
            value=graph.num_boundaries,
            place=place,
            remedy="take it with splitjax.value_and_grad or splitjax.grad",
        )
    if graph.num_examples is None:
        raise PartialError(
            "the step has no batch, so its workers have no examples of their own",
            place=place,
            remedy="name the arguments that hold examples in batch_argnums",
        )
    sites = _sites(jaxpr, place)
    if len(sites) != 1:
        raise PartialError(
            f"the step takes {len(sites)} gradients, and depths are those of one",
            value=len(sites),
            place=place,
            remedy="take one gradient of the sum of the losses, or use backprop=None",
        )
    return sites[0]


def _num_examples(graph: Graph) -> int:
    assert graph.num_examples is not None, "find_boundary refuses a step without a batch"
    return graph.num_examples


def _sites(jaxpr: Any, place: str) -> list[Site]:
    """Lists the boundaries of a step, none of which may stand in a loop."""
    sites: list[Site] = []
    for visit in boundaries(jaxpr):
        if visit.not_inline is not None:
            raise PartialError(
                f"the step takes its gradient inside a {visit.not_inline.primitive.name}, more than once a step",
                value=visit.eqn.params["label"],
                place=place,
                remedy="decorate the loop's body, which takes it once",
            )
        sites.append(visit.site)
    return sites
