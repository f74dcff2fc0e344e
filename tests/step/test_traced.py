"""What a function that is traced under the axes of a mesh raises: what its user did wrong, whatever names axes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import splitjax

MESH = {"data": 2, "model": 4}
BATCH = np.ones((8, 8), np.float32)


def update(state, batch):
    loss, grad = splitjax.value_and_grad(lambda w: ((batch @ w) ** 2).mean())(state["w"])
    return {"w": state["w"] - 0.1 * grad}, loss


def constrained(x, axis):
    return jax.lax.with_sharding_constraint(x, PartitionSpec(axis))


def test_a_mistake_behind_a_constraint_is_what_is_raised():
    def failing_step(state, batch):
        constrained(batch, "data")
        raise KeyError("my own mistake")

    def failing_init(key):
        constrained(jnp.ones((8, 8)), "model")
        raise KeyError("my own mistake")

    with pytest.raises(KeyError, match="my own mistake") as caught:
        splitjax.parallelize(failing_step, mesh=MESH).plan({"w": BATCH}, BATCH)
    assert caught.value.__context__ is None
    with pytest.raises(KeyError, match="my own mistake"):
        splitjax.parallelize(update, mesh=MESH).init(failing_init, jax.random.key(0), example=(BATCH,))


def test_a_mistake_where_only_the_mesh_knows_no_axis_is_what_is_raised():
    def step(state, batch):
        if not jax.sharding.get_abstract_mesh().empty:
            constrained(batch, "embed")
        raise KeyError("my own mistake")

    with pytest.raises(KeyError, match="my own mistake"):
        splitjax.parallelize(step, mesh=MESH).plan({"w": BATCH}, BATCH)


def test_an_axis_that_the_mesh_does_not_have_is_named():
    def step(state, batch):
        return update(state, constrained(batch, "embed"))

    with pytest.raises(Exception, match="embed"):
        splitjax.parallelize(step, mesh=MESH).plan({"w": BATCH}, BATCH)
