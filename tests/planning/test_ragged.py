"""Experts by ragged products: the plan lists no exchange of tokens that XLA does not make, and says what it gathers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import splitjax

EXPERTS, WIDTH, HIDDEN = 4, 16, 32


def loss(params, batch):
    tokens = batch["x"].reshape(-1, WIDTH)
    chosen = jnp.argmax(tokens @ params["gate"], -1)
    order, sizes = jnp.argsort(chosen), jnp.bincount(chosen, length=EXPERTS)
    hidden = jax.nn.silu(jax.lax.ragged_dot(tokens[order], params["up"], sizes))
    out = jnp.zeros_like(tokens).at[order].set(jax.lax.ragged_dot(hidden, params["down"], sizes))
    return jnp.mean((out.reshape(batch["x"].shape) - batch["y"]) ** 2)


def train(params, batch):
    value, grads = splitjax.value_and_grad(loss)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@pytest.mark.parametrize(
    ("rules", "mesh", "split"),
    [
        ("transformer", {"data": 2, "expert": 4}, "along expert x data=8"),
        ("data_parallel", {"data": 8}, ""),
    ],
)
def test_ragged_experts_exchange_no_tokens_and_say_what_is_gathered(rules, mesh, split):
    shapes = {"gate": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}
    params = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    batch = {name: np.ones((16, 4, WIDTH), np.float32) for name in ("x", "y")}
    plan = splitjax.parallelize(train, mesh=mesh, rules=rules).plan(params, batch)
    assert not [one for one in plan.collectives if one.op == "all_to_all"]
    notes = [note for note in plan.notes if "ragged_dot" in note]
    assert [note.split()[0] for note in notes] == ["up", "down"]
    assert all("the tokens of all devices" in note and "gmm" in note for note in notes)
    assert all((f"all of {note.split()[0]} {split}" in note) == bool(split) for note in notes)
