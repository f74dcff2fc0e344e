"""Sums of rows of equal ids: kernels against the oracle, the oracle against numpy, and the accelerators' own
compilers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitjax.errors import KernelError
from splitjax.kernels import FILLER, segment_sum
from splitjax.kernels.segment_sum import _gpu_codes, ranks_of, sums_gpu, sums_reference, sums_tpu
from tests.kernels.interpreting import (
    MODES,
    TOPOLOGIES,
    compiled_for_tpu,
    interpreting,
    interpreting_gpu,
    lowered_for_gpu,
)


def rows_of(num_rows, num_ids, num_fillers, width, dtype=jnp.float32):
    rng = np.random.default_rng(num_rows)
    ids = np.sort(rng.integers(0, num_ids, num_rows))
    ids[num_rows - num_fillers :] = FILLER
    return jnp.asarray(ids, jnp.int32), jnp.asarray(rng.normal(size=(num_rows, width)), dtype)


@pytest.mark.parametrize(
    ("num_rows", "num_ids", "num_fillers", "width", "dtype", "capacity", "mode"),
    [
        (1, 5, 0, 16, jnp.float32, 1, "on_wait"),
        *[(70, 30, 7, 130, jnp.float32, 70, mode) for mode in MODES],  # neither blocks nor lanes come out even
        (64, 1, 0, 128, jnp.bfloat16, 64, "eager"),  # one id over all blocks
        (60, 50, 9, 24, jnp.float32, 11, "on_wait"),  # more ids than slots
        (40, 9, 40, 8, jnp.float32, 40, "on_wait"),  # fillers alone
    ],
)
def test_tpu_kernel(num_rows, num_ids, num_fillers, width, dtype, capacity, mode):
    ids, values = rows_of(num_rows, num_ids, num_fillers, width, dtype)
    _, ranks, count = ranks_of(ids, capacity)
    with interpreting(mode) as interpret:
        sums = sums_tpu(values, ranks, capacity=capacity, block=16, interpret=interpret)
    found = min(int(count), capacity)
    np.testing.assert_allclose(
        sums[:found], sums_reference(values, ranks, capacity=capacity)[:found], rtol=1e-5, atol=1e-5
    )


def test_what_is_not_finite_stays_in_its_row_on_tpu():
    ids, values = rows_of(40, 20, 4, 16)
    values = values.at[3, 5].set(jnp.inf).at[20, 0].set(jnp.nan).at[39].set(jnp.nan)  # the last is a filler
    _, ranks, count = ranks_of(ids, 40)
    with interpreting("on_wait") as interpret:
        sums = sums_tpu(values, ranks, capacity=40, block=16, interpret=interpret)[: int(count)]
    expected = sums_reference(values, ranks, capacity=40)[: int(count)]
    assert np.isfinite(expected).sum() == expected.size - 2
    np.testing.assert_allclose(sums, expected, rtol=1e-5)


@settings(max_examples=10, deadline=None)
@given(
    ids=st.lists(st.integers(0, 9), min_size=12, max_size=12),
    num_fillers=st.integers(0, 12),
    capacity=st.sampled_from([3, 12]),
)
def test_sums_are_those_of_numpy(ids, num_fillers, capacity):
    ids = np.sort(np.asarray(ids, np.int32))
    ids[12 - num_fillers :] = FILLER
    values = np.random.default_rng(1).normal(size=(12, 5)).astype(np.float32)
    values[12 - num_fillers :] = np.nan
    found = jax.jit(segment_sum, static_argnums=2)(ids, values, capacity)
    unique = [one for one in np.unique(ids) if one != FILLER]
    expected = np.zeros((capacity, 5), np.float32)
    for slot, one in enumerate(unique[:capacity]):
        expected[slot] = values[ids == one].sum(0)
    assert found.num_ids == len(unique)
    np.testing.assert_array_equal(found.ids, (unique + [FILLER] * capacity)[:capacity])
    np.testing.assert_allclose(found.sums, expected, rtol=1e-5, atol=1e-6)


def test_bfloat16_rows_are_added_up_in_float32():
    ids, values = jnp.zeros(300, jnp.int32), jnp.ones((300, 4), jnp.bfloat16)  # 256 + 1 = 256 in bfloat16
    found = segment_sum(ids, values, 1)
    assert found.sums.dtype == jnp.bfloat16 and (found.sums == 300).all()


def test_nothing_to_add_up():
    found = segment_sum(jnp.zeros(0, jnp.int32), jnp.zeros((0, 4)), 3)
    assert (found.ids.tolist(), found.sums.tolist(), found.num_ids) == ([FILLER] * 3, [[0] * 4] * 3, 0)
    assert segment_sum(jnp.zeros(0, jnp.int32), jnp.zeros((0, 4))).sums.shape == (0, 4)
    assert segment_sum(jnp.zeros(2, jnp.int32), jnp.zeros((2, 4)), 0).num_ids == 1
    assert not jax.grad(lambda v: segment_sum(jnp.zeros(2, jnp.int32), v, 0).sums.sum())(jnp.zeros((2, 4))).any()


def test_derivative():
    ids, values = rows_of(20, 6, 3, 4)
    weights = jnp.arange(80.0).reshape(20, 4)
    grad = jax.grad(lambda v: (segment_sum(ids, v).sums * weights).sum())(values)
    _, ranks, _ = ranks_of(ids, 20)
    np.testing.assert_allclose(
        grad, jax.grad(lambda v: (sums_reference(v, ranks, capacity=20) * weights).sum())(values)
    )


def test_what_does_not_fit_is_refused():
    with pytest.raises(KernelError, match="one row for each id"):
        segment_sum(jnp.zeros(3, jnp.int32), jnp.zeros((4, 2)))
    with pytest.raises(KernelError, match="wrong dtype"):
        segment_sum(jnp.zeros(3, jnp.int32), jnp.zeros((3, 2), jnp.int32))
    with pytest.raises(KernelError, match="capacity"):
        segment_sum(jnp.zeros(3, jnp.int32), jnp.zeros((3, 2)), 2.0)


def walk(codes, values, capacity, num_parts):
    """What a GPU program does with the codes of its rows, in numpy; what it does not write stays NaN."""
    sums, parts = np.full((capacity, values.shape[1]), np.nan), np.full((num_parts, values.shape[1]), np.nan)
    for block_codes, rows in zip(np.asarray(codes), values.reshape(*codes.shape, -1), strict=True):
        total = np.zeros(values.shape[1])
        for code, row in zip(block_codes, rows, strict=True):
            target, total = code >> 1, total + row if code & 1 else total
            if target >= 0:
                sums[target] = total
            elif target <= -3:
                parts[-3 - target] = total
            total = total if target == -2 else np.zeros(values.shape[1])
    return sums, parts


@pytest.mark.parametrize(
    "ranks", [[0] * 32, [0, 1, 1, 1] + [2] * 16 + [3] * 4 + [4, 5, 5, -1] + [-1] * 4, [-1] * 32, list(range(32))]
)
def test_rounds_of_the_gpu_kernel(ranks):
    """Every rank's rows arrive once: as a sum, or as parts that are written and bear its number."""
    values = np.random.default_rng(0).normal(size=(32, 3))
    codes, part_ranks = jax.jit(_gpu_codes, static_argnums=1)(jnp.asarray(ranks, jnp.int32).reshape(4, 8), 5)
    sums, parts = walk(codes, values, 5, 8)
    part_ranks = np.asarray(part_ranks)
    assert not np.isnan(parts[part_ranks >= 0]).any()
    for rank in set(ranks) - {-1}:
        expected = values[np.asarray(ranks) == rank].sum(0)
        if (part_ranks == rank).any():
            np.testing.assert_allclose(parts[part_ranks == rank].sum(0), expected)
        elif rank < 5:
            np.testing.assert_allclose(sums[rank], expected)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the interpreter of this JAX does not know layouts")
