"""Running sums of integers: the scan below every rank and every list of gaps.

XLA's CPU backend has no scan: its cumulative sum is log n passes over all. Here entries are added up within blocks of
eight, three passes, and then the blocks' totals likewise: an eighth as many at each level ("reduce then scan" of
Blelloch, "Prefix sums and their applications", 1990).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from splitjax.kernels._common import ceil_div, dispatch
from splitjax.kernels.in_memory import in_memory

_BLOCK = 8
_SHORTEST = 64  # entries that are worth blocks


def running_sum(values: jax.Array, *, exclusive: bool = False) -> jax.Array:
    """Adds up all `values` up to each, along the last dim: integers [*lead, n] -> [*lead, n] of the same dtype.

    `exclusive`: of those before each, as a table to look up in: on CPU it is memory, not code that every look-up
    evaluates.

    On accelerators XLA's own scan.
    """
    of_all = functools.partial(cumulated, exclusive=exclusive)
    if values.shape[-1] <= _SHORTEST:
        return of_all(values)
    table = lambda values: in_memory(by_blocks(values, exclusive=True))
    return dispatch(table if exclusive else by_blocks, values, tpu=of_all, gpu=of_all)


def cumulated(values: jax.Array, *, exclusive: bool = False) -> jax.Array:
    """Evaluates `running_sum` of `values`, `exclusive` or not, by `jnp.cumsum`."""
    sums = jnp.cumsum(values, axis=-1, dtype=values.dtype)
    return sums - values if exclusive else sums


def by_blocks(values: jax.Array, *, exclusive: bool = False) -> jax.Array:
    """Evaluates `running_sum` of `values`, `exclusive` or not, by blocks, and of their totals likewise."""
    *lead, n = values.shape
    if n <= _SHORTEST:
        return cumulated(values, exclusive=exclusive)
    num_blocks = ceil_div(n, _BLOCK)
    given = jnp.pad(values, [*[(0, 0)] * len(lead), (0, num_blocks * _BLOCK - n)]).reshape(*lead, num_blocks, _BLOCK)
    sums = given
    for shift in (1, 2, 4):
        sums += jnp.pad(sums[..., :-shift], [*[(0, 0)] * (len(lead) + 1), (shift, 0)])
    sums += by_blocks(sums[..., -1], exclusive=True)[..., None]
    if exclusive:
        sums -= given
    return sums.reshape(*lead, num_blocks * _BLOCK)[..., :n]
