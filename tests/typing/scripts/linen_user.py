"""What a user writes around a Flax Linen model. It is read by type checkers and never run."""

from typing import Any, assert_type

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import splitjax

State = dict[str, Any]
Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


class Network(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        return nn.Dense(10)(nn.relu(nn.Dense(64)(images)))


model = Network()
optimizer = optax.adam(1e-3)


def make_state(key: jax.Array) -> State:
    params = model.init(key, jnp.zeros((1, 784)))
    return {"params": params, "opt": optimizer.init(params)}


@splitjax.parallelize(mesh={"data": 2, "model": 4}, rules="megatron", group_comm="turns", unknown="gather")
def train_step(state: State, batch: Batch) -> tuple[State, Metrics]:
    def loss_fn(params: Any) -> jax.Array:
        logits: Any = model.apply(params, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, gradients = splitjax.value_and_grad(loss_fn)(state["params"])
    updates, opt = optimizer.update(gradients, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}


@splitjax.parallelize
def bare_step(state: State, batch: Batch) -> tuple[State, Metrics]:
    return state, {"loss": batch["image"].sum()}


def evaluate(state: State, batch: Batch) -> Metrics:
    return {"accuracy": (batch["label"] == 0).mean()}


batch: Batch = {"image": jnp.zeros((32, 784)), "label": jnp.zeros(32, jnp.int32)}
described = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in batch.items()}

state = train_step.init(make_state, jax.random.key(0), example=(described,))
assert_type(state, State)
state, metrics = train_step(state, batch)
assert_type(metrics, Metrics)
state, metrics = bare_step(state, batch=batch)

plan = train_step.plan(state, batch)
assert_type(plan, splitjax.Plan)
assert_type(train_step.plan(state, described), splitjax.Plan)  # descriptions of arrays do as well
assert_type(train_step.report(state, batch), splitjax.Report)
train_step.verify(state, batch, sizes="both").raise_if_wrong()
train_step.lower(state, batch).compile()

evaluate_step = train_step.like(evaluate)
assert_type(evaluate_step(state, batch), Metrics)
assert_type(train_step.place(state, example=(batch,)), State)

# Rules and plans of one's own, and what has a registry.
splitjax.parallelize(evaluate, rules="rules/mine.toml", plan=plan, sync={"**/embedding": "zen", "**": "dense"})
splitjax.parallelize(evaluate, rules=splitjax.RuleSet("mine"), sync=splitjax.sync.Zen())
splitjax.parallelize(mesh=jax.make_mesh((8,), ("data",)), backprop=splitjax.PartialBackprop())(evaluate)
