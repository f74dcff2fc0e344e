"""The line that keeps a call whole works as it is pasted, and names the user's function."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import splitjax
from splitjax.errors import UnknownPrimitiveError

MESH = {"data": 4}


def cholesky(x):
    """The factor of each matrix of x [n, m, m], by LAPACK, and whether there is one."""
    layout = (0, 2, 1)  # major dims first: columns are contiguous
    return jax.ffi.ffi_call(
        "lapack_spotrf_ffi",
        (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:1], jnp.int32)),
        input_layouts=[layout],
        output_layouts=[layout, (0,)],
        input_output_aliases={0: 0},
    )(x, uplo=np.uint8(ord("L")))


def train(factor):
    def step(params, batch):
        def loss_fn(p):
            squares = jnp.einsum("nij,nkj->nik", batch, batch) + jnp.eye(4)
            lower, failed = factor(squares)
            return (jnp.tril(lower).reshape(-1, 16) @ p).mean() + failed.sum()

        loss, gradient = splitjax.value_and_grad(loss_fn)(params)
        return params - 0.1 * gradient, loss

    return step


def refusal(step, *arguments):
    with pytest.raises(UnknownPrimitiveError) as caught:
        splitjax.parallelize(step, mesh=MESH, rules="data_parallel").plan(*arguments)
    return caught.value


def test_a_foreign_call_is_refused_with_the_line_to_paste():
    jnp.linalg.cholesky(jnp.eye(2))  # has JAX load LAPACK
    arguments = np.ones((16, 2), "f"), np.random.default_rng(0).normal(size=(8, 4, 4)).astype("f")
    error = refusal(train(cholesky), *arguments)
    assert error.value == "ffi_call:lapack_spotrf_ffi" and "(cholesky)" in error.place
    assert 'cholesky = splitjax.kernel(cholesky, dims="b a c -> b a c, b")' in error.remedy
    assert "for float32[8,4,4] -> float32[8,4,4], int32[8]" in error.remedy
    (dims,) = re.findall('dims="(.*?)"', error.remedy)
    kept = train(splitjax.kernel(cholesky, dims=dims))  # as pasted
    pasted = splitjax.parallelize(kept, mesh=MESH, rules="data_parallel", donate=False)
    assert any("b over data" in note for note in pasted.plan(*arguments).notes)
    for a, b in zip(pasted(*arguments), jax.jit(train(cholesky))(*arguments), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def _double(x_ref, out_ref):
    out_ref[...] = 2 * x_ref[...]


def doubled(x):
    return pl.pallas_call(_double, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


nameless = lambda x: pl.pallas_call(_double, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


@pytest.mark.parametrize(("double", "name"), [(doubled, "doubled"), (nameless, "kernel")])
def test_the_line_names_the_function_that_makes_the_call(double, name):
    def step(params, batch):
        return params, (double(batch) @ params).mean()

    error = refusal(step, np.ones((16, 2), "f"), np.ones((8, 16), "f"))
    assert f'{name} = splitjax.kernel({name}, dims="b a -> b a", whole="a")' in error.remedy
