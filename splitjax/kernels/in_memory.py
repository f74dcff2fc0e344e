"""Integers that are computed once and read from memory, on CPU.

XLA's CPU backend fuses what is computed into everything that reads it, and computes it again there. It takes
optimization barriers away before it fuses, but nothing is fused across a loop.
"""

from __future__ import annotations

import jax
from jax import lax

from splitjax.kernels._common import dispatch

_MOST_BITS = 64  # of an integer
_WORTHWHILE = 4096  # entries: of fewer, doing it again is cheaper than a loop


def in_memory(values: jax.Array) -> jax.Array:
    """Returns `values`, integers of any shape, kept in memory on CPU where there are many of them; on accelerators as
    they are."""
    if values.size < _WORTHWHILE:
        return values
    return dispatch(behind_loop, values, tpu=lambda values: values, gpu=lambda values: values)


def behind_loop(values: jax.Array) -> jax.Array:
    """Returns `values` from a loop that never turns: XLA does not know that no integer has more bits than it has."""
    never = lax.population_count(values.reshape(-1)[0]) > _MOST_BITS
    turn = lambda state: (state[0] & ~state[0], state[1] + 1)
    return lax.while_loop(lambda state: state[0], turn, (never, values))[1]
