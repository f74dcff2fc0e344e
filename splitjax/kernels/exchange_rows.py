"""Rows sent to their owners: each device packs, for every other one, exactly the rows that this one is to have, and
sends those.

What is sent follows the counts at run time and not the capacity: whole chunks of rows, of which only the last is filled
up. On a TPU this is one kernel. It packs a chunk with row copies into one of two buffers while the other one is on its
way by remote copy, so that packed rows never visit the main memory. The push of Balanced Parallelism (Wang et al.,
"Zen", arXiv 2309.13254) at the granularity of rows; remote copies, their semaphores and the barrier as in JAX's Pallas
guide, "Distributed computing in Pallas for TPUs".
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
    LANES,
    TILE_ROWS,
    check_rows,
    check_vector,
    custom_vjp,
    dispatch,
    pad_rows,
    round_up,
)
from splitjax.kernels._pallas import pl, pltpu
from splitjax.kernels.gather_rows import gather_reference, start_copies, wait_for_copies

# Of the barrier along the first mesh axis; the others follow. Exchanges along different axes have to have different
# ones: a device that is through with one axis may begin with the next while its neighbour there still waits at the
# barrier of the first.
_COLLECTIVE_ID = 23


@custom_vjp(nondiff_argnums=(4,))
def exchange_rows(values: jax.Array, rows: jax.Array, counts: jax.Array, incoming: jax.Array, axis: str) -> jax.Array:
    """Sends rows to the devices of a mesh axis and receives theirs; to be called inside `jax.shard_map`, every axis
    manual.

    **Arguments:**

    - `values`: [n, width], 16- or 32-bit numbers: this device's rows.
    - `rows`: int32[devices, capacity]: for each device, the numbers of the rows it is to have; a number outside [0, n)
      sends zeros.
    - `counts`: int32[devices]: how many of them there are (more than `capacity` counts as that); what stands behind is
      not sent.
    - `incoming`: int32[devices]: the `counts` that the other devices have for this one (`exchange_counts` asks for
      them, where the exchange of ids has not told already). They have to be right: a kernel waits for that many rows.
    - `axis`: the name of the mesh axis.

    Returns [devices, capacity, width]: from each device its rows in their order, then zeros. The derivative with
    respect to the values sends the cotangents back and adds them up. Raises `KernelError` for operands that do not
    belong together.

    The TPU kernel sends ceil(count / chunk) chunks to each device; elsewhere an `all_to_all` of the full capacity is
    the exchange.
    """
    _check(values, rows, counts, incoming, axis)
    if 0 in values.shape or rows.shape[1] == 0:
        return jnp.zeros((*rows.shape, values.shape[1]), values.dtype)
    reference, tpu = (functools.partial(function, axis=axis) for function in (exchange_reference, exchange_tpu))
    # and not of a `vmap`: the kernel addresses devices
    is_of_mesh = axis in jax.sharding.get_abstract_mesh().axis_names
    return dispatch(reference, values, rows, counts, incoming, tpu=tpu if is_of_mesh else None, gpu=None)


def exchange_reference(
    values: jax.Array, rows: jax.Array, counts: jax.Array, incoming: jax.Array, *, axis: str
) -> jax.Array:
    """Evaluates `exchange_rows` of `values`, `rows`, `counts` and `incoming` over `axis` in plain JAX."""
    packed = gather_reference(values, _counted(rows, counts).reshape(-1)).reshape(*rows.shape, -1)
    return lax.all_to_all(packed, axis, 0, 0)


def _counted(rows, counts):
    """The row numbers, -1 behind the last that is to be sent."""
    return jnp.where(jnp.arange(rows.shape[1]) < counts[:, None], rows, -1)


def _forward(values, rows, counts, incoming, axis):
    return exchange_rows(values, rows, counts, incoming, axis), (values, rows, counts, incoming)


def _backward(axis, residuals, cotangent):
    values, rows, counts, incoming = residuals
    devices, capacity = rows.shape
    places = jnp.arange(devices * capacity, dtype=jnp.int32).reshape(devices, capacity)
    returned = exchange_rows(cotangent.reshape(-1, values.shape[1]), places, incoming, counts, axis)
    targets = _counted(rows, counts)
    targets = jnp.where(targets < 0, values.shape[0], targets).reshape(-1)
    of_values = jnp.zeros_like(values).at[targets].add(returned.reshape(-1, values.shape[1]), mode="drop")
    return of_values, *(np.zeros(integers.shape, jax.dtypes.float0) for integers in (rows, counts, incoming))


exchange_rows.defvjp(_forward, _backward)


def exchange_counts(counts: jax.Array, axis: str) -> jax.Array:
    """Tells each device of the mesh axis `axis` what every device has for it. `counts`: int32[devices], an entry for
    each receiver. Returns int32[devices], an entry for each sender."""
    check_vector("counts", counts)
    return lax.all_to_all(counts, axis, 0, 0, tiled=True)


def exchange_tpu(
    values: jax.Array,
    rows: jax.Array,
    counts: jax.Array,
    incoming: jax.Array,
    *,
    axis: str,
    chunk: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Evaluates `exchange_rows` of `values`, `rows`, `counts` and `incoming` over `axis` as one TPU kernel, for at
    least one row and slot.

    16-bit rows travel as half as many 32-bit words. `chunk`: rows sent at a time, a multiple of 8; `interpret`: as of
    `pallas_call`.
    """
    (devices, capacity), width = rows.shape, values.shape[1]
    pushed = push_tpu(
        _as_words(values), _counted(rows, counts), counts, incoming, axis=axis, chunk=chunk, interpret=interpret
    )
    is_sent = jnp.arange(capacity) < incoming[:, None]
    received = jnp.where(is_sent[..., None], pushed[:, :capacity], 0)
    return _from_words(received.reshape(devices * capacity, -1), values).reshape(devices, capacity, width)


