"""What steps of modules keep between their calls."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import splitjax.equinox
import splitjax.nnx
from splitjax.plan import BlockRemat
from splitjax.planning.carried import Carried


def test_what_a_filtered_step_carries_is_put_back():
    def train_step(state, batch):
        return state - batch.mean(), batch.sum()

    step = splitjax.equinox.parallelize(
        train_step, mesh={"data": 2}, rules="data_parallel", state_argnums=0, batch_argnums=1
    )
    step.resume(Carried(num_steps=5))
    assert step.carried().num_steps == 5
    state, total = step(jnp.zeros(3), np.ones((4, 3), np.float32))
    assert jax.device_get(total) == 12 and np.array_equal(state, -np.ones(3))
    step.resume(None)
    assert not step.carried()


@pytest.mark.parametrize("frontend", [splitjax.equinox, splitjax.nnx], ids=lambda module: module.__name__)
@pytest.mark.parametrize("told", ["nothing_saveable", "auto"])
def test_every_arrangement_of_arguments_keeps_what_the_first_does(frontend, told):
    """A policy that is given beside rules that are chosen, and one that is chosen with them."""

    def loss_of(params, batch):
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), batch, params["layers"])
        return jnp.mean(x**2)

    def train_step(params, batch, factor=None):
        loss, grads = splitjax.value_and_grad(loss_of)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss if factor is None else factor * loss

    params, batch = {"layers": np.ones((4, 8, 8), np.float32)}, np.ones((1024, 8), np.float32)
    make = lambda **options: frontend.parallelize(
        train_step, mesh={"data": 2}, state_argnums=0, batch_argnums=1, **options
    )
    most = make(rules="data_parallel").plan(params, batch).memory.bound_bytes
    budget = {"memory_budget": most - 1} if told == "auto" else {}
    step = make(rules="auto", remat=told, **budget)
    first, second = step.plan(params, batch), step.plan(params, batch, np.float32(2))
    assert second.remat == first.remat != () and step.choice is not None
    assert told == "auto" or first.remat == (BlockRemat("params/layers", told),)


@pytest.mark.parametrize("frontend", [splitjax.equinox, splitjax.nnx], ids=lambda module: module.__name__)
def test_what_was_compiled_to_be_chosen_is_chosen_once(frontend):
    """Another arrangement of arguments has the rules of the first, among which nothing is left to be compiled."""

    def train_step(params, batch, factor=None):
        loss, grads = splitjax.value_and_grad(lambda params, batch: jnp.mean((batch @ params["w"]) ** 2))(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss if factor is None else factor * loss

    params, batch = {"w": np.ones((8, 8), np.float32)}, np.ones((16, 8), np.float32)
    step = frontend.parallelize(
        train_step, mesh={"data": 2}, rules="auto", target="cpu:2", compile_best=1, state_argnums=0, batch_argnums=1
    )
    first, second = step.plan(params, batch), step.plan(params, batch, np.float32(2))
    assert step.choice.compiled and second.rules == first.rules
