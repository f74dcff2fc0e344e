"""`row_exchange`: rows to owners and back, near the least that can be sent.

Every worker must send its rows to where they are added up, and get the sums: w (k + (1 - 2/n) U) bytes at least, for k
rows of w bytes on a worker and U in the union, if each row is added up by a worker that has it. So: whole rows, not
elements; index sets as gaps of one byte, exchanged before the forward pass (`exchange_indices`); owners among the
workers that hold a row, all owning equally many, so that nothing is padded on the way back; values afterwards, without
any index (`exchange_values`); rows that all workers hold, by a dense all-reduce.

What that costs stands in `costs.row_exchange`.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from splitjax import kernels
from splitjax.sync import wire
from splitjax.sync.costs.capacities import Capacities
from splitjax.sync.costs.row_exchange import RowExchangeCosts
from splitjax.sync.local import rounded_away, send_order, sum_rows, take_rows
from splitjax.sync.routes import Routes, exchange_indices
from splitjax.sync.rows import RowSparse
from splitjax.sync.running import Attempt, Scheme, register_scheme
from splitjax.sync.wire import Axis


@dataclasses.dataclass(frozen=True)
class _OwnRows:
    """Holds this worker's rows as they are sent.

    - `values`, `rounded`: f[k, *row], as they are and as they are on the wire.
    - `owner`, `slots`: i32[k], who adds each up, and where among the rows of the union it stands.
    """

    values: Array
    rounded: Array
    owner: Array
    slots: Array


@register_scheme
@dataclasses.dataclass(frozen=True)
class RowExchange(RowExchangeCosts, Scheme):
    """The scheme `row_exchange` as it runs. Its options are those of `RowExchangeCosts`, which says what it costs."""

    def attempt(self, local: RowSparse, axis: Axis, capacities: Capacities) -> Attempt:
        """Exchanges index sets, then the values of rows by way of their owners.

        `local` is this worker's rows, `axis` the mesh axis or axes of the workers, `capacities` the room there
        is; see `Scheme.attempt`.
        """
        routes = self.exchange_indices(local.ids, local.count, local.num_rows, axis, capacities)
        rows, sent, _ = self.exchange_values(local.values, routes, local.num_rows, axis, capacities)
        return Attempt(rows, routes.fits, sent)

    def attempt_rounded(self, local: RowSparse, axis: Axis, capacities: Capacities) -> tuple[Attempt, RowSparse | None]:
        """Does the same as `attempt`, and says what rounding took away here (`feedback.keep`), of a scheme with a
        `wire_dtype`.

        `local` is this worker's rows, `axis` the mesh axis or axes of the workers, `capacities` the room there
        is. Returns the attempt and the errors: nothing where capacities did not suffice, for then all rows are
        gathered as they are.
        """
        routes = self.exchange_indices(local.ids, local.count, local.num_rows, axis, capacities)
        rows, sent, errors = self.exchange_values(local.values, routes, local.num_rows, axis, capacities)
        if errors is not None:
            errors = dataclasses.replace(errors, ids=jnp.where(routes.fits, errors.ids, local.num_rows))
        return Attempt(rows, routes.fits, sent), errors

    def exchange_indices(self, ids: Array, count: Array, num_rows: int, axis: Axis, capacities: Capacities) -> Routes:
        """Does the first half of an exchange, which needs no values, and returns `Routes`, alike on all workers.

        **Arguments:**

        - `ids`, `count`: `RowSparse.ids` and `.count` of this worker.
        - `num_rows`: of the table.
        - `axis`: the mesh axis or axes of the workers.
        - `capacities`: the room there is.
        """
        ids = _resized(ids, capacities.local, num_rows)
        return exchange_indices(ids, count, axis, self._code(capacities, num_rows), capacities, self.ownership)

    def exchange_values(
        self, values: Array, routes: Routes, num_rows: int, axis: Axis, capacities: Capacities
    ) -> tuple[RowSparse, Array, RowSparse | None]:
        """Does the second half of an exchange: this worker's `values`, in the order of the ids given before.

        **Arguments:** `routes`: of the first half. `num_rows`: of the table. `axis`: the mesh axis or axes of the
        workers. `capacities`: the room there is.

        **Returns:** the sum; rows really sent, i32[]; with a `wire_dtype` what rounding took away here, by row
        (duplicates possible), None without.
        """
        n, me = lax.axis_size(axis), lax.axis_index(axis)
        k, full = capacities.local, values.dtype
        wire_dtype = jnp.dtype(self.wire_dtype) if self.wire_dtype and n > 1 else full  # one worker alone sends nothing
        values = _resized(values, k, 0)
        rounded = values.astype(wire_dtype)
        (slots,), _ = kernels.decode(routes.held[me][None], k, capacities.union)
        slots = kernels.in_memory(slots)  # a search for every bit, which all that reads them would do again
        owner, place = (
            take.at[slots].get(mode="fill", fill_value=fill) for take, fill in ((routes.owner, n), (routes.place, 0))
        )
        sums = sum_rows(values, jnp.where(owner == me, place, capacities.pull), capacities.pull)
        if n > 1 and capacities.push:
            order, counts = send_order(jnp.where(owner == me, n, owner), n, capacities.push)
            target, incoming = _targets(routes, me, capacities)
            blocks, sources = wire.push_rows(rounded, order, counts, incoming, axis, self.pattern)
            sums += sum_rows(blocks.reshape(-1, *values.shape[1:]), target[sources].reshape(-1), capacities.pull, full)
            sent = counts.sum() + (n - 1) * (routes.owner == me).sum(dtype=jnp.int32)
        else:
            sent = jnp.int32(0)
        (parts,) = wire.gather([sums.astype(wire_dtype)], axis)
        parts = parts.reshape(-1, *values.shape[1:])
        source = jnp.where(
            routes.owner < n, routes.owner * capacities.pull + routes.place, parts.shape[0] + capacities.hot
        )
        if capacities.hot:
            hot_slots = jnp.where((owner == n) & (slots < capacities.union), place, capacities.hot)
            # Hot rows are not rounded: what an all-reduce rounds on its way nobody could keep.
            parts = jnp.concatenate([parts.astype(full), lax.psum(sum_rows(values, hot_slots, capacities.hot), axis)])
            source = jnp.where(
                (routes.owner == n) & (routes.ids < num_rows), n * capacities.pull + routes.place, source
            )
        rows = RowSparse(routes.ids, take_rows(parts, source).astype(full), routes.count, num_rows)
        own_rows = _OwnRows(values, rounded, owner, slots)
        return rows, sent, self._error(own_rows, sums, routes, num_rows, me)

    def _error(self, own: _OwnRows, sums: Array, routes: Routes, num_rows: int, me: Array) -> RowSparse | None:
        """Says what rounding took away from the rows that this worker sent, and from its `sums`; None unless values are
        rounded."""
        if not self.wire_dtype:
            return None
        values, rounded, owner, slots = own.values, own.rounded, own.owner, own.slots
        n = routes.held.shape[0]
        sent = (owner != me) & (owner < n)
        ids = jnp.where(sent, routes.ids.at[slots].get(mode="fill", fill_value=num_rows), num_rows)
        lost = jnp.where(sent.reshape(-1, *[1] * (values.ndim - 1)), rounded_away(values, rounded), 0)
        mine = jnp.where(routes.owner == me, routes.place, sums.shape[0])
        owned = jnp.full((sums.shape[0],), num_rows, jnp.int32).at[mine].set(routes.ids, mode="drop")
        rest = rounded_away(sums, sums.astype(rounded.dtype))
        return RowSparse(
            jnp.concatenate([ids, owned]), jnp.concatenate([lost, rest]), jnp.int32(ids.size + owned.size), num_rows
        )


def _targets(routes: Routes, me: Array, capacities: Capacities) -> tuple[Array, Array]:
    """Finds where in this owner's part each row belongs that a worker sends: i32[n, push]; and how many each sends:
    i32[n]."""
    workers = jnp.arange(routes.held.shape[0], dtype=jnp.int32)[:, None]
    mine = kernels.encode(routes.owner == me)
    slots, incoming = kernels.decode(jnp.where(workers == me, 0, routes.held & mine), capacities.push, capacities.union)
    return routes.place.at[slots].get(mode="fill", fill_value=capacities.pull, wrap_negative_indices=False), incoming


def _resized(array: Array, length: int, fill: int) -> Array:
    more = length - array.shape[0]
    if more <= 0:
        return array[:length]
    return jnp.concatenate([array, jnp.full((more, *array.shape[1:]), fill, array.dtype)])