def test_gpu_kernel_in_the_interpreter():
    ids, values = rows_of(150, 4, 20, 640)  # three blocks: two rounds
    _, ranks, count = ranks_of(ids, 150)
    with interpreting_gpu() as interpret:
        sums = sums_gpu(values, ranks, count, capacity=150, interpret=interpret)
    assert not np.asarray(sums[int(count) :]).any()
    np.testing.assert_allclose(sums, sums_reference(values, ranks, capacity=150), rtol=1e-5, atol=1e-5)


@pytest.mark.tpu_aot
def test_tpu_programs_contain_the_kernel():
    """At the widest, where vector memory is scarce."""
    text = compiled_for_tpu(segment_sum, ((3000,), jnp.int32), ((3000, 1024), jnp.float32), topology=TOPOLOGIES[0])
    assert "splitjax_segment_sum" in text


def test_gpu_programs_contain_the_kernel():
    text = lowered_for_gpu(segment_sum, ((5000,), jnp.int32), ((5000, 384), jnp.bfloat16))
    assert text.count("mosaic_gpu_v2") == 3  # rounds: 5000 rows, 158 parts, 6 parts
    assert "mosaic_gpu" not in lowered_for_gpu(segment_sum, ((5000,), jnp.int32), ((5000, 100), jnp.float32))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_rows", "num_ids", "width", "dtype"),
    [(50, 20, 128, jnp.float32), (20_000, 3, 640, jnp.float32), (20_000, 9000, 384, jnp.bfloat16)],
)
def test_gpu_kernel(num_rows, num_ids, width, dtype):
    ids, values = rows_of(num_rows, num_ids, num_rows // 7, width, dtype)
    _, ranks, count = ranks_of(ids, num_rows)
    sums = jax.jit(functools.partial(sums_gpu, capacity=num_rows))(values, ranks, count)
    np.testing.assert_allclose(sums, sums_reference(values, ranks, capacity=num_rows), rtol=1e-4, atol=1e-3)
