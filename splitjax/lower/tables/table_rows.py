"""Adds a table's rows up over the workers of a mesh, and computes from the sum what the step computes.

The ids and cotangents of a step's lookups go in, `Exchanged` comes out, which writes new rows into the state and
reduces over them. The exchange runs in a `shard_map` over all axes: a worker of the table's `axes` has its examples'
rows, split like the table over the others. Its result is the same on all workers; what is computed from it stands
outside, where XLA lays it out, but for tables that are split by rows: there each device writes its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from splitjax.lower.products.groups import scope
from splitjax.lower.products.row_values import Rows, RowView, written
from splitjax.lower.tables.around import LookedUp, RowGradients, Surroundings, placed
from splitjax.lower.tables.collective_order import known_at_the_end
from splitjax.plan import spec_axes
from splitjax.planning.tables.lookups import EditedLookup
from splitjax.planning.tables.table_sync import TableSync, cut
from splitjax.sync.costs.capacities import Capacities
from splitjax.sync.costs.exchange import ByScheme
from splitjax.sync.feedback import keep, with_residual
from splitjax.sync.rows import RowSparse, from_lookups, normalised
from splitjax.sync.running import Attempt
from splitjax.sync.scheme import runnable
from splitjax.sync.synchronising import gather_all, once
from splitjax.sync.wire import Axis


@runtime_checkable
class _Rounding(Protocol):
    """A scheme that rounds values on the wire, such as `sync.row_exchange.RowExchange`."""

    def attempt_rounded(
        self, local: RowSparse, axis: Axis, capacities: Capacities
    ) -> tuple[Attempt, RowSparse | None]: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Exchanged:
    """The sum of all workers' rows within the capacities, and what is needed where they did not suffice.

    - `table`: how the table is synchronised.
    - `around`: the exchanges of the step.
    - `rows`: the sum, the same on all workers.
    - `fits`: bool[], or True where nothing can be missing.
    - `local_ids`, `local_values`: of all workers, [n * k] and [n * k, *row].
    - `touched`: while capacities are not known, the ids of all workers, i32[n, k]; else None.
    - `residual`: f[n, num_rows, *row], what rounding took away, of a table that has a `wire_dtype`.
    """

    table: TableSync
    around: Surroundings
    rows: RowSparse
    fits: Any
    local_ids: Any
    local_values: Any
    touched: Any
    residual: Any = None

    @property
    def observed(self) -> dict[str, Any]:
        """The values that the step returns of it: `fell_back` bool[], and while capacities are not known `touched`."""
        return {"fell_back": jnp.logical_not(self.fits), **({} if self.touched is None else {"touched": self.touched})}

    def write(self, leaves: Mapping[int, Any], new: Mapping[int, Rows]) -> dict[int, Any]:
        """Writes the rows that the update changes into the state's leaves.

        **Arguments:** `leaves`: the table's, by flat argument. `new`: what becomes of those that are written.
        """
        given = {id(array): array for value in new.values() for array in value.arrays()}

        def update(rows: RowSparse, state: dict[int, Any]) -> dict[int, Any]:
            run = _on_devices(
                self,
                lambda view: {**view.leaves, **written(view, new)},
                state,
                {leaf: self.table.row_axes for leaf in state},
            )
            return run(rows, state, given)

        return self._into(update, dict(leaves))

    def total(self, leaves: Mapping[int, Any], eqn: Any, value: Rows) -> Any:
        """Reduces over all touched rows; all other rows have nothing to add.

        **Arguments:** `leaves`: the table's, by flat argument. `eqn`: the reduction's equation. `value`: what it
        reduces.
        """
        given = {id(array): array for array in value.arrays()}

        def reduce(rows: RowSparse) -> Any:
            reduced = lambda view: view.reduced(eqn, value, view.leaves[self.table.leaf].shape[0])
            run = _on_devices(self, reduced, leaves, (), eqn.primitive.name)
            return run(rows, dict(leaves), given)

        return self._choose(reduce)

    def _choose(self, function: Callable[[RowSparse], Any]) -> Any:
        """Computes a function of the whole sum, the same for any capacity, such as a norm."""
        if self.fits is True:
            return function(self.rows)

        @jax.named_scope(scope("fallback", self.table.param))
        def whole() -> tuple[Any, Any]:
            rows = self._all()
            return function(rows), rows.count

        out, self.around.order.token = lax.cond(
            self.around.order.next(self.fits), lambda: (function(self.rows), jnp.int32(0)), whole
        )
        return out

    def _into(self, function: Callable[[RowSparse, Any], Any], carry: Any) -> Any:
        """Changes a carry, such as tables, in place by a function of the whole sum."""
        if self.fits is True:
            return function(self.rows, carry)
        carry = once(self.fits, lambda state: function(self.rows, state), carry)
        whole = lambda rows, state: (function(rows, state), rows.count)
        falls_back = ~self.around.order.next(self.fits)
        with jax.named_scope(scope("fallback", self.table.param)):
            carry, self.around.order.token = once(
                falls_back, lambda state: whole(self._all(), state[0]), (carry, jnp.int32(0))
            )
        return carry

    def _all(self) -> RowSparse:
        """Gathers all workers' rows, for which there always is room."""
        run = _in_shard_map(
            self.table,
            self.around.mesh,
            lambda ids, values: _parts(gather_all(_row_sparse(self.table, ids, values), self.table.axes)),
            (PartitionSpec(self.table.axes), PartitionSpec(self.table.axes, *self.table.row_spec)),
            (PartitionSpec(), PartitionSpec(None, *self.table.row_spec), PartitionSpec()),
        )
        with jax.named_scope(scope("fallback", self.table.param)):
            ids, values, count = run(self.local_ids, self.local_values)
        return RowSparse(ids, values, count, self.table.num_rows)