def push_tpu(
    words: jax.Array,
    rows: jax.Array,
    counts: jax.Array,
    incoming: jax.Array,
    *,
    axis: str,
    chunk: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Runs the kernel of `exchange_tpu` on rows of 32-bit `words`; `rows`, `counts`, `incoming`, `axis`, `chunk` and
    `interpret` are those of `exchange_tpu`. Returns [devices, slots, width], slots a multiple of the chunk. What no
    chunk reached is undefined."""
    (devices, capacity), width = rows.shape, words.shape[1]
    chunk = chunk or _chunk_rows(capacity, width)
    slots = round_up(capacity, chunk)
    # More than the capacity would be written behind the end of another device's memory.
    counts, incoming = jnp.minimum(counts, capacity), jnp.minimum(incoming, capacity)
    numbers = pad_rows(rows.T, slots, -1).T.reshape(-1, 1, 1, chunk)
    names = jax.sharding.get_abstract_mesh().axis_names
    # Where this device is in the mesh comes in as an operand: the compiler of kernels cannot ask where `check_vma` is
    # on.
    place = jnp.stack([lax.axis_index(name) for name in names])
    return pl.pallas_call(
        functools.partial(_tpu_kernel, ring=_Ring(names.index(axis), devices, chunk)),
        out_shape=result_type((devices, slots, width), words.dtype, words, rows, counts, incoming),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pl.ANY),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=[
            pltpu.VMEM((2, chunk, width), words.dtype),
            pltpu.SMEM((1, 1, chunk), jnp.int32),
            pltpu.SemaphoreType.DMA,  # of row numbers
            pltpu.SemaphoreType.DMA,  # of packing
            pltpu.SemaphoreType.DMA((2,)),  # of sending from either buffer
            pltpu.SemaphoreType.DMA,  # of receiving
        ],
        compiler_params=pltpu.CompilerParams(collective_id=_COLLECTIVE_ID + names.index(axis) if devices > 1 else None),
        interpret=interpret,
        name="splitjax_exchange_rows",
    )(place, counts, incoming, numbers, words)


class _Ring(NamedTuple):
    """Says among whom rows are exchanged.

    - `dim`: the number of the mesh axis, and `devices`: those along it. `chunk`: the rows that are sent at a time.
    """

    dim: int
    devices: int
    chunk: int


class _Scratch(NamedTuple):
    """The scratch memory of the TPU kernel, in the order of `scratch_shapes`.

    - `buffers`: two chunks of rows that are sent. `chunk_numbers`: the numbers of the rows of a chunk.
    - `numbers_semaphore`, `pack_semaphore`, `receive_semaphore`: of the copies of row numbers, of rows into a buffer,
      and of what comes in. `send_semaphores`: of sending from either buffer.
    """

    buffers: Any
    chunk_numbers: Any
    numbers_semaphore: Any
    pack_semaphore: Any
    send_semaphores: Any
    receive_semaphore: Any


def _tpu_kernel(place, counts, incoming, numbers, values, *received_and_scratch, ring):
    received, *scratch = received_and_scratch
    buffers, chunk_numbers, numbers_semaphore, pack_semaphore, send_semaphores, receive_semaphore = _Scratch(*scratch)
    dim, devices, chunk = ring
    own = place[dim]
    chunks_each = received.shape[1] // chunk

    def address(device):
        return tuple(device if i == dim else place[i] for i in range(place.shape[0]))

    def num_chunks(count):
        return lax.div(count + (chunk - 1), jnp.int32(chunk))

    def device_at(distance):
        device = own + distance
        return jnp.where(device >= devices, device - devices, device)

    def sending(slot, device, part):
        return pltpu.make_async_remote_copy(
            buffers.at[slot],
            received.at[own, pl.ds(pl.multiple_of(part * chunk, TILE_ROWS), chunk)],
            send_semaphores.at[slot],
            receive_semaphore,
            device_id=address(device),
        )

    def keeping(slot, part):
        place = received.at[own, pl.ds(pl.multiple_of(part * chunk, TILE_ROWS), chunk)]
        return pltpu.make_async_copy(buffers.at[slot], place, send_semaphores.at[slot])

    if devices > 1:
        # Nobody writes into the memory of a device that has not begun: it may still be in use for something else.
        barrier = pltpu.get_barrier_semaphore()

        def signal(distance, nothing):
            pl.semaphore_signal(barrier, 1, device_id=address(device_at(distance)))
            return nothing

        lax.fori_loop(1, devices, signal, None)
        pl.semaphore_wait(barrier, devices - 1)

    def to_device(distance, turn):
        # Each begins with its right neighbour, so that no device is everybody's target at once; its own rows come last.
        device = device_at(distance)

        def one_chunk(part, turn):
            slot = turn & 1

            @pl.when(turn >= 2)
            def buffer_is_free():
                keeping(slot, 0).wait()

            fetch = pltpu.make_async_copy(numbers.at[device * chunks_each + part], chunk_numbers, numbers_semaphore)
            fetch.start()
            fetch.wait()
            started = start_copies(values, chunk_numbers, buffers.at[slot], pack_semaphore)
            wait_for_copies(values, buffers.at[slot], pack_semaphore, started)

            @pl.when(device == own)
            def keep():
                keeping(slot, part).start()

            @pl.when(device != own)
            def send():
                sending(slot, device, part).start()

            return turn + 1

        return lax.fori_loop(0, num_chunks(counts[device]), one_chunk, turn)

    turns = lax.fori_loop(1, devices + 1, to_device, jnp.int32(0))
    for last in (1, 2):

        @pl.when(turns >= last)
        def sent(last=last):
            keeping((turns - last) & 1, 0).wait()

    def from_device(distance, nothing):
        def one_chunk(_, nothing):
            sending(0, own, 0).wait_recv()
            return nothing

        return lax.fori_loop(0, num_chunks(incoming[device_at(distance)]), one_chunk, nothing)

    lax.fori_loop(1, devices, from_device, None)


def _chunk_rows(capacity: int, width: int) -> int:
    """Rows of a chunk: about 256 KiB, for which a link's latency no longer matters, and no more than there are."""
    row_bytes = 4 * round_up(width, LANES)
    return min(round_up(capacity, TILE_ROWS), max(TILE_ROWS, 2**18 // row_bytes // TILE_ROWS * TILE_ROWS))


def _as_words(values: jax.Array) -> jax.Array:
    """Rows of 32-bit words: 32-bit numbers as they are, two 16-bit ones in each."""
    if values.dtype.itemsize == 4:
        return values
    even = jnp.pad(values, ((0, 0), (0, values.shape[1] % 2)))
    return lax.bitcast_convert_type(even.reshape(values.shape[0], -1, 2), jnp.uint32)


def _from_words(words: jax.Array, like: jax.Array) -> jax.Array:
    """The rows that `_as_words` made into words, of the width and dtype of `like`."""
    if like.dtype.itemsize == 4:
        return words
    return lax.bitcast_convert_type(words, like.dtype).reshape(words.shape[0], -1)[:, : like.shape[1]]


def _check(values: jax.Array, rows: jax.Array, counts: jax.Array, incoming: jax.Array, axis: str) -> None:
    check_rows("values", values)
    check_vector("counts", counts)
    check_vector("incoming", incoming)
    check_rows("rows", rows)
    if rows.dtype != jnp.int32:
        raise KernelError("rows has the wrong dtype", value=str(rows.dtype), place="rows", remedy="pass int32")
    devices = lax.axis_size(axis)
    if not rows.shape[0] == counts.shape[0] == incoming.shape[0] == devices:
        raise KernelError(
            f"the mesh axis {axis!r} has {devices} devices, and there is not one entry for each",
            place="rows, counts, incoming",
            value=(rows.shape[0], counts.shape[0], incoming.shape[0]),
            remedy="pass the numbers and counts for every device",
        )
