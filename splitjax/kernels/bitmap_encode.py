"""Presence of ids as a bitmap: bit `i % 32` of word `i // 32` says whether id `i` is there.

A set of ids out of `size` costs `size / 32` words on the wire, however many there are (the pull of Zen: Wang et al.,
"Zen: Near-Optimal Sparse Tensor Synchronization for Distributed DNN Training", arXiv 2309.13254, section on hash
bitmaps). The order of bits is that of `numpy.packbits(..., bitorder="little")` read as little-endian words.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from splitjax._compat import result_type
from splitjax.errors import KernelError
from splitjax.kernels._common import FILLER, LANES, ceil_div, check_vector, dispatch, pad_rows
from splitjax.kernels._pallas import pl, pltpu

_ROW = 32 * LANES  # entries whose words fill the lanes of a TPU's register
_PART = 1024  # entries whose bytes fill them
_BLOCK_ROWS = 64


def encode(presence: jax.Array) -> jax.Array:
    """Packs booleans into words.

    **Arguments:**

    - `presence`: bool[n].

    Returns uint32[ceil(n / 32)]; bits past n are 0. Raises `KernelError` for another dtype or rank.

    On TPU a kernel; elsewhere XLA's own code, which is one fused reduction (on GPU too: there is nothing left to win).
    """
    check_vector("presence", presence, kinds="b")
    if presence.shape[0] == 0:
        return encode_reference(presence)
    return dispatch(encode_reference, presence, tpu=encode_tpu, gpu=None)


def num_words(size: int) -> int:
    """Words of a bitmap over `size` ids."""
    return ceil_div(size, 32)


def encode_ids(ids: jax.Array, size: int) -> jax.Array:
    """Makes the bitmap of a set of ids, or of each of several sets.

    **Arguments:**

    - `ids`: int32[m] or int32[sets, m], in any order, repeated or not; what lies outside [0, size), such as `FILLER`,
      is left out.
    - `size`: how many ids there can be.

    Returns uint32[ceil(size / 32)], or uint32[sets, ceil(size / 32)]. Raises `KernelError` for another dtype or rank,
    or a `size` that is not an int from 0.
    """
    check_vector("ids", ids, ranks=(1, 2))
    if not isinstance(size, int) or size < 0:
        raise KernelError(
            "the number of possible ids is not a static size", value=size, place="size", remedy="pass an int from 0"
        )
    words = num_words(size)
    if ids.ndim == 1:
        present = jnp.zeros(32 * words, bool).at[_below(ids, size)]
    else:
        sets = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
        present = jnp.zeros((ids.shape[0], 32 * words), bool).at[sets, _below(ids, size)]
    present = present.set(True, mode="drop", wrap_negative_indices=False)
    return encode(present.reshape(-1)).reshape(*ids.shape[:-1], words)


def _below(ids: jax.Array, size: int) -> jax.Array:
    """The ids, those past the end where not even the bits that fill the last word are."""
    return ids if size % 32 == 0 else jnp.where(ids < size, ids, FILLER)


def encode_reference(presence: jax.Array) -> jax.Array:
    """Evaluates `encode` of `presence` in plain JAX."""
    octets = jnp.packbits(pad_rows(presence, 32 * ceil_div(presence.shape[0], 32)), bitorder="little")
    return lax.bitcast_convert_type(octets.reshape(-1, 4), jnp.uint32)


def encode_tpu(presence: jax.Array, *, interpret: Any = False) -> jax.Array:
    """Evaluates `encode` of `presence` as a TPU kernel, for n >= 1.

    A word's 32 entries lie side by side in a register, where adding up is slow. The matrix unit does it: a product with
    powers of two makes a byte of 8 entries (exact: sums below 256 of bfloat16 products). The weights put byte k of word
    w into lane 32 k + w, so that three rotations of the lanes bring a word's bytes together. `interpret`: as of
    `pallas_call`.
    """
    num_entries = presence.shape[0]
    num_rows = ceil_div(num_entries, _ROW)
    entries = pad_rows(presence.astype(jnp.int8), num_rows * _ROW).reshape(num_rows, _ROW)
    block_rows = min(num_rows, _BLOCK_ROWS)
    entry, lane = (lax.broadcasted_iota(jnp.int32, (_PART, LANES), dim) for dim in (0, 1))
    is_own = (entry // 32 == lane % 32) & (entry % 32 // 8 == lane // 32)
    weights = jnp.where(is_own, 1 << (entry % 8), 0).astype(jnp.bfloat16)
    words = pl.pallas_call(
        _kernel,
        out_shape=result_type((num_rows, LANES), jnp.int32, presence),
        grid=(ceil_div(num_rows, block_rows),),
        in_specs=[pl.BlockSpec((block_rows, _ROW), lambda i: (i, 0)), pl.BlockSpec((_PART, LANES), lambda i: (0, 0))],
        out_specs=pl.BlockSpec((block_rows, LANES), lambda i: (i, 0)),
        interpret=interpret,
        name="splitjax_bitmap_encode",
    )(entries, weights)
    return lax.bitcast_convert_type(words, jnp.uint32).reshape(-1)[: ceil_div(num_entries, 32)]


def _kernel(entries, weights, words):
    byte = lax.broadcasted_iota(jnp.int32, words.shape, 1) >> 5  # which byte of a word a lane gets
    packed = jnp.zeros(words.shape, jnp.int32)
    for part in range(_ROW // _PART):
        bits = entries[:, part * _PART : (part + 1) * _PART].astype(jnp.float32).astype(jnp.bfloat16)
        sums = jnp.dot(bits, weights[...], preferred_element_type=jnp.float32).astype(jnp.int32)
        placed = sums << (byte << 3)
        together = placed + sum(pltpu.roll(placed, shift, 1) for shift in (32, 64, 96))
        packed = jnp.where(byte == part, together, packed)
    words[...] = packed
