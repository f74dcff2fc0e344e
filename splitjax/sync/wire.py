"""Messages between workers: several arrays as one array of bytes, and the patterns that move them, by size on CPU.

One message instead of several saves latency and processor time, on gloo some tenths of a millisecond each. Call inside
`shard_map`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from splitjax import kernels
from splitjax.errors import SyncError
from splitjax.sync.costs.messages import (
    MOST_AT_ONCE,
    PATTERNS,
    doubles,
    exchange_messages,
    gather_messages,
    shift_messages,
    swapped_parts,
)
from splitjax.sync.local import as_matrix, take_rows

Axis = str | tuple[str, ...]
# What schemes of other packages ask for the messages of their formulas, beside the messages themselves.
__all__ = [
    "PATTERNS",
    "Axis",
    "exchange",
    "exchange_messages",
    "gather",
    "gather_messages",
    "gather_by_doubling",
    "pack",
    "permute",
    "push_rows",
    "shift_messages",
    "unpack",
]


def pack(arrays: Sequence[Array], num_lead: int) -> Array:
    """Packs `arrays` with the same `num_lead` leading dims into one u8[*lead, bytes]; a single one keeps its shape."""
    if len(arrays) == 1:
        # Short floats as integers: XLA's CPU backend widens them to 32 bits on the wire.
        is_short = jnp.issubdtype(arrays[0].dtype, jnp.floating) and arrays[0].dtype.itemsize == 2
        return lax.bitcast_convert_type(arrays[0], jnp.uint16) if is_short else arrays[0]
    lead = arrays[0].shape[:num_lead]
    return jnp.concatenate([_as_bytes(array).reshape(*lead, _num_bytes(array, num_lead)) for array in arrays], axis=-1)


def unpack(message: Array, like: Sequence[Array], num_lead: int) -> list[Array]:
    """Unpacks a `message` that `pack` made, with the trailing shapes and dtypes of `like`, and the message's own
    first `num_lead` dims."""
    if len(like) == 1:
        return [lax.bitcast_convert_type(message, like[0].dtype)]
    lead, start, out = message.shape[:num_lead], 0, []
    for array in like:
        size = _num_bytes(array, num_lead)
        part = lax.slice_in_dim(message, start, start + size, axis=num_lead)
        start += size
        out.append(_from_bytes(part.reshape(*lead, *array.shape[num_lead:], array.dtype.itemsize), array.dtype))
    return out


def exchange(blocks: Sequence[Array], axis: Axis, pattern: str) -> tuple[list[Array], Array]:
    """Sends `block[o]` of each of `blocks` (all [n, ...]) to worker o, from every worker along `axis`.

    `pattern` is one of `PATTERNS` but "kernel"; raises `SyncError` for another.

    **Returns:** arrays [n, ...] of what came in, and the worker that each of the n entries came from (own one
    included).
    """
    n = lax.axis_size(axis)
    if pattern not in PATTERNS or pattern == "kernel":
        raise SyncError(
            "no way to move messages",
            value=pattern,
            place="pattern",
            remedy="one of auto, ppermute, all_to_all"
            + ("; the kernel moves the rows of row_exchange" if pattern == "kernel" else ""),
        )
    if n == 1:
        return list(blocks), jnp.zeros((1,), jnp.int32)
    message = pack(blocks, 1)
    at_once, in_rounds = (
        functools.partial(_exchange_at_once, axis=axis),
        functools.partial(_exchange_in_rounds, axis=axis),
    )
    if pattern == "auto":
        on_cpu = at_once if _num_bytes(message, 1) <= MOST_AT_ONCE else in_rounds
        received, sources = kernels.dispatch(on_cpu, message, tpu=at_once, gpu=at_once)
    else:
        received, sources = (at_once if pattern == "all_to_all" else in_rounds)(message)
    return unpack(received, blocks, 1), sources


def _exchange_at_once(message: Array, *, axis: Axis) -> tuple[Array, Array]:
    return lax.all_to_all(message, axis, 0, 0), jnp.arange(message.shape[0], dtype=jnp.int32)


def _exchange_in_rounds(message: Array, *, axis: Axis) -> tuple[Array, Array]:
    n, me = message.shape[0], lax.axis_index(axis)
    received = [lax.dynamic_index_in_dim(message, me, keepdims=False)]
    for shift in range(1, n):
        block = lax.dynamic_index_in_dim(message, (me + shift) % n, keepdims=False)
        received.append(_permuted(block, axis, [(i, (i + shift) % n) for i in range(n)]))
    return jnp.stack(received), (me - jnp.arange(n, dtype=jnp.int32)) % n


def push_rows(
    values: Array, order: Array, counts: Array, incoming: Array, axis: Axis, pattern: str
) -> tuple[Array, Array]:
    """Sends rows of every worker to every worker o.

    **Arguments:**

    - `values`: f[m, *row]. `order`: i32[n, room], which of them go to worker o (m: none).
    - `counts`: i32[n], how many of them there are; `incoming`: i32[n], the same of each worker for this one. Both
      may exceed the room.
    - `axis`: the mesh axis or axes of the workers. `pattern`: one of `PATTERNS`.

    **Returns:** f[n, room, *row] of what came in, zeros where there was none, and the worker that each of the n
    entries came from.

    The kernel sends `counts` rows, rounded up to its chunks, the messages as many as there is room. It needs a
    single mesh axis. "auto" takes it on TPU for rows of a multiple of 128 32-bit words: a TPU pads others to
    that, on the wire too.
    """

    def by_messages(values: Array, order: Array, counts: Array, incoming: Array) -> tuple[Array, Array]:
        (blocks,), sources = exchange([take_rows(values, order)], axis, pattern)
        return blocks, sources

    def by_kernel(values: Array, order: Array, counts: Array, incoming: Array) -> tuple[Array, Array]:
        received = kernels.exchange_rows(as_matrix(values), order, counts, incoming, names[0])
        return received.reshape(*order.shape, *values.shape[1:]), jnp.arange(order.shape[0], dtype=jnp.int32)

    names = (axis,) if isinstance(axis, str) else axis
    operands = values, order, counts, incoming
    if pattern == "kernel":
        if len(names) > 1:
            raise SyncError(
                "the kernel sends along one mesh axis",
                value=axis,
                place="pattern",
                remedy="pattern='auto', or one axis",
            )
        return by_kernel(*operands)
    row_bytes = math.prod(values.shape[1:]) * values.dtype.itemsize
    pays = len(names) == 1 and values.dtype.itemsize in (2, 4) and row_bytes and row_bytes % 512 == 0
    return kernels.dispatch(by_messages, *operands, tpu=by_kernel if pattern == "auto" and pays else None, gpu=None)


def gather(parts: Sequence[Array], axis: Axis) -> list[Array]:
    """Gathers every worker's `parts` on all workers of `axis`: [...] -> [n, ...].

    Short ones on CPU in rounds that double (Bruck et al. 1997, "Efficient algorithms for all-to-all
    communications in multiport message-passing systems"): as many bytes as a ring sends, in log n messages
    instead of n - 1.
    """
    n = lax.axis_size(axis)
    if n == 1:
        return [part[None] for part in parts]
    message = pack(parts, 0)
    at_once = lambda message: lax.all_gather(message, axis)
    doubling = functools.partial(gather_by_doubling, axis=axis)
    received = (
        kernels.dispatch(doubling, message, tpu=at_once, gpu=at_once)
        if doubles(n, _num_bytes(message, 0))
        else at_once(message)
    )
    return unpack(received, [part[None] for part in parts], 1)


def gather_by_doubling(message: Array, *, axis: Axis) -> Array:
    """Gathers one `message` of every worker of `axis` in rounds that double: [...] -> [n, ...]."""
    n, known = lax.axis_size(axis), message[None]  # of this worker, the next one, and so on
    while known.shape[0] < n:
        distance = known.shape[0]
        sent = known[: min(distance, n - distance)]
        known = jnp.concatenate([known, lax.ppermute(sent, axis, [(i, (i - distance) % n) for i in range(n)])])
    return jnp.roll(known, lax.axis_index(axis), axis=0)


def permute(parts: Sequence[Array], axis: Axis, pairs: Sequence[tuple[int, int]]) -> list[Array]:
    """Sends `parts` as `pairs` (from, to) of workers along `axis` say; returns what came in, zeros where no pair
    names this worker."""
    lead = [part[None] for part in parts]
    return [part[0] for part in unpack(_permuted(pack(lead, 1), axis, pairs), lead, 1)]


def _permuted(message: Array, axis: Axis, pairs: Sequence[tuple[int, int]]) -> Array:
    """`lax.ppermute`; on CPU in parts where it is large and workers swap."""
    whole = lambda message: lax.ppermute(message, axis, pairs)
    num_parts = swapped_parts(_num_bytes(message, 0))
    if num_parts < 2 or not any((to, start) in pairs for start, to in pairs if start != to):
        return whole(message)

    def in_parts(message: Array) -> Array:
        parts = jnp.array_split(message.reshape(-1), num_parts)
        return jnp.concatenate([whole(part) for part in parts]).reshape(message.shape)

    return kernels.dispatch(in_parts, message, tpu=whole, gpu=whole)


def _num_bytes(array: Array, num_lead: int) -> int:
    return math.prod(array.shape[num_lead:]) * array.dtype.itemsize


def _as_bytes(array: Array) -> Array:
    return array if array.dtype == jnp.uint8 else lax.bitcast_convert_type(array, jnp.uint8)


def _from_bytes(data: Array, dtype: jnp.dtype) -> Array:
    return (
        data[..., 0]
        if dtype == jnp.uint8
        else lax.bitcast_convert_type(data if dtype.itemsize > 1 else data[..., 0], dtype)
    )
