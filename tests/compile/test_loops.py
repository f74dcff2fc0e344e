"""Loops around the gradient: accumulation written by hand, and several steps in one, are laid out like a single step,
give one device's numbers, and share their work among the devices."""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import splitjax
from splitjax import models

TURNS, WIDTH = 4, 64
WAYS = {"jax": jax.value_and_grad, "splitjax": splitjax.value_and_grad}


def loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["up"] + params["bias"])
    return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)


def update(state, grads):
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    return {"params": jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum), "momentum": momentum}


def accumulated(state, batch, value_and_grad=splitjax.value_and_grad):
    """Accumulation as people write it: the batch reshaped to [micro, batch / micro], and a scan over it."""
    micro = jax.tree.map(lambda x: x.reshape(TURNS, x.shape[0] // TURNS, *x.shape[1:]), batch)

    def turn(carry, part):
        value, grads = value_and_grad(loss)(state["params"], part)
        return (carry[0] + value, jax.tree.map(jnp.add, carry[1], grads)), None

    zeros = (jnp.zeros((), batch["x"].dtype), jax.tree.map(jnp.zeros_like, state["params"]))
    (value, grads), _ = jax.lax.scan(turn, zeros, micro)
    return update(state, jax.tree.map(lambda g: g / TURNS, grads)), value / TURNS


def one_step(state, batch, value_and_grad=splitjax.value_and_grad):
    value, grads = value_and_grad(loss)(state["params"], batch)
    return update(state, grads), value


def several(state, batches, value_and_grad=splitjax.value_and_grad):
    """Several steps in one program."""
    return jax.lax.scan(functools.partial(one_step, value_and_grad=value_and_grad), state, batches)


def by_index(state, batches, value_and_grad=splitjax.value_and_grad):
    """The same, with each step's batch picked by the loop's counter."""

    def turn(i, carry):
        state, total = carry
        state, value = one_step(state, jax.tree.map(lambda x: x[i], batches), value_and_grad)
        return state, total + value

    return jax.lax.fori_loop(0, TURNS, turn, (state, jnp.zeros((), batches["x"].dtype)))


def arguments(*leading, dtype=np.float64):
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.normal(size=shape) / 4, dtype)
    params = {"up": make(WIDTH, WIDTH), "bias": make(WIDTH), "down": make(WIDTH, WIDTH)}
    state = {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}
    return state, {"x": make(*leading, WIDTH), "y": make(*leading, WIDTH)}


def assert_as_one_device(step, state, batch, **options):
    parallel = splitjax.parallelize(step, **options)
    expected = jax.jit(step)(state, batch)
    report = parallel.report(state, batch)
    found = parallel(jax.tree.map(jnp.array, state), batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10), found, expected)
    return parallel.plan(state, batch), report


CASES = [
    (accumulated, (32,), "jax", {"data": 4}, "data_parallel"),
    (accumulated, (32,), "splitjax", {"data": 2, "model": 2}, "splitbrain"),
    (accumulated, (32,), "jax", {"data": 2, "model": 2}, "splitbrain"),
    (several, (TURNS, 8), "jax", {"data": 2, "model": 2}, "megatron"),
    (several, (TURNS, 8), "splitjax", {"data": 4}, "fsdp"),
    (by_index, (TURNS, 8), "splitjax", {"data": 2, "fsdp": 2, "tensor": 2}, "transformer"),
]


@pytest.mark.parametrize(("step", "leading", "way", "mesh", "rules"), CASES)
def test_a_loop_around_the_gradient_shares_its_work_and_gives_one_devices_numbers(step, leading, way, mesh, rules):
    with jax.enable_x64(True):
        step = functools.partial(step, value_and_grad=WAYS[way])
        plan, report = assert_as_one_device(step, *arguments(*leading), mesh=mesh, rules=rules)
    assert report.compute.compiled <= 1.1 * plan.compute.ideal_flops
    assert plan.compute.over_ideal == 1 and not plan.warnings
    split = {dim for leaf in plan.leaves if leaf.role == "batch" for dim, axes in enumerate(leaf.spec) if axes}
    assert split == {len(leading) - 1}


