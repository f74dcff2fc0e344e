"""Chooses the tables of a step that are synchronised by rows, and says why all others stay dense.

A step's graph, its plan and what is asked for go in, a `SparseStep` comes out. A table takes part if its gradient has
rows (`trace.lookups`), its update acts on rows (`trace.row_update`), its boundary runs once a step, and its state is
laid out alike. Every other table with lookups stays dense, with the reason in the plan.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from splitjax import _compat
from splitjax.errors import SyncError
from splitjax.plan import LeafPlan, Plan, spec_axes
from splitjax.planning.tables.lookups import ids_of
from splitjax.planning.tables.sparse_step import SparseStep
from splitjax.planning.tables.sync_request import SyncRequest
from splitjax.planning.tables.table_sync import IdCut, TableSync
from splitjax.planning.workers import Workers
from splitjax.primitives.calls import CallKind, kind_of
from splitjax.primitives.walk import boundaries, equation_at
from splitjax.sync.costs.all_gather import AllGatherCosts
from splitjax.sync.costs.dense import DenseCosts
from splitjax.sync.costs.exchange import ByOwners, ByScheme, Exchange
from splitjax.sync.costs.schemes import ByRows, SchemeCosts
from splitjax.trace.graph import Graph, itemsize
from splitjax.trace.tables import LookupTable, RowUpdate

_IN_PARTS = (
    "its gradient is summed into parts (shard_state), of which each worker writes its own, and rows are exchanged for"
    " all workers to write; leave shard_state off for it to go by rows, or split its rows over the axes of the batch"
    ' (rules="embedding_owner"): the workers that own them keep their optimizer state too'
)
LAZY_HINT: str = "; lazy=True would leave these rows alone"


Chosen = Mapping[str, Exchange]  # by the path of the table


def find_sparse(graph: Graph, jaxpr: Any, plan: Plan, request: SyncRequest, chosen: Chosen | None) -> SparseStep:
    """Finds the tables to synchronise by rows.

    **Arguments:**

    - `graph`, `jaxpr`, `plan`: the step's graph, its closed jaxpr and its plan.
    - `request`: what is asked for by parameter.
    - `chosen`: exchanges with their capacities, once they are known; None while the first steps are observed.

    Raises `SyncError` for a step without a gradient boundary, and for a pattern that fits no parameter.
    """
    if not graph.num_boundaries:
        raise SyncError(
            "sync needs a gradient boundary: the step takes its gradient with plain jax.grad, whose tables cannot be"
            " told apart",
            place="parallelize, sync",
            remedy="use splitjax.value_and_grad for the gradient",
        )
    request.check([leaf.path for leaf in graph.params])
    syncing = _Syncing(graph, jaxpr, plan, request, chosen)
    tables, reasons = [], {}
    for table in graph.tables:
        asked = request.of(table.param)
        reason = _reason(table, jaxpr, plan, asked) if request.names(table.param) else "no pattern of sync= fits it"
        if not reason and chosen is not None and chosen[table.param].is_dense:
            reason = "chosen"
        if reason:
            reasons[table.param] = reason
            continue
        tables.append(syncing.table_sync(table))
    step = SparseStep(graph, jaxpr, tuple(tables), reasons)
    # Where the ids are known only with the parameters, rows cannot be brought before the forward pass.
    late = {
        sync.param
        for sync in tables
        if sync.exchange.pulls
        and ids_of(step.edited(equation_at(jaxpr, site := step.table_of(sync).boundary), site).edited) is None
    }
    again = lambda sync: syncing.table_sync(step.table_of(sync), may_own=False)
    return dataclasses.replace(step, tables=tuple(again(sync) if sync.param in late else sync for sync in tables))


def _reason(table: LookupTable, jaxpr: Any, plan: Plan, asked: ByRows) -> str:
    """Says why a table stays dense; empty if it need not."""
    if isinstance(asked.scheme, DenseCosts):
        return "asked for"
    update = _update(table, asked)
    if update is None:
        return f"{table.reason}{LAZY_HINT if table.lazy_update is not None else ''}"
    for depth in range(1, len(table.boundary), 2):
        around = equation_at(jaxpr, table.boundary[:depth])
        if kind_of(around) is not CallKind.INLINE:
            return _inside(around)
    planned = [plan.leaves[index] for index in update.leaves]
    if (
        isinstance(asked.scheme, SchemeCosts)
        and asked.scheme.needs_whole_rows
        and any(spec_axes(leaf.spec[1:]) for leaf in planned)
    ):
        return (
            f"its rows are split, and {asked.scheme.name} tells rows by their values, of which each device has a part"
        )
    if any(leaf.gradient is not None for leaf in planned):
        return _IN_PARTS
    if len({spec_axes(leaf.spec[:1]) for leaf in planned}) > 1:
        return "its rows and those of its optimizer state are laid out differently"
    return ""


def _inside(loop: Any) -> str:
    """Says why a gradient that is taken inside an equation stays dense."""
    line = _compat.source_line(loop)
    return f"its gradient is taken inside {loop.primitive.name}, more than once a step{f' ({line})' if line else ''}"


def gradient_in_loop(jaxpr: Any) -> str:
    """Names in words the first loop or condition of the step `jaxpr` that takes a gradient inside; empty without
    one."""
    loop = next((visit.not_inline for visit in boundaries(jaxpr) if visit.not_inline is not None), None)
    return "" if loop is None else _inside(loop)


def _update(table: LookupTable, asked: ByRows) -> RowUpdate | None:
    return table.update if table.update is not None or not asked.lazy else table.lazy_update


@dataclasses.dataclass(frozen=True, eq=False)
class _Syncing:
    """Says how tables of a step are synchronised: the step, and what is asked for or chosen."""

    graph: Graph
    jaxpr: Any
    plan: Plan
    request: SyncRequest
    chosen: Chosen | None

    def table_sync(self, table: LookupTable, may_own: bool = True) -> TableSync:
        """Says how a table is synchronised by rows. `may_own`: its workers may own the rows that they hold."""
        mesh, asked = self.plan.mesh, self.request.of(table.param)
        leaf = {leaf.path: leaf for leaf in self.plan.leaves}[table.param]
        update = _update(table, asked)
        assert update is not None, "a table whose update does not act on rows stays dense"
        split = spec_axes(leaf.spec[1:])
        workers = Workers.beside(mesh, self.plan.batch_axes, split)
        axes, num_workers = workers.axes, workers.num_workers
        is_owned = may_own and bool(axes) and spec_axes(leaf.spec[:1]) == axes
        exchange = None if self.chosen is None else self.chosen[table.param]
        if exchange is None or (exchange.pulls and not is_owned):  # rows that no worker owns are not pulled from any
            exchange = _asked(asked, table.num_rows, leaf, num_workers, is_owned)
        lookups = tuple(
            IdCut(_example_dim(lookup, self.graph, self.jaxpr, num_workers), lookup.mode.removesuffix("_or_drop"))
            for lookup in table.lookups
        )
        return TableSync(
            param=table.param,
            leaf=next(index for index, argument in enumerate(self.graph.leaves) if argument.path == table.param),
            leaves=update.leaves,
            shape=leaf.shape,
            dtype=leaf.dtype,
            spec=leaf.spec,
            axes=axes,
            num_workers=num_workers,
            lookups=lookups,
            row_size=math.prod(leaf.shape[1:]) // mesh.size(split),
            exchange=exchange,
        )


def _asked(asked: ByRows, num_rows: int, leaf: LeafPlan, num_workers: int, is_owned: bool) -> Exchange:
    """Says how a table's rows are added up, as far as that is known before steps were observed. What is not sent, or
    has no more digits than are sent, is not rounded."""
    scheme = asked.scheme if isinstance(asked.scheme, SchemeCosts) else AllGatherCosts()
    wire_dtype = getattr(scheme, "wire_dtype", None)
    if wire_dtype is not None and (num_workers == 1 or itemsize(leaf.dtype) <= itemsize(wire_dtype)):
        scheme, wire_dtype = dataclasses.replace(scheme, wire_dtype=None), None
    return ByOwners(num_rows, wire_dtype=wire_dtype) if is_owned else ByScheme(scheme)


def _example_dim(lookup: Any, graph: Graph, jaxpr: Any, num_workers: int) -> int | None:
    """Gives the dim of a lookup's ids that is cut over the workers, without the loops that the lookup stands in."""
    use = next((use for use in graph.uses if use.site == lookup.site), None)
    if use is None:
        return None
    of_rows = equation_at(jaxpr, lookup.site).params["dimension_numbers"].offset_dims
    of_ids = [dim for dim in range(len(use.out_shape)) if dim not in of_rows]
    return next(
        (
            k
            for k, dim in enumerate(of_ids)
            if graph.is_example(use.out_dims[dim]) and use.out_shape[dim] % num_workers == 0
        ),
        None,
    )
