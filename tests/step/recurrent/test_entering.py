"""Products before a loop and within it that are added up, with both weights dealt out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from splitjax.primitives.dealt import DEAL
from splitjax.primitives.walk import walk
from splitjax.step.dealing.rewriting import Parts, find_parts, rewritten
from splitjax.step.dealing.values import FusedProduct

LENGTH, WIDTH = 3, 8
SHAPES = ((LENGTH, 4, 6), (6, 2 * WIDTH), (WIDTH, 2 * WIDTH))
VALUES = [np.random.default_rng(n).normal(size=shape) for n, shape in enumerate(SHAPES)]


def cut(z):
    left, right = jnp.split(z, 2, -1)
    return jnp.tanh(left) * right


def looped(xs, wh, wrap=lambda turn: turn):
    turn = wrap(lambda state, x: (cut(x + state @ wh), None))
    return jax.lax.scan(turn, jnp.zeros((4, WIDTH)), xs)[0]


def before(xs, wx, wh):
    return looped(xs @ wx, wh)


def examples_first(xs, wx, wh):
    return looped((xs.swapaxes(0, 1) @ wx).swapaxes(0, 1), wh)


def again(xs, wx, wh):
    return looped(xs @ wx, wh, jax.checkpoint)


def constant(xs, wx, wh):
    """What every iteration reads is projected: no part of the sequence."""
    context = xs[0] @ wx
    return jax.lax.scan(lambda state, _: (cut(context + state @ wh), None), jnp.zeros((4, WIDTH)), None, length=2)[0]


def read_twice(xs, wx, wh):
    turn = lambda state, x: (cut(x + cut(x + state @ wh) @ wh), None)
    return jax.lax.scan(turn, jnp.zeros((4, WIDTH)), xs @ wx)[0]


def products_of(jaxpr):
    sites = [visit.site for visit in walk(jaxpr) if visit.eqn.primitive.name == "dot_general"]
    return [(site, 1, 1, 4) for site in sites]


@pytest.mark.parametrize("function", [before, examples_first, again, constant, read_twice])
def test_both_are_dealt_out_before_the_loop(function):
    jaxpr = jax.make_jaxpr(function)(*VALUES)
    products = products_of(jaxpr)
    assert set(find_parts(jaxpr, products)) == {Parts((8, 8), (8, 8), (None, None))}
    changed = rewritten(jaxpr, [FusedProduct(site, 1, dim, (8, 8), (8, 8), num) for site, _, dim, num in products])
    deals = [visit for visit in walk(changed) if visit.eqn.primitive.name == DEAL]
    assert len(deals) == 2 and {visit.trips for visit in deals} == {1}  # each weight once, outside
    for one, other in zip(
        jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *VALUES),
        jax.core.eval_jaxpr(changed.jaxpr, changed.consts, *VALUES),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    again = products_of(changed)
    assert find_parts(changed, [(site, 1, 1, 4) for site, *_ in again]) == [None] * len(again)  # dealt already


def test_what_a_loop_carries_or_cuts_along_columns_is_no_dealt_value():
    def carried(xs, wx, wh):
        return jax.lax.scan(lambda z, x: (z * 2, None), xs[0] @ wx, xs)[0]

    def along_columns(xs, wx, wh):
        return jax.lax.scan(lambda total, column: (total + column, None), jnp.zeros(4), (xs[0] @ wx).T)[0]

    for function in (carried, along_columns):
        jaxpr = jax.make_jaxpr(function)(*VALUES)
        assert find_parts(jaxpr, products_of(jaxpr)) == [None]
