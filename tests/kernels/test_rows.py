"""Rows gathered and written back: kernels against their oracles, derivatives, and the accelerators' own compilers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitjax.errors import KernelError
from splitjax.kernels import FILLER, gather_rows, scatter_rows
from splitjax.kernels.gather_rows import gather_gpu, gather_reference, gather_tpu
from splitjax.kernels.scatter_rows import scatter_reference, scatter_tpu
from tests.kernels.interpreting import by_mode, interpreting, interpreting_gpu, lowered_for_gpu


def table_of(num_rows, width, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(0).normal(size=(num_rows, width)), dtype)


def numbers(num_rows, count, seed=1, unique=False):
    """Row numbers with fillers of every kind among them."""
    rng = np.random.default_rng(seed)
    found = rng.permutation(num_rows)[:count] if unique else rng.integers(0, num_rows, count)
    found[::5] = rng.choice([-1, num_rows, FILLER, -num_rows], len(found[::5]))
    return jnp.asarray(found, jnp.int32)


@by_mode
@pytest.mark.parametrize(("num_rows", "width", "count"), [(1, 16, 1), (50, 130, 37)])
def test_gather_on_tpu(num_rows, width, count, mode):
    table, rows = table_of(num_rows, width), numbers(num_rows, count)
    with interpreting(mode) as interpret:
        np.testing.assert_array_equal(
            gather_tpu(table, rows, block=8, interpret=interpret), gather_reference(table, rows)
        )


@by_mode
def test_gather_on_tpu_of_full_blocks_and_of_nothing(mode):
    """Blocks without fillers are waited for at once; one of fillers alone is not waited for."""
    table = table_of(40, 128)
    rows = jnp.concatenate([jnp.arange(8), jnp.full(8, FILLER), jnp.arange(8) % 3]).astype(jnp.int32)
    with interpreting(mode) as interpret:
        np.testing.assert_array_equal(
            gather_tpu(table, rows, block=8, interpret=interpret), gather_reference(table, rows)
        )


@by_mode
@pytest.mark.parametrize(("num_rows", "width", "count"), [(1, 16, 1), (70, 40, 30)])
def test_scatter_on_tpu(num_rows, width, count, mode):
    table, rows, values = table_of(num_rows, width), numbers(num_rows, count, unique=True), 1 + table_of(count, width)
    with interpreting(mode) as interpret:
        written = scatter_tpu(table, rows, values, block=8, interpret=interpret)
    np.testing.assert_array_equal(written, scatter_reference(table, rows, values))


@settings(max_examples=10, deadline=None)
@given(rows=st.lists(st.integers(-3, 12), min_size=6, max_size=6, unique=True))
def test_rows_go_there_and_back(rows):
    table, rows = np.asarray(table_of(10, 3)), np.asarray(rows, np.int32)
    expected = np.stack([table[row] if 0 <= row < 10 else np.zeros(3, np.float32) for row in rows])
    found = jax.jit(gather_rows)(table, rows)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(jax.jit(scatter_rows)(table, rows, found), table)
    doubled = table.copy()
    for row in rows:
        if 0 <= row < 10:
            doubled[row] *= 2
    np.testing.assert_array_equal(jax.jit(scatter_rows)(table, rows, 2 * found), doubled)


def test_nothing_to_gather_or_write():
    table, none = table_of(5, 4), jnp.zeros(0, jnp.int32)
    assert gather_rows(table, none).shape == (0, 4)
    assert gather_rows(table_of(0, 4), jnp.asarray([0, -1], jnp.int32)).tolist() == [[0] * 4] * 2
    np.testing.assert_array_equal(scatter_rows(table, none, table[:0]), table)


def test_derivatives():
    table, rows = table_of(6, 4), jnp.asarray([3, 3, -1, 0, 99], jnp.int32)
    weights = table_of(5, 4) + 1
    grad = jax.grad(lambda t: (gather_rows(t, rows) * weights).sum())(table)
    expected = jax.grad(lambda t: (gather_reference(t, rows) * weights).sum())(table)
    np.testing.assert_allclose(grad, expected, rtol=1e-6)
    unique, values = jnp.asarray([3, -1, 0, 99, 5], jnp.int32), table_of(5, 4) - 2
    cost = lambda write: lambda t, v: (write(t, unique, v) ** 2).sum()
    both = (jax.grad(cost(write), (0, 1))(table, values) for write in (scatter_rows, scatter_reference))
    for own, oracle in zip(*both, strict=True):
        np.testing.assert_allclose(own, oracle, rtol=1e-6)


def test_what_does_not_fit_is_refused():
    table = table_of(4, 8)
    with pytest.raises(KernelError, match="wrong dtype"):
        gather_rows(table, jnp.zeros(3))
    with pytest.raises(KernelError, match="1 dims instead of 2"):
        gather_rows(table[0], jnp.zeros(3, jnp.int32))
    with pytest.raises(KernelError, match="values do not fit 3 rows"):
        scatter_rows(table, jnp.zeros(3, jnp.int32), table)


def test_gather_of_the_gpu_kernel():
    """Bulk copies and their barrier in the interpreter; blocks, fillers among them."""
    table, rows = table_of(50, 1024), numbers(50, 19)
    with interpreting_gpu() as interpret:
        np.testing.assert_array_equal(gather_gpu(table, rows, interpret=interpret), gather_reference(table, rows))


@pytest.mark.parametrize(("width", "dtype"), [(32, jnp.float32), (768, jnp.float32), (1024, jnp.bfloat16)])
def test_gpu_programs_contain_the_gather(width, dtype):
    text = lowered_for_gpu(gather_rows, ((500, width), dtype), ((100,), jnp.int32))
    assert "mosaic_gpu" in text
    assert "mosaic_gpu" not in lowered_for_gpu(gather_rows, ((500, width - 1), dtype), ((100,), jnp.int32))


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "dtype"), [(32, jnp.float32), (768, jnp.float32), (1024, jnp.bfloat16)])
def test_gather_on_gpu(width, dtype):
    table, rows = table_of(3000, width, dtype), numbers(3000, 5001)
    np.testing.assert_array_equal(jax.jit(gather_gpu)(table, rows), gather_reference(table, rows))
