"""Products of values that lie side by side, taken apart."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from splitjax.primitives.walk import equation_at, walk
from splitjax.step.recurrent.rows_apart import find_side_by_side, with_rows_apart

X, H, W = (np.random.default_rng(n).normal(size=shape) for n, shape in enumerate(((4, 3), (4, 5), (8, 6))))


def products_of(jaxpr):
    return {visit.site: 0 for visit in walk(jaxpr) if visit.eqn.primitive.name == "dot_general"}


def apart(function):
    """The step with its products apart, by the names of its primitives, after a comparison of its numbers."""
    jaxpr = jax.make_jaxpr(function)(X, H, W)
    changed = with_rows_apart(jaxpr, products_of(jaxpr))
    for one, other in zip(
        jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, X, H, W),
        jax.core.eval_jaxpr(changed.jaxpr, changed.consts, X, H, W),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    return [visit.eqn.primitive.name for visit in walk(changed)]


def in_a_loop(x, h, w):
    turn = lambda state, _: (jnp.tanh(jnp.concatenate([x, state], -1) @ w)[:, :5], None)
    return jax.lax.scan(turn, h, None, length=2)[0]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, h, w: jnp.concatenate([x, h], -1) @ w,
        lambda x, h, w: jnp.concatenate([x, h], -1).astype(jnp.float16).astype(jnp.float32) @ w,
        lambda x, h, w: jax.jit(jnp.matmul)(jnp.concatenate([x, h], -1), w),
        lambda x, h, w: jax.checkpoint(lambda x, h: jnp.concatenate([x, h], -1) @ w)(x, h),
        in_a_loop,
    ],
    ids=["plain", "in another dtype", "in a call", "computed again", "in a loop"],
)
def test_each_value_meets_its_own_rows(function):
    names = apart(function)
    assert names.count("dot_general") == 2 and "concatenate" not in names


def test_what_is_read_besides_stays():
    names = apart(lambda x, h, w: ((both := jnp.concatenate([x, h], -1)) @ w, both))
    assert names.count("dot_general") == 2 and names.count("concatenate") == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x, h, w: jnp.concatenate([x[:2], x[2:]], 0) @ w[:3],
        lambda x, h, w: jnp.einsum("bi,ij->bj", h, w[:5]),
        lambda x, h, w: jnp.tanh(jnp.concatenate([x, h], -1)) @ w,
    ],
    ids=["along another dim", "not side by side", "changed between"],
)
def test_other_products_are_left_alone(function):
    assert apart(function).count("dot_general") == 1


def test_a_site_that_another_trace_has_not_is_left_alone():
    jaxpr = jax.make_jaxpr(lambda x: jnp.tanh(x))(X)
    assert find_side_by_side(jaxpr, {}) == () and equation_at(jaxpr, (3,)) is None
    assert with_rows_apart(jaxpr, {(0,): 0, (3,): 0}) is jaxpr
