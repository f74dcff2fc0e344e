"""Arrays that lie where the plan does not want them are named, with where they lie and where they should."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import splitjax
import splitjax.nnx
from splitjax.errors import StateError

MESH = {"data": 2, "model": 4}
BATCH = {"x": np.ones((32, 8), np.float32), "y": np.ones((32, 8), np.float32)}
P = PartitionSpec


def update(state, batch):
    loss, grad = splitjax.value_and_grad(lambda w: ((batch["x"] @ w - batch["y"]) ** 2).mean())(state["w"])
    return {"w": state["w"] - 0.1 * grad}, loss


def stray(step, batch, state=None):
    """Returns the error of a call of `step` whose state is planned, unless one is given."""
    init = lambda key: {"w": jax.random.normal(key, (8, 8))}
    state = state or step.init(init, jax.random.key(0), example=(BATCH,))
    with pytest.raises(StateError, match="other than the plan's") as caught:
        step(state, batch)
    return caught.value


def test_the_array_of_a_batch_that_lies_elsewhere_is_named_alone():
    step = splitjax.parallelize(update, mesh=MESH, rules="megatron")
    where = lambda *spec: NamedSharding(step.mesh, P(*spec))
    error = stray(step, {"x": BATCH["x"], "y": jax.device_put(BATCH["y"], where(None, "model"))})
    assert "batch['y'] (32, 8) lies at P(None, 'model'), planned P('data', None)" in error.message
    assert error.value == ["batch/y"] and "plan.spec('batch/y')" in error.remedy
    whole = {"x": jax.device_put(BATCH["x"], where()), "y": jax.device_put(BATCH["y"], where(None, "model"))}
    assert stray(step, whole).value == ["batch/y"], "what lies whole on every device is laid out, and no mistake"


def test_other_devices_and_other_meshes_are_told():
    step = splitjax.parallelize(update, mesh=MESH, rules="megatron")
    device = jax.devices()[3]
    error = stray(step, jax.device_put(BATCH, device))
    assert error.value == ["batch/x", "batch/y"] and f"batch['x'] (32, 8) lies on {device}, planned" in error.message
    error = stray(step, BATCH, {"w": jax.device_put(jnp.ones((8, 8)), device)})
    assert error.value == ["w"] and f"state['w'] (8, 8) lies on {device}, planned" in error.message
    other = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    error = stray(step, {**BATCH, "y": jax.device_put(BATCH["y"], NamedSharding(other, P("data")))})
    assert "batch['y'] (32, 8) lies at P('data',) of another mesh, Mesh('data': 4, 'model': 2" in error.message


def test_a_variable_is_named_as_its_user_writes_it():
    @splitjax.nnx.parallelize(mesh=MESH, rules="megatron")
    def train(model, batch):
        loss, grads = splitjax.nnx.value_and_grad(lambda m: ((m(batch["x"]) - batch["y"]) ** 2).mean())(model)
        model.kernel[...] -= 0.1 * grads.kernel[...]
        return loss

    model = train.init(lambda key: nnx.Linear(8, 8, rngs=nnx.Rngs(key)), jax.random.key(0), example=(BATCH,))
    model.bias.set_raw_value(jax.device_put(model.bias.get_raw_value(), jax.devices()[3]))
    with pytest.raises(StateError, match=r"model\.bias \(8,\) lies on"):
        train(model, BATCH)
