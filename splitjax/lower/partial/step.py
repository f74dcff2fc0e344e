"""Partial backpropagation of a step: which boundary, which workers, which cuts, and what happens to the state of layers
that are skipped.

Layers that no worker differentiates in a step keep their parameters and their optimizer state; counters that belong to
no parameter go on. Where every layer has a contributor, all state is updated as ever.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from splitjax import _compat
from splitjax.cost.flow import used_axes
from splitjax.errors import PartialError
from splitjax.lower import gradient
from splitjax.lower.partial.truncation import Truncation
from splitjax.lower.products.interpret import Site, holds_boundary
from splitjax.partial.balance import balanced_examples
from splitjax.partial.depths import Depths, choose_depths
from splitjax.partial.pinned import pinned_depths, pinned_request
from splitjax.partial.request import TEMPORAL, PartialBackprop
from splitjax.partial.stages import Stages, find_stages, with_times
from splitjax.plan import PartialPlan, Plan
from splitjax.trace.flatten import bodies, equation_at
from splitjax.trace.graph import Graph

_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})


@dataclasses.dataclass(frozen=True, eq=False)
class PartialStep:
    """The partial backpropagation of one signature of a step.

    - `site`: its gradient boundary. `axes`: the mesh axes of the workers, major first.
    - `params`: by position of a differentiated operand of the boundary, the path of its parameter (or what the boundary
      calls it).
    """

    graph: Graph
    site: Site
    axes: tuple[str, ...]
    depths: Depths
    params: Mapping[int, str]
    examples: tuple[int, ...] = ()  # by slot, where shares are balanced

    @property
    def request(self) -> PartialBackprop:
        return self.depths.request

    @property
    def is_temporal(self) -> bool:
        return self.request.assignment == TEMPORAL

    def segment_of(self) -> dict[int, int]:
        """By position of a differentiated operand its segment."""
        return {
            position: number for number, segment in enumerate(self.depths.segments) for position in segment.operands
        }

    def segments_for(self, eqn: Any, more: Sequence[str] = ()) -> dict[int, int]:
        """The same for the boundary's equation with further operands behind its own, which belong to parameters
        `more`."""
        own = self.segment_of()
        by_param = {self.params[position]: segment for position, segment in own.items()}
        return own | {position: by_param[param] for position, param in self._further(eqn, more).items()}

    def truncation(self, mesh: Mesh, eqn: Any, more: Sequence[str], turn: Any) -> Truncation:
        """Of the boundary's equation. `more` as for `segments_for`; `turn`: i32[]."""
        params = {**self.params, **self._further(eqn, more)}
        return Truncation(self.depths, self.segments_for(eqn, more), params, self.axes, mesh, turn, self.examples)

    def _further(self, eqn: Any, more: Sequence[str]) -> dict[int, str]:
        first = len(eqn.invars) - len(more)
        return {first + k: param for k, param in enumerate(more)}

    def skipped(self, first: int) -> frozenset[str]:
        """The parameters that nobody differentiates where the deepest worker begins with segment `first`."""
        return frozenset(
            self.params[position] for segment in self.depths.segments[:first] for position in segment.operands
        )

    def kept_leaves(self, first: int) -> tuple[int, ...]:
        """The flat arguments that then stay what they are: skipped parameters and the state that follows them."""
        gone = self.skipped(first)
        return tuple(
            leaf.index for leaf in self.graph.leaves if leaf.is_state and (leaf.path in gone or leaf.follows in gone)
        )

    def contributes(self, slots: Collection[int], turn: int) -> list[bool]:
        """Per example of the batch whether it belongs to a worker in one of these slots."""
        depths = self.depths
        equal = (self.graph.num_examples or 0) // depths.num_slots
        found: list[bool] = []
        for worker in range(depths.num_slots):
            slot = depths.slot(worker, turn)
            found += [slot in slots] * (self.examples[slot] if self.examples else equal)
        return found

    def share_of_steps(self, segment: int) -> float:
        """The share of the steps of a temporal assignment in which a segment is differentiated."""
        turns = [self.depths.slot(0, turn) for turn in range(self.depths.num_turns)]
        return sum(self.depths.first[slot] <= segment for slot in turns) / len(turns)


