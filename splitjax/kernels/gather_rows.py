"""Rows of a table in a given order: the lookup of an embedding, and the packing of rows into send order.

Every row is one copy by the accelerator's copy engine, many of them in flight, so that the cost is that of the bytes
and not that of a gather of elements (JAX's Pallas guide, "Pipelining" and "Distributed computing", for asynchronous
copies and their semaphores).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from splitjax._compat import result_type
from splitjax.kernels._common import (
    check_matrix,
    check_vector,
    dispatch,
    has_tpu_rows,
    pad_rows,
    round_up,
    rows_in_flight,
    tma_shape,
)
from splitjax.kernels._pallas import pl, plgpu, pltpu


@jax.custom_vjp
def gather_rows(table: jax.Array, rows: jax.Array) -> jax.Array:
    """Gathers the rows with the given numbers; a number outside [0, n), such as `FILLER`, gives zeros.

    **Arguments:**

    - `table`: [n, width], of any dtype.
    - `rows`: int32[m], in any order, repeated or not.

    Returns [m, width] of the table's dtype. The derivative with respect to the table adds up rows. Raises `KernelError`
    for row numbers of another dtype, or another rank.

    The TPU kernel takes 32-bit rows, of at least 16 numbers, of a table that is a multiple of 128 wide or has at most 8
    rows for each one asked for (`has_tpu_rows` has the reasons); the GPU kernel 16- and 32-bit rows of a multiple of
    128 bytes.
    """
    check_matrix("table", table)
    check_vector("rows", rows)
    if 0 in table.shape or rows.shape[0] == 0:
        return gather_reference(table, rows)
    tpu = gather_tpu if has_tpu_rows(table, rows.shape[0]) else None
    gpu = gather_gpu if tma_shape(table) else None
    return dispatch(gather_reference, table, rows, tpu=tpu, gpu=gpu)


def gather_reference(table: jax.Array, rows: jax.Array) -> jax.Array:
    """Evaluates `gather_rows` of `table` and `rows` in plain JAX."""
    if table.shape[0] == 0:
        return jnp.zeros((rows.shape[0], table.shape[1]), table.dtype)
    return table.at[rows].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _forward(table, rows):
    return gather_rows(table, rows), (table, rows)


def _backward(residuals, cotangent):
    table, rows = residuals
    of_table = jnp.zeros_like(table).at[rows].add(cotangent, mode="drop", wrap_negative_indices=False)
    return of_table, np.zeros(rows.shape, jax.dtypes.float0)


gather_rows.defvjp(_forward, _backward)


def gather_tpu(table: jax.Array, rows: jax.Array, *, block: int | None = None, interpret: Any = False) -> jax.Array:
    """Evaluates `gather_rows` of `table` and `rows` as a TPU kernel, for 32-bit rows, at least one of them.

    Blocks of rows, two deep: the copies of the next block are under way while this one is waited for. `block`: rows in
    one, a multiple of 8; `interpret`: as of `pallas_call`.
    """
    width = table.shape[1]
    block = block or rows_in_flight(table, rows.shape[0])
    padded = pad_rows(rows, round_up(rows.shape[0], block), -1).reshape(-1, 1, block)
    num_blocks = padded.shape[0]
    gathered = pl.pallas_call(
        functools.partial(_tpu_kernel, num_blocks=num_blocks),
        out_shape=result_type((num_blocks * block, width), table.dtype, table, rows),
        grid=(num_blocks,),
        in_specs=[
            pl.BlockSpec((1, 1, block), lambda i: (i, 0, 0), memory_space=pltpu.SMEM),
            pl.BlockSpec((1, 1, block), lambda i: (jnp.minimum(i + 1, num_blocks - 1), 0, 0), memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=pl.BlockSpec((block, width), lambda i: (i, 0)),
        scratch_shapes=[
            pltpu.VMEM((2, block, width), table.dtype),
            pltpu.SMEM((2,), jnp.int32),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="splitjax_gather_rows",
    )(padded, padded, table)
    return gathered[: rows.shape[0]]


class _Scratch(NamedTuple):
    """The scratch memory of the TPU kernel, in the order of `scratch_shapes`.

    - `buffer`: two blocks of rows. `started`: the copies that were started into either. `semaphore`: of these copies.
    """

    buffer: Any
    started: Any
    semaphore: Any


def _tpu_kernel(rows, next_rows, table, gathered, *scratch, num_blocks):
    buffer, started, semaphore = _Scratch(*scratch)
    step = pl.program_id(0)
    slot = step & 1

    @pl.when(step == 0)
    def first():
        started[0] = start_copies(table, rows, buffer.at[0], semaphore.at[0])

    @pl.when(step + 1 < num_blocks)
    def ahead():
        started[1 - slot] = start_copies(table, next_rows, buffer.at[1 - slot], semaphore.at[1 - slot])

    wait_for_copies(table, buffer.at[slot], semaphore.at[slot], started[slot])
    gathered[...] = buffer[slot]


def start_copies(table: Any, rows: Any, buffer: Any, semaphore: Any) -> jax.Array:
    """In a TPU kernel: starts to copy a block of `rows` of `table` into `buffer`, zeros where a number is outside;
    `semaphore` counts the bytes that arrived. All are references of Pallas. Returns how many copies, int32[]."""
    num_rows = table.shape[0]

    def body(place, count):
        row = rows[0, 0, place]
        is_row = (row >= 0) & (row < num_rows)

        @pl.when(is_row)
        def copy():
            pltpu.make_async_copy(table.at[pl.ds(row, 1)], buffer.at[pl.ds(place, 1)], semaphore).start()

        @pl.when(jnp.logical_not(is_row))
        def clear():
            buffer[pl.ds(place, 1), :] = jnp.zeros((1, buffer.shape[1]), buffer.dtype)

        return count + is_row.astype(jnp.int32)

    return lax.fori_loop(0, rows.shape[-1], body, jnp.int32(0))


def wait_for_copies(table: Any, buffer: Any, semaphore: Any, count: jax.Array) -> None:
    """Waits, in a TPU kernel, for `count` of the copies that `start_copies` began with this `table`, `buffer` and
    `semaphore`."""
    # The semaphore counts bytes, so that copies that fill the buffer can be waited for at once.
    is_full = count == buffer.shape[0]

    @pl.when(is_full)
    def at_once():
        pltpu.make_async_copy(buffer, buffer, semaphore).wait()

    @pl.when(jnp.logical_not(is_full))
    def one_by_one():
        def body(_, nothing):
            pltpu.make_async_copy(table.at[pl.ds(0, 1)], buffer.at[pl.ds(0, 1)], semaphore).wait()
            return nothing

        lax.fori_loop(0, count, body, None)


def gather_gpu(table: jax.Array, rows: jax.Array, *, interpret: Any = None) -> jax.Array:
    """Evaluates `gather_rows` of `table` and `rows` as a Mosaic GPU kernel, for rows that `tma_shape` can lay out, at
    least one of them.

    A program brings a block of rows into shared memory, each by one bulk tensor copy, and writes them out together.
    Several programs share a multiprocessor, so that some read while others write. A number outside copies a row of
    zeros. `interpret`: as of `plgpu.kernel`.
    """
    shape = tma_shape(table)
    assert shape is not None, "the dispatcher takes this kernel for rows that tma_shape can lay out"
    cells = table.reshape(table.shape[0], *shape)
    block = max(1, min(64, 32_768 // (table.shape[1] * table.dtype.itemsize)))
    padded = pad_rows(rows, round_up(rows.shape[0], block), -1)

    def body(rows_ref, table_ref, zeros_ref, gathered_ref, buffer, barrier):
        start = lax.axis_index("block") * block

        def copy(place, nothing):
            row = rows_ref[start + place]
            is_row = (row >= 0) & (row < table.shape[0])

            @pl.when(is_row)
            def of_table():
                plgpu.copy_gmem_to_smem(table_ref.at[row], buffer.at[place], barrier)

            @pl.when(jnp.logical_not(is_row))
            def of_zeros():
                plgpu.copy_gmem_to_smem(zeros_ref.at[0], buffer.at[place], barrier)

            return nothing

        lax.fori_loop(0, block, copy, None)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(buffer, gathered_ref.at[pl.ds(start, block)])
        plgpu.wait_smem_to_gmem(0)

    gathered = plgpu.kernel(
        body,
        out_type=result_type((padded.shape[0], *shape), table.dtype, table, rows),
        grid=(padded.shape[0] // block,),
        grid_names=("block",),
        scratch_types=[plgpu.SMEM((block, *shape), table.dtype), plgpu.Barrier(num_arrivals=block)],
        interpret=interpret,
        kernel_name="splitjax_gather_rows",
    )(padded, cells, np.zeros((1, *shape), table.dtype))  # a constant of the program
    return gathered.reshape(-1, table.shape[1])[: rows.shape[0]]
