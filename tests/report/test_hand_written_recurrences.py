"""Recurrent layers that are written by hand, with `lax.scan`: their plans list what is compiled, byte for byte."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import splitjax

EXAMPLES, LENGTH, WIDTH = 16, 5, 32
DATA, WORKERS = {"data": 2, "model": 2}, {"data": 4}


def normalised(z):
    return (z - z.mean(-1, keepdims=True)) * jax.lax.rsqrt(z.var(-1, keepdims=True) + 1e-5)


def simple(params, x, state):
    hidden, memory = state
    return jnp.tanh(x @ params["wx"] + hidden @ params["wh"] + params["b"]), memory


def layer_norm(params, x, state):
    hidden, memory = state
    return jnp.tanh(params["b"] * normalised(x @ params["wx"] + hidden @ params["wh"])), memory


def fused_lstm(params, x, state):
    hidden, memory = state
    i, f, g, o = jnp.split(x @ params["wx"] + hidden @ params["wh"] + params["b"], 4, axis=-1)
    memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(memory), memory


def setup(cell):
    gates, rng = 4 if cell is fused_lstm else 1, np.random.default_rng(0)
    shapes = {"wx": (WIDTH, gates * WIDTH), "wh": (WIDTH, gates * WIDTH), "b": (gates * WIDTH,), "head": (WIDTH, 8)}
    params = {name: jnp.asarray(rng.normal(size=shape) / 4) for name, shape in shapes.items()}
    batch = {
        "x": jnp.asarray(rng.normal(size=(EXAMPLES, LENGTH, WIDTH))), "y": jnp.asarray(rng.integers(0, 8, EXAMPLES))
    }  # fmt: skip
    return params, batch


def stepping(cell, value_and_grad, num_examples=None):
    """A training step. `num_examples`: the batch size, where it is written into the step."""

    def loss(params, batch):
        zeros = jnp.zeros((num_examples or len(batch["x"]), WIDTH))
        turn = lambda state, x: (cell(params, x, state), None)
        (hidden, _), _ = jax.lax.scan(turn, (zeros, zeros), batch["x"].swapaxes(0, 1))
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["head"], batch["y"]).mean()

    def step(params, batch):
        value, grads = value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def checked(step, cell, rules, mesh, more=None):
    """The plan and report of a step that gives one device's numbers. `more`: further parameters."""
    with jax.enable_x64(True):
        params, batch = setup(cell)
        params |= {name: jnp.asarray(np.asarray(value), params["head"].dtype) for name, value in (more or {}).items()}
        parallel = splitjax.parallelize(step, mesh=mesh, rules=rules, donate=False)
        expected = jax.jit(step)(params, batch)
        found = parallel(params, batch)
        for one, two in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            np.testing.assert_allclose(np.asarray(two), np.asarray(one), rtol=1e-10, atol=1e-12)
        return parallel.plan(params, batch), parallel.report(params, batch)


def scalars(report):
    return sum(each.compiled.bytes for each in report.unplanned if each.compiled.shape == ())


@pytest.mark.parametrize("rules", ["data_parallel", "fsdp"])
@pytest.mark.parametrize("value_and_grad", [jax.value_and_grad, splitjax.value_and_grad])
def test_gradients_that_a_loop_sums_in_every_iteration_are_counted_so_often(rules, value_and_grad):
    """JAX's own gradient, or a batch size that is written into the step."""
    plan, report = checked(stepping(simple, value_and_grad, EXAMPLES), simple, rules, WORKERS)
    assert report.total.compiled_bytes - scalars(report) == report.total.predicted_bytes
    (recurrent,) = {each.bytes for each in plan.collectives if each.purpose.leaf == "wh" and each.op == "all_reduce"}
    assert recurrent == LENGTH * 2 * 3 / 4 * 8 * WIDTH * WIDTH


@pytest.mark.parametrize("rules", ["data_parallel", "fsdp"])
@pytest.mark.parametrize("cell", [simple, layer_norm])
def test_gradients_are_exchanged_once_behind_a_loop(rules, cell):
    """`jnp.var` writes a NaN into the loop, which is the same in a loop over fewer examples."""
    plan, report = checked(stepping(cell, splitjax.value_and_grad), cell, rules, WORKERS)
    assert report.missing == () and [one for one in report.unplanned if one.compiled.shape] == []
    assert report.total.compiled_bytes - scalars(report) == report.total.predicted_bytes
    assert sum(each.bytes for each in plan.collectives) < LENGTH * 2 * 3 / 4 * 8 * WIDTH * WIDTH


@pytest.mark.parametrize("rules, mesh", [("splitbrain", DATA), ("transformer", {"data": 2, "fsdp": 2, "tensor": 2})])
def test_gates_in_one_weight_are_dealt_out_once_before_the_loop(rules, mesh):
    plan, report = checked(stepping(fused_lstm, splitjax.value_and_grad), fused_lstm, rules, mesh)
    assert report.missing == ()
    dealt = [one for one in report.collectives if one.compiled.op == "collective_permute"]
    assert dealt and {one.compiled.trips for one in dealt} == {1}


def test_sums_in_every_iteration_are_noted_with_what_makes_them_one():
    params, batch = setup(simple)
    planned = lambda step, mesh=WORKERS: splitjax.parallelize(step, mesh=mesh, rules="data_parallel").plan(
        params, batch
    )
    (note,) = planned(stepping(simple, jax.value_and_grad)).notes
    assert note.startswith(
        "wh: gradients of its recurrence (wx, wh, b) are summed over data=4 in each of 5 iterations;"
    )
    assert "take the gradient by splitjax.value_and_grad" in note
    assert planned(stepping(simple, splitjax.value_and_grad)).notes == ()
    assert planned(stepping(simple, jax.value_and_grad), {"data": 1}).notes == ()  # one device sums nothing
    (boundary,) = planned(stepping(simple, splitjax.value_and_grad, EXAMPLES)).boundaries
    assert "cannot be traced with 4 examples" in boundary.why
    assert boundary.why.endswith(
        '; write sizes from the batch\'s shape, such as batch["x"].shape[0], instead of a number'
    )


@pytest.mark.parametrize("rules, mesh", [("megatron", DATA), ("transformer", {"data": 2, "fsdp": 2, "tensor": 2})])
def test_a_weight_is_dealt_out_before_the_outermost_of_loops_that_read_it(rules, mesh):
    """The sequence goes in chunks; beside the loops another fused weight is dealt out, in another body."""

    def loss(params, batch):
        left, right = jnp.split(jnp.tanh(batch["x"] @ params["gates"]), 2, axis=-1)
        turn = lambda state, x: (fused_lstm(params, x, state), None)
        chunk = lambda state, xs: (jax.lax.scan(turn, state, xs)[0], None)
        zeros = jnp.zeros((len(batch["x"]), WIDTH))
        xs = (left * right).swapaxes(0, 1)[:4].reshape(2, 2, -1, WIDTH)
        (hidden, _), _ = jax.lax.scan(chunk, (zeros, zeros), xs)
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["head"], batch["y"]).mean()

    def step(params, batch):
        value, grads = splitjax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    more = {"gates": jnp.asarray(np.random.default_rng(1).normal(size=(WIDTH, 2 * WIDTH)) / 4)}
    _, report = checked(step, fused_lstm, rules, mesh, more)
    dealt = [one for one in report.collectives if one.compiled.op == "collective_permute"]
    assert dealt and {one.compiled.trips for one in dealt} == {1}
