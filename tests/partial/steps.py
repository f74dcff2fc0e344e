"""A small step that the tests differentiate partially: four dense layers, a masked mean, Adam."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

import splitjax

SIZES = (6, 64, 64, 64, 4)
LAYERS = tuple(f"p/d{i}" for i in range(len(SIZES) - 1))
NUM_EXAMPLES = 16
adam = optax.adam(1e-2)


def make_params(dtype=np.float64):
    rng = np.random.default_rng(0)
    return {
        f"d{i}": {"w": (rng.normal(size=(a, b)) * 0.2).astype(dtype), "b": (rng.normal(size=(b,)) * 0.1).astype(dtype)}
        for i, (a, b) in enumerate(zip(SIZES, SIZES[1:], strict=False))
    }


def make_batch(seed=1, dtype=np.float64, num_examples=NUM_EXAMPLES, masked=True):
    """Examples with weights 0, 1 and 2, so that workers have different denominators of their own."""
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 3, size=num_examples) if masked else np.ones(num_examples)
    return {
        "x": rng.normal(size=(num_examples, SIZES[0])).astype(dtype),
        "y": rng.normal(size=(num_examples, SIZES[-1])).astype(dtype),
        "m": weights.astype(dtype),
    }


def forward(params, x):
    for i in range(len(LAYERS)):
        x = x @ params[f"d{i}"]["w"] + params[f"d{i}"]["b"]
        x = jnp.tanh(x) if i + 1 < len(LAYERS) else x
    return x


def loss_sum(params, batch):
    return (jnp.square(forward(params, batch["x"]) - batch["y"]).sum(-1) * batch["m"]).sum()


def make_step(tx=adam, with_gradient=False):
    def step(state, batch):
        loss, grads = splitjax.value_and_grad(lambda params: loss_sum(params, batch) / batch["m"].sum())(state["p"])
        updates, opt = tx.update(grads, state["o"], state["p"])
        return {"p": optax.apply_updates(state["p"], updates), "o": opt}, {
            "loss": loss,
            **({"grads": grads} if with_gradient else {}),
        }

    return step


def make_state(tx=adam, dtype=np.float64):
    params = make_params(dtype)
    return {"p": params, "o": tx.init(params)}


def abstract(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
