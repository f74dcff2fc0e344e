"""Moments that an optimizer keeps in 8 bits, in blocks or rows with a scale each, lie where their parameter does."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import splitjax

BLOCK = 16


def in_rows(x):
    scale = jnp.abs(x).max(-1, keepdims=True) / 127 + 1e-12
    return jnp.round(x / scale).astype(jnp.int8), scale


def in_blocks(x):
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    codes, scale = in_rows(blocks)
    return codes.reshape(x.shape), scale[..., 0]


def flattened(x):
    codes, scale = in_rows(x.reshape(-1, BLOCK))
    return codes, scale[:, 0]


def wide(codes, scale, shape):
    return (codes.reshape(*scale.shape, -1).astype(jnp.float32) * scale[..., None]).reshape(shape)


def make_step(quantised):
    def train(state, batch):
        def loss(params):
            return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)

        value, grads = splitjax.value_and_grad(loss)(state["params"])
        means = {name: 0.9 * wide(*state["mean"][name], grad.shape) + 0.1 * grad for name, grad in grads.items()}
        params = {name: param - 0.1 * means[name] for name, param in state["params"].items()}
        return {"params": params, "mean": {name: quantised(mean) for name, mean in means.items()}}, value

    params = {"up": jnp.ones((32, 64)), "down": jnp.ones((64, 32))}
    state = {"params": params, "mean": {name: quantised(param) for name, param in params.items()}}
    return train, state


@pytest.mark.parametrize(
    ("quantised", "up"),
    [
        (in_rows, ((None, "tensor"), (None, None))),
        (in_blocks, ((None, "tensor"), (None, "tensor"))),
        # Blocks over rows and columns in one dim: columns are no consecutive part of it.
        (flattened, ((None, None), (None,))),
    ],
)
def test_moments_of_eight_bits_follow_their_parameter(quantised, up):
    train, state = make_step(quantised)
    batch = {name: np.ones((8, 32), np.float32) for name in ("x", "y")}
    plan = splitjax.parallelize(train, mesh={"data": 2, "tensor": 4}, rules="megatron").plan(state, batch)
    leaves = {leaf.path: leaf for leaf in plan.leaves}
    for name, specs in (("up", up), ("down", None)):
        codes, scale = leaves[f"mean/{name}/0"], leaves[f"mean/{name}/1"]
        assert codes.rule == scale.rule == f"follows params/{name}"
        if specs is not None:
            assert (codes.spec, scale.spec) == specs
        else:  # rows lie in consecutive parts, however blocks are counted
            assert codes.spec[0] == scale.spec[0] == "tensor" == leaves["params/down"].spec[0]
