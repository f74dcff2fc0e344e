"""Builds a signature of a step from its trace: plans it and wraps it for `jax.jit`.

A `Recipe` (what the decorator was told), a mesh and a traced call come in; a `CompiledEntry` comes out, which holds the
trace, the plan and the program. It is where the rooms below meet: planning, lowering and programs each know nothing of
the order in which they run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh, NamedSharding

from splitjax.compile.entry import CompiledEntry, Recipe
from splitjax.compile.programs import Programs
from splitjax.cost.convolutions import derive_convolutions
from splitjax.cost.transforms import derive_transforms
from splitjax.errors import PlanError
from splitjax.lower.partial.depth_schedule import scheduled_programs
from splitjax.lower.partial.lowered import Lowered
from splitjax.lower.partial.step import find_partial
from splitjax.lower.products.exchange import derive_exchanges, weight_uses
from splitjax.lower.products.layout import SiteDecisions, StepLayout
from splitjax.lower.products.remedies import guarded_sites, reached_suspects, rewritten_sites
from splitjax.lower.products.scatter import derive_scatters, pin_gradients
from splitjax.lower.products.sharded_dims import ShardedDims
from splitjax.lower.strategies import BoundaryChoices, choose_ways
from splitjax.lower.turns.in_turns import InTurns, boundaries_in_turns
from splitjax.lower.way import LoweredStep, make_twin, planned_boundaries
from splitjax.mesh import MeshShape
from splitjax.plan import LeafPlan, Plan, Spec, SyncPlan
from splitjax.planning.group_comm import choose, crosses
from splitjax.planning.observing import TableDecision
from splitjax.planning.partial_plan import with_partial
from splitjax.planning.pinning import pins_tables, synchronised
from splitjax.planning.planning import follow_plan, make_plan, pin_plan
from splitjax.primitives.walk import Site
from splitjax.step.traced import Traced
from splitjax.trace.graph import Graph


@dataclasses.dataclass(frozen=True)
class KnownTables:
    """Holds what is known of how a step's tables are synchronised before its program is built.

    - `decision`: how they are, once their steps were observed.
    - `carried`: how the run that is resumed synchronised them.
    - `observes`: whether to build the program of the first steps, whatever is known.
    """

    decision: TableDecision | None = None
    carried: Sequence[SyncPlan] = ()
    observes: bool = False


def build_entry(
    recipe: Recipe,
    mesh: Mesh,
    traced: Traced,
    layouts: Mapping[str, LeafPlan] | None = None,
    tables: KnownTables | None = None,
) -> CompiledEntry:
    """Builds the entry of a traced call: makes its plan, and wraps it for `jax.jit`. The step is not called.

    **Arguments:**

    - `recipe`: the step. `mesh`: its devices. `traced`: the call, traced.
    - `layouts`: by path, the layout of the training step that an evaluation follows; None for a training step.
    - `tables`: what is known of how tables are synchronised; None for nothing.

    Raises what planning and lowering raise: typed errors that name value, place and remedy."""
    tables = tables or KnownTables()
    bound, jaxpr, graph, matched, result = traced.bound, traced.jaxpr, traced.graph, traced.matched, traced.result
    plan = _plan(recipe, MeshShape.of(mesh), graph, layouts)
    layout = _layout(mesh, plan, graph)
    twin_of = make_twin(graph, traced.resized)
    in_turns: Mapping[Site, InTurns] = {}
    if recipe.returns_state:
        gathered = LoweredStep(graph, mesh, plan, layout, twin_of)
        plan, in_turns = choose(
            recipe.group_comm if recipe.pinned is None else recipe.pinned.group_comm,
            plan,
            graph,
            lambda kind: boundaries_in_turns(kind, gathered, jaxpr),
            crosses(graph, plan),
        )
    partial, pinned_depths = None, None if recipe.pinned is None else recipe.pinned.partial
    if recipe.returns_state:
        partial = find_partial(
            recipe.backprop, pinned_depths, graph, jaxpr, plan, f"parallelize({recipe.name}), backprop"
        )
    if partial is not None:
        plan = with_partial(plan, partial, mesh.devices.flat[0].platform, pinned_depths)
    sparse, decision = None, tables.decision
    pinned = None if tables.observes else recipe.pinned
    if recipe.returns_state and (pins_tables(pinned) or not recipe.request.is_dense):
        sparse, plan, decision = synchronised(
            graph,
            jaxpr,
            plan,
            recipe.request,
            pinned=pinned,
            carried=() if tables.observes else tables.carried,
            decision=decision,
        )
        twin_of = sparse.twin_of(twin_of)
    lowered_step = LoweredStep(graph, mesh, plan, layout, twin_of)
    ways = choose_ways(lowered_step, jaxpr, BoundaryChoices(in_turns, sparse, partial))
    plan = dataclasses.replace(plan, boundaries=planned_boundaries(ways.planned, jaxpr))
    rounded = () if sparse is None else sparse.rounded
    residual_shardings = {table.param: NamedSharding(mesh, table.residual_spec) for table in rounded}
    lowered = Lowered(layout, jaxpr, matched, sparse)
    programs = Programs(recipe, mesh, bound, plan, jaxpr, result, matched, sparse is not None, residual_shardings)
    if ways.partial is None:
        jitted = programs.whole(functools.partial(lowered.run, ways.full))
    else:
        jitted = scheduled_programs(ways.partial, lowered, programs)
    observing = sparse is not None and bool(sparse.tables) and decision is None
    return CompiledEntry(
        traced,
        plan,
        jitted,
        mesh,
        sparse=sparse,
        observes=observing,
        is_decided=decision is not None,
        residual_shardings=residual_shardings,
        partial=partial,
    )


def _plan(recipe: Recipe, shape: MeshShape, graph: Graph, layouts: Mapping[str, LeafPlan] | None) -> Plan:
    """Plans the step: after the training step's `layouts`, a pinned plan, or rules."""
    if layouts is not None:
        if not layouts:
            raise PlanError(
                "the training step has no plan yet, so there is nothing to be like",
                place=f"{recipe.name}, made by like()",
                remedy="call init, place, plan or the training step itself first",
            )
        return follow_plan(graph, recipe.rules, shape, _follow(graph, layouts), recipe.unknown)
    if recipe.pinned is not None:
        return pin_plan(graph, recipe.pinned, shape, recipe.unknown)
    return make_plan(graph, recipe.rules, shape, recipe.unknown, recipe.shard_state)


