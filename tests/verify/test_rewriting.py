"""A rewritten step computes what the step computes: at its own sizes, in its own precision or in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import splitjax
from splitjax import _compat
from splitjax.verify.rewriting import Rewriter
from splitjax.verify.taps import CotangentTaps, ResultTaps

X = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32)


@jax.custom_vjp
def halved(x):
    return x / 2


halved.defvjp(lambda x: (x / 2, x.sum()), lambda total, cotangent: (0.25 * cotangent + 0 * total,))


@jax.custom_jvp
def cubed(x):
    return x**3


cubed.defjvp(
    lambda primals, tangents: (primals[0] ** 3, 5 * primals[0] ** 2 * tangents[0])
)  # not its derivative, on purpose


def powers(x, w):
    return jax.lax.scan(lambda c, k: (jnp.tanh(c @ w) * k, c.sum()), x, jnp.arange(3, dtype=x.dtype))


def search(x, w):
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[1]


def branch(x, w):
    return jax.lax.cond(x.sum() > 0, lambda y: y @ w, lambda y: y - 1, x)


def lookup(x, w):
    ids = jnp.argsort(x[:, 0]) % 8
    return jnp.take(w, ids, axis=0) + jax.nn.one_hot(ids, 8) + w.at[ids].add(1.0)[:6] + jax.lax.top_k(x, 3)[0].sum()


def noisy(x, w):
    keep = jax.random.bernoulli(jax.random.key(3), 0.5, x.shape)
    return jnp.where(keep, x / 0.5, 0.0) @ w + jax.random.normal(jax.random.key(4), x.shape)


def narrow(x, w):
    return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)


def normalised(x, w):
    return (
        jax.nn.softmax(jax.nn.gelu(x @ w))
        + jax.nn.logsumexp(x, axis=-1, keepdims=True)
        + jnp.var(x, axis=0)
        + jax.nn.relu(x)
    )


def derived(x, w):
    loss = lambda w: (halved(cubed(x @ w)) ** 2).mean() + jax.checkpoint(lambda y: jnp.sin(y @ w).sum())(x)
    value, gradient = splitjax.value_and_grad(loss)(w)
    return value, gradient


FUNCTIONS = [powers, search, branch, lookup, noisy, narrow, normalised, derived]


@pytest.mark.parametrize("fun", FUNCTIONS, ids=lambda fun: fun.__name__)
def test_a_rewritten_function_is_the_function(fun):
    closed, _ = _compat.trace(fun, X, W)
    expected = jax.tree.leaves(jax.jit(fun)(X, W))
    for value, want in zip(jax.jit(lambda *a: Rewriter(None, False).run(closed, a))(X, W), expected, strict=True):
        assert value.dtype == want.dtype
        np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fun", FUNCTIONS, ids=lambda fun: fun.__name__)
def test_in_float64_it_is_the_same_function_with_less_rounding(fun):
    closed, _ = _compat.trace(fun, X, W)
    expected = jax.tree.leaves(jax.jit(fun)(X, W))
    with jax.enable_x64(True):
        values = jax.jit(lambda *a: Rewriter(None, True).run(closed, a))(X.astype(np.float64), W.astype(np.float64))
        if fun is not noisy and fun is not narrow:  # in float64 these draw other numbers, or round on purpose
            exact = jax.tree.leaves(jax.jit(fun)(X.astype(np.float64), W.astype(np.float64)))
            for value, want in zip(values, exact, strict=True):
                # Numbers that the function spells out were rounded to float32 when it was traced.
                np.testing.assert_allclose(value, want, rtol=1e-8, atol=1e-8)
    for value, want in zip(values, expected, strict=True):
        assert value.dtype == np.float64
        np.testing.assert_allclose(
            value,
            np.asarray(want, np.float64),
            rtol=2e-2 if fun is narrow else 1e-4,
            atol=5e-2 if fun is narrow else 1e-4,
        )


def test_taps_show_every_result_and_every_contribution_to_a_cotangent():
    def step(x, w):
        def loss_fn(w):
            hidden = jnp.tanh(x @ w)
            return (hidden * hidden + x @ w).sum()

        return splitjax.value_and_grad(loss_fn)(w)

    closed, _ = _compat.trace(step, X, W)
    results = ResultTaps()
    plain = Rewriter(None, False).run(closed, (X, W), (), results)
    names = [tap.eqn.primitive.name for tap in results.taps]
    assert (
        names.count("dot_general") == 2
        and names[-1] == "splitjax_value_and_grad"
        and results.taps[-1].gradient_of == "w"
    )
    np.testing.assert_allclose(results.values[names.index("tanh")], np.tanh(X @ W), rtol=1e-5)

    recorder = CotangentTaps()
    jax.eval_shape(lambda *a: Rewriter(None, False).run(closed, a, (), recorder), X, W)
    tapped = CotangentTaps(wanted=recorder.noted)
    again = Rewriter(None, False).run(closed, (X, W), (), tapped)
    for value, want in zip(again, plain, strict=True):
        np.testing.assert_allclose(value, want, rtol=1e-6)
    # The weight is read twice: its gradient is the sum of what both products contribute.
    parts = [
        value
        for tap, value in zip(tapped.taps, tapped.values, strict=True)
        if tap.eqn.primitive.name == "dot_general" and tap.operand == 1
    ]
    assert len(parts) == 2
    np.testing.assert_allclose(sum(parts), plain[1], rtol=1e-5)
