"""Decides what lowering does at each operation of a step whose leaves are laid out: constraints where two layouts
meet, gathers around unknown operations, remedies for what XLA's partitioner gets wrong.

A `Draft` with a layout comes in and goes out with constraints, and with all of it by site.
"""

from __future__ import annotations

import dataclasses

from splitjax.cost.convolutions import derive_convolutions
from splitjax.cost.flow import Setting, flows
from splitjax.cost.saved import saved_inputs
from splitjax.cost.transforms import derive_transforms
from splitjax.errors import UnknownPrimitiveError
from splitjax.plan import Constraint
from splitjax.planning.draft import Draft
from splitjax.planning.jax_gradients import recurrence_notes
from splitjax.planning.kernel_lines import kernel_line
from splitjax.planning.sites.callbacks import gather_callbacks
from splitjax.planning.sites.constraints import derive_constraints
from splitjax.planning.sites.dealing import deal_notes, derive_deals
from splitjax.planning.sites.exchange import derive_exchanges, weight_uses
from splitjax.planning.sites.experts import derive_travels, expert_notes, pin_experts
from splitjax.planning.sites.gradients import pin_gradients
from splitjax.planning.sites.grids import derive_grids
from splitjax.planning.sites.joined_outputs import pin_joined_outputs
from splitjax.planning.sites.kernels import derive_kernels, kernel_notes
from splitjax.planning.sites.layout import SiteDecisions, SiteLayout
from splitjax.planning.sites.leaving import pin_leaving
from splitjax.planning.sites.manual import manual_notes
from splitjax.planning.sites.meeting import pin_met
from splitjax.planning.sites.ragged import ragged_notes
from splitjax.planning.sites.remedies import (
    apply_remedies,
    check_orders,
    guarded_sites,
    reached_suspects,
    rewritten_sites,
)
from splitjax.planning.sites.row_inputs import pin_column_inputs, pin_row_inputs, with_row_inputs
from splitjax.planning.sites.scatter import derive_scatters
from splitjax.planning.sites.sharded_dims import ShardedDims
from splitjax.planning.sites.shared_heads import pin_shared_heads, shared_notes
from splitjax.planning.sites.turns import derive_turns
from splitjax.primitives.foreign.callbacks import CALLBACKS
from splitjax.trace.graph import Graph, Unknown


