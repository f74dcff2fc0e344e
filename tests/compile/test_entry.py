"""A plan never changes the numbers: every layout equals one device, through everything that is global over the
batch."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest

import splitjax
from tests.steps import attention_case, conv_case, largest_difference, train

RULES = ("splitbrain", "megatron", "fsdp", "data_parallel")
MESHES = ({"data": 2, "model": 4}, {"data": 8}, {"data": 4, "model": 2}, {"data": 1, "model": 8})


@functools.cache
def one_device(case):
    """A state, and what one device makes of it: the state behind and the losses."""
    state = case.init(jax.random.key(0))
    return state, *train(jax.jit(case.step), state, case.batches)


@functools.cache
def float64_case(make):
    options = {"dtype": np.float64} if make is conv_case else {}
    return make(
        optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.05, momentum=0.9)), steps=20, dropout=0.3, **options
    )


@functools.cache
def float32_case():
    return conv_case(dropout=0.3)


@functools.cache
def plain_jax_case(make):
    return make(value_and_grad=jax.value_and_grad)


def compare(case, rules, mesh, tolerance):
    state, want_state, want = one_device(case)
    step = splitjax.parallelize(case.step, mesh=mesh, rules=rules)
    got_state, got = train(step, step.place(state, example=(case.batches[0],)), case.batches)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)
    assert largest_difference(got_state, want_state) <= tolerance
    assert len(step.compiles) == 1
    return step, got_state


# Of each rule set on each version of JAX, the model that it is for.
MEANT = {"splitbrain": conv_case, "data_parallel": conv_case, "megatron": attention_case, "fsdp": attention_case}


@pytest.mark.optimised
@pytest.mark.parametrize(
    ("make", "rules"),
    [
        pytest.param(make, rules, marks=() if make is MEANT[rules] else pytest.mark.one_version)
        for make in (conv_case, attention_case)
        for rules in RULES
    ],
)
def test_twenty_steps_in_float64(make, rules):
    with jax.enable_x64(True):
        compare(float64_case(make), rules, MESHES[0], 1e-10)


@pytest.mark.one_version
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("mesh", MESHES[1:], ids=str)
def test_three_steps_in_float32(rules, mesh):
    compare(float32_case(), rules, mesh, 1e-5)


@pytest.mark.parametrize("rules", ["splitbrain", "megatron"])
def test_plain_jax_gradients_get_layouts_too(rules):
    step, state = compare(plain_jax_case(conv_case), rules, MESHES[0], 1e-5)
    assert not state["params"]["Dense_0"]["kernel"].sharding.is_fully_replicated
    step, state = compare(plain_jax_case(attention_case), rules, MESHES[0], 1e-5)
    assert not state["params"]["Dense_0"]["kernel"].sharding.is_fully_replicated


@pytest.mark.parametrize(
    "tx",
    [optax.adam(1e-3), optax.adafactor(1e-2, min_dim_size_to_factor=8), optax.MultiSteps(optax.sgd(0.1), 2)],
    ids=["adam", "adafactor", "multisteps"],
)
def test_optimizer_state_lives_with_its_parameter(tx):
    with jax.enable_x64(True):
        step, state = compare(conv_case(tx, dtype=np.float64, batch_norm=False), "splitbrain", MESHES[0], 1e-10)
    plan = step.plan(state, conv_case().batches[0]) if False else step._last.plan
    split = [leaf for leaf in plan.leaves if leaf.role == "optimizer" and any(leaf.spec)]
    assert len(split) >= 4
    for leaf in split:
        owner = plan.leaf(leaf.rule.removeprefix("follows "))
        if owner.shape == leaf.shape:
            assert owner.spec == leaf.spec


def test_dropout_draws_the_bits_of_the_global_batch():
    """Drawn per worker, the mask would repeat on every worker, and 20 dropped rows would not be 20 different ones."""

    def step(state, batch):
        keep = jax.random.bernoulli(state["key"], 0.5, batch.shape)
        return {"key": state["key"], "w": state["w"] + 0 * batch.sum()}, keep * batch

    batch = np.ones((16, 32), np.float32)
    state = {"key": jax.random.key(3), "w": np.zeros((8, 8), np.float32)}
    _, want = jax.jit(step)(state, batch)
    parallel = splitjax.parallelize(step, mesh={"data": 8}, rules="data_parallel")
    _, got = parallel(parallel.place(state, example=(batch,)), batch)
    np.testing.assert_array_equal(got, want)
    assert len({tuple(row) for row in np.asarray(got)}) == 16


def test_a_masked_mean_is_global():
    """Averaged per worker, two workers with 8 and 1 valid examples would weigh the same."""

    def step(state, batch):
        def loss(w):
            return (((batch["x"] @ w) ** 2) * batch["mask"]).sum() / batch["mask"].sum()

        value, grad = splitjax.value_and_grad(loss)(state)
        return state - 0.1 * grad, {"loss": value}

    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(16, 8)).astype(np.float32), "mask": np.array([1.0] * 9 + [0.0] * 7, np.float32)}
    state = rng.normal(size=(8,)).astype(np.float32)
    _, want = jax.jit(step)(state, batch)
    _, got = splitjax.parallelize(step, mesh={"data": 2}, rules="data_parallel")(state, batch)
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-6)


def test_batch_norm_statistics_are_those_of_the_whole_batch():
    case = conv_case(steps=1)
    # Each worker's own examples have another mean: averaging statistics per worker would get the variance wrong.
    case.batches[0]["x"] += np.arange(16, dtype=np.float32).reshape(16, 1, 1, 1)
    state = case.init(jax.random.key(0))
    want, _ = jax.jit(case.step)(state, case.batches[0])
    for rules in RULES:
        step = splitjax.parallelize(case.step, mesh=MESHES[0], rules=rules)
        got, _ = step(step.place(state, example=(case.batches[0],)), case.batches[0])
        np.testing.assert_allclose(got["stats"]["BatchNorm_0"]["var"], want["stats"]["BatchNorm_0"]["var"], rtol=1e-5)


def test_several_boundaries_in_one_step():
    def step(state, batch):
        a, ga = splitjax.value_and_grad(lambda p: ((batch @ p["g"] @ p["d"]) ** 2).mean())(state)
        b, gb = splitjax.value_and_grad(lambda d: ((batch @ state["g"] @ d) - 1).mean())(state["d"])
        return {"g": state["g"] - 0.1 * ga["g"], "d": state["d"] - 0.1 * gb}, {"loss": a + b}

    rng = np.random.default_rng(0)
    state = {"g": rng.normal(size=(8, 16)).astype(np.float32), "d": rng.normal(size=(16, 4)).astype(np.float32)}
    batch = rng.normal(size=(8, 8)).astype(np.float32)
    want, _ = jax.jit(step)(state, batch)
    parallel = splitjax.parallelize(step, mesh=MESHES[0], rules="megatron")
    got, _ = parallel(parallel.place(state, example=(batch,)), batch)
    assert largest_difference(got, want) < 1e-5
    assert parallel.graph(got, batch).num_boundaries == 2


@pytest.mark.parametrize("gradient", [jax.grad, splitjax.grad])
def test_gradients_per_example_of_a_convolution(gradient):
    """`vmap` makes them convolutions whose groups run over examples, which XLA partitions wrongly: each device
    evaluates its own."""

    def step(kernel, batch):
        def loss(k, x):
            return (jax.lax.conv(x[None], k, (1, 1), "SAME") ** 2).sum()

        grads = jax.vmap(gradient(loss), (None, 0))(kernel, batch)
        return kernel - 1e-3 * grads.sum(0), (grads**2).sum()

    rng = np.random.default_rng(0)
    batch, kernel = rng.normal(size=(16, 4, 8, 8)).astype(np.float32), rng.normal(size=(8, 4, 3, 3)).astype(np.float32)
    want = jax.jit(step)(kernel, batch)
    parallel = splitjax.parallelize(step, mesh={"data": 8}, rules="data_parallel")
    got = parallel(kernel, batch)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5)
    assert any("grouped-convolution" in note for note in parallel.plan(kernel, batch).notes)
