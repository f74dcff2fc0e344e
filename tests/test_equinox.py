"""`splitjax.equinox`: steps over modules train sharded with the numbers of `eqx.filter_jit` on one device."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import splitjax
import splitjax.equinox
from splitjax.errors import DonatedStateError, GradientError, PlanError, SplitjaxError, StateError

MESH = {"data": 2, "model": 2}
RULES = ("splitbrain", "megatron", "fsdp")
SGD = optax.sgd(0.1, momentum=0.9)
X64 = jax.enable_x64


class CNN(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    hidden: eqx.nn.Linear
    head: eqx.nn.Linear
    activation: Callable

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.conv = eqx.nn.Conv2d(3, 8, 3, key=keys[0])
        self.norm = eqx.nn.BatchNorm(8, "batch", mode="batch")
        self.hidden = eqx.nn.Linear(8 * 4 * 4, 64, key=keys[1])
        self.head = eqx.nn.Linear(64, 8, key=keys[2])
        self.activation = jax.nn.relu

    def __call__(self, x, state):
        x, state = self.norm(self.conv(x), state)
        return self.head(self.activation(self.hidden(self.activation(x).reshape(-1)))), state


class Noisy(eqx.Module):
    layers: list
    drop: eqx.nn.Dropout
    name: str

    def __init__(self, key):
        keys = jax.random.split(key, 2)
        self.layers = [eqx.nn.Linear(16, 64, key=keys[0]), eqx.nn.Linear(64, 8, key=keys[1])]
        self.drop = eqx.nn.Dropout(0.3)
        self.name = "noisy"

    def __call__(self, x, key=None):
        return self.layers[1](self.drop(jax.nn.relu(self.layers[0](x)), key=key))


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def flat_batch(number=0):
    return numbers(16, 16, seed=number), numbers(16, 8, seed=100 + number)


def image_batch(number=0):
    return numbers(16, 3, 6, 6, seed=number), numbers(16, 8, seed=100 + number)


def make_mlp(key=None, tx=SGD):
    model = eqx.nn.MLP(16, 8, 64, 2, key=jax.random.key(0) if key is None else key)
    return model, tx.init(eqx.filter(model, eqx.is_inexact_array))


def loss_fn(model, batch):
    return jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)


def step_with(value_and_grad, tx=SGD):
    def train_step(model, opt_state, batch):
        loss, grads = value_and_grad(loss_fn)(model, batch)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    return train_step


train_step = step_with(splitjax.equinox.value_and_grad)


def arrays(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


def assert_same(one, other, tolerance=1e-10):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def run(step, states, rest, steps=3):
    """Trains: `step(*states, *rest(number))` returns the states, then a loss."""
    losses = []
    for number in range(steps):
        *states, loss = step(*states, *rest(number))
        losses.append(np.asarray(loss))
    return losses, states


@functools.cache
def mlp_on_one_device():
    with X64(True):
        losses, states = run(
            eqx.filter_jit(step_with(eqx.filter_value_and_grad)), make_mlp(), lambda n: (flat_batch(n),)
        )
        return losses, arrays(states)


# The numbers of one device, in double precision.


@pytest.mark.parametrize("rules", RULES)
def test_trains_like_one_device(rules):
    losses, final = mlp_on_one_device()
    with X64(True):
        step = splitjax.equinox.parallelize(train_step, mesh=MESH, rules=rules)
        mine, (model, opt_state) = run(step, make_mlp(), lambda n: (flat_batch(n),))
        assert_same(mine, losses)
        assert_same(arrays((model, opt_state)), final)
    weight = model.layers[1].weight
    assert not weight.sharding.is_fully_replicated
    assert opt_state[0].trace.layers[1].weight.sharding == weight.sharding
    assert len(step.compiles) == 1


def batch_norm_step(value_and_grad):
    def train_step(model, state, opt_state, x, y):
        def of(model, state):
            outputs, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
            return jnp.mean((outputs - y) ** 2), state

        (loss, state), grads = value_and_grad(of, has_aux=True)(model, state)
        updates, opt_state = SGD.update(grads, opt_state)
        return eqx.apply_updates(model, updates), state, opt_state, loss

    return train_step


def make_cnn():
    model, state = eqx.nn.make_with_state(CNN)(jax.random.key(0))
    return model, state, SGD.init(eqx.filter(model, eqx.is_inexact_array))


@functools.cache
def cnn_on_one_device():
    with X64(True):
        return run(eqx.filter_jit(batch_norm_step(eqx.filter_value_and_grad)), make_cnn(), image_batch)


@pytest.mark.parametrize("rules", RULES)
def test_batch_norm(rules):
    losses, final = cnn_on_one_device()
    with X64(True):
        step = splitjax.equinox.parallelize(
            batch_norm_step(splitjax.equinox.value_and_grad),
            mesh=MESH,
            rules=rules,
            state_argnums=(0, 1, 2),
            batch_argnums=(3, 4),
        )
        mine, trained = run(step, make_cnn(), image_batch)
        assert_same(mine, losses)
        assert_same(arrays(trained), arrays(final))
    assert trained[0].activation is jax.nn.relu
    assert not trained[0].hidden.weight.sharding.is_fully_replicated


def test_like_with_an_equinox_state():
    _, (model, state, _) = cnn_on_one_device()

    def predict(model, state, x):
        return jax.vmap(lambda x: eqx.nn.inference_mode(model)(x, state)[0])(x)

    with X64(True):
        step = splitjax.equinox.parallelize(
            batch_norm_step(splitjax.equinox.value_and_grad), mesh=MESH, state_argnums=(0, 1, 2), batch_argnums=(3, 4)
        )
        states = step.place(model, state, make_cnn()[2], example=image_batch())
        parallel = step.like(predict, state_argnums=(0, 1), batch_argnums=2)
        assert_same([parallel(*states[:2], image_batch()[0])], [predict(model, state, image_batch()[0])])


def dropout_step(value_and_grad, tx):
    def train_step(model, opt_state, batch, key):
        def of(model):
            return jnp.mean((jax.vmap(model)(batch[0], jax.random.split(key, batch[0].shape[0])) - batch[1]) ** 2)

        loss, grads = value_and_grad(of)(model)
        updates, opt_state = tx.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss

    return train_step


def test_dropout_with_adam():
    tx = optax.adam(1e-2)

    def states():
        model = Noisy(jax.random.key(0))
        return model, tx.init(eqx.filter(model, eqx.is_inexact_array))

    def rest(number):
        return flat_batch(number), jax.random.key(number)

    with X64(True):
        losses, final = run(eqx.filter_jit(dropout_step(eqx.filter_value_and_grad, tx)), states(), rest)
        for rules in ("splitbrain", "megatron"):
            step = splitjax.equinox.parallelize(
                dropout_step(splitjax.equinox.value_and_grad, tx), mesh={"data": 2, "model": 4}, rules=rules
            )
            mine, trained = run(step, states(), rest)
            assert_same(mine, losses)
            assert_same(arrays(trained), arrays(final))
            assert trained[0].name == "noisy"
            assert trained[0].layers[0].weight.addressable_shards[0].data.shape == (16, 16)


def test_equinoxs_own_gradient_works():
    losses, _ = mlp_on_one_device()
    with X64(True):
        step = splitjax.equinox.parallelize(step_with(eqx.filter_value_and_grad), mesh=MESH)
        assert_same(run(step, make_mlp(), lambda n: (flat_batch(n),))[0], losses)


def test_microbatches():
    losses, final = mlp_on_one_device()
    with X64(True):
        accumulating = step_with(functools.partial(splitjax.equinox.value_and_grad, microbatches=2))
        mine, states = run(
            splitjax.equinox.parallelize(accumulating, mesh=MESH), make_mlp(), lambda n: (flat_batch(n),)
        )
        assert_same(mine, losses)
        assert_same(arrays(states), final)


# Static leaves.


def test_static_leaves_are_part_of_the_program():
    step = splitjax.equinox.parallelize(train_step, mesh=MESH, donate=False)
    model, opt_state = make_mlp()
    batch = jax.tree.map(np.float32, flat_batch())
    first = step(model, opt_state, batch)
    other = eqx.tree_at(lambda m: m.activation, model, jnp.tanh)
    second = step(other, opt_state, batch)
    assert second[0].activation is jnp.tanh and first[0].activation is model.activation
    assert float(first[2]) != float(second[2])
    step(model, opt_state, batch)
    assert len(step.compiles) == 2
    assert step.compiles[1].reason.startswith("model/activation: relu -> ")


def test_results_may_hold_anything():
    class Box:
        __hash__ = None

    box = Box()

    def train(model, opt_state, batch, note):
        *states, loss = train_step(model, opt_state, batch)
        return {"states": tuple(states), "loss": loss, "note": note, "shape": batch[0].shape, "number": 3}

    step = splitjax.equinox.parallelize(train, mesh=MESH, donate=False)
    batch = jax.tree.map(np.float32, flat_batch())
    for _ in range(2):
        result = step(*make_mlp(), batch, box)
    assert result["note"] is box and result["shape"] == (16, 16) and result["number"] == 3
    assert callable(result["states"][0].activation)
    assert len(step.compiles) == 1
    step(*make_mlp(), batch, Box())  # equal to nothing but itself
    assert len(step.compiles) == 2


def test_optimizer_as_an_argument_and_scattered_states():
    def train(model, tx, batch, opt_state, *, scale=2.0):
        loss, grads = splitjax.equinox.value_and_grad(loss_fn)(model, batch)
        updates, opt_state = tx.update(grads, opt_state)
        return loss * scale, opt_state, eqx.apply_updates(model, updates)

    step = splitjax.equinox.parallelize(train, mesh=MESH, state_argnums=(0, 3), batch_argnums=2)
    model, opt_state = make_mlp()
    batch = jax.tree.map(np.float32, flat_batch())
    for _ in range(2):
        loss, opt_state, model = step(model, SGD, batch, opt_state=opt_state)
    assert np.isfinite(loss) and len(step.compiles) == 1
    # 33 numbers in a list: static, so that Python control flow may depend on them.
    listed = splitjax.equinox.parallelize(
        lambda model, n, x: (model, x.sum() * sum(n)),
        mesh=MESH,
        state_argnums=0,
        batch_argnums=2,
        rules="data_parallel",
    )
    assert listed(make_mlp()[0], [1] * 33, np.ones(16, np.float32))[1] == 33 * 16


def test_static_fields_are_part_of_the_program():
    class Listed(eqx.Module):
        weight: jax.Array
        sizes: list = eqx.field(static=True)

    step = splitjax.equinox.parallelize(
        lambda model, x: (model, x.sum() * model.sizes[0]),
        mesh=MESH,
        state_argnums=0,
        batch_argnums=1,
        rules="data_parallel",
    )
    for sizes in ([1, 2], [3, 4], [1, 2]):
        assert step(Listed(jnp.ones(8), sizes), np.ones(16, np.float32))[1] == 16 * sizes[0]
    assert len(step.compiles) == 2


def test_two_states_of_equal_structure():
    def train(model, average, batch):
        grads = splitjax.equinox.grad(loss_fn)(model, batch)
        model = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads))
        blend = jax.tree.map(lambda a, p: 0.5 * (a + p) if eqx.is_array(a) else a, average, model)
        return model, blend

    batch = jax.tree.map(np.float32, flat_batch())
    with pytest.raises(StateError, match="state_outnums"):
        splitjax.equinox.parallelize(train, mesh=MESH)(make_mlp()[0], make_mlp()[0], batch)
    step = splitjax.equinox.parallelize(train, mesh=MESH, state_outnums=(0, 1))
    model = make_mlp()[0]
    model, average = step(model, model, batch)  # one array in two donated states
    model, average = step(model, average, batch)
    assert float(jnp.abs(model.layers[0].weight - average.layers[0].weight).max()) > 0


# Placing.


def test_init_creates_the_states_sharded():
    step = splitjax.equinox.parallelize(train_step, mesh=MESH)
    batch = jax.tree.map(np.float32, flat_batch())
    model, opt_state = step.init(make_mlp, jax.random.key(3), example=(batch,))
    assert model.layers[0].weight.addressable_shards[0].data.shape == (32, 16)
    assert_same(arrays((model, opt_state)), arrays(make_mlp(jax.random.key(3))), 1e-6)
    model, opt_state, _ = step(model, opt_state, batch)
    assert len(step.compiles) == 1


def test_init_makes_static_leaves_once():
    def make(key):
        model = eqx.nn.Sequential(
            [eqx.nn.Linear(16, 64, key=key), eqx.nn.Lambda(lambda x: jnp.tanh(x)), eqx.nn.Linear(64, 8, key=key)]
        )
        return model, SGD.init(eqx.filter(model, eqx.is_inexact_array))

    step = splitjax.equinox.parallelize(train_step, mesh=MESH)
    batch = jax.tree.map(np.float32, flat_batch())
    states = step.init(make, jax.random.key(0), example=(batch,))
    step(*states, batch)
    assert len(step.compiles) == 1


def test_place_and_abstract_state():
    step = splitjax.equinox.parallelize(train_step, mesh=MESH)
    batch = jax.tree.map(np.float32, flat_batch())
    model, opt_state = make_mlp()
    placed, _ = step.place(model, opt_state, example=(batch,))
    abstract, _ = step.abstract_state(make_mlp, jax.random.key(0), example=(batch,))
    assert placed.layers[0].weight.sharding == abstract.layers[0].weight.sharding
    assert placed.layers[0].weight.sharding.spec == jax.P("model", None)
    assert placed.activation is model.activation
    step(placed, step.place(model, opt_state, example=(batch,))[1], batch)
    assert not model.layers[0].weight.is_deleted()
    assert len(step.compiles) == 1
    assert step.lower(*jax.eval_shape(make_mlp_arrays), batch).compile().memory_analysis() is not None


def make_mlp_arrays():
    class Linear(eqx.Module):  # no static leaves, so that eval_shape can return it
        weight: jax.Array

        def __call__(self, x):
            return self.weight @ x

    model = Linear(jnp.ones((8, 16)))
    return model, SGD.init(model)


def test_a_consumed_state_names_the_call():
    step = splitjax.equinox.parallelize(train_step, mesh=MESH)
    batch = jax.tree.map(np.float32, flat_batch())
    model, opt_state = step.init(make_mlp, jax.random.key(0), example=(batch,))
    step(model, opt_state, batch)
    with pytest.raises(DonatedStateError, match=r"call 1 of the step, at .*test_equinox\.py") as caught:
        step(model, opt_state, batch)
    assert caught.value.value == "layers/0/weight"


def test_paths_read_like_the_program():
    plan = splitjax.equinox.parallelize(train_step, mesh=MESH).plan(*make_mlp(), jax.tree.map(np.float32, flat_batch()))
    paths = {leaf.path for leaf in plan.leaves}
    assert {"model/layers/0/weight", "opt_state/0/trace/layers/2/bias", "batch/0"} <= paths


# Evaluation.


def test_like_follows_the_layout():
    step = splitjax.equinox.parallelize(train_step, mesh=MESH)
    batch = jax.tree.map(np.float32, flat_batch())
    states = step.init(make_mlp, jax.random.key(0), example=(batch,))
    evaluate = step.like(loss_fn)
    np.testing.assert_allclose(evaluate(states[0], batch), loss_fn(make_mlp()[0], batch), rtol=1e-5)
    assert evaluate.plan(states[0], batch).leaf("layers/0/weight").rule == "as in the training step"
    evaluate(states[0], batch)  # nothing was donated
    with pytest.raises(PlanError, match="nothing to be like"):
        splitjax.equinox.parallelize(train_step, mesh=MESH).like(loss_fn)(states[0], batch)


# The gradient.


@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("traced", [False, True])
def test_gradient_equals_equinoxs(traced, has_aux):
    def of(model, batch, scale=1.0):
        loss = scale * loss_fn(model, batch)
        return (loss, {"twice": 2 * loss, "activation": model.activation}) if has_aux else loss

    model, batch = make_mlp()[0], jax.tree.map(np.float32, flat_batch())

    def evaluate(value_and_grad):
        def compute(model, batch):
            return value_and_grad(of, has_aux=has_aux)(model, batch, scale=3.0)

        return (eqx.filter_jit(compute) if traced else compute)(model, batch)

    mine, theirs = evaluate(splitjax.equinox.value_and_grad), evaluate(eqx.filter_value_and_grad)
    assert jax.tree.structure(mine) == jax.tree.structure(theirs)
    assert_same(arrays(mine), arrays(theirs), 1e-6)
    assert mine[1].activation is None
    if has_aux:
        assert mine[0][1]["activation"] is model.activation
        grads, aux = splitjax.equinox.grad(of, has_aux=True)(model, batch)
        assert aux["activation"] is model.activation and grads.activation is None


def test_gradient_skips_integers():
    tree = {"weight": jnp.ones(3), "steps": jnp.arange(3), "name": "weights"}
    grads = splitjax.equinox.grad(lambda tree: jnp.sum(tree["weight"] ** 2 * tree["steps"]))(tree)
    assert grads["steps"] is None and grads["name"] is None
    np.testing.assert_array_equal(grads["weight"], 2.0 * np.arange(3))


def test_the_gradients_mistakes():
    with pytest.raises(GradientError, match="microbatches"):
        splitjax.equinox.value_and_grad(loss_fn, microbatches=-1)
    with pytest.raises(GradientError, match="pair"):
        jax.jit(splitjax.equinox.grad(lambda w: jnp.sum(w), has_aux=True))(jnp.ones(3))


# The rest.


def test_other_pytrees_need_no_equinox():
    program = """
