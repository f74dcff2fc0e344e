"""Graph x RuleSet x mesh -> the whole `Plan`: leaf specs, constraints, unknown operations, predictions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from splitjax.cost import predict_collectives, predict_memory
from splitjax.cost.convolutions import derive_convolutions
from splitjax.errors import PlanError, UnknownPrimitiveError
from splitjax.lower.products.constraints import derive_constraints, place_batches
from splitjax.lower.products.remedies import apply_remedies, check_orders, reached_suspects
from splitjax.lower.products.sharded_dims import ShardedDims
from splitjax.mesh import MeshShape
from splitjax.plan import Constraint, LayerPlan, LeafPlan, Plan, Spec, first_mismatch, spec_axes
from splitjax.rules import RuleSet, assign
from splitjax.rules.sharded_state import shard_state
from splitjax.trace.graph import Graph, Unknown


def make_plan(
    graph: Graph, rules: RuleSet, mesh: MeshShape, unknown: str = "error", sharded_state: bool = False
) -> Plan:
    """Plans a step by rules. Raises what `rules.assign` raises, and `UnknownPrimitiveError`."""
    decided = assign(graph, rules, mesh)
    leaves, notes = place_batches(graph, decided.leaves, mesh, decided.batch_axes), decided.notes
    if sharded_state:
        leaves, more = shard_state(graph, leaves, mesh, decided.batch_axes)
        notes += more
    return _complete(
        graph, mesh, decided.rules, decided.replicated_batch, decided.batch_axes, leaves, decided.layers, notes, unknown
    )


def pin_plan(graph: Graph, pinned: Plan, mesh: MeshShape, unknown: str = "error") -> Plan:
    """The pinned plan's layout for this step. Raises `PlanError` naming the first difference between plan and step."""
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
    return _complete(
        graph,
        mesh,
        pinned.rules,
        pinned.replicated_batch,
        pinned.batch_axes,
        leaves,
        pinned.layers,
        pinned.notes,
        unknown,
    )


def follow_plan(
    graph: Graph, rules: RuleSet, mesh: MeshShape, specs: Mapping[str, Spec], unknown: str = "error"
) -> Plan:
    """A plan for another step over the same state: leaves in `specs` keep their layout, whatever the rules would
    say."""
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
    return _complete(
        graph,
        mesh,
        decided.rules,
        decided.replicated_batch,
        decided.batch_axes,
        leaves,
        layers,
        decided.notes,
        unknown,
        backward=False,
    )


def _bytes_per_device(leaf: LeafPlan, spec: Spec, mesh: MeshShape) -> int:
    return leaf.whole_bytes(mesh) // mesh.size(spec_axes(spec))


def _complete(
    graph: Graph,
    mesh: MeshShape,
    rules: str,
    replicated_batch: str,
    batch_axes: tuple[str, ...],
    leaves: tuple[LeafPlan, ...],
    layers: tuple[LayerPlan, ...],
    notes: tuple[str, ...],
    unknown: str,
    backward: bool = True,
) -> Plan:
    check_orders(leaves, mesh)
    by_path = {leaf.path: leaf for leaf in leaves}
    constraints = derive_constraints(graph, by_path, mesh, batch_axes)
    sharded = ShardedDims.of(graph, leaves, batch_axes)
    reached = [one for one in graph.unknown if sharded.reaches((*one.operand_dims, *one.result_dims), one.site)]
    if reached and unknown == "error":
        raise _unknown_error(reached[0])
    extra = tuple(
        constraint
        for one in reached
        for constraint in _gather_around(one, f"{one.primitive} has no dim rule: gathered around it")
    )
    convolutions = derive_convolutions(graph, leaves, mesh, batch_axes, replicated_batch)
    remedies = apply_remedies(reached_suspects(graph, mesh, sharded, convolutions), graph)
    extra += remedies.constraints
    notes += tuple(note for note in remedies.notes if note not in notes)  # a pinned plan has them already
    return Plan(
        mesh=mesh,
        rules=rules,
        replicated_batch=replicated_batch,
        batch_axes=batch_axes,
        leaves=leaves,
        layers=layers,
        constraints=constraints + extra,
        gathered=tuple(f"{one.primitive} at {one.source}" for one in reached),
        memory=predict_memory(graph, leaves, mesh, batch_axes, replicated_batch),
        collectives=predict_collectives(graph, leaves, layers, mesh, batch_axes, replicated_batch, backward=backward),
        notes=notes,
    )


def _unknown_error(one: Unknown) -> UnknownPrimitiveError:
    return UnknownPrimitiveError(
        f"splitjax does not know what the primitive {one.primitive!r} does to dims, and something sharded reaches it",
        value=one.primitive,
        place=one.source or f"equation {'.'.join(map(str, one.site))}",
        remedy=(
            f'teach it with splitjax.register_dims({one.primitive!r}, "b i, i o -> b o"), or pass unknown="gather" to'
            " run the operation replicated on every device"
        ),
    )


def _gather_around(one: Unknown, why: str) -> list[Constraint]:
    return [
        Constraint(one.site, k, (None,) * len(dims), one.primitive, why)
        for k, dims in enumerate(one.operand_dims)
        if dims
    ]
