"""What operations make of padded operands: the same numbers as without, whatever stands in the padding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from splitjax import _compat
from splitjax.step.padding.rewriting import padded_step

SIZE, STORED = 5, 8


def both(fn, *arrays, garbage=False):
    """The results of `fn` as it is, and rewritten with the first dim of its first argument padded; with `garbage` the
    first thing that is done to it leaves something there."""
    outer = (lambda x, *rest: fn(jnp.cos(x), *rest)) if garbage else fn
    jaxpr, _ = _compat.trace(outer, *arrays)
    rewritten = padded_step(jaxpr, {0: {0: STORED}}, {})
    widths = [(0, STORED - SIZE)] + [(0, 0)] * (arrays[0].ndim - 1)
    expected = _compat.eval_jaxpr(jaxpr, (), *arrays)
    return expected, _compat.eval_jaxpr(rewritten, (), jnp.pad(arrays[0], widths), *arrays[1:]), rewritten


def assert_same(fn, *arrays, **options):
    for garbage in (False, True):
        expected, found, _ = both(fn, *arrays, garbage=garbage, **options)
        for one, other in zip(found, expected, strict=True):
            assert one.shape == other.shape
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


X = jnp.asarray(np.random.default_rng(0).normal(size=(SIZE, 3)), jnp.float32)
WEIGHT = jnp.asarray(np.random.default_rng(1).normal(size=(SIZE, 3)), jnp.float32)

REDUCTIONS = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(0),
    "prod": lambda x: x.prod(0),
    "max": lambda x: (x - 9).max(0),
    "min": lambda x: (x + 9).min(0),
    "argmax": lambda x: (x - 9).argmax(0),
    "argmin": lambda x: (x + 9).argmin(0),
    "all": lambda x: (x > -9).all(0),
    "any": lambda x: (x > 9).any(0),
    "integers": lambda x: (x - 9).astype(jnp.int32).max(0),
    "norm": lambda x: jnp.sqrt((x * x).sum()),
    "logsumexp": lambda x: jax.nn.logsumexp(x - 300, axis=0),
    "softmax": lambda x: jax.nn.softmax(x, axis=0),
    "variance": lambda x: x.var(0),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_leave_the_padding_out(name):
    assert_same(REDUCTIONS[name], X)


OPERATIONS = {
    "product": lambda x: x @ x.T,
    "contraction": lambda x: x.T @ jnp.log(x * x),
    "with another": lambda x: WEIGHT.T @ x,
    "logarithm": lambda x: jnp.log(x * x).sum(0),
    "quotient": lambda x: (1 / x).sum(0),
    "negative power": lambda x: ((0 * x) * lax.integer_pow(x, -2)).sum(0),
    "transposed": lambda x: x.T[1:].sum(),
    "reshaped": lambda x: x.reshape(1, SIZE, 3, 1)[0, :, :, 0].sum(0),
    "flattened": lambda x: x.reshape(-1).cumsum(),
    "turned round": lambda x: x[::-1],
    "cut": lambda x: x[1:4],
    "cut at the end": lambda x: lax.dynamic_slice(x, (4, 0), (3, 3)),
    "written": lambda x: lax.dynamic_update_slice(x, jnp.ones((3, 3)), (4, 1)).sum(0),
    "joined": lambda x: jnp.concatenate([x, x], 1).sum(0),
    "joined along": lambda x: jnp.concatenate([x, x], 0).sum(0),
    "padded": lambda x: jnp.pad(x, ((0, 0), (1, 1))).sum(0),
    "padded along": lambda x: jnp.pad(x, ((1, 1), (0, 0))).max(0),
    "cumulative": lambda x: x.cumsum(0),
    "cumulative, reversed": lambda x: lax.cumsum(x, reverse=True),
    "largest, reversed": lambda x: lax.cummax(x - 9, reverse=True),
    "sorted": lambda x: jnp.sort(x, 0)[0],
    "sorted along another": lambda x: jnp.sort(x, 1).sum(0),
    "top": lambda x: lax.top_k(x.T, 2)[1],
    "one hot": lambda x: (jax.nn.one_hot(jnp.array([1, 4]), SIZE) @ x).sum(0),
    "counted": lambda x: (x * jnp.arange(SIZE)[:, None]).sum(0),
    "branch": lambda x: lax.cond(x.sum() > 0, lambda: x.max(0), lambda: x.min(0)),
    "loop": lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.cos(c[1])), (0, x))[1].sum(0),
    "scan over it": lambda x: lax.scan(lambda c, row: (c + row.sum(), row.max()), 0.0, x),
    "scan beside it": lambda x: lax.scan(lambda c, k: (c + x * k, (c * c).sum()), x, jnp.arange(3.0)),
    "scan of its columns": lambda x: lax.scan(lambda c, column: (c + column.max(), column * c), 0.0, x.T),
    "rematerialised": lambda x: jax.checkpoint(lambda x: jnp.exp(x).sum(0))(x),
    "own derivative": lambda x: jax.nn.relu(x).sum(0),
    "derivative": lambda x: jax.grad(lambda x: jax.nn.log_softmax(jax.nn.relu(x) @ WEIGHT.T, 0)[0].sum())(x),
    "unknown": lambda x: jnp.linalg.qr(x)[1] ** 2,
    "random": lambda x: (x * jax.random.normal(jax.random.key(0), x.shape)).sum(0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_give_the_numbers_that_they_give_without_padding(name):
    assert_same(OPERATIONS[name], X)


@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
def test_indices_behind_the_end_mean_what_they_mean_without_padding(mode):
    indices = jnp.array([0, 4, 5, 7, 8, 100, -1])
    assert_same(lambda x: x.at[indices].get(mode=mode), X)  # a promise that does not hold is cut as well
    assert_same(lambda x: x.at[indices].add(1.0, mode="drop" if mode == "fill" else mode), X)
    assert_same(lambda x: jax.vmap(lambda k: x.at[k, :2].get(mode=mode))(indices), X)
    assert_same(lambda x: jnp.zeros((SIZE, 3)).at[indices].add(1.0, mode="drop") * x, X)


def test_the_rest_of_the_step_is_padded_with_it():
    """No array is cut, or padded anew, where rules are known."""

    def step(table, bias, ids):
        logits = table[ids] @ table.T + bias
        loss = lambda table, bias: jax.nn.logsumexp(table[ids] @ table.T + bias, axis=-1).sum()
        return jax.grad(loss, (0, 1))(table, bias), jax.nn.one_hot(ids, SIZE) * logits

    arrays = X, X[:, 0], jnp.array([0, 3])
    jaxpr, _ = _compat.trace(step, *arrays)
    text = str(padded_step(jaxpr, {0: {0: STORED}, 1: {0: STORED}}, {0: 0, 1: 1}))
    assert f"f32[{STORED},3]" in text and f"f32[2,{STORED}]" in text
    assert text.count("= pad[") == 0
    assert text.count("= slice[") == 1  # of the second result, which is no state


def test_parts_that_lie_side_by_side_are_padded_whole():
    """Of columns that a reshape takes apart and joins: without cutting the padding off in between."""
    columns = jnp.asarray(np.random.default_rng(2).normal(size=(SIZE * 3, 2)), jnp.float32)

    def step(x):
        parts = x.reshape(SIZE, 3, 2) * jnp.arange(1.0, SIZE + 1)[:, None, None]
        return jax.nn.softmax(parts, 0).reshape(1, SIZE * 3, 2) * 2

    jaxpr, _ = _compat.trace(lambda x: step(x)[0], columns)
    stored = jnp.pad(columns, ((0, 3 * (STORED - SIZE)), (0, 0)))
    rewritten = padded_step(jaxpr, {0: {0: 3 * STORED}}, {0: 0})
    assert "slice[" not in str(rewritten) and "pad[" not in str(rewritten)
    (found,) = _compat.eval_jaxpr(rewritten, (), stored)
    np.testing.assert_allclose(found[: 3 * SIZE], step(columns)[0], rtol=1e-6)
    np.testing.assert_array_equal(found[3 * SIZE :], 0)
    # Padding that ends within a part is cut off.
    (found,) = _compat.eval_jaxpr(padded_step(jaxpr, {0: {0: 16}}, {0: 0}), (), stored[:16])
    np.testing.assert_allclose(found[: 3 * SIZE], step(columns)[0], rtol=1e-6)


def test_what_is_stored_is_zero_behind_the_end():
    jaxpr, _ = _compat.trace(lambda x: jnp.cos(x), X)
    rewritten = padded_step(jaxpr, {0: {0: STORED}}, {0: 0})
    (found,) = _compat.eval_jaxpr(rewritten, (), jnp.pad(X, ((0, STORED - SIZE), (0, 0))))
    np.testing.assert_array_equal(found[SIZE:], 0)
    np.testing.assert_allclose(found[:SIZE], jnp.cos(X), rtol=1e-6)