def find_partial(
    request: PartialBackprop | None, pinned: PartialPlan | None, graph: Graph, jaxpr: Any, plan: Plan, place: str
) -> PartialStep | None:
    """How a step is differentiated partially: as a pinned plan says, or as asked for; None where neither does. Raises
    `PartialError` where it cannot be, `PlanError` where the pinned plan is of another step."""
    request = request if pinned is None else pinned_request(pinned)
    if request is None:
        return None
    site = find_boundary(graph, jaxpr, place)
    axes = worker_axes(graph, plan)
    found, params = stages_of(graph, jaxpr, site, request)
    num_workers = plan.mesh.size(axes)
    depths = (
        choose_depths(found, request, num_workers, place)
        if pinned is None
        else pinned_depths(found, pinned, request, num_workers)
    )
    if not request.rebalance:
        return PartialStep(graph, site, axes, depths, params)
    examples, unit = () if pinned is None else pinned.examples, devices_of_worker(plan, axes)
    # the plan was made for another batch, or for none
    if sum(examples) != graph.num_examples or any(one % unit for one in examples):
        examples = balanced_examples(depths, graph.num_examples, place, unit)
    return PartialStep(graph, site, axes, depths, params, examples)


def devices_of_worker(plan: Plan, axes: tuple[str, ...]) -> int:
    """How many devices share the examples of one worker, in equal parts: the places along the other batch axes."""
    return plan.mesh.size(tuple(axis for axis in plan.mesh.present(plan.batch_axes) if axis not in axes))


def stages_of(
    graph: Graph, jaxpr: Any, site: Site, request: PartialBackprop | None = None
) -> tuple[Stages, dict[int, str]]:
    """The stages of a boundary, with measured times where the request has them; by operand the path of its
    parameter."""
    boundary = gradient.boundary_of(equation_at(jaxpr, site).params)
    known = {(one.site, one.result): one.param for one in graph.gradients}
    layers = {param: layer.name for layer in graph.layers for param in layer.params}
    params = {position: known.get((site, result), boundary.names[position]) for result, position in boundary.gradients}
    found = find_stages(
        boundary.forward, boundary.positions, {position: layers.get(param, param) for position, param in params.items()}
    )
    measured = None if request is None else request.measured
    if measured is not None:
        seconds = dict(zip(measured.layers, measured.backward_seconds, strict=True))
        other = [stage.name for stage in found.stages if stage.name not in seconds]
        if other:
            raise PartialError(
                "the measured times are of another step: they have no such layer",
                value=other[0],
                place=boundary.label,
                remedy="call step.advise on this step, and pass its .measured",
            )
        found = with_times(found, seconds, measured.forward_seconds)
    return found, params


def worker_axes(graph: Graph, plan: Plan) -> tuple[str, ...]:
    """The batch axes over which no parameter is split while it is used: each place along them is a worker, whatever it
    shares its examples with along the others."""
    used: set[str] = set()
    for leaf in plan.leaves:
        if leaf.role == "param":
            used |= set(used_axes(leaf.spec, plan.mesh, plan.batch_axes, plan.replicated_batch))
    return tuple(axis for axis in plan.mesh.present(plan.batch_axes) if axis not in used)


def find_boundary(graph: Graph, jaxpr: Any, place: str) -> Site:
    """The step's one gradient boundary. Raises `PartialError` where it has none, or several, or takes it in a loop."""
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
    sites = list(_sites(jaxpr, place))
    if len(sites) != 1:
        raise PartialError(
            f"the step takes {len(sites)} gradients, and depths are those of one",
            value=len(sites),
            place=place,
            remedy="take one gradient of the sum of the losses, or use backprop=None",
        )
    return sites[0]


def _sites(jaxpr: Any, place: str, prefix: Site = (), inside: str = "") -> list[Site]:
    found: list[Site] = []
    for index, eqn in enumerate(_compat.open_jaxpr(jaxpr)[0].eqns):
        if gradient.is_boundary(eqn):
            if inside:
                raise PartialError(
                    f"the step takes its gradient inside a {inside}, more than once a step",
                    value=eqn.params["label"],
                    place=place,
                    remedy="decorate the loop's body, which takes it once",
                )
            found.append((*prefix, index))
        elif holds_boundary(eqn):
            within = inside or ("" if eqn.primitive.name in _CALLS else eqn.primitive.name)
            for number, body in enumerate(bodies(eqn)):
                found += _sites(body, place, (*prefix, index, number), within)
    return found