def _follow(graph: Graph, layouts: Mapping[str, LeafPlan]) -> dict[str, Spec]:
    """Returns specs for an evaluation's state leaves, found by path, or by a path ending that fits exactly one planned
    leaf of that shape."""
    specs = {}
    for leaf in graph.leaves:
        if not leaf.is_state:
            continue
        known = layouts.get(leaf.path)
        if known is None or known.shape != leaf.shape:
            ends = [p for p in layouts.values() if p.shape == leaf.shape and p.path.endswith("/" + leaf.path)]
            params = [p for p in ends if p.role == "param"]
            known = ends[0] if len(ends) == 1 else params[0] if len(params) == 1 else None
        if known is not None:
            specs[leaf.path] = known.spec
    return specs


def _layout(mesh: Mesh, plan: Plan, graph: Graph) -> StepLayout:
    """Derives from a plan what evaluation does at each site: constraints, exchanges, rewrites."""
    arguments = graph, plan.leaves, plan.mesh, plan.batch_axes, plan.replicated_batch
    exchanges = derive_exchanges(*arguments)
    sums = derive_scatters(*arguments, exchanges)
    convolutions = derive_convolutions(*arguments)
    sharded = ShardedDims.of(graph, plan.leaves, plan.batch_axes)
    reached = reached_suspects(graph, plan.mesh, sharded, convolutions)
    split_sites = {suspect.site for suspects in reached.values() for suspect in suspects}
    return StepLayout.of(
        mesh,
        (*plan.constraints, *pin_gradients(graph, plan.leaves)),
        SiteDecisions(
            sums,
            weight_uses(*arguments),
            names={use.site: use.layer for use in graph.uses},
            convolutions=convolutions,
            transforms=[transform for transform in derive_transforms(*arguments) if transform.site in split_sites],
            rewrites=rewritten_sites(graph, plan.mesh),
            guarded=guarded_sites(reached),
        ),
    )