@dataclasses.dataclass(frozen=True, eq=False)
class Unread:
    """The rows of a table that every worker reads by itself, before they are exchanged.

    - `around`: the exchanges of the step. `looked_up`: the table and its lookups.
    """

    around: Surroundings
    looked_up: LookedUp

    def given(self, of_table: int, lookup: EditedLookup, number: int) -> Any:
        """Gives zeros, which are added to the rows that `lookup` reads."""
        return jnp.zeros(lookup.delta.shape, lookup.delta.dtype)

    def push(self, ready: Any, gradients: Sequence[RowGradients]) -> list[Exchanged]:
        """Adds up the rows of all lookups over all workers. The arguments are those of `RowsInStep.push`."""
        (own,) = gradients
        table = placed(self.looked_up.table, self.looked_up.loops, own.ids)
        return [_exchange(table, self.around, ready, own.ids, own.values, own.residual)]


def begin_summed(around: Surroundings, looked_up: Sequence[LookedUp]) -> Unread:
    """Begins the exchange of a table by a scheme: nothing is sent before the gradients are there. `around`: the
    exchanges of the step. `looked_up`: the table and its lookups; no other's rows travel with its own."""
    (own,) = looked_up
    return Unread(around, own)


def _exchange(
    table: TableSync, around: Surroundings, ready: Any, ids: Sequence[Any], values: Sequence[Any], residual: Any
) -> Exchanged:
    """Adds up the rows of all lookups of a table over all workers. `around`: the exchanges of the step, which this one
    joins. The others are the arguments of `Unread.push`."""
    exchange, mesh = table.exchange, around.mesh
    assert isinstance(exchange, ByScheme), "rows of an owned table are pushed to their owners"
    is_static = []

    def body(numbers, cotangents, kept, ready):
        local, errors, touched = _local(table, numbers, cotangents), None, None
        local = dataclasses.replace(local, ids=jnp.where(ready, local.ids, table.num_rows))
        if kept is not None:
            local, kept = with_residual(local, kept[0])
        if table.capacities is None:
            total, touched = (
                gather_all(local, table.axes),
                lax.all_gather(local.ids, table.axes) if table.axes else local.ids[None],
            )
            attempt = Attempt(total, True, jnp.int32(0))
        elif table.num_workers == 1 or not local.capacity:
            attempt = Attempt(local, True, jnp.int32(0))
        elif kept is not None:
            rounding = runnable(exchange.scheme)
            assert isinstance(rounding, _Rounding), "a scheme with a wire_dtype rounds what it sends"
            attempt, errors = rounding.attempt_rounded(local, table.axes, table.capacities)
        else:
            attempt = runnable(exchange.scheme).attempt(local, table.axes, table.capacities)
        if kept is not None:
            kept = (kept if errors is None else keep(kept, errors))[None]
        is_static.append(attempt.fits is True)
        fits = jnp.asarray(True) if attempt.fits is True else known_at_the_end(attempt.fits, attempt.rows.values)
        return _parts(attempt.rows), fits, local.ids, local.values, touched, kept

    of_residual = None if residual is None else table.residual_spec
    run = _in_shard_map(
        table,
        mesh,
        body,
        (
            [cut(lookup.dim, table.axes) for lookup in table.lookups],
            [
                cut(lookup.dim, table.axes, x.ndim - len(table.shape) + 1, table.row_spec)
                for lookup, x in zip(table.lookups, values, strict=True)
            ],
            of_residual,
            PartitionSpec(),
        ),
        (
            (PartitionSpec(), PartitionSpec(None, *table.row_spec), PartitionSpec()),
            PartitionSpec(),
            PartitionSpec(table.axes),
            PartitionSpec(table.axes, *table.row_spec),
            PartitionSpec() if table.capacities is None else None,
            of_residual,
        ),
    )
    with jax.named_scope(scope("rows", table.param)):
        (total_ids, total_values, count), fits, local_ids, local_values, touched, residual = run(
            list(ids), list(values), residual, ready
        )
    if not is_static[-1]:
        around.order.join(fits)
    total = RowSparse(total_ids, total_values, count, table.num_rows)
    return Exchanged(table, around, total, True if is_static[-1] else fits, local_ids, local_values, touched, residual)


