"""Rows of equal ids added up, ids ascending: how the duplicates of a lookup become one gradient row each.

The rows of one block belong to consecutive results, so that a block's sums are one small product with a matrix of zeros
and ones on a TPU (the segmented sums of Blelloch, "Prefix sums and their applications", 1990, with a matrix unit for
each block), and a walk along the rows on a GPU, where what crosses a block's border goes up to a next, far smaller
round of the same kind. Neither adds with atomics: the result does not depend on timing, and a very frequent id costs no
more than others.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from splitjax._compat import result_type
from splitjax.errors import KernelError
from splitjax.kernels._common import (
    FILLER,
    TILE_ROWS,
    WARPGROUP,
    ceil_div,
    check_capacity,
    check_rows,
    check_vector,
    dispatch,
    pad_rows,
    round_up,
)
from splitjax.kernels._pallas import pl, plgpu, pltpu
from splitjax.kernels.gather_rows import gather_rows

_GPU_BLOCK = 64  # rows that one GPU program walks along


class Segments(NamedTuple):
    """Sums of rows, one for each id."""

    ids: jax.Array  # int32[capacity]: ascending and different, then FILLER
    sums: jax.Array  # [capacity, width]; zeros behind the last
    num_ids: jax.Array  # int32[]: how many different ids there are; more than `capacity` if some found no slot


def segment_sum(ids: jax.Array, values: jax.Array, capacity: int | None = None) -> Segments:
    """Adds up the rows of equal ids.

    **Arguments:**

    - `ids`: int32[n], ascending; `FILLER`s, at the end, mark rows that do not count, whatever they hold.
    - `values`: [n, width], float32, bfloat16 or float16. They are added up in float32 and rounded once.
    - `capacity`: the number of slots of the result; n if it is None. What finds no slot is left out, and `num_ids`
      tells.

    Returns `Segments` of the dtype of the values, which can be differentiated with respect to them. Raises
    `KernelError` for operands that do not belong together or have another dtype or rank.
    """
    check_vector("ids", ids)
    check_rows("values", values, floating=True)
    capacity = ids.shape[0] if capacity is None else capacity
    check_capacity(capacity)
    if values.shape[0] != ids.shape[0]:
        raise KernelError(
            "there is not one row for each id",
            value=(tuple(ids.shape), tuple(values.shape)),
            place="values",
            remedy="pass as many",
        )
    unique, ranks, count = ranks_of(ids, capacity)
    return Segments(unique, _sums(values, ranks, count, capacity), count)


def ranks_of(ids: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Finds the different ones among `ids`, int32[n], which ascend and end with `FILLER`s.

    Returns the different ids, int32[capacity]; the slot of each id, int32[n], -1 for a filler; and the number of
    different ids, int32[].
    """
    is_first = jnp.concatenate([jnp.ones(min(1, ids.shape[0]), bool), ids[1:] != ids[:-1]]) & (ids != FILLER)
    ranks = jnp.cumsum(is_first.astype(jnp.int32)) - 1
    count = ranks[-1] + 1 if ids.shape[0] else jnp.zeros((), jnp.int32)
    unique = jnp.full(capacity, FILLER, jnp.int32).at[jnp.where(is_first, ranks, capacity)].set(ids, mode="drop")
    return unique, jnp.where(ids == FILLER, -1, ranks), count


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _sums(values: jax.Array, ranks: jax.Array, count: jax.Array, capacity: int) -> jax.Array:
    """The sums of the rows of each rank, rounded to the dtype of the values."""
    if 0 in values.shape or capacity == 0:
        return jnp.zeros((capacity, values.shape[1]), values.dtype)

    def reference(values, ranks, count):
        return sums_reference(values, ranks, capacity=capacity)

    def tpu(values, ranks, count):
        # The kernel writes what it has sums for; behind that its result is whatever the memory held.
        return jnp.where(jnp.arange(capacity)[:, None] < count, sums_tpu(values, ranks, capacity=capacity), 0)

    gpu = functools.partial(sums_gpu, capacity=capacity) if values.shape[1] % WARPGROUP == 0 else None
    return dispatch(reference, values, ranks, count, tpu=tpu, gpu=gpu).astype(values.dtype)