def constrain(draft: Draft) -> Draft:
    """Returns the draft with its constraints, and with what they and the layout mean by site.

    Raises `UnknownPrimitiveError` where something sharded reaches an operation without dim rule, and `PlanError` for
    a layout that XLA cannot be trusted with."""
    graph, mesh, layout = draft.graph, draft.shape, draft.layout
    check_orders(layout.leaves, mesh)
    by_path = {leaf.path: leaf for leaf in layout.leaves}
    arguments = graph, layout.leaves, mesh, layout.batch_axes, layout.replicated_batch
    chain = flows(*arguments)
    travels = derive_travels(graph, chain, mesh, layout.batch_axes)
    constraints = (
        *derive_constraints(
            graph, by_path, mesh, layout.batch_axes, layout.replicated_batch, {travel.site for travel in travels}
        ),
        *pin_experts(graph, travels),
    )
    sharded = ShardedDims.of(graph, layout.leaves, layout.batch_axes)
    unknown = [
        op
        for op in graph.unknown
        if op.primitive not in CALLBACKS and sharded.reaches((*op.operand_dims, *op.result_dims), op.site)
    ]
    if unknown and draft.request.unknown == "error":
        raise _unknown_error(unknown[0], graph)
    around = tuple(
        constraint
        for op in unknown
        for constraint in _gather_around(op, f"{op.primitive} has no dim rule: gathered around it")
    )
    convolutions = derive_convolutions(*arguments)
    suspects = reached_suspects(graph, mesh, sharded, convolutions)
    remedies = apply_remedies(suspects, graph)
    calls, called = gather_callbacks(graph, sharded, mesh)
    constraints = (*constraints, *around, *remedies.constraints, *calls)
    split_sites = {suspect.site for of_defect in suspects.values() for suspect in of_defect}
    exchanges = derive_exchanges(graph, chain, layout.leaves, mesh, layout.batch_axes)
    products = derive_scatters(*arguments, (*exchanges, *travels), chain)
    kernels = derive_kernels(graph, sharded, mesh)
    row_inputs = pin_row_inputs(graph, chain, layout.leaves)
    leaving = tuple(pin_leaving(graph, chain, layout.leaves, layout.batch_axes))
    over = draft.saving_axes
    grids, whole = derive_grids(graph, sharded, mesh, draft.request.unknown)
    sites = SiteLayout.of(
        (
            *constraints,
            *row_inputs,
            *pin_joined_outputs(graph, chain, layout.batch_axes),
            *leaving,
            *pin_met(graph, chain, layout.batch_axes),
            *pin_shared_heads(graph, chain, layout.batch_axes),
            *pin_gradients(graph, layout.leaves, sharded),
        ),
        SiteDecisions(
            with_row_inputs(products, (*row_inputs, *pin_column_inputs(graph, chain, layout.leaves))),
            weight_uses(chain, layout.leaves, mesh),
            names={use.site: use.layer for use in graph.uses},
            convolutions=convolutions,
            transforms=[transform for transform in derive_transforms(*arguments) if transform.site in split_sites],
            rewrites=rewritten_sites(graph, mesh),
            guarded=guarded_sites(suspects),
            leaving={pin.site for pin in leaving},
            kernels=(*kernels, *grids),
            deals=derive_deals(graph, layout.leaves, mesh),
            turns=derive_turns(graph, layout.leaves, mesh),
            travels=[travel for travel in travels if travel.in_boundary],
            saved=saved_inputs(graph, layout.leaves, Setting(mesh, layout.batch_axes, layout.replicated_batch), over),
        ),
    )
    said = (*remedies.notes, *called, *manual_notes(graph, sharded), *kernel_notes(graph, kernels, sharded))
    said = (*said, *deal_notes(graph, layout.leaves, mesh), *shared_notes(graph, chain, mesh))
    said = (*said, *recurrence_notes(graph, mesh, layout.batch_axes))
    said = (*said, *expert_notes(graph, chain, layout.leaves, mesh, layout.batch_axes))
    divided = {product.site for product in products}
    said = (*said, *ragged_notes(graph, layout.leaves, mesh, layout.batch_axes, divided))
    notes = (note for note in said if note not in draft.notes)  # a pinned plan has them already
    gathered = (*(f"{op.primitive} at {op.source}" for op in unknown), *whole)
    return dataclasses.replace(draft, constraints=constraints, gathered=gathered, flows=chain, sites=sites).noting(
        *notes
    )


def _unknown_error(op: Unknown, graph: Graph) -> UnknownPrimitiveError:
    foreign = next((call for call in graph.foreign if call.site == op.site), None)
    if foreign is None:
        remedy = f'teach it with splitjax.register_dims({op.primitive!r}, "b i, i o -> b o")'
    else:
        remedy = (
            f"keep it whole: {kernel_line(foreign, graph)} (give one label to dims that are one dim, and name in whole"
            " those whose entries influence each other; .check(...) tries them)"
        )
    return UnknownPrimitiveError(
        f"splitjax does not know what the primitive {op.primitive!r} does to dims, and something sharded reaches it",
        value=op.primitive,
        place=op.source or f"equation {'.'.join(map(str, op.site))}",
        remedy=f'{remedy}, or pass unknown="gather" to run the operation replicated on every device',
    )


def _gather_around(op: Unknown, why: str) -> list[Constraint]:
    """Returns constraints that make every operand of an operation whole."""
    return [
        Constraint(op.site, k, (None,) * len(dims), op.primitive, why) for k, dims in enumerate(op.operand_dims) if dims
    ]
