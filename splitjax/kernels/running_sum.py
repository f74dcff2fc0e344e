"""Running sums of integers: the scan below every rank and every list of gaps.

XLA's CPU backend has no scan: its cumulative sum is log n passes over all. Here rows are summed, and then columns are
added up one after the other, each a sum of vectors that begins with the sums of the rows before ("reduce then scan" of
Blelloch, "Prefix sums and their applications", 1990). Long inclusive sums go by blocks of eight first, three passes
each, so that the loop adds up an eighth of the entries.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from splitjax.kernels._common import ceil_div, dispatch

_BLOCK, _COLUMNS = 8, 128
# A loop is worth it from here on, and blocks before it from there on.
_SHORTEST, _LONG = 4 * _COLUMNS, 32 * _COLUMNS


def running_sum(values: jax.Array, *, exclusive: bool = False) -> jax.Array:
    """Adds up all `values` up to each, along the last dim: integers [*lead, n] -> [*lead, n] of the same dtype.

    `exclusive`: of those before each, as a table to look up in: on CPU it is memory, not code that every look-up
    evaluates.

    On accelerators XLA's own scan.
    """
    of_all = functools.partial(cumulated, exclusive=exclusive)
    if values.shape[-1] < _SHORTEST:
        return of_all(values)
    is_long = values.shape[-1] >= _LONG and not exclusive
    return dispatch(
        by_blocks if is_long else functools.partial(by_columns, exclusive=exclusive), values, tpu=of_all, gpu=of_all
    )


def cumulated(values: jax.Array, *, exclusive: bool = False) -> jax.Array:
    """Evaluates `running_sum` of `values`, `exclusive` or not, by `jnp.cumsum`."""
    sums = jnp.cumsum(values, axis=-1, dtype=values.dtype)
    return sums - values if exclusive else sums


def by_columns(values: jax.Array, *, exclusive: bool = False) -> jax.Array:
    """Evaluates `running_sum` of `values`, `exclusive` or not, as a loop over columns."""
    *lead, n = values.shape
    num_rows = ceil_div(n, _COLUMNS)
    rows = jnp.pad(values, [*[(0, 0)] * len(lead), (0, num_rows * _COLUMNS - n)]).reshape(*lead, num_rows, _COLUMNS)

    def add(total: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
        new = total + column
        return new, total if exclusive else new

    _, sums = lax.scan(add, cumulated(rows.sum(axis=-1, dtype=values.dtype), exclusive=True), jnp.moveaxis(rows, -1, 0))
    return jnp.moveaxis(sums, 0, -1).reshape(*lead, num_rows * _COLUMNS)[..., :n]


def by_blocks(values: jax.Array) -> jax.Array:
    """Evaluates `running_sum` of `values` by blocks, and by columns over their totals."""
    *lead, n = values.shape
    num_blocks = ceil_div(n, _BLOCK)
    sums = jnp.pad(values, [*[(0, 0)] * len(lead), (0, num_blocks * _BLOCK - n)]).reshape(*lead, num_blocks, _BLOCK)
    for shift in (1, 2, 4):
        sums += jnp.pad(sums[..., :-shift], [*[(0, 0)] * (len(lead) + 1), (shift, 0)])
    totals = sums[..., -1]
    sums += (by_columns(totals) - totals)[..., None]
    return sums.reshape(*lead, num_blocks * _BLOCK)[..., :n]
