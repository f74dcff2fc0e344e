"""What a printed plan says beneath its table."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import splitjax
from splitjax.plan import Plan
from splitjax.report.plan.summary import examples_text


def accumulated(params, batch):
    """Two turns over the rows of `x`; `prior` has examples of its own, which no loop counts."""

    def turn(total, x):
        loss_of = lambda params: ((jnp.tanh(x @ params["up"]) @ params["head"]) ** 2).mean() * batch["prior"].mean()
        value, grads = splitjax.value_and_grad(loss_of)(params)
        return jax.tree.map(jnp.add, total, grads), value

    grads, values = jax.lax.scan(turn, jax.tree.map(jnp.zeros_like, params), batch["x"])
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), values


@pytest.mark.parametrize(("priors", "is_apart"), [(2, True), (24, False)])
def test_examples_are_counted_behind_the_turns_of_a_loop(priors, is_apart):
    shapes = lambda **sizes: {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}
    params, batch = shapes(up=(8, 16), head=(16, 3)), shapes(x=(2, 24, 8), prior=(priors, 3))
    plan = splitjax.parallelize(accumulated, mesh={"data": 8}, rules="data_parallel").plan(params, batch)
    assert {leaf.path: leaf.example_dim for leaf in plan.leaves if leaf.role == "batch"} == {
        "batch/prior": None,
        "batch/x": 1,
    }
    assert Plan.from_json(plan.to_json()) == plan
    assert ("one by one" in examples_text(plan)) == is_apart
