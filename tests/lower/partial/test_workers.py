"""Programs of single workers: what they take of the step's arguments, and what is computed for them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import splitjax
from splitjax.lower.partial.workers import peak_bytes

pytestmark = pytest.mark.usefixtures("programs_are_kept")
WIDTH, LAYERS = 64, 4


def init(_key=None):
    rng = np.random.default_rng(0)
    return {f"w{k}": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5 for k in range(LAYERS)}


def step(state, batch):
    def loss_fn(params):
        x = batch["x"]
        for k in range(LAYERS):
            x = jnp.tanh(x @ params[f"w{k}"])
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = splitjax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def batch_of(number):
    rng = np.random.default_rng(number)
    return {name: rng.normal(size=(16, WIDTH)).astype(np.float32) for name in ("x", "y")}


def made(execution, **options):
    backprop = splitjax.PartialBackprop(execution=execution, rotate=False)
    return splitjax.parallelize(step, mesh={"data": 4}, rules="data_parallel", backprop=backprop, **options)


def test_parameters_go_to_the_workers_as_they_are():
    """A result of the first program would be a copy of them, held beside the state."""
    apart = made("program")
    lowered = apart.lower(init(), batch_of(0))
    compiled = {name: part.compile().memory_analysis() for name, part in lowered.parts.items()}
    params = LAYERS * WIDTH * WIDTH * 4
    assert compiled["before"].output_size_in_bytes < params / 4
    assert compiled["worker 0"].argument_size_in_bytes >= params
    assert peak_bytes(compiled["worker 0"]) < peak_bytes(compiled["worker 3"])


@pytest.mark.parametrize("place", ["host", "laid out", "spelt otherwise"])
def test_arguments_may_lie_anywhere_at_first(place):
    apart, together = made("program"), made("branch")
    state, expected = init(), init()
    if place != "host":
        state = apart.place(state, example=(batch_of(0),))
    if place == "spelt otherwise":
        everywhere = NamedSharding(state["w0"].sharding.mesh, PartitionSpec(None, None))
        state = {name: jax.device_put(np.asarray(value), everywhere) for name, value in state.items()}
    for number in range(3):
        state, loss = apart(state, batch_of(number))
        expected, expected_loss = together(expected, batch_of(number))
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for name, value in state.items():
        np.testing.assert_allclose(value, expected[name], atol=1e-6)


def test_a_state_that_is_not_consumed_stays_as_it_was():
    apart, state = made("program", donate=False), init()
    placed = apart.place(state, example=(batch_of(0),))
    first, _ = apart(placed, batch_of(0))
    again, _ = apart(placed, batch_of(0))
    for name in state:
        np.testing.assert_array_equal(placed[name], state[name])
        np.testing.assert_array_equal(first[name], again[name])
