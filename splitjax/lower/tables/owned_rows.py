"""Pulls the rows that a step's lookups read from the workers that own them, and pushes their gradients to these owners.

The ids of a step's lookups go in, `Pulled` comes out; their cotangents go in, `OwnerSums` comes out. No worker ever has
the whole table, forward or backward: 1/n of its memory, and the least that can be sent (`sync.owner`). Which rows are
read must be known before the forward pass runs: where ids depend on parameters, the table is gathered as XLA sees fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from splitjax.lower.products.groups import scope
from splitjax.lower.products.row_values import Rows, RowView, written
from splitjax.lower.tables.around import LookedUp, RowGradients, Surroundings, placed
from splitjax.lower.tables.collective_order import known_at_the_end
from splitjax.lower.tables.table_rows import JOIN
from splitjax.plan import spec_axes
from splitjax.planning.tables.lookups import EditedLookup
from splitjax.planning.tables.table_sync import TableSync, cut
from splitjax.sync.costs.capacities import Capacities
from splitjax.sync.costs.exchange import ByOwners
from splitjax.sync.feedback import keep, with_residual
from splitjax.sync.local import sum_rows
from splitjax.sync.owner import OwnerSharded, Requests, owner_sharded
from splitjax.sync.rows import RowSparse, normalised
from splitjax.sync.synchronising import once


@dataclasses.dataclass(frozen=True, eq=False)
class Pulled:
    """The rows that a step asked the owners for, by worker (leading dims of all arrays are cut over them): of a table,
    and of those that are looked up by the same ids.

    - `tables`: how they are synchronised.
    - `around`: the exchanges of the step.
    - `rows`: of each table, per lookup f[*ids, *row].
    - `ids`: per lookup i[...].
    - `slots`: where each looked-up id stands among the rows that the worker asked for, those without a gradient past
      the end.
    - `requests`: as `sync.owner` has them, each leaf with a leading dim of 1.
    """

    tables: Sequence[TableSync]
    around: Surroundings
    rows: tuple[tuple[Any, ...], ...]
    ids: tuple[Any, ...]
    slots: Any
    requests: Requests

    def given(self, of_table: int, lookup: EditedLookup, number: int) -> Any:
        """Gives the rows of `lookup`, number `number` of those of table `of_table`, as its gather would give them."""
        table = self.tables[of_table]
        return _gathered(lookup, table, table.lookups[number].mode, self.ids[number], self.rows[of_table][number])

    def push(self, ready: Any, gradients: Sequence[RowGradients]) -> list[OwnerSums]:
        """Sends the gradients of the pulled rows to their owners, who know which they were: ids are not sent again.

        `ready`, `gradients`: as `RowsInStep.push` has them. Of what is rounded every worker keeps what was taken away
        of all that it sends, its own rows' gradients too.
        """
        return _push(self, ready, gradients)


def begin_owned(around: Surroundings, looked_up: Sequence[LookedUp]) -> Pulled:
    """Pulls the rows that all lookups of a table read. `around`: the exchanges of the step. `looked_up`: the table and
    its lookups, whose ids are known; and other tables whose rows come along, as all are looked up by the ids of the
    first and exchanged like it."""
    first = looked_up[0]
    assert first.ids is not None, "rows are pulled where ids are known before the forward pass"
    ids = first.ids
    tables = [placed(each.table, each.loops, ids) for each in looked_up]
    table = tables[0]
    assert all(
        (each.axes, each.lookups, each.exchange) == (table.axes, table.lookups, table.exchange) for each in tables
    ), "rows that travel together are of tables that are exchanged alike"

    def body(shards, numbers, ready):
        read, has_gradient = _read(table, numbers)
        exchange = _exchange(table, min(read.size, table.num_rows))
        looked, slots, requests = exchange.read_each(shards, jnp.where(ready, read, table.num_rows), table.axes)
        ended = requests.fits
        for each in looked:
            ended = known_at_the_end(ended, each)
        rows = tuple(_by_lookup(each, numbers) for each in looked)
        return rows, jnp.where(has_gradient, slots, requests.ids.size), _lead(requests), ended

    spec = PartitionSpec(table.axes)
    run = jax.shard_map(
        body,
        mesh=around.mesh,
        check_vma=False,
        in_specs=(
            [PartitionSpec(table.axes, *each.row_spec) for each in tables],
            [cut(lookup.dim, table.axes) for lookup in table.lookups],
            PartitionSpec(),
        ),
        out_specs=(
            tuple(
                tuple(
                    cut(lookup.dim, table.axes, x.ndim, each.row_spec)
                    for lookup, x in zip(table.lookups, ids, strict=True)
                )
                for each in tables
            ),
            spec,
            spec,
            PartitionSpec(),
        ),
    )
    with jax.named_scope(scope("rows", table.param)):
        arrays = [each.array for each in looked_up]
        rows, slots, requests, ended = run(arrays, list(ids), around.order.ready())
    around.order.join(ended)
    return Pulled(tables, around, rows, tuple(ids), slots, requests)


def _by_lookup(looked: Any, ids: Sequence[Any]) -> tuple[Any, ...]:
    """Divides the rows f[m, *row] of all lookups, which have these `ids`: per lookup f[*ids, *row]."""
    out, start = [], 0
    for own in ids:
        out.append(looked[start : start + own.size].reshape(*own.shape, *looked.shape[1:]))
        start += own.size
    return tuple(out)


def _read(table: TableSync, ids: Sequence[Any]) -> tuple[Any, Any]:
    """Gives the rows that all lookups of a worker read, i32[m], `num_rows` for none; and tells whether they have a
    gradient here, bool[m]."""
    read, given = [], []
    for lookup, looked_up in zip(table.lookups, ids, strict=True):
        flat = looked_up.reshape(-1)
        # Reading out of bounds gives the nearest row, or what the gather fills in; a gradient goes to rows that exist.
        read.append(normalised(flat, table.num_rows, "fill" if lookup.mode == "fill" else "clip", False))
        given.append(read[-1] if lookup.mode == "clip" else normalised(flat, table.num_rows, "fill", False))
        if lookup.dim is None:  # every worker reads the rows, and has all of their gradient: the first one pushes it
            given[-1] = jnp.where(lax.axis_index(table.axes) == 0, given[-1], table.num_rows)
    return jnp.concatenate(read), jnp.concatenate(given) < table.num_rows


def _gathered(lookup: EditedLookup, table: TableSync, mode: str, ids: Any, rows: Any) -> Any:
    """Brings rows f[*ids, *row] into the form that the lookup's gather gives them."""
    numbers = lookup.params["dimension_numbers"]
    if mode == "fill":
        value = lookup.params["fill_value"]
        value = jnp.nan if value is None else value
        good = (ids >= 0) & (ids < table.num_rows)
        rows = jnp.where(
            good.reshape(*good.shape, *[1] * (rows.ndim - good.ndim)), rows, jnp.asarray(value, rows.dtype)
        )
    num_offset = len(numbers.offset_dims)
    inner = (
        lookup.params["slice_sizes"]
        if num_offset == len(lookup.params["slice_sizes"])
        else lookup.params["slice_sizes"][1:]
    )
    rows = rows.reshape(*ids.shape, *inner)
    offset = [lookup.num_loops + dim for dim in numbers.offset_dims]
    return jnp.moveaxis(rows, range(rows.ndim - num_offset, rows.ndim), offset).astype(lookup.delta.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class OwnerSums:
    """The sum of the gradients of each owner's rows, and what is needed where there was no room for everything.

    - `table`: how the table is synchronised.
    - `around`: the exchanges of the step.
    - `lookups`: per lookup ids and per lookup cotangents, from which the sum is computed anew where there was no room.
    - `positions`: i32[n * pull], the rows in their owner's part.
    - `values`: f[n * pull, *row], the sums of their gradients.
    - `fits`: bool[], whether everything had room.
    - `asked`: the ids that all workers asked for, i32[n * k].
    - `added`: f[n * k, *row], of a table that has a `wire_dtype`: what rounding took away in earlier steps of the rows
      asked for.
    - `residual`: f[n, num_rows, *row], what it has taken away now.
    """

    table: TableSync
    around: Surroundings
    lookups: tuple[Sequence[Any], Sequence[Any]]
    positions: Any
    values: Any
    fits: Any
    asked: Any
    added: Any = None
    residual: Any = None

    @property
    def observed(self) -> dict[str, Any]:
        """The values that the step returns of it: `fell_back` bool[], and while capacities are not known `touched`, the
        ids of all workers."""
        if self.table.capacities is None:
            return {"fell_back": jnp.bool_(False), "touched": self.asked.reshape(self.table.num_workers, -1)}
        return {"fell_back": jnp.logical_not(self.fits)}

    def write(self, leaves: Mapping[int, Any], new: Mapping[int, Rows]) -> dict[int, Any]:
        """Writes the rows that the update changes into the state's leaves.

        **Arguments:** `leaves`: the table's, by flat argument. `new`: what becomes of those that are written.
        """
        given = {id(array): array for value in new.values() for array in value.arrays()}
        spec = PartitionSpec(self.table.row_axes)

        def body(owned, fits, every, state, arrays):
            update = lambda rows, state: state | written(RowView(rows.ids, rows.values, state, arrays), new)
            state = once(fits, lambda state: update(owned(), state), dict(state))
            whole = lambda rows, state: (update(rows, state), _ended(rows))
            with jax.named_scope(scope("fallback", self.table.param)):
                return once(~fits, lambda state: whole(every(), state[0]), (state, jnp.int32(0)))

        return self._run(body, leaves, given, {leaf: spec for leaf in leaves})

    def total(self, leaves: Mapping[int, Any], eqn: Any, value: Rows) -> Any:
        """Reduces over all touched rows; all other rows have nothing to add.

        **Arguments:** `leaves`: the table's, by flat argument. `eqn`: the reduction's equation. `value`: what it
        reduces.
        """
        given = {id(array): array for array in value.arrays()}

        def body(owned, fits, every, state, arrays):
            part = lambda rows: RowView(rows.ids, rows.values, state, arrays).reduced(eqn, value, rows.num_rows)

            @jax.named_scope(scope("fallback", self.table.param))
            def whole() -> tuple[Any, Any]:
                rows = every()
                return part(rows), _ended(rows)

            mine, ended = lax.cond(fits, lambda: (part(owned()), jnp.int32(0)), whole)
            return JOIN[eqn.primitive.name](mine, self.table.row_axes), ended

        return self._run(body, leaves, given, PartitionSpec())

    def _run(self, body: Callable, leaves: Mapping[int, Any], given: Mapping[int, Any], out_specs: Any) -> Any:
        """Runs `body(the owner's rows, fits, the same from all workers' rows, leaves, other arrays)` on each owner:
        gives its result, and `_ended`."""
        table = self.table
        manual = table.row_axes if spec_axes(table.row_spec) else tuple(self.around.mesh.axis_names)
        spec, lookups = PartitionSpec(table.row_axes), [cut(lookup.dim, table.axes) for lookup in table.lookups]

        def inside(positions, values, fits, looked, asked, state, arrays):
            mine = lambda: RowSparse(positions, values, jnp.int32(0), state[table.leaf].shape[0])
            return body(mine, fits, lambda: _every(table, *looked, *asked), state, arrays)

        run = jax.shard_map(
            inside,
            mesh=self.around.mesh,
            axis_names=frozenset(manual),
            check_vma=False,
            out_specs=(out_specs, PartitionSpec()),
            in_specs=(
                spec,
                spec,
                PartitionSpec(),
                (lookups, lookups),
                (spec, spec),
                {leaf: spec for leaf in leaves},
                PartitionSpec(),
            ),
        )
        fits, looked = self.around.order.next(self.fits), tuple(map(list, self.lookups))
        out, self.around.order.token = run(
            self.positions, self.values, fits, looked, (self.asked, self.added), dict(leaves), dict(given)
        )
        return out


def _ended(rows: RowSparse) -> Any:
    """Gives 0 on all owners, though XLA does not know that: it waits for the rows."""
    return jnp.minimum(rows.count, 0)


def _push(pulled: Pulled, ready: Any, gradients: Sequence[RowGradients]) -> list[OwnerSums]:
    """Sends the gradients of the pulled rows to their owners; see `Pulled.push`."""
    tables, around = pulled.tables, pulled.around
    first = tables[0]

    def body(cotangents, slots, requests, kept, ready):
        requests = _unlead(requests)
        slots = jnp.where(ready, slots, requests.ids.size)
        local = [
            _local(table, own, slots, requests, before)
            for table, own, before in zip(tables, cotangents, kept, strict=True)
        ]
        exchange = _exchange(first, requests.ids.size)
        sums = exchange.collect_each([own.values for own in local], requests, first.axes)
        values, residuals, fits = [], [], requests.fits
        for table, own, (mine, lost) in zip(tables, local, sums, strict=True):
            after = own.residual
            if after is not None:
                # Without room for all, everything is gathered as it is.
                if lost is not None:
                    ids = jnp.where(requests.fits, requests.ids, table.num_rows)
                    after = keep(after, RowSparse(ids, lost, jnp.int32(0), table.num_rows))
                after = after[None]
            values.append(mine.values)
            residuals.append(after)
            fits = known_at_the_end(fits, mine.values)
        return sums[0][0].ids, values, fits, requests.ids, [own.added for own in local], residuals

    spec, rows = PartitionSpec(first.axes), [PartitionSpec(first.axes, *table.row_spec) for table in tables]
    of_residuals = [
        None if each.residual is None else table.residual_spec for table, each in zip(tables, gradients, strict=True)
    ]
    cotangents = [
        [
            cut(lookup.dim, table.axes, x.ndim - len(table.shape) + 1, table.row_spec)
            for lookup, x in zip(table.lookups, each.values, strict=True)
        ]
        for table, each in zip(tables, gradients, strict=True)
    ]
    run = jax.shard_map(
        body,
        mesh=around.mesh,
        check_vma=False,
        out_specs=(spec, rows, PartitionSpec(), spec, rows, of_residuals),
        in_specs=(cotangents, spec, spec, of_residuals, PartitionSpec()),
    )
    with jax.named_scope(scope("rows", first.param)):
        positions, values, fits, asked, added, residuals = run(
            [list(each.values) for each in gradients],
            pulled.slots,
            pulled.requests,
            [each.residual for each in gradients],
            ready,
        )
    around.order.join(fits)
    of_each = zip(tables, gradients, values, added, residuals, strict=True)
    return [
        OwnerSums(table, around, (pulled.ids, each.values), positions, own, fits, asked, before, after)
        for table, each, own, before, after in of_each
    ]


@dataclasses.dataclass(frozen=True)
class _Local:
    """The gradients of the rows of a table that a worker asked for, before they are sent.

    - `values`: f[k, *row]. `added`: what of them rounding took away in earlier steps; None without rounding.
    - `residual`: f[num_rows, *row], what is left of that; None without rounding.
    """

    values: Any
    added: Any
    residual: Any


def _local(table: TableSync, cotangents: Sequence[Any], slots: Any, requests: Requests, kept: Any) -> _Local:
    """Adds up the `cotangents` of a worker's lookups by the rows that it asked for. `kept`: f[1, num_rows, *row], what
    rounding took away before; None without rounding."""
    values = sum_rows(_flat(table, cotangents), slots, requests.ids.size, table.dtype)
    if kept is None:
        return _Local(values, None, None)
    # Apart from the gradients: where there is no room, these come from the lookups themselves.
    rows, kept = with_residual(RowSparse(requests.ids, jnp.zeros_like(values), jnp.int32(0), table.num_rows), kept[0])
    return _Local(values + rows.values, rows.values, kept)


def _exchange(table: TableSync, capacity: int) -> OwnerSharded:
    """Gives the exchange of an owned table, for at most `capacity` ids of a worker. Without capacities from a profile,
    there is room for everything, and nothing is rounded."""
    exchange = table.exchange
    assert isinstance(exchange, ByOwners), "rows of an owned table go by their owners"
    if exchange.capacities is not None:
        return owner_sharded(exchange.costs)
    size = table.num_rows // max(lax.axis_size(table.axes), 1)
    room = Capacities(push=min(capacity, size), pull=min(capacity * lax.axis_size(table.axes), size))
    return owner_sharded(ByOwners(table.num_rows, room).costs)


def _every(table: TableSync, ids: Sequence[Any], cotangents: Sequence[Any], asked: Any, added: Any) -> RowSparse:
    """Adds up all rows that workers read, whether there was room to ask for them or not: per lookup `ids` i[...] and
    `cotangents` f[..., *row]; `asked` i32[k] and `added` f[k, *row] as `OwnerSums` has them, of this worker."""
    with jax.named_scope(scope("fallback", table.param)):
        read, has_gradient = _read(table, ids)
        flat = _flat(table, cotangents)
        values = jnp.where(has_gradient.reshape(-1, *[1] * (flat.ndim - 1)), flat, 0)
        if added is not None:
            read, values = jnp.concatenate([read, asked]), jnp.concatenate([values, added])
        return owner_sharded(ByOwners(table.num_rows).costs).collect_all(read, values, table.axes)


def _flat(table: TableSync, cotangents: Sequence[Any]) -> Any:
    """Joins the cotangents of all lookups to f[m, *row], in the table's own dtype: those in half precision are added up
    without losing digits."""
    row_shape = cotangents[0].shape[cotangents[0].ndim - len(table.shape) + 1 :]
    return jnp.concatenate([part.reshape(-1, *row_shape).astype(table.dtype) for part in cotangents])


def _lead(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)


def _unlead(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)
