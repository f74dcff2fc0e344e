"""Heads that lie side by side in the columns of a weight, and do not divide by the devices: weights are padded by whole
heads, and the numbers are those of one device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import splitjax
from tests.step.padded_model import X64, assert_equal

MESH = {"data": 2, "model": 4}
EMBED, HEADS, WIDTH, VOCABULARY, LENGTH = 12, 6, 8, 32, 5


def separate(p, x, heads):
    """Query, key and value of a projection each."""
    return [(x @ p[name] + p[f"{name}_bias"]).reshape(*x.shape[:2], heads, WIDTH) for name in ("q", "k", "v")]


def cut(p, x, heads):
    """The same of one projection, cut into three (GPT-2)."""
    parts = jnp.split(x @ p["qkv"] + p["qkv_bias"], 3, -1)
    return [part.reshape(*x.shape[:2], heads, WIDTH) for part in parts]


def counted(p, x, heads):
    """The same with a dim that counts the three."""
    values = (x @ p["qkv"] + p["qkv_bias"]).reshape(*x.shape[:2], 3, heads, WIDTH)
    return [values[:, :, number] for number in range(3)]


def attended(q, k, v, axis=-1):
    """What an attention gives, with a softmax over `axis` of its scores (examples, heads, queries, keys)."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(WIDTH)
    scores = jnp.where(np.tril(np.ones((LENGTH, LENGTH), bool)), scores, -1e9) if axis == -1 else scores
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis), v)


def with_examples(q, k, v):
    """The same with examples and heads in one dim."""
    flat = lambda y: y.transpose(0, 2, 1, 3).reshape(-1, LENGTH, WIDTH)
    values = jax.nn.softmax(flat(q) @ flat(k).transpose(0, 2, 1), -1) @ flat(v)
    return values.reshape(q.shape[0], -1, LENGTH, WIDTH).transpose(0, 2, 1, 3)


def attention_model(gradient=splitjax.value_and_grad, attend=attended, heads=HEADS, project=separate):
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))

    def logits(p, ids):
        x = p["table"][ids]
        values = attend(*project(p, x, heads))
        return (x + values.reshape(*x.shape[:2], heads * WIDTH) @ p["out"]) @ p["table"].T

    def step(state, batch):
        loss_fn = lambda p: optax.softmax_cross_entropy_with_integer_labels(logits(p, batch["x"]), batch["y"]).mean()
        loss, grads = gradient(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    def init(key):
        keys = iter(jax.random.split(key, 8))
        params = {"table": jax.random.normal(next(keys), (VOCABULARY, EMBED))}
        for name in "qkv":
            params[name] = jax.random.normal(next(keys), (EMBED, heads * WIDTH))
            params[f"{name}_bias"] = 0.1 * jax.random.normal(next(keys), (heads * WIDTH,))
        params["out"] = 0.1 * jax.random.normal(next(keys), (heads * WIDTH, EMBED))
        if project is not separate:
            for name in ("", "_bias"):
                params[f"qkv{name}"] = jnp.concatenate([params.pop(letter + name) for letter in "qkv"], -1)
        return {"params": params, "opt": tx.init(params)}

    return step, init, logits


def tokens(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, VOCABULARY, (8, LENGTH)) for name in "xy"}


def trained(parallel, init, state=None):
    if state is None:
        state = parallel.init(init, jax.random.key(0), example=(tokens(0),))
    losses = []
    for seed in range(3):
        state, loss = parallel(state, tokens(seed))
        losses.append(float(loss))
    return parallel.logical(state), losses


@functools.cache
def reference(attend=attended):
    with X64(True):
        step, init, _ = attention_model(attend=attend)
        return trained(splitjax.parallelize(step, mesh={"data": 1}, rules="data_parallel"), init)


def apart(state):
    """A state with fused projections, as one of the model that has them apart."""

    def cut_up(params):
        given = {name: leaf for name, leaf in params.items() if not name.startswith("qkv")}
        parts = {name: jnp.split(params[f"qkv{name}"], 3, -1) for name in ("", "_bias")}
        return given | {letter + name: of[at] for name, of in parts.items() for at, letter in enumerate("qkv")}

    is_params = lambda node: isinstance(node, dict) and "qkv" in node
    return jax.tree.map(lambda node: cut_up(node) if is_params(node) else node, state, is_leaf=is_params)


def padded_shapes(plan):
    return {leaf.path[7:]: (leaf.logical, leaf.shape) for leaf in plan.leaves if leaf.logical and leaf.role == "param"}


