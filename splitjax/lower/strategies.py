"""Chooses, while a step is planned, how each of its gradient boundaries runs: whole, in microbatches, in turns, to
depths of its workers' own; with tables by rows around any of these.

A step's graph, plan and layout come in; by site of a boundary a `way.BoundaryWay` comes out, in which everything is
prepared that its evaluation needs. It exists so that the ways to run a boundary do not know of each other, nor the
interpreter of them. What cannot run as it is asked for is an error here, before anything is lowered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from splitjax import _compat
from splitjax.cost.flow import used_axes
from splitjax.cost.use_links import reads_ids
from splitjax.errors import BatchError, PlanError, Refusal, SplitjaxError
from splitjax.lower.microbatch.looped import Looped, looped
from splitjax.lower.microbatch.microbatched import Microbatched, microbatched
from splitjax.lower.partial.truncated import OrdinaryBoundary, PartialWays, partial_ways
from splitjax.lower.products.rebuilding import REBUILD
from splitjax.lower.tables.with_rows import WithRows
from splitjax.lower.turns.in_turns import boundaries_in_turns, boundary_in_turns
from splitjax.lower.way import Whole
from splitjax.plan import Plan
from splitjax.planning.tables.sparse_step import TableEdit
from splitjax.planning.ways import BoundaryChoices, BoundaryWay, DecidedStep, SumWithin, WayChooser, Ways
from splitjax.planning.workers import workers_of
from splitjax.primitives.calls import kind_of
from splitjax.primitives.walk import Site, Visit, boundaries, holds_boundary
from splitjax.trace.graph import Graph


@dataclasses.dataclass(frozen=True, eq=False)
class StepWays:
    """Holds how the boundaries of a step run.

    - `full`: by site, in full backpropagation. `partial`: at each depth; None without partial backpropagation.
    """

    full: Ways
    partial: PartialWays | None = None

    @property
    def planned(self) -> Ways:
        """What the plan records."""
        return self.full if self.partial is None else self.partial.planned

    @property
    def sums_within(self) -> Mapping[str, SumWithin]:
        """By parameter, how its gradient is added up within a worker that has a depth of its own."""
        return {} if self.partial is None else self.partial.sums_within

    @property
    def gathered(self) -> Mapping[str, tuple[str, ...]]:
        """By parameter, the axes along which workers have it whole in a loop of their own."""
        inner = (way.inner if isinstance(way, WithRows) else way for way in self.full.values())
        return {path: axes for way in inner if isinstance(way, Looped) for path, axes in way.gathered.items()}

    @property
    def left(self) -> frozenset[Site]:
        """The sites of the boundaries in which XLA adds gradients up, those of loops among them."""
        inner = {site: way.inner if isinstance(way, WithRows) else way for site, way in self.full.items()}
        return frozenset(site for site, way in inner.items() if type(way) is Whole)


def choose_ways(step: DecidedStep, jaxpr: _compat.ClosedJaxpr, choices: BoundaryChoices) -> StepWays:
    """Chooses how each gradient boundary of a step runs, and prepares it.

    **Arguments:** `step`: the step, with its plan. `jaxpr`: of the step, in which the boundaries are found. `choices`:
    what else was decided.

    Raises `MicrobatchError` for a boundary that cannot run in the microbatches that it asks for, `PartialError` where
    workers cannot have depths of their own, and `PlanError` or `BatchError` where it cannot run in turns.
    """
    ways: dict[Site, BoundaryWay] = {}
    ordinary: OrdinaryBoundary | None = None
    for visit in boundaries(jaxpr, lambda visit: _is_entered(visit, ways)):
        eqn, site = visit.eqn, visit.site
        edit = choices.tables.edited(eqn, site) if choices.tables is not None and choices.tables.at(site) else None
        own = _ordinary(step, eqn, site, edit, choices)
        ways[site] = own.inner if edit is None else WithRows(own.inner, edit)
        if choices.partial is not None and site == choices.partial.site:
            ordinary = own
    if choices.partial is None:
        return StepWays(ways)
    assert ordinary is not None, "a step with partial backpropagation has its boundary"
    return StepWays(ways, _allowed(partial_ways(choices.partial, ordinary, ways)))


def _ordinary(
    step: DecidedStep, eqn: Any, site: Site, edit: TableEdit | None, choices: BoundaryChoices
) -> OrdinaryBoundary:
    """Prepares the boundary `eqn` at `site` as it runs in full backpropagation, its lookups edited by `edit`."""
    tables = choices.tables
    pulled = frozenset() if tables is None else tables.pulled_at(site)

    def way_of(part: Any) -> BoundaryWay | Refusal:
        return _way(step, part, site, pulled)

    if edit is None or tables is None:
        inner = choices.in_turns.get(site) or way_of(eqn)
        return OrdinaryBoundary(step, site, eqn, None, (), _allowed(inner), way_of)
    by_delta = [tables.tables[number] for number, _ in edit.order]
    return OrdinaryBoundary(step, site, edit.edited.eqn, edit, by_delta, _allowed(way_of(edit.edited.eqn)), way_of)


def _way(step: DecidedStep, eqn: Any, site: Site, pulled: frozenset[str]) -> BoundaryWay | Refusal:
    """Prepares the boundary `eqn` at `site` to run in turns, in microbatches, or whole. `pulled`: the paths of the
    tables that it is given rows of."""
    plan, graph, number = step.plan, step.graph, eqn.params["microbatches"]
    if plan.group_comm != "gather":
        turned = boundary_in_turns(plan.group_comm, step, eqn, site)
        if turned is not None:
            return _without_turns(plan, turned) if isinstance(turned, Refusal) else turned
    if graph.num_examples is None:
        return Whole()
    workers, why = workers_of(plan, apart=pulled), ""
    recurrent = _recurrent_layers(graph) if _has_recurrence(graph, site) else frozenset[str]()
    gathering = workers_of(plan, gathers=True, apart=pulled) if recurrent else workers
    if gathering != workers:
        alone = looped(step, eqn, site, gathering, recurrent) if number in (None, 1) else None
        if alone is not None:
            return alone
        own, others = _stored_bytes(step, site)
        if own >= others:
            workers = gathering
        else:
            why = (
                "gradients of its recurrence are exchanged at every turn over the devices that store its weights: to"
                f" exchange them once, each would hold {others} bytes of other layers' weights whole"
            )
    if number not in (None, 1):
        loop = microbatched(step, eqn, site, number, workers)
        if not isinstance(loop, Microbatched):
            return loop
        return dataclasses.replace(loop, why="; ".join(part for part in (loop.why, why) if part))
    if workers.num_workers == 1 or not recurrent:
        return Whole(why)
    once = microbatched(step, eqn, site, 1, workers)
    if isinstance(once, Refusal):  # its loss is no sum over examples, say: XLA sums in every iteration of other loops
        alone = looped(step, eqn, site, workers, recurrent)
        return alone or Whole(f"gradients of its recurrence are exchanged at every turn: {_refused(once)}")
    if isinstance(once, Microbatched):
        return dataclasses.replace(once, why=why or "gradients of its recurrence are exchanged once, behind it")
    return once


def _refused(refusal: Refusal) -> str:
    """Returns the message of a boundary that was refused as one microbatch, with what to do about it where the user's
    code is why."""
    if refusal.cause is None or isinstance(refusal.cause, SplitjaxError):
        return refusal.message
    remedy = 'write sizes from the batch\'s shape, such as batch["x"].shape[0], instead of a number'
    return f"{refusal.message.rstrip('.')}; {remedy}"


def _without_turns(plan: Plan, refusal: Refusal) -> Refusal:
    """Returns the refusal of a boundary that runs in turns where its tables are left whole, and cannot otherwise."""
    if refusal.kind is BatchError:
        return refusal
    return Refusal(
        f"group_comm={plan.group_comm!r} cannot be had for this step: {refusal.message}",
        value=plan.group_comm,
        place="parallelize, group_comm",
        remedy='use group_comm="gather"',
        kind=PlanError,
    )


def _allowed(way: Any) -> Any:
    """Returns a way that was prepared; raises the error of a refusal."""
    if isinstance(way, Refusal):
        raise way.error()
    return way


def _is_entered(visit: Visit, ways: Ways) -> bool:
    """Returns whether the interpreter meets the boundaries inside of an equation by themselves: inside of a boundary
    that runs whole, as `ways` says by then, and of calls that it rebuilds."""
    is_met = ways[visit.site].how == "whole" if visit.site in ways else kind_of(visit.eqn) in REBUILD
    return is_met and holds_boundary(visit.eqn)


def _has_recurrence(graph: Graph, site: Site) -> bool:
    """Returns whether a boundary differentiates weights that a recurrence uses each time round its loop. Their
    gradients are added up over the loop, and XLA adds them up over workers each time round, too. In a loop of one
    microbatch they are exchanged once."""
    recurrent = _recurrent_layers(graph)
    return any(use.trips > 1 and use.layer in recurrent and use.site[: len(site)] == site for use in graph.uses)


def _recurrent_layers(graph: Graph) -> frozenset[str]:
    """Returns the names of the recurrent layers of a step."""
    return frozenset(layer.name for layer in graph.layers if layer.kind == "recurrent")


def _stored_bytes(step: DecidedStep, site: Site) -> tuple[int, int]:
    """Returns the bytes that weights of a boundary have on a device where they are gathered that are stored in parts:
    of recurrent layers, and of others. Tables of lookups are left out, which are gathered for all of their lookups
    anyway."""
    plan, recurrent = step.plan, _recurrent_layers(step.graph)
    gathered: dict[str, int] = {}
    for leaf in plan.leaves:
        used = used_axes(leaf, plan.mesh, plan.batch_axes, plan.replicated_batch)
        stored = tuple(axis for axis in plan.mesh.present(leaf.axes) if axis not in used)
        if leaf.role == "param" and plan.mesh.size(stored) > 1:
            gathered[leaf.path] = leaf.bytes_per_device * plan.mesh.size(stored)
    own, others = dict[str, int](), dict[str, int]()
    for use in step.graph.uses:
        if use.param in gathered and use.site[: len(site)] == site and not reads_ids(use):
            (own if use.layer in recurrent else others)[use.param] = gathered[use.param]
    return sum(own.values()), sum(others.values())


CHOOSER: WayChooser = WayChooser(boundaries_in_turns, choose_ways)  # what planning is told to choose by