@pytest.mark.parametrize(
    ("turns", "mesh", "rules", "sent"),
    [
        (4, {"data": 4}, "data_parallel", [("all_to_all", "data", 4608)]),
        (8, {"data": 2, "fsdp": 2, "tensor": 2}, "transformer", [("all_to_all", "data+fsdp", 4608)]),
        (2, {"data": 8}, "data_parallel", [("collective_permute", "data", 1536)] * 2),
        (3, {"data": 4}, "fsdp", [("collective_permute", "data", 2048)] * 2),
        (4, {"data": 2, "model": 4}, "splitbrain", [("all_to_all", "data", 6144)]),
    ],
)
def test_devices_send_each_other_the_examples_of_turns_as_planned(monkeypatch, turns, mesh, rules, sent):
    """XLA gathered the whole batch where turns and devices do not divide each other, and sent it twice for more
    devices."""
    monkeypatch.setattr(sys.modules[__name__], "TURNS", turns)
    with jax.enable_x64(True):
        assert_as_one_device(accumulated, *arguments(96), mesh=mesh, rules=rules)
    report = splitjax.parallelize(accumulated, mesh=mesh, rules=rules).report(*arguments(96, dtype=np.float32))
    for path in ("batch/x", "batch/y"):
        found = [each for each in report.collectives if each.layer == path]
        assert [(each.op, each.axis, each.bytes) for each in found] == sent
        assert [each.planned is not None and each.differs for each in found] == [""] * len(found)
    assert [each for each in report.unplanned if each.compiled.shape] == []


