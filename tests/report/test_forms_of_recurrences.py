"""The ways in which a recurrent cell may be written exchange the same, and their plans list what is compiled: one
weight for inputs and state side by side, inputs projected before the loop, a weight that an iteration reads twice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import splitjax
from splitjax.plan import PurposeKind

EXAMPLES, LENGTH, WIDTH, HIDDEN = 16, 3, 24, 32
SPLIT = {"data": 2, "model": 4}
TENSOR = {"data": 2, "tensor": 4}
SHAPES = {
    "wx": (WIDTH, 4 * HIDDEN), "wh": (HIDDEN, 4 * HIDDEN), "w": (WIDTH + HIDDEN, 4 * HIDDEN), "b": (4 * HIDDEN,),
    "plain": (WIDTH + HIDDEN, HIDDEN), "head": (HIDDEN, 8),
}  # fmt: skip


def gated(z, memory):
    i, f, g, o = jnp.split(z, 4, axis=-1)
    memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(memory), memory


def apart(params, x, state):
    return gated(x @ params["wx"] + state[0] @ params["wh"] + params["b"], state[1])


def side_by_side(params, x, state):
    return gated(jnp.concatenate([x, state[0]], -1) @ params["w"] + params["b"], state[1])


def without_gates(params, x, state):
    return jnp.tanh(jnp.concatenate([x, state[0]], -1) @ params["plain"]), state[1]


def projected(params, x, state):
    return gated(x + state[0] @ params["wh"], state[1])


def twice(params, x, state):
    return apart(params, x, apart(params, x, state))


def projection(params, xs):
    return xs @ params["wx"] + params["b"]


def by_time(params, xs):
    return xs


CELLS = {
    apart: ("wx", "wh", "b"),
    side_by_side: ("w", "b"),
    without_gates: ("plain",),
    projected: ("wx", "wh", "b"),
    twice: ("wx", "wh", "b"),
}


def setup(cell):
    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.normal(size=SHAPES[name]) / 4) for name in (*CELLS[cell], "head")}
    x, y = rng.normal(size=(EXAMPLES, LENGTH, WIDTH)), rng.integers(0, 8, EXAMPLES)
    return params, {"x": jnp.asarray(x), "y": jnp.asarray(y)}


def loss_of(cell, remat=False, examples_first=False):
    def loss(params, batch):
        zeros = jnp.zeros((len(batch["x"]), HIDDEN))
        before = projection if cell is projected else by_time
        xs = batch["x"] if examples_first else batch["x"].swapaxes(0, 1)
        xs = before(params, xs).swapaxes(0, 1) if examples_first else before(params, xs)
        turn = lambda state, x: (cell(params, x, state), None)
        (hidden, _), _ = jax.lax.scan(jax.checkpoint(turn) if remat else turn, (zeros, zeros), xs)
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["head"], batch["y"]).mean()

    return loss


def checked(cell, rules, microbatches=None, **how):
    """The plan and report of a step that gives one device's numbers."""
    loss = loss_of(cell, **how)

    def step(params, batch):
        value, grads = splitjax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    mesh = TENSOR if rules == "transformer" else SPLIT
    with jax.enable_x64(True):
        params, batch = setup(cell)
        parallel = splitjax.parallelize(step, mesh=mesh, rules=rules, donate=False, microbatches=microbatches)
        close = lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-10, atol=1e-12)
        jax.tree.map(close, parallel(params, batch), jax.jit(step)(params, batch))
        return parallel.plan(params, batch), parallel.report(params, batch)


def sent(report):
    """What is planned and what is compiled, without scalars."""
    scalars = sum(each.compiled.bytes for each in report.unplanned if each.compiled.shape == ())
    return report.total.predicted_bytes, report.total.compiled_bytes - scalars


def is_exact(report):
    planned, compiled = sent(report)
    return report.missing == () and {each.compiled.shape for each in report.unplanned} <= {()} and planned == compiled


def in_iterations(report):
    """What is sent in every iteration of the loop: operations with their bytes."""
    return sorted((one.compiled.op, one.compiled.bytes) for one in report.collectives if one.compiled.trips == LENGTH)


@pytest.mark.parametrize("rules", ["megatron", "splitbrain", "transformer"])
def test_inputs_and_state_side_by_side_exchange_what_two_weights_do(rules):
    _, expected = checked(apart, rules)
    plan, report = checked(side_by_side, rules)
    assert report.missing == () and sent(report) == sent(expected)
    assert in_iterations(report) == in_iterations(expected)
    assert [each for each in report.unplanned if each.compiled.trips > 1] == []
    assert any(each.purpose.kind == PurposeKind.WHOLE_STATE for each in plan.collectives)


