"""What a user writes around a Flax NNX model, and around a pytree that holds functions. It is never run."""

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import splitjax

Batch = dict[str, jax.Array]


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(784, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.dense(images)


def loss_fn(model: Network, batch: Batch) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"]).mean()


@splitjax.nnx.parallelize(mesh={"data": 2, "model": 4}, sync="auto", verify="first")
def train_step(model: Network, optimizer: Any, batch: Batch) -> jax.Array:
    loss, gradients = splitjax.nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, gradients)
    return loss


def make_objects(key: jax.Array) -> tuple[Network, Any]:
    model = Network(nnx.Rngs(key))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


batch: Batch = {"image": jnp.zeros((32, 784)), "label": jnp.zeros(32, jnp.int32)}
model, optimizer = train_step.init(make_objects, jax.random.key(0), example=(batch,))
assert_type(model, Network)
assert_type(train_step(model, optimizer, batch), jax.Array)
assert_type(train_step.plan(model, optimizer, batch), splitjax.Plan)
assert_type(train_step.like(loss_fn, batch_argnums=1)(model, batch), jax.Array)


@splitjax.equinox.parallelize
def filtered_step(model: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any, jax.Array]:
    return model, opt_state, batch["image"].sum()


assert_type(filtered_step(model, None, batch)[2], jax.Array)
