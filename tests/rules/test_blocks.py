"""State that an 8-bit optimizer stores in blocks of the flattened parameter: parameters are split along the dims along
which blocks are, and where there are none, state stays whole and the plan says so."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import splitjax

BLOCK = 256


def flattened(x):
    blocks = jnp.pad(x.reshape(-1), (0, -x.size % BLOCK)).reshape(-1, BLOCK)
    scale = jnp.max(jnp.abs(blocks), 1, keepdims=True) / 127 + 1e-12
    return jnp.round(blocks / scale).astype(jnp.int8), scale


def wide(codes, scale, like):
    return (codes.astype(jnp.float32) * scale).reshape(-1)[: like.size].reshape(like.shape)


def train(state, batch):
    def loss(params):
        hidden = jnp.tanh(batch["x"] @ params["up"] + params["bias"])
        return jnp.mean((jnp.tanh(hidden @ params["down"] + params["odd"]) @ params["out"] - batch["y"]) ** 2)

    value, grads = splitjax.value_and_grad(loss)(state["params"])
    means = {name: 0.9 * wide(*state["mean"][name], grad) + 0.1 * grad for name, grad in grads.items()}
    params = {name: param - 0.1 * means[name] for name, param in state["params"].items()}
    return {"params": params, "mean": {name: flattened(mean) for name, mean in means.items()}}, value


def call():
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "up": jax.random.normal(keys[0], (64, 512)) / 8,
        "bias": jnp.zeros(512),
        "down": jax.random.normal(keys[1], (512, 32)) / 16,
        "odd": jnp.zeros(32),
        "out": jax.random.normal(keys[2], (32, 256)) / 8,
    }
    x, y = np.asarray(jax.random.normal(keys[3], (16, 64))), np.ones((16, 256), np.float32)
    state = {"params": params, "mean": {name: flattened(param) for name, param in params.items()}}
    return state, {"x": x, "y": y}


@pytest.mark.parametrize(("rules", "shares"), [("fsdp", False), ("data_parallel", True)])
def test_blocks_lie_as_their_parameter_does_and_nothing_is_sent_for_them(rules, shares):
    state, batch = call()
    step = splitjax.parallelize(train, mesh={"data": 4}, rules=rules, shard_state=shares)
    plan, report = step.plan(state, batch), step.report(state, batch)
    leaves = {leaf.path: leaf for leaf in plan.leaves}
    for name in ("up", "down", "out"):
        param, codes, scale = leaves[f"params/{name}"], leaves[f"mean/{name}/0"], leaves[f"mean/{name}/1"]
        assert codes.spec == scale.spec == (param.gradient or param.spec) == ("data", None)
    # Fewer blocks than devices, or one that is filled up: their gradients are as whole as they are.
    for name in ("bias", "odd"):
        assert not leaves[f"mean/{name}/0"].axes and leaves[f"params/{name}"].gradient is None
        assert leaves[f"mean/{name}/0"].rule == f"follows params/{name}"
        assert ("the blocks of mean/" in leaves[f"params/{name}"].note) == shares
    assert not report.missing and not [each for each in report.unplanned if each.compiled.shape]
    assert plan.warnings == ()
    expected, got = jax.jit(train)(state, batch), step(state, batch)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-5)
    for name, param in expected[0]["params"].items():
        np.testing.assert_allclose(got[0]["params"][name], param, rtol=1e-3, atol=1e-4)


def test_blocks_that_stay_whole_beside_columns_are_a_warning():
    plan = splitjax.parallelize(train, mesh={"data": 2, "tensor": 4}, rules="megatron").plan(*call())
    (warning,) = plan.warnings
    assert warning.kind == "state" and "whole over tensor=4: params/up, params/bias;" in warning.message
    assert "x.reshape(*x.shape[:-1], -1, size)" in warning.remedy
    note = next(leaf.note for leaf in plan.leaves if leaf.path == "mean/up/0")
    assert note == "stays whole over tensor=4, over which params/up is split: its blocks are no parts of that dim"
    shared = splitjax.parallelize(train, mesh={"data": 2, "tensor": 4}, rules="megatron", shard_state=True)
    assert next(leaf.spec for leaf in shared.plan(*call()).leaves if leaf.path == "mean/up/0") == ("data", None)
