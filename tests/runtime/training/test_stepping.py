"""The training loop with steps of every frontend: it trains, tells, saves, and resumes to the same numbers."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import splitjax
from splitjax import runtime
from splitjax.errors import TrainingError
from splitjax.runtime import CheckpointOptions, Checkpoints, LoopOptions
from tests.runtime.states import assert_same

MESH = {"data": 2, "model": 2}
TX = optax.adam(1e-2)
NUM_STEPS, SAVED = 6, 3


def make_batch(number, size=8):
    rng = np.random.default_rng(number)
    return {name: rng.standard_normal((size, width)).astype(np.float32) for name, width in (("x", 8), ("y", 4))}


WEIGHT = {"w": np.zeros((8, 4), np.float32)}
EXAMPLE = (jax.eval_shape(lambda: make_batch(0)),)


class Rows:
    def __init__(self):
        self.rows = []

    def step(self, row):
        self.rows.append(row)

    def close(self):
        pass

    @property
    def losses(self):
        return [row["loss"] for row in self.rows]


# One model for each frontend: a decorated step, and what makes its states.


def plain(parts):
    """`parts`: one state, or parameters and optimizer apart."""

    def init_fn(key):
        params = {"hidden": jax.random.normal(key, (8, 16)), "out": jnp.zeros((16, 4))}
        opt = TX.init(params)
        return {"params": params, "opt": opt, "key": jax.random.key(7)} if parts == 1 else (params, opt)

    def loss_fn(params, batch, mask):
        hidden = jnp.tanh(batch["x"] @ params["hidden"]) * mask
        return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)

    def together(state, batch):
        key, noise = jax.random.split(state["key"])
        mask = jax.random.bernoulli(noise, 0.5, (8, 16))
        loss, grads = splitjax.value_and_grad(loss_fn)(state["params"], batch, mask)
        updates, opt = TX.update(grads, state["opt"], state["params"])
        new = {"params": optax.apply_updates(state["params"], updates), "opt": opt, "key": key}
        return new, {"loss": loss, "half": loss / 2}

    def apart(params, opt, batch):
        loss, grads = splitjax.value_and_grad(loss_fn)(params, batch, 1.0)
        updates, opt = TX.update(grads, opt, params)
        return {"loss": loss}, optax.apply_updates(params, updates), opt  # states are found by structure

    if parts == 1:
        return splitjax.parallelize(together, mesh=MESH), init_fn
    return splitjax.parallelize(apart, mesh=MESH, state_argnums=(0, 1), batch_argnums=2), init_fn


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden, self.same = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        self.same.kernel = self.hidden.kernel  # tied
        self.norm, self.drop = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(self.drop(nnx.relu(self.norm(self.same(nnx.relu(self.hidden(x)))))))


def in_place():
    def train_step(model, optimizer, batch):
        loss, grads = splitjax.nnx.value_and_grad(lambda model: jnp.mean((model(batch["x"]) - batch["y"]) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    def make(key):
        model = Net(nnx.Rngs(key))
        return model, nnx.Optimizer(model, TX, wrt=nnx.Param)

    return splitjax.nnx.parallelize(train_step, mesh=MESH), make


def in_place_and_returned():
    """An NNX model beside an optimizer state that is a plain pytree."""

    def train_step(model, opt, batch):
        loss, grads = splitjax.nnx.value_and_grad(lambda model: jnp.mean((model(batch["x"]) - batch["y"]) ** 2))(model)
        params = nnx.state(model, nnx.Param)
        updates, opt = TX.update(nnx.to_pure_dict(grads), opt)
        nnx.replace_by_pure_dict(params, optax.apply_updates(nnx.to_pure_dict(params), updates))
        nnx.update(model, params)
        return opt, {"loss": loss}

    def make(key):
        model = Net(nnx.Rngs(key))
        return model, TX.init(nnx.to_pure_dict(nnx.state(model, nnx.Param)))

    return splitjax.nnx.parallelize(train_step, mesh=MESH, state_argnums=(0, 1), batch_argnums=2), make


def modules():
    def train_step(model, opt, batch):
        def loss_fn(model):
            return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)

        loss, grads = splitjax.equinox.value_and_grad(loss_fn)(model)
        updates, opt = TX.update(grads, opt, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), opt, loss

    def make(key):
        model = eqx.nn.MLP(8, 4, 16, 2, key=key)  # its activations are functions among its leaves
        return model, TX.init(eqx.filter(model, eqx.is_inexact_array))

    return splitjax.equinox.parallelize(train_step, mesh=MESH), make


FRONTENDS = {
    "plain": lambda: plain(1), "two states": lambda: plain(2), "nnx": in_place, "nnx and plain": in_place_and_returned,
    "equinox": modules,
}  # fmt: skip


def by_position(start):
    """Batches with a position that is any JSON: the first that lies behind `start`."""
    first = 0 if start is None else start["files"][0]
    return (({"files": [number + 1], "seen": None}, make_batch(number)) for number in range(first, 100))


def by_count(start):
    return (make_batch(number) for number in range(100))


@pytest.mark.parametrize("data", [by_position, by_count], ids=["positions", "plain batches"])
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_resumed_run_has_the_numbers_of_an_undisturbed_one(tmp_path, frontend, data):
    def run(state, step, done, start):
        rows = Rows()
        with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
            options = LoopOptions(NUM_STEPS, 8, checkpoint_every=SAVED)
            more = {"first_step": done + 1, "checkpoints": checkpoints, "observers": [rows]}
            outcome = runtime.train(step, state, data(start), options, **more)
        return outcome, rows.losses

    step, make = FRONTENDS[frontend]()
    whole, losses = run(step.init(make, jax.random.key(0), example=EXAMPLE), step, 0, None)
    assert len(set(losses)) == NUM_STEPS and losses[-1] < losses[0]
    step, make = FRONTENDS[frontend]()
    with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
        restored = runtime.restore(checkpoints, step, make, jax.random.key(1), example=EXAMPLE, at=SAVED)
        assert runtime.restore(checkpoints, step, make, jax.random.key(1), example=EXAMPLE).step == NUM_STEPS
    start = restored.extra["position"]
    assert start == (SAVED if data is by_count else {"files": [SAVED], "seen": None})
    resumed, rest = run(restored.state, step, restored.step, start)
    assert rest == losses[SAVED:]
    arrays = lambda state: [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    assert_same(arrays(resumed.state), arrays(whole.state))
    assert jax.tree.structure(resumed.state) == jax.tree.structure(whole.state)


def called(frontend, state, step, batch):
    """The new state and the loss of one call, by hand."""
    if frontend == "plain":
        state, metrics = step(state, batch)
        return state, metrics["loss"]
    if frontend == "two states":
        metrics, *state = step(*state, batch)
        return state, metrics["loss"]
    if frontend == "nnx":
        return state, step(*state, batch)
    if frontend == "nnx and plain":
        opt, metrics = step(*state, batch)
        return (state[0], opt), metrics["loss"]
    *state, loss = step(*state, batch)
    return state, loss


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_the_losses_are_those_of_calls_of_the_step(frontend):
    step, make = FRONTENDS[frontend]()
    rows = Rows()
    state = step.init(make, jax.random.key(0), example=EXAMPLE)
    runtime.train(step, state, map(make_batch, range(3)), LoopOptions(3, 8), observers=[rows])
    state = step.init(make, jax.random.key(0), example=EXAMPLE)
    for number, loss in enumerate(rows.losses):
        state, expected = called(frontend, state, step, make_batch(number))
        assert loss == float(expected)


def test_tied_variables_are_tied_again_when_they_are_restored(tmp_path):
    step, make = in_place()
    states = step.init(make, jax.random.key(0), example=EXAMPLE)
    step(*states, make_batch(0))
    with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
        checkpoints.save(1, states)
        model, optimizer = checkpoints.restore(step.abstract_state(make, jax.random.key(1), example=EXAMPLE)).state
    assert model.same.kernel is model.hidden.kernel and model.same.bias is not model.hidden.bias
    assert_same(nnx.state((model, optimizer)), nnx.state(states))


def test_a_step_with_two_batch_arguments_gets_tuples():
    def train_step(params, x, y):
        loss, grads = splitjax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(params)
        return params - 0.1 * grads, loss

    step = splitjax.parallelize(train_step, mesh=MESH, rules="data_parallel", batch_argnums=(1, 2))
    rows = Rows()
    pairs = lambda: ((batch["x"], batch["y"]) for batch in map(make_batch, range(3)))
    runtime.train(step, np.zeros((8, 4), np.float32), pairs(), LoopOptions(3, 8), observers=[rows])
    params, expected = np.zeros((8, 4), np.float32), []
    for x, y in pairs():
        params, loss = step(params, x, y)
        expected.append(float(loss))
    assert rows.losses == expected
    with pytest.raises(TrainingError, match="2 batch arguments"):
        runtime.train(step, np.zeros((8, 4), np.float32), map(make_batch, range(3)), LoopOptions(3, 8))


# What is refused.


def refused(pattern, step, state, batches=None, **more):
    with pytest.raises(TrainingError, match=pattern) as caught:
        batches = map(make_batch, range(9)) if batches is None else batches
        runtime.train(step, state, batches, LoopOptions(3, 8), **more)
    assert caught.value.place and caught.value.remedy and caught.value.value is not None
    return caught.value


def test_states_and_results_that_are_none():
    step, make = in_place()
    model, optimizer = step.init(make, jax.random.key(0), example=EXAMPLE)
    undecorated = nnx.jit(lambda state, batch: jnp.float32(0))
    assert "splitjax.nnx.parallelize" in refused("new state and its metrics", undecorated, (model, optimizer)).remedy
    step, make = modules()
    model, opt = step.init(make, jax.random.key(0), example=EXAMPLE)
    assert "what step.init returned" in refused("the step has 2 states", step, model).remedy
    refused("the step has 2 states", step, (model, opt, opt))
    evaluate = step.like(lambda model, batch: {"loss": jnp.mean(jax.vmap(model)(batch["x"]))})
    assert "like" in refused("returns its new states", evaluate, model).remedy
    three = lambda params, batch: (params, batch["x"].mean(), batch["y"].mean())
    refused("and nothing else", splitjax.parallelize(three, mesh=MESH, rules="data_parallel"), WEIGHT)


def test_metrics_that_are_none():
    def step_with(metrics):
        return lambda state, batch: (state, metrics)

    refused("no loss", step_with({"accuracy": 1.0}), 0)
    refused("no loss", step_with(None), 0)
    refused("no loss", step_with(np.zeros(3)), 0)
    refused("'logits' is no single number", step_with({"loss": 1.0, "logits": np.zeros(3)}), 0)
    refused("'name' is no single number", step_with({"loss": 1.0, "name": "a"}), 0)


def test_arguments_that_the_loop_does_not_have():
    def train_step(state, batch, key):
        return state, batch["x"].mean()

    step = splitjax.parallelize(train_step, mesh=MESH, rules="data_parallel")
    assert "in the state" in refused("nothing to give for the argument 'key'", step, WEIGHT).remedy

    def with_default(state, scale=2.0, *, batch):
        return state, scale * batch["x"].mean()

    step = splitjax.parallelize(with_default, mesh=MESH, rules="data_parallel", batch_argnums=2)
    rows = Rows()
    runtime.train(step, WEIGHT, map(make_batch, range(2)), LoopOptions(2, 8), observers=[rows])
    np.testing.assert_allclose(rows.losses, [2 * make_batch(number)["x"].mean() for number in range(2)], rtol=1e-5)
