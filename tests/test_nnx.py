"""`splitjax.nnx`: steps that change NNX objects train sharded with the numbers of `nnx.jit` on one device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import splitjax
import splitjax.nnx
from splitjax.errors import DonatedStateError, GradientError, PlanError, SplitjaxError, StateError, TraceError

MESH = {"data": 2, "model": 2}
RULES = ("splitbrain", "megatron", "fsdp")
SGD = optax.sgd(0.1, momentum=0.9)


class MLP(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.layers = nnx.List([nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)])
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.head = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = self.drop(nnx.relu(layer(x)))
        return self.head(x)


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.hidden = nnx.Linear(8 * 6 * 6, 64, rngs=rngs)
        self.head = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        return self.head(nnx.relu(self.hidden(x.reshape(x.shape[0], -1))))


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def flat_batch(number=0):
    return {"x": numbers(16, 16, seed=number), "y": numbers(16, 8, seed=100 + number)}


def image_batch(number=0):
    return {"x": numbers(16, 6, 6, 3, seed=number), "y": numbers(16, 8, seed=100 + number)}


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def make(key=0, model=MLP, tx=SGD):
    made = model(nnx.Rngs(key))
    return made, nnx.Optimizer(made, tx, wrt=nnx.Param)


def step_with(value_and_grad):
    def train_step(model, optimizer, batch):
        loss, grads = value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    return train_step


train_step = step_with(splitjax.nnx.value_and_grad)


def values(*objects):
    return [np.asarray(leaf) for one in objects for leaf in jax.tree.leaves(nnx.state(one, nnx.Not(nnx.RngKey)))]


def assert_same(one, other, tolerance=1e-5):
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@functools.cache
def on_one_device(make_objects, batches):
    """Losses and final values."""
    objects, plain = make_objects(), nnx.jit(step_with(nnx.value_and_grad))
    return [float(plain(*objects, batches(number))) for number in range(4)], values(*objects)


def compare(make_objects, batches, step, tolerance=1e-5, state_tolerance=1e-5):
    """Trains under `step`, with the numbers of one device; returns the objects."""
    objects = make_objects()
    losses, final = on_one_device(make_objects, batches)
    assert_same([step(*objects, batches(number)) for number in range(4)], losses, tolerance)
    if state_tolerance is not None:
        assert_same(values(*objects), final, state_tolerance)
    return objects


# The numbers of one device.


def make_dropout():
    return make(model=functools.partial(MLP, rate=0.3))


def make_cnn():
    return make(model=CNN)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(
    ("make_objects", "batches"),
    [(make, flat_batch), (make_dropout, flat_batch), (make_cnn, image_batch)],
    ids=["mlp", "dropout", "batch_norm"],
)
def test_trains_like_one_device(make_objects, batches, rules):
    step = splitjax.nnx.parallelize(train_step, mesh=MESH, rules=rules)
    model, _ = compare(make_objects, batches, step)
    assert len(step.compiles) == 1
    weights = model.hidden if make_objects is make_cnn else model.layers[0]
    assert not weights.kernel.get_value().sharding.is_fully_replicated


@pytest.mark.parametrize("rules", ["splitbrain", "megatron"])
def test_eight_devices(rules):
    model, optimizer = compare(
        make, flat_batch, splitjax.nnx.parallelize(train_step, mesh={"data": 2, "model": 4}, rules=rules)
    )
    kernel = model.layers[0].kernel.get_value()
    assert kernel.addressable_shards[0].data.shape == (16, 16)
    assert optimizer.opt_state[0].trace["layers"][0]["kernel"].get_value().sharding == kernel.sharding


def test_adam():
    # Adam turns the rounding noise of a zero gradient into a step of its learning rate: losses only.
    step = splitjax.nnx.parallelize(train_step, mesh=MESH)
    compare(functools.partial(make, tx=optax.adam(1e-2)), flat_batch, step, tolerance=1e-4, state_tolerance=None)


def test_the_plain_boundary_is_not_needed():
    compare(make, flat_batch, splitjax.nnx.parallelize(step_with(nnx.value_and_grad), mesh=MESH))


@pytest.mark.parametrize("make_objects", [make, make_dropout])
def test_microbatches(make_objects):
    accumulating = step_with(functools.partial(splitjax.nnx.value_and_grad, microbatches=2))
    compare(make_objects, flat_batch, splitjax.nnx.parallelize(accumulating, mesh=MESH))


# Objects.


def test_metrics_and_random_streams_are_state():
    def train(model, optimizer, metrics, batch, rngs):
        def loss_of(model, rngs):
            noisy = batch["x"] + 0.1 * jax.random.normal(rngs.noise(), batch["x"].shape)
            return jnp.mean((model(noisy) - batch["y"]) ** 2)

        loss, grads = value_and_grad(loss_of)(model, rngs)
        optimizer.update(model, grads)
        metrics.update(loss=loss, values=batch["y"])

    def objects():
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), mean=nnx.metrics.Average())
        return *make(), metrics, nnx.Rngs(noise=7)

    *mine, my_rngs = objects()
    *reference, rngs = objects()
    value_and_grad = splitjax.nnx.value_and_grad
    step = splitjax.nnx.parallelize(train, mesh=MESH)
    for number in range(3):
        assert step(*mine, flat_batch(number), my_rngs) is None
    value_and_grad, plain = nnx.value_and_grad, nnx.jit(train)
    for number in range(3):
        plain(*reference, flat_batch(number), rngs)
    assert int(my_rngs.noise.count.get_value()) == 3
    for name, value in reference[2].compute().items():
        np.testing.assert_allclose(mine[2].compute()[name], value, rtol=1e-5)


def test_an_optimizer_that_holds_the_model():
    def train(optimizer, batch):
        loss, grads = splitjax.nnx.value_and_grad(loss_fn)(optimizer.model, batch)
        optimizer.update(grads)
        return loss

    model = MLP(nnx.Rngs(0))
    optimizer = nnx.ModelAndOptimizer(model, SGD)
    losses, _ = on_one_device(make, flat_batch)
    step = splitjax.nnx.parallelize(train, mesh=MESH)
    assert_same([step(optimizer, flat_batch(number)) for number in range(4)], losses)
    assert optimizer.model is model
    predict = step.like(lambda net, x: net(x))
    assert predict.plan(model, flat_batch()["x"]).leaf("optimizer/model/head/kernel").rule == "as in the training step"
    single = MLP(nnx.Rngs(0))
    nnx.update(single, jax.tree.map(np.asarray, nnx.state(model, nnx.Param)))
    np.testing.assert_allclose(predict(model, flat_batch()["x"]), single(flat_batch()["x"]), rtol=1e-4, atol=1e-5)


def test_variables_shared_between_arguments_stay_shared():
    def train(model, optimizer, batch):
        loss, grads = splitjax.nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(grads)
        return loss

    model = MLP(nnx.Rngs(0))
    optimizer = nnx.ModelAndOptimizer(model, SGD)
    step = splitjax.nnx.parallelize(train, mesh=MESH)
    step(model, optimizer, flat_batch())
    paths = [leaf.path for leaf in step.plan(model, optimizer, flat_batch()).leaves]
    assert "model/head/kernel" in paths and "optimizer/model/head/kernel" not in paths
    assert optimizer.model.head.kernel is model.head.kernel


def test_objects_in_containers_and_plain_states():
    def train(objects, average, batch):
        model = objects["model"]
        loss, grads = splitjax.nnx.value_and_grad(loss_fn)(model, batch)
        objects["optimizer"].update(model, grads)
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        return {"loss": loss, "half": 0.5}, average, model, nnx.state(model, nnx.Param)

    model, optimizer = make()
    average = jax.tree.map(jnp.copy, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    step = splitjax.nnx.parallelize(train, mesh=MESH, state_argnums=(0, 1), batch_argnums=2)
    objects = {"model": model, "optimizer": optimizer}
    for number in range(2):
        metrics, average, returned, params = step(objects, average, flat_batch(number))
    assert returned is model
    assert isinstance(metrics["half"], jax.Array) and float(metrics["half"]) == 0.5
    assert average["head"]["kernel"].sharding == model.head.kernel.get_value().sharding
    np.testing.assert_array_equal(params["head"]["kernel"].get_value(), model.head.kernel.get_value())
    assert len(step.compiles) == 1


def test_objects_outside_state_argnums_are_only_read():
    def distil(model, optimizer, teacher, batch):
        target = teacher(batch["x"])
        loss, grads = splitjax.nnx.value_and_grad(lambda model: jnp.mean((model(batch["x"]) - target) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    teacher = MLP(nnx.Rngs(1))
    before = teacher.head.kernel.get_value()
    step = splitjax.nnx.parallelize(distil, mesh=MESH, state_argnums=(0, 1))
    step(*make(), teacher, flat_batch())
    assert teacher.head.kernel.get_value() is before and not before.is_deleted()

    def spoil(model, optimizer, teacher, batch):
        teacher.head.bias[...] += 1.0
        return distil(model, optimizer, teacher, batch)

    with pytest.raises(StateError, match="no state") as caught:
        splitjax.nnx.parallelize(spoil, mesh=MESH, state_argnums=(0, 1))(*make(), teacher, flat_batch())
    assert caught.value.value == "teacher/head/bias"


def test_a_bare_array_is_a_constant():
    class Scaled(nnx.Module):
        def __init__(self, rngs):
            self.inner, self.scale = MLP(rngs), jnp.full(8, 2.0)

        def __call__(self, x):
            return self.inner(x) * self.scale

    compare(functools.partial(make, model=Scaled), flat_batch, splitjax.nnx.parallelize(train_step, mesh=MESH))

    def grow(model, batch):
        model.scale = model.scale + 1.0

    with pytest.raises(StateError) as caught:
        splitjax.nnx.parallelize(grow, mesh=MESH)(Scaled(nnx.Rngs(0)), flat_batch())
    assert caught.value.value == "model/scale" and "nnx.Variable" in caught.value.remedy


# Structure.


def test_static_attributes_are_part_of_the_program():
    model, optimizer = make(model=functools.partial(MLP, rate=0.3))
    step = splitjax.nnx.parallelize(train_step, mesh=MESH)
    step(model, optimizer, flat_batch())
    model.eval()
    step(model, optimizer, flat_batch())
    model.train()
    step(model, optimizer, flat_batch())
    assert [record.number for record in step.compiles] == [1, 2]
    assert step.compiles[1].reason == "model/drop/deterministic: False -> True"


def test_static_attributes_that_the_step_sets_reach_the_object():
    def train(model, optimizer, batch):
        model.train()
        return train_step(model, optimizer, batch)

    model, optimizer = make(model=functools.partial(MLP, rate=0.3))
    model.eval()
    step = splitjax.nnx.parallelize(train, mesh=MESH)
    step(model, optimizer, flat_batch())
    assert model.drop.deterministic is False
    for number in range(1, 4):
        step(model, optimizer, flat_batch(number))
    assert_same(values(model, optimizer), on_one_device(make_dropout, flat_batch)[1])


def test_a_changed_structure_is_an_error_that_names_it():
    def train(model, optimizer, batch):
        loss = train_step(model, optimizer, batch)
        model.extra = nnx.Param(jnp.ones(3))
        return loss

    model, optimizer = make()
    with pytest.raises(StateError, match="model/extra goes in absent and comes out Param"):
        splitjax.nnx.parallelize(train, mesh=MESH)(model, optimizer, flat_batch())
    assert not hasattr(model, "extra")

    def cast(model, optimizer, batch):
        model.head.bias.set_value(model.head.bias.get_value().astype(jnp.bfloat16))

    with pytest.raises(StateError, match=r"model/head/bias goes in as float32\[8\] and comes out as bfloat16\[8\]"):
        splitjax.nnx.parallelize(cast, mesh=MESH)(*make(), flat_batch())


def test_what_the_loss_adds_can_be_popped():
    def capturing(model, batch):
        hidden = model.layers[0](batch["x"])
        model.hidden_size = nnx.Intermediate(jnp.mean(hidden**2))
        return loss_fn(model, batch)

    def train(model, optimizer, batch):
        _, grads = splitjax.nnx.value_and_grad(capturing)(model, batch)
        seen = nnx.pop(model, nnx.Intermediate)
        optimizer.update(model, grads)
        return seen["hidden_size"].get_value()

    model, optimizer = make()
    expected = jnp.mean(model.layers[0](flat_batch()["x"]) ** 2)
    step = splitjax.nnx.parallelize(train, mesh=MESH)
    np.testing.assert_allclose(step(model, optimizer, flat_batch()), expected, rtol=1e-5)
    assert not hasattr(model, "hidden_size")


# Placing.


def test_init_creates_the_objects_sharded():
    step = splitjax.nnx.parallelize(train_step, mesh=MESH)
    model, optimizer = step.init(make, jax.random.key(3), example=(flat_batch(),))
    kernel = model.layers[0].kernel.get_value()
    assert kernel.addressable_shards[0].data.shape == (16, 32)
    assert_same(values(model, optimizer), values(*make(jax.random.key(3))))
    step(model, optimizer, flat_batch())
    assert len(step.compiles) == 1
    assert model.layers[0].kernel.get_value().sharding == kernel.sharding


def test_place_moves_in_place_and_copies():
    step = splitjax.nnx.parallelize(train_step, mesh=MESH)
    model, optimizer = make()
    old = model.layers[0].kernel.get_value()
    placed = step.place(model, optimizer, example=(flat_batch(),))
    assert placed[0] is model and placed[1] is optimizer
    assert model.layers[0].kernel.get_value().sharding.spec == step.plan(model, optimizer, flat_batch()).spec(
        "model/layers/0/kernel"
    )
    step(model, optimizer, flat_batch())
    assert not old.is_deleted()


def test_abstract_state():
    step = splitjax.nnx.parallelize(train_step, mesh=MESH)
    model, optimizer = step.abstract_state(make, jax.random.key(0), example=(flat_batch(),))
    kernel = model.layers[0].kernel.get_raw_value()
    assert isinstance(kernel, jax.ShapeDtypeStruct) and kernel.sharding.spec == jax.P(None, "model")
    abstract = nnx.eval_shape(make)
    assert step.plan(*abstract, flat_batch()).spec("model/layers/0/kernel") == jax.P(None, "model")
    assert step.lower(*abstract, flat_batch()).compile().memory_analysis() is not None
    assert len(step.compiles) == 1


def test_paths_read_like_the_program():
    step = splitjax.nnx.parallelize(train_step, mesh=MESH)
    paths = {leaf.path for leaf in step.plan(*make(), flat_batch()).leaves}
    assert {"model/layers/0/kernel", "optimizer/opt_state/0/trace/head/bias", "optimizer/step", "batch/x"} <= paths


def test_arrays_are_donated_once_each():
    model, optimizer = make()
    step = splitjax.nnx.parallelize(train_step, mesh=MESH)
    step(model, optimizer, flat_batch())
    old = model.head.kernel.get_value()
    for number in range(3):
        step(model, optimizer, flat_batch(number))
    assert old.is_deleted()

    kept = splitjax.nnx.parallelize(train_step, mesh=MESH, donate=False)
    old = model.head.kernel.get_value()
    kept(model, optimizer, flat_batch())
    assert not old.is_deleted()


def test_objects_that_share_an_array():
    def train(model, target, optimizer, batch):
        loss = train_step(model, optimizer, batch)
        nnx.update(
            target, jax.tree.map(lambda a, b: 0.5 * (a + b), nnx.state(target, nnx.Param), nnx.state(model, nnx.Param))
        )
        return loss

    step = splitjax.nnx.parallelize(train, mesh=MESH)
    model, optimizer = make()
    target = MLP(nnx.Rngs(1))
    step.place(model, target, optimizer, example=(flat_batch(),))
    nnx.update(target, nnx.to_pure_dict(nnx.state(model)))
    assert target.head.kernel.get_raw_value() is model.head.kernel.get_raw_value()
    step(model, target, optimizer, flat_batch())
    assert np.isfinite(step(model, target, optimizer, flat_batch()))


def test_a_state_that_shares_arrays_with_an_object_that_is_read():
    def distil(model, optimizer, teacher, batch):
        target = teacher(batch["x"]) + 1.0
        loss, grads = splitjax.nnx.value_and_grad(lambda model: jnp.mean((model(batch["x"]) - target) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    step = splitjax.nnx.parallelize(distil, mesh=MESH, state_argnums=(0, 1), rules="data_parallel")
    model, optimizer = make()
    step.place(model, optimizer, example=(MLP(nnx.Rngs(1)), flat_batch()))
    teacher = MLP(nnx.Rngs(1))
    nnx.update(teacher, nnx.to_pure_dict(nnx.state(model)))
    np.testing.assert_allclose(step(model, optimizer, teacher, flat_batch()), 1.0, rtol=1e-6)
    assert not teacher.head.kernel.get_value().is_deleted()


def test_consumed_arrays_are_named():
    step = splitjax.nnx.parallelize(train_step, mesh=MESH)
    model, optimizer = make()
    step(model, optimizer, flat_batch())
    clone = MLP(nnx.Rngs(0))
    nnx.update(clone, nnx.to_pure_dict(nnx.state(model)))
    step(model, optimizer, flat_batch())
    with pytest.raises(DonatedStateError) as caught:
        step(clone, optimizer, flat_batch())
    assert caught.value.value.startswith("model/") and "nnx.clone" in caught.value.remedy


# Evaluation.


def test_like_follows_the_layout_and_updates_metrics():
    step = splitjax.nnx.parallelize(train_step, mesh=MESH)
    model, optimizer = make(model=functools.partial(MLP, rate=0.3))
    step(model, optimizer, flat_batch())

    def evaluate(net, metrics, batch):
        outputs = net(batch["x"])
        metrics.update(values=outputs)
        return outputs

    evaluation = step.like(evaluate)
    model.eval()
    metrics, reference = nnx.metrics.Average(), nnx.metrics.Average()
    kernel = model.layers[0].kernel.get_value()
    for number in range(3):
        outputs = evaluation(model, metrics, flat_batch(number))
        single = MLP(nnx.Rngs(0))
        single.eval()
        nnx.update(single, jax.tree.map(np.asarray, nnx.state(model, nnx.Param)))
        expected = single(flat_batch(number)["x"])
        reference.update(values=expected)
        np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(metrics.compute(), reference.compute(), rtol=1e-4, atol=1e-6)
    assert model.layers[0].kernel.get_value() is kernel
    assert len(evaluation.compiles) == 1 and evaluation.mesh is step.mesh
    assert evaluation.plan(model, metrics, flat_batch()).leaf("model/layers/0/kernel").rule == "as in the training step"


def test_like_needs_a_plan():
    step = splitjax.nnx.parallelize(train_step, mesh=MESH)
    with pytest.raises(PlanError, match="nothing to be like"):
        step.like(lambda model, x: model(x))(MLP(nnx.Rngs(0)), flat_batch()["x"])


# The gradient.


def test_gradient_outside_a_step_is_that_of_nnx():
    model = MLP(nnx.Rngs(0))
    loss, grads = splitjax.nnx.value_and_grad(loss_fn)(model, flat_batch())
    expected_loss, expected = nnx.value_and_grad(loss_fn)(model, flat_batch())
    np.testing.assert_array_equal(loss, expected_loss)
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    assert_same(map(np.asarray, jax.tree.leaves(grads)), map(np.asarray, jax.tree.leaves(expected)), 0)


@pytest.mark.parametrize(
    ("argnums", "has_aux"),
    [
        (0, False),
        (nnx.DiffState(0, nnx.PathContains("kernel")), True),
        ((0, 2), False),
        ((nnx.DiffState(0, nnx.Param), 1, 2), True),
    ],
    ids=["int", "filter", "two", "mixed"],
)
def test_gradient_in_a_trace_equals_nnx(argnums, has_aux):
    def loss_of(model, x, bias):
        outputs = model(x)
        loss = jnp.mean((outputs + bias.get_value()) ** 2)
        return (loss, {"outputs": outputs, "name": "mean"}) if has_aux else loss

    def run(value_and_grad):
        model, bias = CNN(nnx.Rngs(0)), nnx.Param(jnp.ones(8))

        @nnx.jit
        def evaluate(model, bias, x):
            value, grads = value_and_grad(loss_of, argnums=argnums, has_aux=has_aux)(model, x, bias)
            if has_aux:
                assert value[1].pop("name") == "mean"
            return value, grads

        return evaluate(model, bias, image_batch()["x"]), values(model)

    (mine, my_values), (theirs, their_values) = run(splitjax.nnx.value_and_grad), run(nnx.value_and_grad)
    assert jax.tree.structure(mine) == jax.tree.structure(theirs)
    assert_same(map(np.asarray, jax.tree.leaves(mine)), map(np.asarray, jax.tree.leaves(theirs)), 1e-6)
    assert_same(my_values, their_values, 1e-6)  # the batch statistics moved


def test_grad():
    def train(model, batch):
        grads, aux = splitjax.nnx.grad(lambda model: (loss_fn(model, batch), 1.0), has_aux=True)(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))
        return aux

    model = MLP(nnx.Rngs(0))
    before = loss_fn(model, flat_batch())
    step = splitjax.nnx.parallelize(train, mesh=MESH)
    for _ in range(3):
        step(model, flat_batch())
    predict = step.like(loss_fn)
    assert predict(model, flat_batch()) < before


def test_a_variable_cannot_be_differentiated_and_fixed():
    @nnx.jit
    def run(model, x):
        return splitjax.nnx.grad(lambda one, other: jnp.sum(one(x) * other(x)))(model, model)

    with pytest.raises(GradientError, match="held fixed"):
        run(MLP(nnx.Rngs(0)), flat_batch()["x"])


def test_microbatches_is_checked_at_once():
    with pytest.raises(GradientError, match="microbatches"):
        splitjax.nnx.value_and_grad(loss_fn, microbatches=0)


# Mistakes.


def test_the_plain_decorator_rejects_nnx_objects():
    with pytest.raises(TraceError, match="changes in place") as caught:
        splitjax.parallelize(train_step, mesh=MESH)(*make(), flat_batch())
    assert "splitjax.nnx.parallelize" in caught.value.remedy


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"rules": "nothing"}, "rule set"),
        ({"sync": "wrong"}, "sync"),
        ({"mesh": {"data": 0}}, "data"),
        ({"unknown": 1}, "unknown"),
    ],
    ids=["rules", "sync", "mesh", "unknown"],
)
def test_options_are_checked_when_the_decorator_runs(options, word):
    with pytest.raises(SplitjaxError, match=word):
        splitjax.nnx.parallelize(train_step, **{"mesh": MESH, **options})


def test_a_batch_holds_no_objects():
    step = splitjax.nnx.parallelize(train_step, mesh=MESH, batch_argnums=1)
    with pytest.raises(StateError, match="cannot be a batch"):
        step(*make(), flat_batch())


def test_a_traced_static_attribute_is_named():
    class Bare(nnx.Module):
        def __init__(self, rngs):
            self.scale = jnp.ones(8) * jax.random.normal(rngs(), (8,))

    def train(model, batch):
        return jnp.sum(batch["x"])

    step = splitjax.nnx.parallelize(train, mesh=MESH)
    with pytest.raises(TraceError) as caught:
        step.init(lambda key: Bare(nnx.Rngs(key)), jax.random.key(0), example=(flat_batch(),))
    assert caught.value.value == ["model/scale"]


def test_bare_decorator_and_keyword_arguments():
    @splitjax.nnx.parallelize
    def bare(model, optimizer, batch, *, scale=1.0):
        loss, grads = splitjax.nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss * scale

    assert bare.__name__ == "bare"
    assert dict(bare.mesh.shape) == {"data": 8}
    assert np.isfinite(bare(*make(), batch=flat_batch()))


def test_static_arguments():
    @splitjax.nnx.parallelize(mesh=MESH, static_argnames="kind")
    def train(model, optimizer, batch, kind):
        return train_step(model, optimizer, batch) if kind == "train" else loss_fn(model, batch)

    model, optimizer = make()
    first = train(model, optimizer, flat_batch(), "train")
    second = train(model, optimizer, flat_batch(), "look")
    third = train(model, optimizer, flat_batch(), kind="look")
    assert second < first and second == third
    assert len(train.compiles) == 2


def test_static_fields_without_a_hash():
    """Lists and dicts on a module, as many people write them: equal ones share a program, one changed in place does
    not."""

    class Listed(nnx.Module):
        def __init__(self, sizes, options):
            self.sizes, self.options = sizes, options
            self.weight = nnx.Param(jnp.ones(8))

    step = splitjax.nnx.parallelize(
        lambda model, x: x.sum() * sum(model.sizes) * model.options["a"][0], mesh=MESH, rules="data_parallel"
    )
    model = Listed([1, 2], {"a": [2]})
    assert step(model, np.ones(16, np.float32)) == 16 * 3 * 2
    assert step(Listed([1, 2], {"a": [2]}), np.ones(16, np.float32)) == 16 * 3 * 2 and len(step.compiles) == 1
    model.sizes.append(3)
    model.options["a"][0] = 1
    assert step(model, np.ones(16, np.float32)) == 16 * 6 and len(step.compiles) == 2


def test_partial_backpropagation():
    """One worker of two goes to the front: its examples alone train the first layer, all examples the head. The
    assignment is carried on."""
    step = splitjax.nnx.parallelize(
        train_step, mesh={"data": 2}, rules="data_parallel", backprop=splitjax.PartialBackprop((0.01, 1.0))
    )
    (model, optimizer), batch = make(), flat_batch()
    second_half = {name: array[8:] for name, array in batch.items()}
    (whole, of_whole), (half, of_half) = make(), make()
    expected = nnx.jit(step_with(nnx.value_and_grad))(whole, of_whole, batch)
    nnx.jit(step_with(nnx.value_and_grad))(half, of_half, second_half)
    np.testing.assert_allclose(step(model, optimizer, batch), expected, rtol=1e-5)
    assert_same(values(model.head), values(whole.head))
    assert_same(values(model.layers[0]), values(half.layers[0]))
    assert not np.allclose(values(half.layers[0])[1], values(whole.layers[0])[1], atol=1e-4)
    assert step.carried().num_steps == 1
    again = splitjax.nnx.parallelize(
        train_step, mesh={"data": 2}, rules="data_parallel", backprop=splitjax.PartialBackprop((0.01, 1.0))
    )
    again.resume(step.carried())
    step(model, optimizer, batch)
    before = values(model, optimizer)
    advice = again.advise(
        model, optimizer, [flat_batch(number) for number in range(2)], link=splitjax.sync.Link(1e-4, 1e8)
    )
    assert_same(values(model, optimizer), before, 0)
    assert again.carried().num_steps == 1 and step.carried().num_steps == 2, "an advice is no step"
    assert len(advice.row("spatial").cuts) == 2 and "head" in str(advice) and advice.recommendation.option


class Annotated(nnx.Module):
    """A layer whose kernel says along which axis of the mesh it lies."""

    def __init__(self, rngs, axis):
        split = nnx.with_partitioning(nnx.initializers.lecun_normal(), (axis, None))
        self.hidden = nnx.Linear(16, 32, kernel_init=split, rngs=rngs)

    def __call__(self, x):
        return self.hidden(x)


@pytest.mark.parametrize("axis", ["model", "embed"])
def test_a_mistake_in_what_makes_annotated_objects_is_what_is_raised(axis):
    def failing():
        make(model=functools.partial(Annotated, axis=axis))
        raise KeyError("my own mistake")

    with pytest.raises(KeyError, match="my own mistake") as caught:
        splitjax.nnx.parallelize(train_step, mesh=MESH).init(failing, example=(flat_batch(),))
    assert caught.value.__context__ is None


def an_if_in_the_step(model, optimizer, batch):
    return loss_fn(model, batch) if model.layers[1].bias[0] > 0 else 0.0


def an_if_on_the_optimizer(model, optimizer, batch):
    return loss_fn(model, batch) if optimizer.step[...] > 0 else 0.0


def an_if_in_the_loss(model, optimizer, batch):
    def loss_of(mine):
        return loss_fn(mine, batch) if mine.layers[1].bias[0] > 0 else 0.0

    return splitjax.nnx.value_and_grad(loss_of)(model)[0]


@pytest.mark.parametrize(
    ("fn", "named", "argument"),
    [
        (an_if_in_the_step, "an_if_in_the_step", "model.layers[1].bias"),
        (an_if_on_the_optimizer, "an_if_on_the_optimizer", "optimizer.step"),
        (an_if_in_the_loss, "loss_of", "mine.layers[1].bias"),
    ],
)
def test_what_jax_says_of_traced_values_names_the_users_function_and_variable(fn, named, argument):
    with pytest.raises(Exception, match="traced array") as caught:
        splitjax.nnx.parallelize(fn, mesh=MESH).plan(*make(), flat_batch())
    text = str(caught.value)
    assert f"tracing the function {named} at {__file__}" in text and f"of the argument {argument}." in text, text


def test_what_jax_says_of_traced_values_names_the_function_that_makes_objects():
    def an_if_in_init(key):
        return make() if jax.random.normal(key) > 0 else make(1)

    with pytest.raises(Exception, match="traced array") as caught:
        splitjax.nnx.parallelize(train_step, mesh=MESH).init(an_if_in_init, jax.random.key(0), example=(flat_batch(),))
    text = str(caught.value)
    assert f"an_if_in_init at {__file__}" in text and "of the argument key." in text, text
