"""`recursive_doubling` (SparCML, Renggli et al., SC'19): partners swap sparse partial sums, which turn dense when they
fill.

This worker's rows go in, the sum comes out. What that costs stands in `costs.recursive_doubling`.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax import Array, lax

from splitjax import kernels
from splitjax.sync import wire
from splitjax.sync.costs.capacities import Capacities
from splitjax.sync.costs.recursive_doubling import RecursiveDoublingCosts, num_rounds
from splitjax.sync.local import take_rows
from splitjax.sync.profile import Table
from splitjax.sync.rows import RowSparse, merge
from splitjax.sync.running import Attempt, Scheme, check_levels, register_scheme
from splitjax.sync.wire import Axis


@register_scheme
@dataclasses.dataclass(frozen=True)
class RecursiveDoubling(RecursiveDoublingCosts, Scheme):
    """The scheme `recursive_doubling` as it runs. Its options are those of `RecursiveDoublingCosts`, which says what it
    costs."""

    def attempt(self, local: RowSparse, axis: Axis, capacities: Capacities) -> Attempt:
        """Swaps partial sums between partners 1, 2, 4, ... apart.

        `local` is this worker's rows, `axis` the mesh axis or axes of the workers, `capacities` the room there
        is; see `Scheme.attempt`.
        """
        n, me = lax.axis_size(axis), lax.axis_index(axis)
        power = 1 << num_rounds(n)
        check_levels(self, capacities, num_rounds(n) + (n > power))
        table = Table(local.num_rows, math.prod(local.values.shape[1:]), local.values.dtype.itemsize, n)
        rest, rooms = n - power, (*capacities.levels, capacities.union)
        state = _Partial.sparse(local.padded(rooms[0]), ~local.overflowed)
        sent = jnp.int32(0)
        if rest:
            sent += jnp.where(me >= power, state.num_sent(), 0)
            state = state.plus(state.permuted(axis, [(power + i, i) for i in range(rest)]), me < power, rooms[1])
            rooms = rooms[1:]
        for i, room in enumerate(rooms[1:]):
            if self._is_dense(rooms[i], table):
                state = state.dense()
            sent += jnp.where(me < power, state.num_sent(), 0)
            pairs = [(j, j ^ (1 << i)) for j in range(power)]
            state = state.plus(state.permuted(axis, pairs), (me >> i & 1) == 0, room)
        if rest:
            sent += jnp.where(me < rest, state.num_sent(), 0)
            final = state.permuted(axis, [(i, power + i) for i in range(rest)])
            state = state.where(me < power, final)
        rows, fits = state.rows(capacities.union)
        return Attempt(rows, fits & ~rows.overflowed, sent)


@dataclasses.dataclass(frozen=True)
class _Partial:
    """A partial sum: rows with their exact number, or a table with a bitmap of the rows touched. `good`: nothing was
    lost yet."""

    arrays: tuple[Array, ...]  # (ids, values, count) or (bitmap, table)
    good: Array
    num_rows: int

    @staticmethod
    def sparse(rows: RowSparse, good: Array) -> _Partial:
        return _Partial((rows.ids, rows.values, rows.count), good & ~rows.overflowed, rows.num_rows)

    @property
    def is_dense(self) -> bool:
        return len(self.arrays) == 2

    def dense(self) -> _Partial:
        if self.is_dense:
            return self
        ids, values, count = self.arrays
        rows = RowSparse(ids, values, count, self.num_rows)
        return _Partial((kernels.encode_ids(rows.ids, self.num_rows), rows.to_dense()), self.good, self.num_rows)

    def permuted(self, axis: Axis, pairs: list[tuple[int, int]]) -> _Partial:
        *arrays, good = wire.permute([*self.arrays, self.good.astype(jnp.int32)], axis, pairs)
        is_target = jnp.asarray([any(i == to for _, to in pairs) for i in range(lax.axis_size(axis))])[
            lax.axis_index(axis)
        ]
        if not self.is_dense:  # who gets nothing gets zeros: ids of row 0
            arrays[0] = jnp.where(is_target, arrays[0], self.num_rows)
        return _Partial(tuple(arrays), (good > 0) | ~is_target, self.num_rows)

    def plus(self, partner: _Partial, first: Array, room: int) -> _Partial:
        """`first`: this one comes first in the sum, so that partners add up alike."""
        good = self.good & partner.good
        if self.is_dense:
            return _Partial(
                (self.arrays[0] | partner.arrays[0], self.arrays[1] + partner.arrays[1]), good, self.num_rows
            )
        ids, values = (
            jnp.stack([jnp.where(first, a, b), jnp.where(first, b, a)])
            for a, b in zip(self.arrays[:2], partner.arrays[:2])
        )
        return _Partial.sparse(merge(ids, values, self.num_rows, room), good)

    def where(self, condition: Array, otherwise: _Partial) -> _Partial:
        arrays = tuple(jnp.where(condition, a, b) for a, b in zip(self.arrays, otherwise.arrays))
        return _Partial(arrays, jnp.where(condition, self.good, otherwise.good), self.num_rows)

    def num_sent(self) -> Array:
        return jnp.int32(self.num_rows) if self.is_dense else jnp.minimum(self.arrays[2], self.arrays[0].size)

    def rows(self, capacity: int) -> tuple[RowSparse, Array]:
        if not self.is_dense:
            ids, values, count = self.arrays
            return RowSparse(ids, values, count, self.num_rows), self.good
        ids, count = kernels.decode(self.arrays[0], capacity, self.num_rows)
        return RowSparse(ids, take_rows(self.arrays[1], ids), count, self.num_rows), self.good
