"""Makes the whole `Plan` of a step: leaf specs, constraints, unknown operations, predictions.

A traced step (`Graph`) and a mesh shape come in, with the layout to use: rules, a plan that is pinned, or the specs of
the training step that an evaluation follows. All three ways end in the same completion of a layout to a plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from splitjax.cost import LaidOutStep, predict_collectives, predict_memory
from splitjax.cost.convolutions import derive_convolutions
from splitjax.errors import PlanError, UnknownPrimitiveError
from splitjax.lower.products.constraints import derive_constraints, place_batches
from splitjax.lower.products.remedies import apply_remedies, check_orders, reached_suspects
from splitjax.lower.products.sharded_dims import ShardedDims
from splitjax.mesh import MeshShape
from splitjax.plan import Constraint, LayerPlan, LeafPlan, Plan, Spec, first_mismatch, spec_axes
from splitjax.rules import RuleSet, assign
from splitjax.rules.assign import Assignment
from splitjax.rules.sharded_state import shard_state
from splitjax.trace.graph import Graph, Unknown


def make_plan(
    graph: Graph, rules: RuleSet, mesh: MeshShape, unknown: str = "error", sharded_state: bool = False
) -> Plan:
    """Plans a step by rules.

    **Arguments:** `graph`: the traced step. `rules`: the rules that split its parameters. `mesh`: the shape of the
    mesh. `unknown`: what to do with an operation without dim rule that something sharded reaches: `error`, or `gather`
    around it. `sharded_state`: whether optimizer state and gradients of whole parameters are split over workers.

    Raises what `rules.assign` raises, and `UnknownPrimitiveError`."""
    decided = assign(graph, rules, mesh)
    leaves, notes = place_batches(graph, decided.leaves, mesh, decided.batch_axes), decided.notes
    if sharded_state:
        leaves, more = shard_state(graph, leaves, mesh, decided.batch_axes)
        notes += more
    return _complete(graph, mesh, dataclasses.replace(decided, leaves=leaves, notes=notes), unknown)


def pin_plan(graph: Graph, pinned: Plan, mesh: MeshShape, unknown: str = "error") -> Plan:
    """Plans a step by the layout of a plan that is pinned.

    **Arguments:** `graph`, `mesh`, `unknown`: as for `make_plan`. `pinned`: the plan.

    Raises `PlanError` naming the first difference between plan and step, and `UnknownPrimitiveError`."""
    problem = first_mismatch(pinned, graph.leaves, mesh)
    if problem is not None:
        raise PlanError(
            f"the pinned plan does not fit this step: {problem}",
            place="plan=",
            remedy="make a new plan with step.plan(state, batch), or run the step that the plan was made for",
        )
    planned = {leaf.path: leaf for leaf in pinned.leaves}
    # The step may come with another number of examples than the plan was made for.
    leaves = tuple(
        dataclasses.replace(
            planned[leaf.path], shape=leaf.shape, bytes_per_device=leaf.num_bytes // planned[leaf.path].num_shards(mesh)
        )
        for leaf in graph.leaves
    )
    layout = Assignment(
        rules=pinned.rules,
        replicated_batch=pinned.replicated_batch,
        batch_axes=pinned.batch_axes,
        leaves=leaves,
        layers=pinned.layers,
        notes=pinned.notes,
        dead=(),
    )
    return _complete(graph, mesh, layout, unknown)


def follow_plan(
    graph: Graph, rules: RuleSet, mesh: MeshShape, specs: Mapping[str, Spec], unknown: str = "error"
) -> Plan:
    """Plans another step over the same state, which takes no gradient (an evaluation).

    **Arguments:** `graph`, `rules`, `mesh`, `unknown`: as for `make_plan`. `specs`: path -> spec of the leaves that
    keep the layout that they have in the training step, whatever the rules would say.

    Raises as `make_plan` does."""
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
    leaves = place_batches(graph, leaves, mesh, decided.batch_axes)
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
    return _complete(graph, mesh, dataclasses.replace(decided, leaves=leaves, layers=layers), unknown, backward=False)


def _bytes_per_device(leaf: LeafPlan, spec: Spec, mesh: MeshShape) -> int:
    return leaf.whole_bytes(mesh) // mesh.size(spec_axes(spec))


def _complete(graph: Graph, mesh: MeshShape, layout: Assignment, unknown: str, backward: bool = True) -> Plan:
    """Completes a layout to a plan: constraints, unknown operations, remedies for defects, predictions. `backward`:
    whether the step takes a gradient."""
    leaves, layers, batch_axes = layout.leaves, layout.layers, layout.batch_axes
    replicated_batch, notes = layout.replicated_batch, layout.notes
    check_orders(leaves, mesh)
    by_path = {leaf.path: leaf for leaf in leaves}
    constraints = derive_constraints(graph, by_path, mesh, batch_axes)
    sharded = ShardedDims.of(graph, leaves, batch_axes)
    reached = [op for op in graph.unknown if sharded.reaches((*op.operand_dims, *op.result_dims), op.site)]
    if reached and unknown == "error":
        raise _unknown_error(reached[0])
    extra = tuple(
        constraint
        for op in reached
        for constraint in _gather_around(op, f"{op.primitive} has no dim rule: gathered around it")
    )
    convolutions = derive_convolutions(graph, leaves, mesh, batch_axes, replicated_batch)
    remedies = apply_remedies(reached_suspects(graph, mesh, sharded, convolutions), graph)
    extra += remedies.constraints
    notes += tuple(note for note in remedies.notes if note not in notes)  # a pinned plan has them already
    return Plan(
        mesh=mesh,
        rules=layout.rules,
        replicated_batch=replicated_batch,
        batch_axes=batch_axes,
        leaves=leaves,
        layers=layers,
        constraints=constraints + extra,
        gathered=tuple(f"{op.primitive} at {op.source}" for op in reached),
        memory=predict_memory(graph, leaves, mesh, batch_axes, replicated_batch),
        collectives=predict_collectives(
            LaidOutStep(graph, leaves, layers, mesh, batch_axes, replicated_batch), backward=backward
        ),
        notes=notes,
    )


def _unknown_error(op: Unknown) -> UnknownPrimitiveError:
    return UnknownPrimitiveError(
        f"splitjax does not know what the primitive {op.primitive!r} does to dims, and something sharded reaches it",
        value=op.primitive,
        place=op.source or f"equation {'.'.join(map(str, op.site))}",
        remedy=(
            f'teach it with splitjax.register_dims({op.primitive!r}, "b i, i o -> b o"), or pass unknown="gather" to'
            " run the operation replicated on every device"
        ),
    )


def _gather_around(op: Unknown, why: str) -> list[Constraint]:
    """Returns constraints that make every operand of an operation whole."""
    return [
        Constraint(op.site, k, (None,) * len(dims), op.primitive, why) for k, dims in enumerate(op.operand_dims) if dims
    ]
