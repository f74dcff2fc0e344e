"""Bitmaps: kernels against their oracles, the way there and back, and the TPU's own compiler."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitjax.errors import KernelError
from splitjax.kernels import FILLER, bitmap_decode, bitmap_encode, decode, encode, encode_ids, running_sum
from splitjax.kernels.in_memory import behind_loop, in_memory
from splitjax.kernels.running_sum import by_blocks
from tests.kernels.interpreting import interpreting


def presence_of(size, density, seed=0):
    return jnp.asarray(np.random.default_rng(seed).random(size) < density)


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 5000])
def test_bits_lie_as_numpy_packs_them(size):
    presence = presence_of(size, 0.3)
    packed = np.packbits(np.asarray(presence), bitorder="little")
    words = np.pad(packed, (0, -len(packed) % 4)).view("<u4")
    np.testing.assert_array_equal(encode(presence), words)


@pytest.mark.parametrize(
    ("size", "density", "mode"),
    [(1, 1.0, "eager"), (4097, 0.0, "on_wait"), (300_000, 0.02, "on_wait"), (300_000, 0.02, "eager")],
)
def test_tpu_kernels_agree_with_their_oracles(size, density, mode):
    presence = presence_of(size, density)
    words = bitmap_encode.encode_reference(presence)
    with interpreting(mode) as interpret:
        np.testing.assert_array_equal(bitmap_encode.encode_tpu(presence, interpret=interpret), words)
        before, count = bitmap_decode.ranks_tpu(words, interpret=interpret)
    expected = np.cumsum(np.asarray(presence))
    assert count == expected[-1]
    np.testing.assert_array_equal(before, np.append(0, expected[31::32])[: len(words)])


def test_sums_carry_over_blocks():
    words = jnp.full(128 * 600 + 5, 0xFFFFFFFF, jnp.uint32)  # three blocks, every bit set
    with interpreting("on_wait") as interpret:
        before, count = bitmap_decode.ranks_tpu(words, interpret=interpret)
    assert count == 32 * len(words)
    np.testing.assert_array_equal(before, 32 * np.arange(len(words)))


@settings(max_examples=10, deadline=None)
@given(ids=st.sets(st.integers(0, 199)), capacity=st.sampled_from([7, 250]))
def test_there_and_back(ids, capacity):
    padded = np.full(220, FILLER, np.int32)
    padded[: len(ids)] = sorted(ids)
    words = jax.jit(encode_ids, static_argnums=1)(jnp.asarray(padded), 200)
    found, count = jax.jit(decode, static_argnums=1)(words, capacity)
    assert count == len(ids)
    expected = np.full(capacity, FILLER, np.int32)
    expected[: len(ids)] = sorted(ids)[:capacity]
    np.testing.assert_array_equal(found, expected)
    for own, oracle in zip(
        (found, count), jax.jit(bitmap_decode.decode_reference, static_argnums=1)(words, capacity), strict=True
    ):
        np.testing.assert_array_equal(own, oracle)


def test_several_sets_at_a_time():
    rng = np.random.default_rng(0)
    for size in (64, 70):
        ids = rng.integers(-3, size + 3, (3, 20)).astype(np.int32)
        ids[1] = FILLER
        words = encode_ids(jnp.asarray(ids), size)
        found, counts = decode(words, 18, -7)
        for row in range(3):
            expected = [one for one in np.unique(ids[row]) if 0 <= one < size]
            np.testing.assert_array_equal(words[row], encode_ids(jnp.asarray(ids[row]), size))
            assert counts[row] == len(expected)
            np.testing.assert_array_equal(found[row], (expected + [-7] * 18)[:18])
        with interpreting("on_wait") as interpret:
            before, count = bitmap_decode.ranks_tpu(words.reshape(-1), interpret=interpret)
        own = bitmap_decode.of_each_set(before.reshape(words.shape), count)
        for one, oracle in zip(own, bitmap_decode.ranks_reference(words), strict=True):
            np.testing.assert_array_equal(one, oracle)


@pytest.mark.parametrize("shape", [(0,), (5,), (700,), (9000,), (3, 4096), (2, 4500)])
def test_running_sums(shape):
    values = np.random.default_rng(0).integers(-9, 10, shape).astype(np.int32)
    sums = np.cumsum(values, axis=-1)
    np.testing.assert_array_equal(jax.jit(running_sum)(values), sums)
    np.testing.assert_array_equal(jax.jit(functools.partial(running_sum, exclusive=True))(values), sums - values)
    if values.size:
        np.testing.assert_array_equal(jax.jit(by_blocks)(values), sums)


def test_no_slots_and_no_words():
    for words in (jnp.zeros(0, jnp.uint32), jnp.asarray([5, 0], jnp.uint32)):
        found, count = decode(words, 0)
        assert found.shape == (0,) and count == (2 if len(words) else 0)


def test_ids_outside_are_left_out():
    ids = jnp.asarray([-1, 64, FILLER, 3, 3], jnp.int32)
    assert encode_ids(ids, 64).tolist() == [8, 0]
    assert encode_ids(ids, 0).shape == (0,)
    # nor the bits that fill the last word
    assert encode_ids(jnp.asarray([33, 32, 63, 2], jnp.int32), 33).tolist() == [4, 1]
    found, count = decode(jnp.zeros(0, jnp.uint32), 3)
    assert (found.tolist(), count) == ([FILLER] * 3, 0)


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(KernelError, match="wrong dtype"):
        encode(jnp.zeros(4))
    with pytest.raises(KernelError, match="2 dims instead of 1"):
        encode(jnp.zeros((4, 4), bool))
    with pytest.raises(KernelError, match="wrong dtype"):
        decode(jnp.zeros(4, jnp.int32), 4)
    with pytest.raises(KernelError, match="capacity"):
        decode(jnp.zeros(4, jnp.uint32), -1)
    with pytest.raises(KernelError, match="static size"):
        encode_ids(jnp.zeros(4, jnp.int32), -3)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.uint32])
def test_what_is_kept_in_memory_is_the_same_and_is_computed_once(dtype):
    values = np.random.default_rng(0).integers(0, 100, (3, 2000)).astype(dtype)
    values[0, 0] = np.iinfo(dtype).max
    np.testing.assert_array_equal(jax.jit(in_memory)(values), values)
    np.testing.assert_array_equal(jax.jit(behind_loop)(values[:1, :3]), values[:1, :3])
    few = jnp.arange(10)
    assert in_memory(few) is few

    def read_twice(values):
        kept = in_memory(values * 2 + 1)
        return kept[:, ::-1], jnp.cumsum(kept, axis=1)

    if jax.default_backend() == "cpu":  # XLA leaves the loop in its place, which it fuses nothing across
        assert "while(" in jax.jit(read_twice).lower(values).compile().as_text()