def test_whole_heads_are_padded():
    with X64(True):
        step, init, logits = attention_model()
        parallel = splitjax.parallelize(step, mesh=MESH, rules="megatron", uneven="pad")
        state = parallel.init(init, jax.random.key(0), example=(tokens(0),))
        assert {shard.data.shape for shard in state["params"]["q"].addressable_shards} == {(EMBED, 2 * WIDTH)}
        found = trained(parallel, init, state)
        assert_equal(found, reference())
        plan = parallel.plan(jax.eval_shape(init, jax.random.key(0)), tokens(0))
        columns = {name: ((EMBED, 48), (EMBED, 64)) for name in "qkv"}
        biases = {f"{name}_bias": ((48,), (64,)) for name in "qkv"}
        assert padded_shapes(plan) == columns | biases | {"out": ((48, EMBED), (64, EMBED))}
        assert not plan.warnings
        stored = parallel.stored(jax.tree.map(jnp.copy, found[0]))["params"]
        evaluate = parallel.like(lambda params, batch: logits(params, batch["x"]))
        expected = logits(found[0]["params"], tokens(5)["x"])
        for params in (found[0]["params"], stored):
            np.testing.assert_allclose(evaluate(params, tokens(5)), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("project", [separate, cut, counted])
def test_the_program_is_that_of_heads_that_divide(project):
    compiled = {}
    for heads in (6, 8):
        step, init, _ = attention_model(heads=heads, project=project)
        parallel = splitjax.parallelize(step, mesh=MESH, rules="megatron", uneven="pad")
        report = parallel.report(jax.eval_shape(init, jax.random.key(0)), tokens(0))
        collectives = lambda found: sorted((one.op, one.bytes) for one in found)
        compiled[heads] = collectives(report.collectives), collectives(report.unplanned)
    assert compiled[6] == compiled[8]


@pytest.mark.parametrize("rules", ["megatron", "transformer"])
@pytest.mark.parametrize("project", [cut, counted])
def test_heads_of_a_fused_weight_are_padded_in_each_of_its_parts(project, rules):
    """Six heads on four devices, three times side by side: the padding of all stands behind them."""
    with X64(True):
        step, init, logits = attention_model(project=project)
        parallel = splitjax.parallelize(step, mesh=MESH, rules=rules, uneven="pad")
        state, losses = trained(parallel, init)
        assert_equal((apart(state), losses), reference())
        shapes = jax.eval_shape(init, jax.random.key(0))
        plan = parallel.plan(shapes, tokens(0))
        whole = {"qkv": ((EMBED, 144), (EMBED, 192)), "qkv_bias": ((144,), (192,))}
        assert padded_shapes(plan) == whole | {"out": ((48, EMBED), (64, EMBED))}
        assert not plan.warnings
        evaluate = parallel.like(lambda params, batch: logits(params, batch["x"]))
        expected = logits(state["params"], tokens(5)["x"])
        for params in (state["params"], parallel.stored(jax.tree.map(jnp.copy, state))["params"]):
            np.testing.assert_allclose(evaluate(params, tokens(5)), expected, rtol=1e-10, atol=1e-10)


def test_the_plan_names_what_pads_the_parts_of_a_fused_weight():
    step, init, _ = attention_model(project=cut)
    plan = splitjax.parallelize(step, mesh=MESH, rules="megatron").plan(
        jax.eval_shape(init, jax.random.key(0)), tokens(0)
    )
    (note,) = (note for note in plan.notes if "side by side" in note)
    assert "the weights of 6 heads" in note and note.endswith('uneven="pad" would pad each of them')


def test_a_fused_weight_that_is_not_dealt_out_is_not_padded():
    """JAX has traced the backward pass, which would read other shares than the forward pass leaves."""
    with X64(True):
        step, init, _ = attention_model(jax.value_and_grad, project=cut)
        parallel = splitjax.parallelize(step, mesh=MESH, rules="megatron", uneven="pad")
        state, losses = trained(parallel, init)
        assert_equal((apart(state), losses), reference())
        assert not padded_shapes(parallel.plan(jax.eval_shape(init, jax.random.key(0)), tokens(0)))


@pytest.mark.parametrize("rules", ["megatron", "transformer"])
def test_a_dim_that_counts_the_parts_of_a_fused_weight_changes_nothing(rules):
    """Where weights are stored in parts, too, it was taken for one of 24 heads, of which none is cut."""
    compiled = []
    for project in (cut, counted):
        step, init, _ = attention_model(heads=8, project=project)
        parallel = splitjax.parallelize(step, mesh=MESH, rules=rules)
        report = parallel.report(jax.eval_shape(init, jax.random.key(0)), tokens(0))
        compiled.append(sorted((one.op, one.bytes) for one in report.collectives))
    assert compiled[0] == compiled[1]


OTHERS = {
    "plain": ("megatron", jax.value_and_grad, attended),
    "stored in parts": ("transformer", splitjax.value_and_grad, attended),
    "softmax over heads": ("megatron", splitjax.value_and_grad, functools.partial(attended, axis=1)),
}


@pytest.mark.parametrize("case", OTHERS)
def test_numbers_are_those_of_one_device(case):
    rules, gradient, attend = OTHERS[case]
    with X64(True):
        step, init, _ = attention_model(gradient, attend)
        parallel = splitjax.parallelize(step, mesh=MESH, rules=rules, uneven="pad")
        assert_equal(trained(parallel, init), reference(attend))
        assert len(padded_shapes(parallel.plan(jax.eval_shape(init, jax.random.key(0)), tokens(0)))) == 7


def test_heads_that_are_joined_with_examples_stay_as_they_are():
    """Padding would stand between the entries of the dim that holds both."""
    with X64(True):
        step, init, _ = attention_model(attend=with_examples)
        parallel = splitjax.parallelize(step, mesh=MESH, rules="megatron", uneven="pad")
        assert_equal(trained(parallel, init), reference(with_examples))
        plan = parallel.plan(jax.eval_shape(init, jax.random.key(0)), tokens(0))
        assert not padded_shapes(plan)
        assert any('uneven="pad" leaves' in warning.remedy for warning in plan.warnings)