import sys, numpy as np, jax.numpy as jnp, splitjax.equinox
step = splitjax.equinox.parallelize(
    lambda model, x: (dict(model, w=model["w"] * 0.5), model["act"](x @ model["w"]).sum()),
    mesh={"data": 2, "model": 2}, state_argnums=0, batch_argnums=1)
model, total = step({"w": jnp.ones((8, 16)), "act": jnp.tanh, "name": "w"}, np.ones((4, 8), np.float32))
assert model["name"] == "w" and "equinox" not in sys.modules and "flax.nnx" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"rules": "nothing"}, "rule set"),
        ({"sync": "wrong"}, "sync"),
        ({"mesh": {"data": 0}}, "data"),
        ({"batch_argnums": 1}, "at once"),
    ],
    ids=["rules", "sync", "mesh", "overlap"],
)
def test_options_are_checked_when_the_decorator_runs(options, word):
    with pytest.raises(SplitjaxError, match=word):
        splitjax.equinox.parallelize(train_step, **{"mesh": MESH, **options})


def test_bare_decorator():
    @splitjax.equinox.parallelize
    def bare(model, opt_state, batch):
        return train_step(model, opt_state, batch)

    assert bare.__name__ == "bare"
    assert np.isfinite(bare(*make_mlp(), batch=jax.tree.map(np.float32, flat_batch()))[2])


def test_static_arguments():
    @splitjax.equinox.parallelize(mesh=MESH, static_argnames="kind", donate=False)
    def train(model, opt_state, batch, kind):
        assert kind == {"of": "loss"}
        return train_step(model, opt_state, batch)

    for _ in range(2):
        train(*make_mlp(), jax.tree.map(np.float32, flat_batch()), FrozenDict(of="loss"))
    assert len(train.compiles) == 1


class FrozenDict(dict):
    def __hash__(self):
        return hash(tuple(sorted(self.items())))


def test_what_jax_says_of_traced_values_names_the_users_function_and_array():
    def an_if(model, opt_state, batch):
        return train_step(model, opt_state, batch) if model.layers[0].bias[0] > 0 else 0.0

    with pytest.raises(Exception, match="traced array") as caught:
        splitjax.equinox.parallelize(an_if, mesh=MESH).plan(*make_mlp(), jax.tree.map(np.float32, flat_batch()))
    text = str(caught.value)
    assert f"an_if at {__file__}" in text and "of the argument model.layers[0].bias." in text, text
