"""Decides where every leaf of a step lives: by rules, as a pinned plan says, or as another step has it.

Each function here is a pass: a `Draft` comes in and goes out with its layout, or with a layout changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from splitjax.errors import PlanError
from splitjax.mesh import MeshShape
from splitjax.plan import LayerPlan, LeafPlan, Plan, Spec, first_mismatch, spec_axes, spec_text
from splitjax.planning.draft import Draft
from splitjax.planning.examples import check_examples
from splitjax.planning.padding import describe, logical_spec
from splitjax.planning.sites.constraints import place_batches
from splitjax.rules import RuleSet, assign
from splitjax.rules.assign import Assignment
from splitjax.rules.match import unmatched_paths
from splitjax.rules.pins import OPEN
from splitjax.rules.sharded_state import shard_state, without_sharding
from splitjax.trace.graph import Graph


def lay_out(draft: Draft) -> Draft:
    """Returns the draft with a layout for every leaf: that of the training step which an evaluation follows, of the
    pinned plan, or by rules.

    Raises what `rules.assign` raises, and `PlanError` naming the first difference between a pinned plan and the
    step."""
    request, graph, mesh = draft.request, draft.graph, draft.shape
    if request.followed is not None:
        if not request.followed:
            raise PlanError(
                "the training step has no plan yet, so there is nothing to be like",
                place=f"{request.name}, made by like()",
                remedy="call init, place, plan or the training step itself first",
            )
        layout = _followed(graph, request.rules, mesh, _specs_like(graph, request.followed))
    elif request.pinned is not None:
        layout = _pinned(graph, request.pinned, mesh)
        check_examples(draft)
    else:
        layout = assign(graph, request.rules, mesh, draft.pins.by_path)
        check_examples(draft)
        unmatched = unmatched_paths(request.rules.rules, graph)
        layout = dataclasses.replace(layout, notes=(*layout.notes, *unmatched))
    layout = _with_logical(draft, layout)
    padded = describe(layout.leaves)
    told = [padded] if padded and padded not in layout.notes else []
    return dataclasses.replace(draft, layout=layout, notes=(*layout.notes, *told, *draft.pins.notes))


def _with_logical(draft: Draft, layout: Assignment) -> Assignment:
    """Returns the layout with the shapes that the step knows, of leaves that are stored padded."""
    if draft.traced.known is None:
        return layout
    shapes = [aval[0] for aval in draft.traced.known.signature.avals]
    leaves = tuple(
        dataclasses.replace(leaf, logical=shape if shape != leaf.shape else None)
        for leaf, shape in zip(layout.leaves, shapes, strict=True)
    )
    return dataclasses.replace(layout, leaves=leaves)


def place_examples(draft: Draft) -> Draft:
    """Returns the draft with every batch where its first layers want it. A pinned plan has placed them already."""
    if _is_pinned(draft):
        return draft
    layout = draft.layout
    leaves = place_batches(draft.graph, layout.leaves, draft.shape, layout.batch_axes, layout.replicated_batch)
    return dataclasses.replace(draft, layout=dataclasses.replace(layout, leaves=leaves))


def share_state(draft: Draft) -> Draft:
    """Returns the draft with optimizer state and gradients of whole parameters split over workers, where that is asked
    for."""
    if not draft.request.shard_state or _is_pinned(draft) or draft.request.followed is not None:
        return draft
    layout = draft.layout
    leaves, notes = shard_state(draft.graph, layout.leaves, draft.shape, layout.batch_axes)
    return dataclasses.replace(draft, layout=dataclasses.replace(layout, leaves=leaves)).noting(*notes)


def pin_rest(draft: Draft) -> Draft:
    """Returns the draft with everything that is pinned and no parameter where its pin says, which comes before what it
    follows: optimizer state with a sharding of its own, batches that lie somewhere already."""
    pins, notes = draft.pins.by_path, []
    leaves = list(draft.layout.leaves)
    for number, leaf in enumerate(leaves):
        pin = pins.get(leaf.path)
        if pin is None or leaf.role == "param":
            continue
        wanted = tuple(had if entry == OPEN else entry for entry, had in zip(pin.spec, leaf.spec, strict=True))
        if wanted != leaf.spec:
            size = leaf.whole_bytes(draft.shape) // draft.shape.size(spec_axes(wanted))
            leaves[number] = dataclasses.replace(leaf, spec=wanted, rule=pin.reason, bytes_per_device=size)
            notes.append(f"{leaf.path}: {pin.reason}; otherwise {spec_text(leaf.spec)} ({leaf.rule})")
    return dataclasses.replace(draft, layout=dataclasses.replace(draft.layout, leaves=tuple(leaves))).noting(*notes)


def typed_specs(
    graph: Graph, leaves: Sequence[LeafPlan], mesh: MeshShape, followed: Mapping[str, LeafPlan] | None = None
) -> list[Spec]:
    """Returns where a step that is traced under Explicit axes sees its arguments: where they live, in the sizes that it
    knows, but for optimizer state that lies in parts of its own. It meets its parameter and the gradient in the step,
    which JAX takes only where they lie alike, and is seen as it would lie without; no value is moved for it.

    **Arguments:** `graph`, `leaves`: the traced step, laid out. `mesh`: its mesh. `followed`: by path, the layout of
    the training step that an evaluation follows; None for a training step."""
    if followed is None:
        specs = without_sharding(graph, leaves)
    else:
        trained = list(followed.values())
        seen = zip(trained, without_sharding(graph, trained), strict=True)
        like = _specs_like(graph, {leaf.path: dataclasses.replace(leaf, spec=spec) for leaf, spec in seen})
        specs = [like.get(leaf.path, leaf.spec) for leaf in leaves]
    seen_as = (dataclasses.replace(leaf, spec=spec) for leaf, spec in zip(leaves, specs, strict=True))
    return [logical_spec(leaf, mesh, moves=False) for leaf in seen_as]


def _is_pinned(draft: Draft) -> bool:
    return draft.request.pinned is not None and draft.request.followed is None


def _pinned(graph: Graph, pinned: Plan, mesh: MeshShape) -> Assignment:
    """Returns the layout of a `pinned` plan. The step may come with another number of examples than it was made for."""
    problem = first_mismatch(pinned, graph.leaves, mesh)
    if problem is not None:
        raise PlanError(
            f"the pinned plan does not fit this step: {problem}",
            place="plan=",
            remedy="make a new plan with step.plan(state, batch), or run the step that the plan was made for",
        )
    planned = {leaf.path: leaf for leaf in pinned.leaves}
    leaves = tuple(
        dataclasses.replace(
            planned[leaf.path], shape=leaf.shape, bytes_per_device=leaf.num_bytes // planned[leaf.path].num_shards(mesh)
        )
        for leaf in graph.leaves
    )
    return Assignment(
        rules=pinned.rules,
        replicated_batch=pinned.replicated_batch,
        batch_axes=pinned.batch_axes,
        leaves=leaves,
        layers=pinned.layers,
        notes=pinned.notes,
        dead=(),
    )


def _followed(graph: Graph, rules: RuleSet, mesh: MeshShape, specs: Mapping[str, Spec]) -> Assignment:
    """Returns the layout of a step that takes no gradient. `specs`: path -> spec of the leaves that keep the layout
    that they have in the training step, whatever the rules would say."""
    decided = assign(graph, dataclasses.replace(rules, allow_replicated=True), mesh)
    leaves = tuple(
        dataclasses.replace(
            leaf,
            spec=specs[leaf.path],
            rule="as in the training step",
            bytes_per_device=_bytes_per_device(leaf, specs[leaf.path], mesh),
        )
        if leaf.path in specs
        else leaf
        for leaf in decided.leaves
    )
    by_path = {leaf.path: leaf for leaf in leaves}
    layers = tuple(
        LayerPlan(
            layer.name,
            layer.kind,
            layer.params,
            tuple(by_path[p].spec for p in layer.params),
            by_path[layer.params[0]].rule,
        )
        for layer in decided.layers
    )
    return dataclasses.replace(decided, leaves=leaves, layers=layers)


def _bytes_per_device(leaf: LeafPlan, spec: Spec, mesh: MeshShape) -> int:
    return leaf.whole_bytes(mesh) // mesh.size(spec_axes(spec))


def _specs_like(graph: Graph, layouts: Mapping[str, LeafPlan]) -> dict[str, Spec]:
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
