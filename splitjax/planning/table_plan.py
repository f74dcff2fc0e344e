"""Predicts what tables that are synchronised by rows send, and says in the plan how they are.

A table's exchange and what its dense gradient would send come in; its entry of the plan and its collectives come out.
Each table is predicted by itself, so that a layout that changes one of them leaves the others alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from splitjax.cost.row_tables import ID_BYTES, RowTable
from splitjax.mesh import MeshShape
from splitjax.plan import (
    GRADIENT_SUMS,
    ROW_EXCHANGE,
    Collective,
    Phase,
    Purpose,
    PurposeKind,
    SyncPlan,
    spec_axes,
)
from splitjax.planning.observing import OBSERVED_STEPS, TableDecision
from splitjax.planning.tables.sparse_step import SparseStep
from splitjax.planning.tables.sync_request import AUTO, SyncRequest
from splitjax.planning.tables.table_sync import TableSync
from splitjax.sync.costs.dense import DenseCosts
from splitjax.sync.costs.exchange import ByOwners, sizes_of
from splitjax.sync.profile import Table as Costs
from splitjax.trace.graph import itemsize
from splitjax.trace.tables import LookupTable

_KEPT = "each worker keeps what that takes away from gradients, in an array of the table's size"


_TRAVELS = ", with whose rows its own travel"


def row_exchange(syncs: Sequence[SyncPlan], layer: str) -> tuple[Collective, ...]:
    """Returns what is sent for tables that go by rows in the same messages. `syncs`: their entries of the plan, that of
    the table whose messages these are first. `layer`: its layer."""
    first, num_bytes = syncs[0], sum(sync.bytes for sync in syncs)
    if not num_bytes:
        return ()
    purpose = Purpose(PurposeKind.GRADIENT_ROWS, Phase.BACKWARD, first.param, scheme=first.scheme)
    return (Collective(ROW_EXCHANGE, first.axis, num_bytes, layer, purpose),)


def dense_bytes(param: str, sent: Sequence[Collective]) -> int:
    """Returns the bytes of those collectives of `sent` that sum the gradient of `param` where it goes whole."""
    return sum(
        collective.bytes
        for collective in sent
        if collective.purpose.kind in GRADIENT_SUMS and collective.purpose.leaf == param
    )


def row_bytes(step: SparseStep) -> dict[str, int]:
    """Returns the bytes that a device has of the gradient of each table of `step` that goes by rows, by its path."""
    return {table.param: _row_bytes(table, step.num_ids(table)) for table in step.tables}


def _row_bytes(table: TableSync, num_ids: int) -> int:
    """Returns the bytes that a device has of a table's gradient: the rows of its lookups and their sums; then, in the
    exchange or in its fallback, what it sends and gets; and the residual of a table that is rounded. `num_ids`: that it
    looks up."""
    n, capacities = table.num_workers, table.capacities
    local = min(num_ids, table.num_rows)
    everything = n * local + min(n * local, table.num_rows)
    if capacities is None or n == 1:
        moved = everything if n > 1 else 0
    else:
        moved = max(
            everything, capacities.local + capacities.union + capacities.hot + n * (capacities.push + capacities.pull)
        )
    residual = table.num_rows if table.wire_dtype else 0
    return (num_ids + local + moved + residual) * table.row_size * itemsize(table.dtype)


def row_tables(
    step: SparseStep, request: SyncRequest, mesh: MeshShape, batch_axes: Sequence[str]
) -> tuple[RowTable, ...]:
    """Returns what the tables of `step` that go by rows store and send before a step was observed. `request`: what is
    asked for by parameter. `mesh`, `batch_axes`: where the examples lie."""
    stored, found = row_bytes(step), []
    for table in step.tables:
        num_ids = step.num_ids(table)
        split = tuple(axis for axis in spec_axes(table.spec[1:]) if axis in batch_axes)
        may_be_dense = request.of(table.param).scheme == AUTO
        # Rows that travel in another table's messages are counted there.
        row = sum(each.row_size * itemsize(each.dtype) for each in step.together(table))
        own = () if table.joins else _sent_at_most(table, num_ids, row, may_be_dense)
        sent = (*own, *_turned(table, num_ids, split, mesh.size(split)))
        found.append(RowTable(table.param, table.leaves, stored[table.param], sent, table.exchange.pulls, table.joins))
    return tuple(found)


def _sent_at_most(table: TableSync, num_ids: int, row: int, may_be_dense: bool) -> tuple[Collective, ...]:
    """Returns what a worker sends for a table where every one of its `num_ids` lookups finds another row, of `row`
    bytes with those that travel with it. `may_be_dense`: whether the whole gradient is sent where that is less."""
    n, axis = table.num_workers, "+".join(table.axes)
    if n == 1:
        return ()
    rows = min(num_ids, table.num_rows)
    if table.exchange.pulls:
        # Requests, rows, and their gradients. A worker owns as many of the rows that it reads as any other does.
        sizes = ((ID_BYTES, Phase.FORWARD), (row, Phase.FORWARD), (row, Phase.BACKWARD))
        return tuple(_of_rows("all_to_all", axis, rows * (n - 1) // n * size, table, phase) for size, phase in sizes)
    gathered, whole = (n - 1) * rows * (row + ID_BYTES), 2 * (n - 1) * table.num_rows * row // n
    if may_be_dense and whole < gathered:
        return (_of_rows("all_reduce", axis, whole, table),)
    return (_of_rows("all_gather", axis, gathered, table),)


def _turned(table: TableSync, num_ids: int, split: Sequence[str], n: int) -> tuple[Collective, ...]:
    """Returns what a device sends for a table whose rows are `split` over `n` devices, each with examples of its own.

    All get the ids of all. What each finds in its part of the rows is exchanged for whole rows of its own examples, and
    gradients the other way round."""
    if n == 1:
        return ()
    axis, rows = "+".join(split), num_ids // n
    part = rows * table.row_size * itemsize(table.dtype)
    turned = (_of_rows("all_to_all", axis, (n - 1) * part, table, phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
    return (_of_rows("all_gather", axis, (n - 1) * rows * ID_BYTES, table, Phase.FORWARD), *turned)


def _of_rows(op: str, axis: str, num_bytes: int, table: TableSync, phase: Phase = Phase.BACKWARD) -> Collective:
    return Collective(op, axis, num_bytes, table.param, Purpose(PurposeKind.GRADIENT_ROWS, phase, table.param))


def sync_plans(
    step: SparseStep, batch_axes: Sequence[str], dense: Mapping[str, int], decision: TableDecision | None
) -> tuple[SyncPlan, ...]:
    """Returns the entries for all tables of `step` with lookups, also for those that stay dense.

    **Arguments:** `batch_axes`: over which the batch lies. `dense`: by table, what its dense gradient sends (0 where it
    has none). `decision`: their exchanges; None while the first steps are observed."""
    tables = {table.param: table for table in step.tables}
    entries = []
    for traced in step.graph.tables:
        table, sent = tables.get(traced.param), dense.get(traced.param, 0)
        if table is None:
            entries.append(_dense_plan(traced, "+".join(batch_axes), sent, _why_dense(traced, step, decision)))
        else:
            entries.append(_rows_plan(table, traced, sent, decision))
    return tuple(entries)


def _why_dense(traced: LookupTable, step: SparseStep, decision: TableDecision | None) -> str:
    """Says why a table stays dense."""
    chosen = None if decision is None else decision.chosen.get(traced.param)
    if decision is not None and chosen is not None and chosen.is_dense:
        return decision.why[traced.param]
    return step.reasons[traced.param]


def _dense_plan(traced: LookupTable, axis: str, sent: int, why: str) -> SyncPlan:
    """Returns the entry of a table that stays dense."""
    return SyncPlan(traced.param, DenseCosts.name, axis, traced.num_rows, sent, sent, why)


def _rows_plan(table: TableSync, traced: LookupTable, dense: int, decision: TableDecision | None) -> SyncPlan:
    """Returns the entry of a table that goes by rows."""
    exchange = table.exchange
    sizes = Costs(table.num_rows, table.row_size, itemsize(table.dtype), table.num_workers)
    if decision is None or exchange.capacities is None:
        why = f"the first {OBSERVED_STEPS} steps are observed, with all rows gathered"
    else:
        why = decision.why[traced.param]
    if decision is None or not decision.is_whole:
        why = "; ".join((*_changes(table, traced), why))
    # Said anew of a pinned plan's table, which travels with another in this step or does not.
    why = "; ".join((*_joins(table), *(each for each in why.split("; ") if not each.endswith(_TRAVELS))))
    return SyncPlan(
        traced.param,
        exchange.name,
        "+".join(table.axes),
        traced.num_rows,
        _sent(table, sizes),
        dense,
        why,
        traced.update is None,
        exchange.options,
        sizes_of(exchange.capacities),
    )


def _sent(table: TableSync, sizes: Costs) -> int:
    """Returns what a worker sends for a table of these `sizes`: of one whose rows travel with another's, the rows."""
    if table.num_workers == 1:
        return 0
    exchange = table.exchange
    return (
        exchange.row_bytes(sizes) if table.joins and isinstance(exchange, ByOwners) else exchange.predicted_bytes(sizes)
    )


def _joins(table: TableSync) -> Iterator[str]:
    """Says with whose rows those of a table travel."""
    if table.joins:
        yield f"looked up by the ids of {table.joins}{_TRAVELS}"


def _changes(table: TableSync, traced: LookupTable) -> Iterator[str]:
    """Says what about the exchange of a table changes the numbers."""
    if traced.update is None:
        yield f"lazy, which changes the numbers: {traced.reason}"
    if table.wire_dtype:
        read = ", and the rows that are read" if table.exchange.pulls else ""
        yield f"gradients{read} are rounded to {table.wire_dtype} on the wire, which changes the numbers: {_KEPT}"
