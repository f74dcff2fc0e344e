"""Defines row-sparse values: the rows of a table that a batch touched, as a pytree of static shape."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from splitjax.errors import SyncError
from splitjax.sync.local import set_rows, sum_rows, take_rows, unite

# What JAX does with an index past the end, by the names of `jax.numpy.ndarray.at`.
MODES = ("promise_in_bounds", "clip", "fill", "drop")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSparse:
    """Some rows of a table; all others are zero.

    **Attributes:**

    - `ids`: i32[capacity], ascending and unique, filled up with `num_rows`.
    - `values`: f[capacity, *row]; rows past the end are zero.
    - `count`: i32[], the exact number of rows. It exceeds the capacity where rows did not fit: see `overflowed`.
    - `num_rows`: of the table (static).
    """

    ids: Array
    values: Array
    count: Array
    num_rows: int = dataclasses.field(metadata={"static": True})

    @property
    def capacity(self) -> int:
        """The number of rows there is room for."""
        return self.ids.shape[0]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row."""
        return self.values.shape[1:]

    @property
    def row_size(self) -> int:
        """Values of one row."""
        return math.prod(self.row_shape)

    @property
    def overflowed(self) -> Array:
        """Tells whether rows did not fit (bool[]); they are missing then."""
        return self.count > self.capacity

    def to_dense(self) -> Array:
        """The table, f[num_rows, *row]."""
        out = jnp.zeros((self.num_rows, *self.row_shape), self.values.dtype)
        return set_rows(out, self.ids, self.values)

    def padded(self, capacity: int) -> RowSparse:
        """Returns the same rows with another `capacity`; a smaller one drops the last rows, and `overflowed` says
        so."""
        more = capacity - self.capacity
        if more <= 0:
            return RowSparse(self.ids[:capacity], self.values[:capacity], self.count, self.num_rows)
        ids = jnp.concatenate([self.ids, jnp.full((more,), self.num_rows, jnp.int32)])
        values = jnp.concatenate([self.values, jnp.zeros((more, *self.row_shape), self.values.dtype)])
        return RowSparse(ids, values, self.count, self.num_rows)

    def update(self, tables: Any, function: Callable[[Any, Array], Any]) -> Any:
        """Tables of which only the touched rows are computed anew.

        **Arguments:**

        - `tables`: a pytree of arrays [num_rows, ...], such as parameter and accumulator.
        - `function`: (their touched rows [capacity, ...], these values) -> their new rows, row by row. Slots without a
          row get zeros.

        **Returns:** the tables with the new rows; untouched rows are bit-identical.
        """
        new = function(jax.tree.map(lambda table: take_rows(table, self.ids), tables), self.values)
        return jax.tree.map(lambda table, rows: set_rows(table, self.ids, rows.astype(table.dtype)), tables, new)


def from_lookups(
    ids: Array, values: Array, num_rows: int, capacity: int | None = None, *, mode: str = "fill", wrap: bool = True
) -> RowSparse:
    """Returns the gradient of `table[ids]` as rows: `values` added up by id.

    **Arguments:**

    - `ids`: integers of any shape, empty allowed.
    - `values`: f[*ids.shape, *row], the cotangents of the looked-up rows.
    - `num_rows`: of the table.
    - `capacity`: of the result. The default, as many as there are ids (at most `num_rows`), always suffices.
    - `mode`: what the lookup's gradient does with ids out of range: "clip" gives it to the nearest row; "fill"
      and "drop" to none, and so does "promise_in_bounds" (a scatter skips them).
    - `wrap`: negative ids count from the end first, as in numpy. False for ids as a `gather` has them, where
      `jnp` has wrapped them.

    Raises `SyncError` for an unknown mode or shapes that do not fit.
    """
    if mode not in MODES:
        raise SyncError(
            "unknown mode of a lookup", value=mode, place="from_lookups(mode=...)", remedy=f"one of {', '.join(MODES)}"
        )
    if values.shape[: ids.ndim] != ids.shape or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise SyncError(
            "ids must be integers, and values must start with their shape",
            value=(ids.dtype.name, ids.shape, values.shape),
            place="from_lookups(ids, values)",
            remedy="pass values of shape [*ids.shape, *row]",
        )
    if num_rows > jnp.iinfo(jnp.int32).max - 64:
        raise SyncError("more rows than a 32-bit id can tell apart", value=num_rows, remedy="split the table")
    values = values.reshape(ids.size, *values.shape[ids.ndim :])
    flat = normalised(ids.reshape(-1), num_rows, mode, wrap)
    capacity = min(flat.size, num_rows) if capacity is None else capacity
    if not flat.size:
        empty = jnp.full((capacity,), num_rows, jnp.int32)
        return RowSparse(empty, jnp.zeros((capacity, *values.shape[1:]), values.dtype), jnp.int32(0), num_rows)
    unique, slots, count = unite(flat, num_rows, capacity)
    return RowSparse(unique, sum_rows(values, slots, capacity, has_no_gaps=True), count, num_rows)


def merge(ids: Array, values: Array, num_rows: int, capacity: int, dtype: Any = None) -> RowSparse:
    """Merges rows of several workers: `ids` i32[...] (`num_rows`: none), `values` f[..., *row], added up by id in
    `dtype`.

    `capacity` is the result's.
    """
    unique, slots, count = unite(ids, num_rows, capacity)
    flat = values.reshape(ids.size, *values.shape[ids.ndim :])
    return RowSparse(unique, sum_rows(flat, slots.reshape(-1), capacity, dtype, has_no_gaps=True), count, num_rows)


def normalised(ids: Array, num_rows: int, mode: str, wrap: bool) -> Array:
    """Returns `ids` as i32 in 0..`num_rows`; `num_rows` for those that touch no row.

    `mode` and `wrap` are those of `from_lookups`.
    """
    if jnp.issubdtype(ids.dtype, jnp.unsignedinteger):
        ids = jnp.minimum(ids, jnp.asarray(min(num_rows, jnp.iinfo(ids.dtype).max), ids.dtype)).astype(jnp.int32)
    elif ids.dtype.itemsize < 4:
        ids = ids.astype(jnp.int32)
    if wrap:
        ids = jnp.where(ids < 0, ids + num_rows, ids)
    if mode == "clip":
        return jnp.clip(ids, 0, num_rows - 1).astype(jnp.int32) if num_rows else jnp.zeros_like(ids, jnp.int32)
    return jnp.where((ids < 0) | (ids >= num_rows), num_rows, ids).astype(jnp.int32)
