"""Rows added up by slot, in any order: gradients of lookups by id, and what several workers sent by row.

On CPU a scatter that adds. On accelerators such scatters go row by row, or by atomics that many equal slots slow down a
hundredfold (openxla/xla#46225), so rows are brought into the order of their slots first: one sort of the numbers, then
`gather_rows`, `segment_sum` and, where slots are left out, `scatter_rows`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from splitjax.errors import KernelError
from splitjax.kernels._common import (
    FILLER,
    MIN_WIDTH,
    WARPGROUP,
    check_capacity,
    check_matrix,
    check_vector,
    custom_vjp,
    dispatch,
)
from splitjax.kernels.gather_rows import gather_rows
from splitjax.kernels.scatter_rows import scatter_rows
from splitjax.kernels.segment_sum import segment_sum


@custom_vjp(nondiff_argnums=(2, 3))
def sum_rows(values: jax.Array, slots: jax.Array, capacity: int, has_no_gaps: bool = False) -> jax.Array:
    """Adds up the rows of equal slots.

    **Arguments:**

    - `values`: [m, width], of any dtype.
    - `slots`: int32[m], in any order, repeated or not; rows whose slot lies outside [0, capacity) are left out.
    - `capacity`: the number of slots of the result.
    - `has_no_gaps`: between 0 and the largest slot below the capacity, each has a row (static), which saves a pass on
      accelerators.

    Returns [capacity, width] of the dtype of the values; zeros where a slot has no row. The derivative with respect to
    the values gathers rows. Raises `KernelError` for operands that do not belong together.

    Kernels take rows of float32, bfloat16 or float16: on TPU of at least 16 numbers, on GPU of a multiple of 128. They
    add up in float32 and round once. Other rows, and all on CPU, are added by XLA's scatter in their own dtype.
    """
    check_matrix("values", values)
    check_vector("slots", slots)
    check_capacity(capacity)
    if values.shape[0] != slots.shape[0]:
        raise KernelError(
            "there is not one slot for each row",
            value=(tuple(values.shape), tuple(slots.shape)),
            place="slots",
            remedy="pass as many",
        )
    if 0 in values.shape or capacity == 0:
        return jnp.zeros((capacity, values.shape[1]), values.dtype)
    is_float = values.dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
    by_sorting = functools.partial(sum_by_sorting, capacity=capacity, has_no_gaps=has_no_gaps)
    tpu, gpu = is_float and values.shape[1] >= MIN_WIDTH, is_float and values.shape[1] % WARPGROUP == 0
    reference = functools.partial(sum_reference, capacity=capacity)
    return dispatch(reference, values, slots, tpu=by_sorting if tpu else None, gpu=by_sorting if gpu else None)


def _forward(values, slots, capacity, has_no_gaps):
    return sum_rows(values, slots, capacity, has_no_gaps), slots


def _backward(capacity, has_no_gaps, slots, cotangent):
    return gather_rows(cotangent, slots), np.zeros(slots.shape, jax.dtypes.float0)


sum_rows.defvjp(_forward, _backward)


def sum_reference(values: jax.Array, slots: jax.Array, *, capacity: int) -> jax.Array:
    """Evaluates `sum_rows` of `values`, `slots` and `capacity` in plain JAX."""
    nothing = jnp.zeros((capacity, values.shape[1]), values.dtype)
    return nothing.at[slots].add(values, mode="drop", wrap_negative_indices=False)


def sum_by_sorting(values: jax.Array, slots: jax.Array, *, capacity: int, has_no_gaps: bool = False) -> jax.Array:
    """Evaluates `sum_rows` of `values`, `slots` and `capacity` by the kernels for rows in order; float32, bfloat16 or
    float16. `has_no_gaps`: as of `sum_rows`."""
    outside = (slots < 0) | (slots >= capacity)
    positions = jnp.arange(slots.shape[0], dtype=jnp.int32)
    ascending, order = lax.sort((jnp.where(outside, FILLER, slots), positions), num_keys=1)
    segments = segment_sum(
        ascending, gather_rows(values, order), capacity if has_no_gaps else min(capacity, slots.shape[0])
    )
    if has_no_gaps:
        return segments.sums
    return scatter_rows(jnp.zeros((capacity, values.shape[1]), values.dtype), segments.ids, segments.sums, True)
