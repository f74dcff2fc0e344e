"""Rows written back into a table: the way back of `gather_rows`, for row numbers that are all different.

The table is updated in place where its buffer can be reused: only the rows that are written move.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from splitjax._compat import result_type
from splitjax.errors import KernelError
from splitjax.kernels._common import (
    check_matrix,
    check_vector,
    custom_vjp,
    dispatch,
    has_tpu_rows,
    pad_rows,
    round_up,
    rows_in_flight,
)
from splitjax.kernels._pallas import pl, pltpu
from splitjax.kernels.gather_rows import gather_rows


@custom_vjp(nondiff_argnums=(3,))
def scatter_rows(table: jax.Array, rows: jax.Array, values: jax.Array, is_sorted: bool = False) -> jax.Array:
    """Replaces some rows of a table.

    **Arguments:**

    - `table`: [n, width], of any dtype.
    - `rows`: int32[m], different from each other where inside [0, n); what is outside, such as `FILLER`, writes
      nothing.
    - `values`: [m, width], of the table's dtype.
    - `is_sorted`: the row numbers ascend, `FILLER`s or n at the end (static); XLA's scatter makes use of it.

    Returns [n, width]. Which of two equal row numbers wins is undefined. Raises `KernelError` for operands that do not
    belong together.

    The TPU kernel takes what `gather_rows` has one for; on GPU this is XLA's scatter, which is told that rows are
    unique and then writes each once.
    """
    check_matrix("table", table)
    check_vector("rows", rows)
    check_matrix("values", values)
    if values.dtype != table.dtype or values.shape != (rows.shape[0], table.shape[1]):
        raise KernelError(
            f"values do not fit {rows.shape[0]} rows of a table of {table.dtype}[{table.shape[0]}, {table.shape[1]}]",
            value=f"{values.dtype}{list(values.shape)}",
            place="values",
            remedy="pass one row of the table's dtype for each number",
        )
    if 0 in table.shape or rows.shape[0] == 0:
        return table
    reference = functools.partial(scatter_reference, is_sorted=is_sorted)
    return dispatch(
        reference, table, rows, values, tpu=scatter_tpu if has_tpu_rows(table, rows.shape[0]) else None, gpu=None
    )


def scatter_reference(table: jax.Array, rows: jax.Array, values: jax.Array, *, is_sorted: bool = False) -> jax.Array:
    """Evaluates `scatter_rows` of `table`, `rows` and `values` in plain JAX; `is_sorted` as there."""
    # Different indices for fillers too: what is promised to be unique has to be so out of bounds as well.
    outside = (rows < 0) | (rows >= table.shape[0])
    fillers = table.shape[0] + jnp.arange(rows.shape[0], dtype=jnp.int32)
    places = table.at[jnp.where(outside, fillers, rows)]
    # Past 2^31 a filler is negative, and outside too.
    return places.set(
        values, mode="drop", unique_indices=True, indices_are_sorted=is_sorted, wrap_negative_indices=False
    )


def _forward(table, rows, values, is_sorted):
    return scatter_rows(table, rows, values, is_sorted), rows


def _backward(is_sorted, rows, cotangent):
    of_values = gather_rows(cotangent, rows)
    of_table = scatter_rows(cotangent, rows, jnp.zeros_like(of_values), is_sorted)
    return of_table, np.zeros(rows.shape, jax.dtypes.float0), of_values


scatter_rows.defvjp(_forward, _backward)


def scatter_tpu(
    table: jax.Array, rows: jax.Array, values: jax.Array, *, block: int | None = None, interpret: Any = False
) -> jax.Array:
    """Evaluates `scatter_rows` of `table`, `rows` and `values` as a TPU kernel, for 32-bit rows, at least one of them.
    `block` and `interpret`: as of `gather_tpu`."""
    width = table.shape[1]
    block = block or rows_in_flight(table, rows.shape[0])
    padded = pad_rows(rows, round_up(rows.shape[0], block), -1).reshape(-1, 1, block)
    return pl.pallas_call(
        _tpu_kernel,
        out_shape=result_type(table.shape, table.dtype, table, rows, values),
        grid=(padded.shape[0],),
        in_specs=[
            pl.BlockSpec((1, 1, block), lambda i: (i, 0, 0), memory_space=pltpu.SMEM),
            pl.BlockSpec((block, width), lambda i: (i, 0)),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=[pltpu.SemaphoreType.DMA],
        input_output_aliases={2: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="splitjax_scatter_rows",
    )(padded, values, table)


def _tpu_kernel(rows, values, _, table, semaphore):
    def start(place, count):
        row = rows[0, 0, place]
        is_row = (row >= 0) & (row < table.shape[0])

        @pl.when(is_row)
        def copy():
            pltpu.make_async_copy(values.at[pl.ds(place, 1)], table.at[pl.ds(row, 1)], semaphore).start()

        return count + is_row.astype(jnp.int32)

    def wait(_, nothing):
        pltpu.make_async_copy(values.at[pl.ds(0, 1)], table.at[pl.ds(0, 1)], semaphore).wait()
        return nothing

    lax.fori_loop(0, lax.fori_loop(0, rows.shape[-1], start, jnp.int32(0)), wait, None)