def transposed(state, batch):
    """Accumulation that has features in front of the examples before it cuts them into turns."""
    cut = lambda x: jnp.moveaxis(x.T.reshape(x.shape[1], TURNS, x.shape[0] // TURNS), 1, 0)

    def turn(total, part):
        value, grads = splitjax.value_and_grad(loss)(state["params"], jax.tree.map(lambda x: x.T, part))
        return jax.tree.map(jnp.add, total, (value, grads)), None

    zeros = (jnp.zeros((), batch["x"].dtype), jax.tree.map(jnp.zeros_like, state["params"]))
    (value, grads), _ = jax.lax.scan(turn, zeros, jax.tree.map(cut, batch))
    return update(state, jax.tree.map(lambda g: g / TURNS, grads)), value / TURNS


@pytest.mark.parametrize(
    ("mesh", "spec"),
    [({"data": 4}, None), ({"data": 2, "rows": 4}, ("data", "rows"))],
    ids=["examples", "features too"],
)
@pytest.mark.parametrize("examples", [96, WIDTH])
def test_a_batch_that_is_transposed_before_it_is_cut_moves_as_its_own_dims_lie(mesh, spec, examples):
    """The dim of examples is the second of what is cut: the axes of the batch's second dim were taken for it. A square
    batch has its own shape when it is transposed."""
    roles = {"rows": "tensor"} if spec else None
    devices = jax.make_mesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))

    def given(dtype):
        state, batch = arguments(examples, dtype=dtype)
        where = NamedSharding(devices, PartitionSpec(*(spec or ("data",))))
        return state, jax.tree.map(lambda x: jax.device_put(x, where), batch)

    options = {"mesh": devices, "rules": "data_parallel", "roles": roles}
    with jax.enable_x64(True):
        assert_as_one_device(transposed, *given(np.float64), **options)
    report = splitjax.parallelize(transposed, **options).report(*given(np.float32))
    part_bytes = 4 * examples * WIDTH // 4 if spec is None else 4 * examples * WIDTH // 8
    num = mesh["data"]
    for path in ("batch/x", "batch/y"):
        found = [each for each in report.collectives if each.layer == path]
        sent = [(each.op, each.axis, each.bytes) for each in found if each.planned is not None]
        assert sent == [("all_to_all", "data", part_bytes * (num - 1) // num)]
        assert [each.planned is not None and each.differs for each in found] == [""]


def test_a_turn_of_split_layers_has_its_examples_where_these_want_them():
    """They were split over the group's devices too, and gathered again in every turn."""
    step = splitjax.parallelize(several, mesh={"data": 2, "model": 4}, rules="splitbrain")
    report = step.report(*arguments(TURNS, 8, dtype=np.float32))
    assert report.missing == () and [each for each in report.unplanned if each.compiled.shape] == []


def test_gradients_that_are_summed_in_every_turn_are_predicted_so():
    state, batch = arguments(TURNS, 8, dtype=np.float32)
    report = splitjax.parallelize(several, mesh={"data": 4}).report(state, batch)
    assert not report.missing and not [found for found in report.unplanned if found.bytes > 100]
    total = report.by_op["all_reduce", "data"]
    assert total.predicted_bytes == 2 * 3 * 4 * (2 * WIDTH * WIDTH + WIDTH) * TURNS // 4
    assert total.predicted_bytes == pytest.approx(total.compiled_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("mesh", "rules"),
    [({"data": 2, "model": 4}, "megatron"), ({"data": 2, "model": 4}, "splitbrain"), ({"data": 8}, "fsdp")],
)
def test_several_steps_are_laid_out_as_one(mesh, rules):
    sizes = {"num_layers": 2, "d_model": 32, "num_heads": 4, "vocab_size": 64, "max_len": 16}
    spec = models.build("transformer", **sizes)
    init, train_step, _ = models.make_step(spec, optax.adam(1e-3), value_and_grad=splitjax.value_and_grad)
    state, batch = jax.eval_shape(init, jax.random.key(0)), spec.example(16)
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), batch)

    def steps(state, batches):
        return jax.lax.scan(train_step, state, batches)

    one = splitjax.parallelize(train_step, mesh=mesh, rules=rules).plan(state, batch)
    many = splitjax.parallelize(steps, mesh=mesh, rules=rules).plan(state, stacked)
    assert many.layers == one.layers
    assert [leaf for leaf in many.leaves if leaf.is_state] == [leaf for leaf in one.leaves if leaf.is_state]


def test_a_step_among_several_runs_in_microbatches():
    with jax.enable_x64(True):
        value_and_grad = functools.partial(splitjax.value_and_grad, microbatches=2)
        step = functools.partial(several, value_and_grad=value_and_grad)
        plan, _ = assert_as_one_device(step, *arguments(TURNS, 8), mesh={"data": 4})
    assert [(boundary.how, boundary.num_parts) for boundary in plan.boundaries] == [("microbatches", 2)]


def test_a_loop_over_single_examples_is_said_to_be_computed_by_every_device():
    def step(params, batch):
        def turn(total, example):
            grads = jax.grad(lambda p: jnp.sum((jnp.tanh(example["x"] @ p["up"]) - example["y"]) ** 2))(params)
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
            return jax.tree.map(lambda t, g: t + g / jnp.maximum(norm, 1.0), total, grads), None

        total, _ = jax.lax.scan(turn, jax.tree.map(jnp.zeros_like, params), batch)
        return jax.tree.map(lambda p, t: p - 0.1 * t, params, total)

    batch = {"x": jnp.ones((8, 16)), "y": jnp.ones((8,))}
    plan = splitjax.parallelize(step, mesh={"data": 4}, batch_argnums=1).plan({"up": jnp.ones((16, 8))}, batch)
    (warning,) = plan.warnings
    assert warning.kind == "compute" and warning.ratio == 4 and "data=4" in warning.message
    assert plan.leaf("batch/x").spec == ("data", None)