def _forward(values, ranks, count, capacity):
    return _sums(values, ranks, count, capacity), (ranks, count)


def _backward(capacity, residuals, cotangent):
    ranks, count = residuals
    return (
        gather_rows(cotangent, ranks),
        np.zeros(ranks.shape, jax.dtypes.float0),
        np.zeros(count.shape, jax.dtypes.float0),
    )


_sums.defvjp(_forward, _backward)


def sums_reference(values: jax.Array, ranks: jax.Array, *, capacity: int) -> jax.Array:
    """Adds up the rows of `values` of each of the `ranks` below `capacity`, in plain JAX. Returns float32[capacity,
    width]."""
    slots = jnp.where(ranks < 0, capacity, ranks)
    nothing = jnp.zeros((capacity, values.shape[1]), jnp.float32)
    return nothing.at[slots].add(values.astype(jnp.float32), mode="drop", indices_are_sorted=True)


def sums_tpu(
    values: jax.Array, ranks: jax.Array, *, capacity: int, block: int = 128, interpret: Any = False
) -> jax.Array:
    """Evaluates `sums_reference` of `values`, `ranks` and `capacity` as a TPU kernel, for at least one row; rows behind
    the last sum are undefined.

    A block's results start at its first rank, rounded down to a tile of 8 rows. Each block writes its window of results
    whole, after the one before it, and takes over the sums of the tile that both share, so that the order of writes
    makes the result. A product of zeros with what is not finite would spread it over the block: such a block is added
    up row by row. `block`: rows in one, a multiple of 16; `interpret`: as of `pallas_call`.
    """
    values = values.astype(jnp.float32) if values.dtype == jnp.float16 else values  # which a TPU does not know
    num_rows, width = values.shape
    num_blocks = ceil_div(num_rows, block)
    window = block + TILE_ROWS
    running = lax.cummax(pad_rows(ranks, num_blocks * block, -1))  # a filler's is that of the last row before it
    ranks = pad_rows(ranks, num_blocks * block, -1)
    sums = pl.pallas_call(
        functools.partial(_tpu_kernel, capacity=capacity),
        out_shape=result_type((round_up(capacity, TILE_ROWS) + window, width), jnp.float32, values, ranks),
        grid=(num_blocks,),
        in_specs=[
            pl.BlockSpec((1, 1, block), lambda i: (i, 0, 0)),
            pl.BlockSpec((1, 1, block), lambda i: (i, 0, 0), memory_space=pltpu.SMEM),
            pl.BlockSpec((1, 1, 1), lambda i: (i, 0, 0), memory_space=pltpu.SMEM),
            pl.BlockSpec((block, width), lambda i: (i, 0)),
        ],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=[
            pltpu.VMEM((2, window, width), jnp.float32),
            pltpu.VMEM((block, width), jnp.float32),
            pltpu.SMEM((1,), jnp.int32),
            pltpu.SemaphoreType.DMA,
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="splitjax_segment_sum",
    )(
        ranks.reshape(-1, 1, block),
        ranks.reshape(-1, 1, block),
        running[::block].reshape(-1, 1, 1),
        pad_rows(values, num_blocks * block),
    )
    return sums[:capacity]


class _Scratch(NamedTuple):
    """The scratch memory of the TPU kernel, in the order of `scratch_shapes`.

    - `windows`: the sums of this block and of the one before it. `rows`: those of this block, as float32.
    - `last_start`: where the window before begins. `semaphore`: of the copy of a window.
    """

    windows: Any
    rows: Any
    last_start: Any
    semaphore: Any


def _tpu_kernel(ranks, scalar_ranks, first_rank, values, sums, *scratch, capacity):
    windows, rows, last_start, semaphore = _Scratch(*scratch)
    step = pl.program_id(0)
    block, window = values.shape[0], windows.shape[1]
    own, previous = windows.at[step & 1], windows.at[1 - (step & 1)]
    start = jnp.maximum(first_rank[0, 0, 0], 0) & -TILE_ROWS
    has_slots = start < capacity

    place = ranks[0] - start  # [1, block]; negative for fillers
    is_result = lax.broadcasted_iota(jnp.int32, (window, block), 0) == place
    counts = jnp.where(is_result, 1.0, 0.0)
    rows[...] = values[...].astype(jnp.float32)
    # An exponent of ones: infinite, or not a number.
    exponent = lax.bitcast_convert_type(rows[...], jnp.int32) & 0x7F800000
    finite = jnp.max(exponent) < 0x7F800000

    @pl.when(finite)
    def together():
        if values.dtype == jnp.bfloat16:
            own[...] = jnp.dot(counts.astype(jnp.bfloat16), values[...], preferred_element_type=jnp.float32)
        else:
            own[...] = jnp.dot(counts, rows[...], preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST)

    @pl.when(jnp.logical_not(finite))
    def one_by_one():
        own[...] = jnp.zeros(own.shape, own.dtype)

        def add(row, nothing):
            rank = scalar_ranks[0, 0, row]

            @pl.when(rank >= 0)
            def counted():
                at = pl.ds(rank - start, 1)
                own[at, :] = own[at, :] + rows[pl.ds(row, 1), :]

            return nothing

        lax.fori_loop(0, block, add, None)

    @pl.when(step > 0)
    def take_over():
        shared = pl.multiple_of(start - last_start[0], TILE_ROWS)
        own[pl.ds(0, TILE_ROWS), :] += previous[pl.ds(shared, TILE_ROWS), :]

    def write(source, at):
        return pltpu.make_async_copy(source, sums.at[pl.ds(pl.multiple_of(at, TILE_ROWS), window)], semaphore)

    @pl.when((step > 0) & (last_start[0] < capacity))
    def after_the_one_before():
        write(previous, last_start[0]).wait()

    last_start[0] = start

    @pl.when(has_slots)
    def begin():
        write(own, start).start()

    @pl.when(has_slots & (step == pl.num_programs(0) - 1))
    def end():
        write(own, start).wait()


def sums_gpu(
    values: jax.Array, ranks: jax.Array, count: jax.Array, *, capacity: int, interpret: Any = None
) -> jax.Array:
    """Evaluates `sums_reference` of `values`, `ranks` and `capacity` in Mosaic GPU kernels, for a width of a multiple
    of 128 and at least one row. `count`, int32[], says how many ranks there are: from 0, every one below it has rows.

    A program walks along a block of rows and writes each sum when its run of equal ranks ends, then its share of the
    zeros from `count` on: a pass over the result for these alone would take as long as writing it. Runs that cross a
    border of blocks go to a list of parts instead, two for each block, which the next round adds up in the same way.
    `interpret`: as of `plgpu.kernel`.
    """
    width = values.shape[1]
    num_blocks = ceil_div(values.shape[0], _GPU_BLOCK)
    values, ranks = (pad_rows(array, num_blocks * _GPU_BLOCK, filler) for array, filler in ((values, 0), (ranks, -1)))
    codes, part_ranks = _gpu_codes(ranks.reshape(num_blocks, _GPU_BLOCK), capacity)
    # Whole blocks of parts, so that the next round copies none: what lies behind the last counts nowhere.
    num_parts = round_up(2 * num_blocks, _GPU_BLOCK)
    sums, parts = plgpu.kernel(
        functools.partial(_gpu_kernel, share=ceil_div(capacity, num_blocks)),
        out_type=[
            result_type((capacity, width), jnp.float32, values, ranks),
            result_type((num_parts, width), jnp.float32, values, ranks),
        ],
        grid=(num_blocks,),
        grid_names=("block",),
        interpret=interpret,
        kernel_name="splitjax_segment_sum",
    )(codes.reshape(-1), values, count.reshape(1))
    if num_blocks == 1:
        return sums
    part_ranks = pad_rows(part_ranks, num_parts, -1)
    is_part = part_ranks >= 0
    running = lax.cummax(part_ranks)
    is_first = is_part & (running != jnp.concatenate([jnp.full(1, -1, jnp.int32), running[:-1]]))
    numbers = jnp.cumsum(is_first.astype(jnp.int32)) - 1
    # Each crosses a border. What lies behind the last goes nowhere, and need not be cleared.
    totals = sums_gpu(
        parts, jnp.where(is_part, numbers, -1), jnp.int32(num_blocks), capacity=num_blocks, interpret=interpret
    )
    targets = (
        jnp.full(num_blocks, capacity, jnp.int32)
        .at[jnp.where(is_first, numbers, num_blocks)]
        .set(part_ranks, mode="drop")
    )
    return sums.at[targets].set(totals, mode="drop")


def _gpu_codes(ranks: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """For each row of [blocks, rows]: twice a target, plus whether the row counts. Targets: from 0 the slot that a sum
    goes to, -1 nowhere, -2 the sum goes on, from -3 down a part. And the rank of each part, -1 for one that is not
    written."""
    num_blocks = ranks.shape[0]
    running = lax.cummax(ranks.reshape(-1)).reshape(ranks.shape)  # what does not count leaves the run as it is
    head, tail, none = running[:, :1], running[:, -1:], jnp.full((1, 1), -2, jnp.int32)
    crosses_before = (head == jnp.concatenate([none, tail[:-1]])) & (head >= 0)
    crosses_after = (tail == jnp.concatenate([head[1:], none])) & (tail >= 0)
    in_head, in_tail = running == head, running == tail
    crosses = (in_head & crosses_before) | (in_tail & crosses_after)
    part = 2 * jnp.arange(num_blocks, dtype=jnp.int32)[:, None] + jnp.where(in_head, 0, 1)
    to_slot = jnp.where((running >= 0) & (running < capacity), running, -1)
    is_end = jnp.concatenate([running[:, :-1] != running[:, 1:], jnp.ones((num_blocks, 1), bool)], axis=1)
    target = jnp.where(is_end, jnp.where(crosses, -3 - part, to_slot), -2)
    is_whole = head == tail
    part_ranks = jnp.concatenate(
        [
            jnp.where(crosses_before | (is_whole & crosses_after), head, -1),
            jnp.where(crosses_after & ~is_whole, tail, -1),
        ],
        axis=1,
    )
    return 2 * target + (ranks >= 0), part_ranks.reshape(-1)


def _gpu_kernel(codes, values, count, sums, parts, *, share):
    capacity, width = sums.shape
    block = lax.axis_index("block")
    start = block * _GPU_BLOCK
    layout = plgpu.Layout.WG_STRIDED((width,), next(size for size in (4, 2, 1) if width // WARPGROUP % size == 0))
    # Rows read before the first is used, to have as many reads in flight as registers allow; it has to divide a block.
    at_once = next(size for size in (8, 4, 2, 1) if size * width <= 4096 or size == 1)

    def zeros():
        return plgpu.layout_cast(jnp.zeros((width,), jnp.float32), layout)

    def some(turn, total):
        first = start + turn * at_once
        rows = [plgpu.layout_cast(values[first + i], layout) for i in range(at_once)]
        coded = [codes[first + i] for i in range(at_once)]
        for row, code in zip(rows, coded, strict=True):
            target, counts = code >> 1, (code & 1) == 1
            total = lax.cond(
                counts, lambda total, row: total + row.astype(jnp.float32), lambda total, row: total, total, row
            )

            @pl.when(target >= 0)
            def to_slot(total=total, target=target):
                sums[target] = total

            @pl.when(target <= -3)
            def to_part(total=total, target=target):
                parts[-3 - target] = total

            total = lax.cond(target == -2, lambda total: total, lambda _: zeros(), total)
        return total

    lax.fori_loop(0, _GPU_BLOCK // at_once, some, zeros())

    def clear(slot, nothing):
        sums[slot] = zeros()
        return nothing

    lax.fori_loop(jnp.maximum(block * share, count[0]), jnp.minimum((block + 1) * share, capacity), clear, None)
