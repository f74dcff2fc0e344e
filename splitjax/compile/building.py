"""Builds a signature of a step from its draft: predicts its plan and wraps it for `jax.jit`.

A `Recipe` (what the decorator was told), a mesh and a traced call come in; a `CompiledEntry` comes out, which holds the
trace, the plan and the program. It is where the rooms below meet: planning, lowering and programs each know nothing of
the order in which they run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from splitjax.compile.entry import CompiledEntry, Recipe
from splitjax.compile.memory import plan_memory
from splitjax.compile.programs import Programs
from splitjax.lower.partial.depth_schedule import scheduled_programs
from splitjax.lower.partial.lowered import Lowered
from splitjax.lower.strategies import CHOOSER, StepWays
from splitjax.mesh import inside_mesh, platform_of
from splitjax.plan import ComingMemory, LeafPlan, Memory
from splitjax.planning.draft import Draft, KnownTables, PlanRequest
from splitjax.planning.explaining import explain
from splitjax.planning.fused import fused_products, side_by_side_products
from splitjax.planning.layouts import typed_specs
from splitjax.planning.padding import find_padding
from splitjax.planning.passes import completed, draft_step, with_tables
from splitjax.planning.predict import predict
from splitjax.planning.sites.layout import StepLayout
from splitjax.planning.sites.mesh_context import MeshContext
from splitjax.step.padding.stored import padded_traced
from splitjax.step.traced import Traced, trace_step, with_dealt, with_rows_taken_apart


def build_entry(recipe: Recipe, mesh: Mesh | AbstractMesh, traced: Traced) -> CompiledEntry:
    """Builds the entry of a training step's call of which nothing else is known: makes its plan, and wraps it for
    `jax.jit`. The step is not called.

    **Arguments:** `recipe`: the step. `mesh`: its devices. `traced`: the call, traced.

    Raises what planning and lowering raise: typed errors that name value, place and remedy."""
    return compile_draft(recipe, mesh, with_tables(begin(recipe, mesh, traced), KnownTables()))


def begin(
    recipe: Recipe, mesh: Mesh | AbstractMesh, traced: Traced, layouts: Mapping[str, LeafPlan] | None = None
) -> Draft:
    """Decides what the trace and the options of a step decide; see `planning.passes.draft_step`.

    **Arguments:** `recipe`, `mesh`, `traced`: as for `build_entry`. `layouts`: by path, the layout of the training step
    that an evaluation follows; None for a training step."""
    request = plan_request(recipe, platform_of(mesh), layouts)
    simulator = functools.partial(_simulated, recipe, mesh)
    padding = find_padding(Draft.of(traced, inside_mesh(mesh), request, CHOOSER))
    if padding:
        traced = padded_traced(traced, padding)
    draft = draft_step(traced, inside_mesh(mesh), request, CHOOSER, simulator)
    if not traced.is_settled:
        specs = typed_specs(draft.graph, draft.layout.leaves, draft.shape, layouts)
        traced = trace_step(recipe, traced.call, traced.matched, mesh, specs)
        if padding:
            traced = padded_traced(traced, padding)
        draft = draft_step(traced, inside_mesh(mesh), request, CHOOSER, simulator)
    products, fused = fused_products(draft)
    while products:
        # A product behind a dealt one may be laid out by columns in this draft alone, and is found in it then.
        traced = with_dealt(traced, products)
        draft = draft_step(traced, inside_mesh(mesh), request, CHOOSER, simulator)
        products, fused = fused_products(draft)
    side_by_side, left = side_by_side_products(draft)
    if side_by_side:
        traced = with_rows_taken_apart(traced, side_by_side)
        draft = draft_step(traced, inside_mesh(mesh), request, CHOOSER, simulator)
    fused = (*fused, *left)
    notes = [*fused] if inside_mesh(mesh) is mesh else [*fused, *_about_types(mesh, traced)]
    return draft.noting(*(note for note in notes if note not in draft.notes))  # a pinned plan has them already


def _simulated(recipe: Recipe, mesh: Mesh | AbstractMesh, draft: Draft) -> Memory:
    """Returns what a step takes whose layout and crossing are decided in `draft`. The step is traced for it."""
    return compile_draft(recipe, mesh, completed(draft)).plan.memory


def _about_types(mesh: Mesh | AbstractMesh, traced: Traced) -> list[str]:
    """Says what became of the Explicit axes of the user's `mesh` in the step."""
    explicit = [name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit]
    axes = f"mesh axes of type Explicit ({', '.join(explicit)})"
    if not traced.annotations:
        return [
            f"{axes} are Auto inside the step, which has no jax.reshard, out_sharding= or sharding constraint: XLA"
            " places what the plan leaves open; arguments and results carry the mesh as given"
        ]
    return [
        f"the step is traced under its {axes}; what it says of arrays is pinned",
        *(f"pinned: {annotation}" for annotation in traced.annotations),
    ]


def plan_request(recipe: Recipe, platform: str, layouts: Mapping[str, LeafPlan] | None = None) -> PlanRequest:
    """Returns what the plan of a step is asked to be. `recipe`, `layouts`: as for `begin`. `platform`: of the devices,
    such as `cpu`."""
    return PlanRequest(
        name=recipe.name,
        returns_state=recipe.returns_state,
        rules=recipe.rules,
        roles=recipe.roles,
        pinned=recipe.pinned,
        followed=layouts,
        unknown=recipe.unknown,
        group_comm=recipe.group_comm,
        shard_state=recipe.shard_state,
        sync=recipe.request,
        backprop=recipe.backprop,
        platform=platform,
        uneven=recipe.uneven,
    )


def compile_draft(recipe: Recipe, mesh: Mesh | AbstractMesh, draft: Draft) -> CompiledEntry:
    """Builds the entry of a `draft` that went through all passes. `recipe`, `mesh`: as for `build_entry`."""
    assert draft.sites is not None, "a draft went through all passes before it is compiled"
    assert isinstance(draft.ways, StepWays), "its boundaries run as lowering chose"
    predicted, traced, tables, ways = predict(draft), draft.traced, draft.tables, draft.ways
    memory = ComingMemory(lambda: plan_memory(recipe, entry), predicted.memory)
    explainer = functools.partial(explain, draft, target=None if recipe.target is None else str(recipe.target))
    plan = dataclasses.replace(predicted, memory=memory, explainer=explainer)
    rounded = () if tables is None else tables.rounded
    residual_shardings = {table.param: NamedSharding(mesh, table.residual_spec) for table in rounded}
    lowered = Lowered(StepLayout(MeshContext(draft.mesh), draft.sites), traced.jaxpr, traced.matched, tables)
    programs = Programs(
        recipe,
        mesh,
        traced.bound,
        plan,
        traced.jaxpr,
        traced.result,
        traced.matched,
        tables is not None,
        residual_shardings,
    )
    if ways.partial is None:
        jitted = programs.whole(functools.partial(lowered.run, ways.full))
    else:
        jitted = scheduled_programs(ways.partial, lowered, programs)
    entry = CompiledEntry(
        traced,
        plan,
        predicted.memory,
        jitted,
        mesh,
        sparse=tables,
        observes=tables is not None and bool(tables.tables) and draft.decision is None,
        is_decided=draft.decision is not None,
        residual_shardings=residual_shardings,
        partial=draft.partial,
    )
    return entry