@pytest.mark.parametrize("rules", ["megatron", "splitbrain"])
def test_a_cell_without_gates_is_taken_apart_too(rules):
    _, report = checked(without_gates, rules)
    assert {one.compiled.op for one in report.collectives if one.compiled.trips > 1} <= {
        "all_gather", "all_reduce", "reduce_scatter"
    }  # fmt: skip
    assert [each for each in report.unplanned if each.compiled.trips > 1] == []


@pytest.mark.parametrize("rules", ["megatron", "splitbrain", "transformer"])
def test_inputs_that_are_projected_before_the_loop_exchange_nothing_else_in_it(rules):
    _, report = checked(projected, rules)
    assert is_exact(report)
    assert {op for op, _ in in_iterations(report)} <= {"all_gather", "all_reduce", "reduce_scatter"}


def test_what_is_projected_with_the_examples_first_lies_as_the_loop_wants_it():
    assert is_exact(checked(projected, "splitbrain", examples_first=True)[1])


@pytest.mark.parametrize("microbatches", [None, 2])
def test_a_weight_that_an_iteration_reads_twice_is_dealt_out_once(microbatches):
    plan, report = checked(twice, "splitbrain", microbatches)
    assert is_exact(report)
    dealt = [each for each in plan.collectives if each.purpose.kind == PurposeKind.DEALT_COLUMNS]
    assert {sum(each.purpose.leaf == path for each in dealt) for path in ("wx", "wh", "b")} == {3}


@pytest.mark.parametrize("rules", ["megatron", "splitbrain"])
@pytest.mark.parametrize("microbatches", [None, 2])
def test_a_cell_that_is_computed_again_deals_out_and_gathers_what_is_planned(rules, microbatches):
    _, report = checked(projected, rules, microbatches, remat=True)
    assert is_exact(report)


def test_what_is_side_by_side_under_jax_s_own_gradient_is_noted():
    def step(params, batch):
        value, grads = jax.value_and_grad(loss_of(without_gates))(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    notes = splitjax.parallelize(step, mesh=SPLIT, rules="megatron").plan(*setup(without_gates)).notes
    assert any(
        note.startswith("plain: reads inputs and state side by side, and 4 devices exchange both in each of 3")
        and "splitjax.value_and_grad" in note
        for note in notes
    )


def test_a_weight_that_is_split_by_rows_stays_as_it_is(monkeypatch):
    """Its columns do not divide: parts of its rows lie on several devices."""
    monkeypatch.delattr("splitjax.compile.building.with_rows_taken_apart")

    def step(params, batch):
        def loss(params):
            turn = lambda h, x: (jnp.tanh(jnp.concatenate([x, h], -1) @ params["w"]), None)
            hidden, _ = jax.lax.scan(turn, jnp.zeros((len(batch["x"]), 30)), batch["x"].swapaxes(0, 1))
            return jnp.mean(hidden**2)

        value, grads = splitjax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        params = {"w": jnp.asarray(rng.normal(size=(26 + 30, 30)) / 4)}
        batch = {"x": jnp.asarray(rng.normal(size=(EXAMPLES, LENGTH, 26)))}
        parallel = splitjax.parallelize(step, mesh=SPLIT, rules="splitbrain", donate=False)
        (leaf,) = (leaf for leaf in parallel.plan(params, batch).leaves if leaf.path == "w")
        assert leaf.axes_by_dim[0] == ("model",)
        close = lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-10, atol=1e-12)
        jax.tree.map(close, parallel(params, batch), jax.jit(step)(params, batch))


@pytest.mark.parametrize("cell", [side_by_side, projected])
def test_an_evaluation_sends_what_is_planned(cell):
    loss = loss_of(cell)

    def train(params, batch):
        value, grads = splitjax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    with jax.enable_x64(True):
        params, batch = setup(cell)
        parallel = splitjax.parallelize(train, mesh=SPLIT, rules="megatron", donate=False)
        parallel(params, batch)
        evaluation = parallel.like(loss)
        np.testing.assert_allclose(evaluation(params, batch), loss(params, batch), rtol=1e-10)
        assert is_exact(evaluation.report(params, batch))
