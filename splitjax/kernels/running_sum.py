"""Running sums of integers: the scan below every rank and every list of gaps.

XLA's CPU backend has no scan: its cumulative sum is log n passes over all. Here columns are added up one after the other, each a sum of
vectors, and the sums of the rows before are added at the end ("scan then fan" of Blelloch, "Prefix sums and their applications", 1990).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from splitjax.kernels._common import ceil_div, dispatch

_COLUMNS = 128
# A loop is worth it from here on.
_SHORTEST = 32 * _COLUMNS


def running_sum(values: jax.Array) -> jax.Array:
    """The sums of all entries up to each, along the last dim: integers [*lead, n] -> [*lead, n] of the same dtype.

    On accelerators XLA's own scan.
    """
    if values.shape[-1] < _SHORTEST:
        return cumulated(values)
    return dispatch(by_columns, values, tpu=cumulated, gpu=cumulated)


def cumulated(values: jax.Array) -> jax.Array:
    """`running_sum` by `jnp.cumsum`."""
    return jnp.cumsum(values, axis=-1, dtype=values.dtype)


def by_columns(values: jax.Array) -> jax.Array:
    """`running_sum` as a loop over columns."""
    *lead, n = values.shape
    num_rows = ceil_div(n, _COLUMNS)
    padded = jnp.pad(values, [*[(0, 0)] * len(lead), (0, num_rows * _COLUMNS - n)])
    columns = jnp.moveaxis(padded.reshape(*lead, num_rows, _COLUMNS), -1, 0)
    add = lambda total, column: (total + column,) * 2
    nothing = columns[0] - columns[0]  # varies over the mesh axes that the values vary over
    rows, sums = lax.scan(add, nothing, columns)
    sums += cumulated(rows) - rows
    return jnp.moveaxis(sums, 0, -1).reshape(*lead, num_rows * _COLUMNS)[..., :n]
