"""What is small and sent beside products: the sums of batch normalisation, planned where they are compiled, and
gradients that XLA is kept from cutting."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import splitjax
from splitjax.models import build, make_step
from splitjax.plan import PurposeKind
from tests.models.test_model_steps import build_small

WIDTH, EXAMPLES = 32, 16
KINDS = (PurposeKind.STATISTIC, PurposeKind.STATISTIC_COTANGENT)


def normalised(how, x, average, param):
    """`x` with a mean of 0 and a variance of 1 over the examples, as libraries write it, and the new averages."""
    keepdims = how == "kept dims"
    mean = x.mean(0, keepdims=keepdims)
    variance = ((x - mean) ** 2).mean(0) if how == "two passes" else (x * x).mean(0, keepdims=keepdims) - mean**2
    new = {"mean": 0.9 * average["mean"] + 0.1 * mean, "var": 0.9 * average["var"] + 0.1 * variance}
    factor = jax.lax.rsqrt(variance + 1e-5)
    if how == "no scale":
        return (x - mean) * factor, new
    if how == "scaled last":
        return (x - mean) * factor * param["scale"] + param["bias"], new
    return (x - mean) * (factor * param["scale"]) + param["bias"], new


def step_of(how, value_and_grad):
    shape = (1, WIDTH) if how == "kept dims" else (WIDTH,)
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"first": jax.random.normal(keys[0], (8, WIDTH)), "last": jax.random.normal(keys[1], (WIDTH, 4)) / 8}
    if how != "no scale":
        params["norm"] = {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}
    state = {"params": params, "averages": {"norm": {"mean": jnp.zeros(shape), "var": jnp.ones(shape)}}}

    def step(state, batch):
        def loss_of(params):
            x, new = normalised(how, batch @ params["first"], state["averages"]["norm"], params.get("norm"))
            return jnp.mean((jax.nn.relu(x) @ params["last"]) ** 2), {"norm": new}

        (loss, averages), grads = value_and_grad(loss_of, has_aux=True)(state["params"])
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": new, "averages": averages}, loss

    return step, state, jax.random.normal(keys[2], (EXAMPLES, 8))


def planned(plan, kind):
    return [each for each in plan.collectives if each.purpose.kind == kind]


@pytest.mark.parametrize("value_and_grad", [splitjax.value_and_grad, jax.value_and_grad], ids=["boundary", "plain"])
@pytest.mark.parametrize(
    "how, back",
    [("fast", 1), ("two passes", 2), ("kept dims", 1), ("no scale", 2), ("scaled last", 2)],
)
def test_what_is_planned_is_compiled(how, back, value_and_grad):
    step, state, batch = step_of(how, value_and_grad)
    parallel = splitjax.parallelize(step, mesh={"data": 8}, rules="data_parallel", donate=False)
    plan, report = parallel.plan(state, batch), parallel.report(state, batch)
    assert [len(planned(plan, kind)) for kind in KINDS] == [2, back]
    assert {each.bytes for kind in KINDS for each in planned(plan, kind)} == {2 * 7 * WIDTH * 4 // 8}
    assert {each.layer for kind in KINDS for each in planned(plan, kind)} <= {"params/norm", *(
        f"averages/norm/{name}" for name in ("mean", "var") if how == "no scale"
    )}  # fmt: skip
    assert report.missing == () and [each for each in report.unplanned if each.compiled.shape] == []
    new, loss = step(state, batch)
    found, found_loss = parallel(state, batch)
    np.testing.assert_allclose(found_loss, loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), found, new)


def test_averages_that_are_only_read_send_nothing():
    step, state, batch = step_of("fast", splitjax.value_and_grad)

    def evaluated(state, batch):
        average = state["averages"]["norm"]
        x = (batch @ state["params"]["first"] - average["mean"]) * jax.lax.rsqrt(average["var"])
        return state, jnp.mean((x @ state["params"]["last"]) ** 2)

    plan = splitjax.parallelize(evaluated, mesh={"data": 8}, rules="data_parallel").plan(state, batch)
    assert not any(planned(plan, kind) for kind in KINDS)


@functools.cache
def network():
    spec = build("vgg16", width=1 / 16, head_features=64, batch_norm=True)
    init, step, _ = make_step(spec, optax.adam(1e-3), value_and_grad=splitjax.value_and_grad)
    return step, (jax.eval_shape(init, jax.random.key(0)), spec.example(16))


@pytest.mark.parametrize(
    "rules, mesh, shard_state",
    [
        ("data_parallel", {"data": 8}, False),
        ("data_parallel", {"data": 8}, True),
        ("megatron", {"data": 2, "model": 4}, False),
        ("transformer", {"data": 2, "fsdp": 2, "tensor": 2}, False),
    ],
)
def test_a_network_with_batch_normalisation_sends_nothing_else_but_scalars(rules, mesh, shard_state):
    step, arguments = network()
    parallel = splitjax.parallelize(step, mesh=mesh, rules=rules, shard_state=shard_state)
    report, plan = parallel.report(*arguments), parallel.plan(*arguments)
    assert [len(planned(plan, kind)) for kind in KINDS] == [26, 13]
    # With sharded state XLA would compute what the gradient of a scale is made of in parts, and gather it.
    assert report.missing == () and [each for each in report.unplanned if each.compiled.shape] == []


def test_a_parameter_that_meets_split_columns_is_updated_whole():
    """XLA would compute its new value and its moments in parts, as its gradient is, and gather each."""
    spec = build_small("deepfm")
    init, step, _ = make_step(spec, optax.adam(1e-3), value_and_grad=splitjax.value_and_grad)
    arguments = jax.eval_shape(init, jax.random.key(0)), spec.example(EXAMPLES)
    parallel = splitjax.parallelize(step, mesh={"data": 2, "model": 4}, rules="megatron")
    report, plan = parallel.report(*arguments), parallel.plan(*arguments)
    assert "params/dense_embedding" in {leaf.path for leaf in plan.leaves if not leaf.axes}
    assert not any("computes the new" in each.cause for each in report.unplanned)


def test_workers_of_partial_backpropagation_have_statistics_of_their_own():
    step, arguments = network()
    local = splitjax.PartialBackprop(statistics="local", rebalance=False)
    parallel = splitjax.parallelize(step, mesh={"data": 4}, rules="data_parallel", backprop=local)
    assert not any(planned(parallel.plan(*arguments), kind) for kind in KINDS)


def test_a_state_with_a_value_for_each_example_is_no_statistic():
    def step(state, batch):
        loss, grad = splitjax.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch @ w) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * grad, "last": batch.sum(1)}, loss

    state = {"w": jnp.ones((8, 8)) / 8, "last": jnp.zeros(EXAMPLES)}
    plan = splitjax.parallelize(step, mesh={"data": 8}, rules="data_parallel").plan(state, jnp.ones((EXAMPLES, 8)))
    assert not any(planned(plan, kind) for kind in KINDS)


def test_a_sum_that_a_loop_goes_on_with_is_planned():
    """What a loop hands to its next turn has no result among the operations."""

    def step(state, batch):
        loss, grad = splitjax.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch @ w) ** 2))(state["w"])
        seen, _ = jax.lax.scan(lambda total, _: (total * 0.5, None), batch.sum(0), None, length=2)
        return {"w": state["w"] - 0.1 * grad, "seen": state["seen"] + seen}, loss

    state = {"w": jnp.ones((8, 8)) / 8, "seen": jnp.zeros(8)}
    batch = jax.random.normal(jax.random.key(0), (EXAMPLES, 8))
    plan = splitjax.parallelize(step, mesh={"data": 8}, rules="data_parallel").plan(state, batch)
    assert [len(planned(plan, kind)) for kind in KINDS] == [1, 0]