# How partial results of devices that have some of the rows each are put together: of the reductions that
# `trace.row_update` admits.
JOIN: Mapping[str, Callable[[Any, tuple[str, ...]], Any]] = {
    "reduce_sum": lax.psum,
    "reduce_and": lambda part, axes: lax.pmin(part.astype(jnp.int32), axes).astype(part.dtype),
    "reduce_or": lambda part, axes: lax.pmax(part.astype(jnp.int32), axes).astype(part.dtype),
}


def _on_devices(
    exchanged: Exchanged, function: Callable[[RowView], Any], leaves: Mapping[int, Any], out_axes: Any, join: str = ""
) -> Callable:
    """Gives a function of the touched rows as each device runs it on the rows that it has.

    Manual over all axes where only rows are split, for kernels cannot be partitioned; otherwise over those that split
    rows. `out_axes`: like its result, the axes that split its leading dim. `join`: the reduction by which parts of it
    are put together."""
    table = exchanged.table
    manual = table.row_axes if spec_axes(table.row_spec) else tuple(exchanged.around.mesh.axis_names)
    specs = lambda axes: PartitionSpec(axes) if axes else PartitionSpec()

    def body(rows: RowSparse, state: Mapping[int, Any], given: Mapping[int, Any]) -> Any:
        if not table.row_axes:
            return function(RowView(rows.ids, rows.values, state, given))
        size = table.num_rows // lax.axis_size(table.row_axes)
        ids = rows.ids - lax.axis_index(table.row_axes) * size
        mine = (ids >= 0) & (ids < size)
        values = jnp.where(mine.reshape(-1, *[1] * (rows.values.ndim - 1)), rows.values, 0)
        part = function(RowView(jnp.where(mine, ids, size), values, state, given, is_sorted=False))
        return JOIN[join](part, table.row_axes) if join else part

    if not manual:
        return body
    is_array = isinstance(out_axes, tuple)
    # check_vma=False: rows are alike on all workers, which the checker cannot know.
    return jax.shard_map(
        body,
        mesh=exchanged.around.mesh,
        axis_names=frozenset(manual),
        check_vma=False,
        in_specs=(PartitionSpec(), {leaf: specs(table.row_axes) for leaf in leaves}, PartitionSpec()),
        out_specs=specs(out_axes) if is_array else {leaf: specs(axes) for leaf, axes in out_axes.items()},
    )


def _local(table: TableSync, ids: Sequence[Any], values: Sequence[Any]) -> RowSparse:
    """Gives this worker's rows. A lookup that all workers make alike is the first worker's."""
    row_shape = values[0].shape[values[0].ndim - len(table.shape) + 1 :]
    numbers = []
    for lookup, looked_up in zip(table.lookups, ids, strict=True):
        rows = normalised(looked_up.reshape(-1), table.num_rows, lookup.mode, False)
        if lookup.dim is None:
            rows = jnp.where(lax.axis_index(table.axes) == 0, rows, table.num_rows)
        numbers.append(rows)
    # In the table's own dtype: half-precision cotangents are added up without losing digits.
    flat = [cotangents.reshape(-1, *row_shape).astype(table.dtype) for cotangents in values]
    return from_lookups(jnp.concatenate(numbers), jnp.concatenate(flat), table.num_rows, wrap=False)


def _row_sparse(table: TableSync, ids: Any, values: Any) -> RowSparse:
    return RowSparse(ids, values, jnp.sum(ids < table.num_rows, dtype=jnp.int32), table.num_rows)


def _parts(rows: RowSparse) -> tuple[Any, Any, Any]:
    return rows.ids, rows.values, rows.count


def _in_shard_map(
    table: TableSync, mesh: Mesh | AbstractMesh, body: Callable, in_specs: Any, out_specs: Any
) -> Callable:
    # check_vma=False: what the exchange returns is alike on all workers, which the checker cannot know.
    return functools.partial(jax.shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(body)
