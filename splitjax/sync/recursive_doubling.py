"""`recursive_doubling` (SparCML, Renggli et al., SC'19): partners swap sparse partial sums, which turn dense when they
fill."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
from jax import Array, lax

from splitjax import kernels
from splitjax.errors import SyncError
from splitjax.sync import wire
from splitjax.sync.local import take_rows
from splitjax.sync.profile import Sparsity, Table
from splitjax.sync.rows import RowSparse, merge
from splitjax.sync.scheme import (
    Attempt,
    Capacities,
    Scheme,
    check_levels,
    local_capacity,
    partial_capacity,
    register_scheme,
    union_capacity,
)
from splitjax.sync.wire import Axis

_ID_BYTES, _VERDICT_BYTES = 4, 4


@register_scheme
@dataclasses.dataclass(frozen=True)
class RecursiveDoubling(Scheme):
    """Sum over rounds i of U(2^i) (w + 4) bytes: Zen's 2dM sum gamma^(2^(i-1)) with an index a row (arXiv 2309.13254).

    In round i partners 2^i apart swap the sums of 2^i workers each. With n workers, not a power of two, those from the
    largest power on hand their rows to a partner first, and get the result from it at the end (section 5.3 of SparCML).

    `dense_above`: rounds whose partial sums fill more than this share of the rows swap whole tables, and so do all
    later ones. None: where that is fewer bytes, which is SparCML's threshold: half of the values where each has an
    index, nearly all rows where a row has one. Raises `SyncError` for what is no share.
    """

    name: ClassVar[str] = "recursive_doubling"
    dense_above: float | None = None

    def __post_init__(self) -> None:
        share = self.dense_above
        if share is not None and not (isinstance(share, (int, float)) and 0 <= share <= 1):
            raise SyncError(
                "not a share of the rows",
                value=share,
                place="RecursiveDoubling(dense_above=...)",
                remedy="a number from 0 to 1, or None",
            )

    def plan(self, sparsity: Sparsity) -> Capacities:
        """Returns room for the partial sums of every round in steps such as those of `sparsity`."""
        n, rounds = sparsity.num_workers, _num_rounds(sparsity.num_workers)
        folded = n > 1 << rounds  # then a partner's sum is of up to twice as many workers
        levels = [partial_capacity(sparsity, 1)] if folded else []
        for i in range(rounds):
            levels.append(max([partial_capacity(sparsity, min(n, (1 + folded) << i)), *levels]))
        return Capacities(local=local_capacity(sparsity), union=union_capacity(sparsity), levels=tuple(levels))

    def attempt(self, local: RowSparse, axis: Axis, capacities: Capacities) -> Attempt:
        """Swaps partial sums between partners 1, 2, 4, ... apart.

        `local` is this worker's rows, `axis` the mesh axis or axes of the workers, `capacities` the room there
        is; see `Scheme.attempt`.
        """
        n, me = lax.axis_size(axis), lax.axis_index(axis)
        power = 1 << _num_rounds(n)
        check_levels(self, capacities, _num_rounds(n) + (n > power))
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

    def predicted_bytes(self, capacities: Capacities, table: Table) -> int:
        """Returns the bytes that a worker sends for a `table` with these `capacities`, padding included."""
        return sum(self._swapped_bytes(capacities, table)) + sum(self._folded_bytes(capacities, table))

    def _swapped_bytes(self, capacities: Capacities, table: Table) -> list[int]:
        """Returns the bytes of each round's message."""
        levels = capacities.levels[1:] if self._folded(table) else capacities.levels
        return [_message_bytes(level, table, whole) for level, whole in zip(levels, self._dense_rounds(levels, table))]

    def _folded_bytes(self, capacities: Capacities, table: Table) -> list[int]:
        """Returns the bytes of the message that a worker past the last power of two sends first, and of the one that
        it gets in the end."""
        if not self._folded(table):
            return []
        is_dense = any(self._dense_rounds(capacities.levels[1:], table))
        return [_message_bytes(capacities.levels[0], table, False), _message_bytes(capacities.union, table, is_dense)]

    def _dense_rounds(self, levels: tuple[int, ...], table: Table) -> list[bool]:
        dense = [self._is_dense(level, table) for level in levels]
        return [any(dense[: i + 1]) for i in range(len(dense))]

    @staticmethod
    def _folded(table: Table) -> int:
        return table.num_workers - (1 << _num_rounds(table.num_workers))

    def formula_bytes(self, sparsity: Sparsity) -> float:
        """Returns the bytes that the class's formula gives for `sparsity`, without padding."""
        per_row, n = sparsity.table.row_bytes + _ID_BYTES, sparsity.num_workers
        rounds = _num_rounds(n)
        doubled = sum(min(sparsity.union(min(1 << i, n)) * per_row, sparsity.table.num_bytes) for i in range(rounds))
        return doubled + (min(sparsity.union(n) * per_row, sparsity.table.num_bytes) if n > 1 << rounds else 0)

    def num_messages(self, capacities: Capacities, table: Table) -> int:
        """Returns how many messages a worker sends one after the other for a `table` with these `capacities`, on
        CPU."""
        return sum(wire.shift_messages(2, 1, size) for size in self._swapped_bytes(capacities, table)) + len(
            self._folded_bytes(capacities, table)
        )

    def _is_dense(self, rows: int, table: Table) -> bool:
        if self.dense_above is None:
            return _message_bytes(rows, table, True) < _message_bytes(rows, table, False)
        return rows > self.dense_above * table.num_rows


def _message_bytes(rows: int, table: Table, is_dense: bool) -> int:
    if is_dense:
        return table.num_bytes + 4 * kernels.num_words(table.num_rows) + _VERDICT_BYTES
    return rows * (table.row_bytes + _ID_BYTES) + 4 + _VERDICT_BYTES


def _num_rounds(num_workers: int) -> int:
    return num_workers.bit_length() - 1


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
