"""`mesh="auto"` in a whole step: its numbers, everything that needs the mesh, budgets, and what the choice says."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec

import splitjax
import splitjax.equinox
import splitjax.nnx
from splitjax import runtime
from splitjax.choosing import Prices, Pricing
from splitjax.choosing.layering import laid_out
from splitjax.errors import BudgetError, MeshError, PinError, TargetError
from splitjax.machines.targets import parse_target
from splitjax.runtime import CheckpointOptions, Checkpoints


def loss_of(state, batch):
    return jnp.mean((jax.nn.relu(batch @ state["up"]) @ state["down"]) ** 2)


def step(state, batch):
    loss, grads = splitjax.value_and_grad(loss_of)(state, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def make_state(key):
    up, down = jax.random.split(key)
    return {"up": jax.random.normal(up, (64, 512)) / 8, "down": jax.random.normal(down, (512, 64)) / 23}


def batch_of(num_examples=16):
    return np.random.default_rng(0).normal(size=(num_examples, 64))


def sizes_of(mesh):
    return dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))


OPTIONS = {
    "rules": {"rules": "megatron"},
    "rules, budget": {"rules": "megatron", "memory_budget": "250KiB"},
    "auto": {"rules": "auto"},
    "auto, budget": {"rules": "auto", "memory_budget": "250KiB"},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_the_numbers_of_one_device(options):
    with jax.enable_x64(True):
        decorated = splitjax.parallelize(step, mesh="auto", **OPTIONS[options])
        state = decorated.init(make_state, jax.random.key(0), example=(batch_of(),))
        mesh = decorated.mesh
        assert mesh.devices.size == 8 and mesh.axis_names == ("data", "model")
        assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(state))
        plan = decorated.plan(state, batch_of())
        assert dict(plan.mesh.axes) == sizes_of(mesh) and decorated.choice.mesh == plan.mesh
        assert any("mesh=" in note and " chose " in note for note in plan.notes)
        assert decorated.shardings(state, batch_of())[0]["up"] == state["up"].sharding
        expected, _ = step(make_state(jax.random.key(0)), batch_of())
        found, _ = decorated(state, batch_of())
        # Another batch keeps the mesh and the rules, and with them where the state lies.
        expected, loss = step(expected, batch_of(48))
        found, found_loss = decorated(found, batch_of(48))
        assert decorated.mesh is mesh and len(decorated.compiles) == 2
        np.testing.assert_allclose(found_loss, loss, rtol=1e-10)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-13), found, expected)
        # Written out, what was chosen is the same plan.
        again = splitjax.parallelize(step, mesh=sizes_of(mesh), rules=decorated.rules)
        assert again.plan(make_state(jax.random.key(0)), batch_of()).leaves == plan.leaves


def test_what_needs_the_mesh_before_it_is_chosen_says_how_to_have_it():
    decorated = splitjax.parallelize(step, mesh="auto", donate=False)
    assert "a mesh to be chosen over data, model" in repr(decorated) and decorated.choice is None
    evaluation = decorated.like(loss_of)
    for early in (lambda: decorated.mesh, lambda: evaluation.mesh):
        with pytest.raises(MeshError, match="chosen when the first call is planned") as caught:
            early()
        assert "step.init(" in caught.value.remedy
    state = decorated.place(make_state(jax.random.key(0)), example=(batch_of(),))
    assert decorated.mesh is evaluation.mesh and state["up"].sharding.mesh == decorated.mesh
    np.testing.assert_allclose(evaluation(state, batch_of()), decorated(state, batch_of())[1], rtol=1e-5)
    assert str(decorated.choice.mesh) in repr(decorated) and "slower" in str(decorated.choice)
    # The step itself decides too, and so does what compiles or describes it.
    called = splitjax.parallelize(step, mesh="auto", donate=False)
    called(make_state(jax.random.key(0)), batch_of())
    described = splitjax.parallelize(step, mesh="auto")
    described.abstract_state(make_state, jax.random.key(0), example=(batch_of(),))
    assert called.mesh == described.mesh == decorated.mesh


def least_of(error):
    """The bytes that an error's remedy says would do."""
    return int(error.value.remedy.split()[1])


def test_budgets_are_held_by_the_upper_bound_on_every_mesh():
    state, batch = make_state(jax.random.key(0)), batch_of()
    plan_of = lambda **options: splitjax.parallelize(step, **{"mesh": "auto", "rules": "megatron"} | options)
    asked = splitjax.AutoMesh()
    meshes = [dict(shape.axes) for shape in (*asked.shapes(8), *asked.further(8))]
    bounds = [plan_of(mesh=mesh).plan(state, batch).memory.bound_bytes for mesh in meshes]
    with pytest.raises(BudgetError) as caught:
        plan_of(memory_budget="10KiB").plan(state, batch)
    assert least_of(caught) == min(bounds)
    tight = plan_of(memory_budget=min(bounds))
    assert tight.plan(state, batch).memory.bound_bytes == min(bounds)
    free = plan_of()
    assert free.plan(state, batch).memory.bound_bytes > min(bounds)
    assert any(note.startswith("faster, and not within") for note in tight.plan(state, batch).notes)
    verdicts = {str(each.mesh): tight.choice.verdict(each) for each in tight.choice.candidates}
    assert verdicts[str(tight.choice.mesh)] == "taken" and "needs more than the budget" in verdicts.values()
    assert "taken" in str(tight.choice) and "<table" in tight.choice._repr_html_()


def test_the_fastest_mesh_is_taken():
    state, batch = make_state(jax.random.key(0)), batch_of()
    choice = splitjax.parallelize(step, mesh="auto", rules="megatron")
    choice.plan(state, batch)
    seconds = {each.mesh: each.seconds for each in choice.choice.candidates}
    # Megatron stores over an axis for storage, which six of the meshes have.
    assert sum(mesh.names == ("data", "model") for mesh in seconds) == 4 and len(seconds) == 10
    assert choice.choice.best.seconds == min(seconds.values())


def test_more_devices_than_there_are():
    decorated = splitjax.parallelize(step, mesh=splitjax.AutoMesh(num_devices=64), rules="megatron")
    plan = decorated.plan(make_state(jax.random.key(0)), batch_of(128))
    assert plan.mesh.num_devices == 64 and plan.memory.bound_bytes
    with pytest.raises(MeshError, match="needs 64 devices"):
        decorated(make_state(jax.random.key(0)), batch_of(128))
    with pytest.raises(MeshError, match="needs 64 devices"):
        decorated.init(make_state, jax.random.key(0), example=(batch_of(128),))
    one = splitjax.parallelize(step, mesh=splitjax.AutoMesh(num_devices=1), rules="auto")
    assert one.plan(make_state(jax.random.key(0)), batch_of()).mesh.num_devices == 1


def test_roles_of_axes_with_other_names():
    asked = splitjax.AutoMesh(axes=("rows", "columns"))
    decorated = splitjax.parallelize(step, mesh=asked, rules="megatron", roles={"rows": "data", "columns": "tensor"})
    usual = splitjax.parallelize(step, mesh="auto", rules="megatron")
    state, batch = make_state(jax.random.key(0)), batch_of()
    assert sizes_of(decorated_mesh(decorated, state, batch)) == dict(
        zip(("rows", "columns"), sizes_of(decorated_mesh(usual, state, batch)).values(), strict=True)
    )


def decorated_mesh(decorated, *args):
    decorated.plan(*args)
    return decorated.mesh


@pytest.mark.parametrize(
    "options", [{"num_devices": 0}, {"num_devices": 2.0}, {"axes": ()}, {"axes": "data"}, {"axes": ("a", "a")}], ids=str
)
def test_requests_that_are_none(options):
    with pytest.raises(MeshError) as caught:
        splitjax.AutoMesh(**options)
    assert caught.value.remedy and caught.value.place.startswith("AutoMesh")


def test_a_step_that_names_axes_of_its_mesh():
    def naming(state, batch):
        return step(state, jax.lax.with_sharding_constraint(batch, PartitionSpec("data", None)))

    def init(key):
        return jax.lax.with_sharding_constraint(make_state(key), PartitionSpec(None, "model"))

    with jax.enable_x64(True):
        decorated = splitjax.parallelize(naming, mesh="auto", rules="megatron", donate=False)
        state = decorated.init(init, jax.random.key(0), example=(batch_of(),))
        _, loss = decorated(state, batch_of())
        np.testing.assert_allclose(loss, step(make_state(jax.random.key(0)), batch_of())[1], rtol=1e-10)
    broken = splitjax.parallelize(lambda state, batch: state["nowhere"], mesh="auto")
    with pytest.raises(KeyError, match="nowhere"):
        broken.plan(state, batch_of())


def test_annotations_rule_out_meshes():
    def pinned(size):
        return {
            "up": nn.Partitioned(jnp.ones((64, size)), names=(None, "model")),
            "down": nn.Partitioned(jnp.ones((size, 64)), names=("model", None)),
        }

    def train(state, batch):
        loss, grads = splitjax.value_and_grad(lambda p: loss_of(nn.meta.unbox(p), batch))(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    decorated = splitjax.parallelize(train, mesh="auto", rules="megatron")
    plan = decorated.plan(pinned(6), batch_of())
    assert plan.mesh.size("model") in (1, 2)
    assert {each.mesh.size("model") for each in decorated.choice.refused} >= {4, 8}
    assert any(note.startswith("no layout on data=1 x model=8") for note in plan.notes)
    with pytest.raises(PinError, match="does not divide"):
        splitjax.parallelize(train, mesh=splitjax.AutoMesh(axes=("model",)), rules="megatron").plan(
            pinned(6), batch_of()
        )


def test_a_pinned_plan_brings_its_mesh():
    state, batch = make_state(jax.random.key(0)), batch_of()
    plan = splitjax.parallelize(step, mesh={"data": 4, "model": 2}, rules="megatron").plan(state, batch)
    again = splitjax.parallelize(step, mesh="auto", plan=plan)
    assert sizes_of(again.mesh) == {"data": 4, "model": 2} and again.plan(state, batch).leaves == plan.leaves


def test_checkpoints_of_a_chosen_mesh(tmp_path):
    make = lambda: splitjax.parallelize(step, mesh="auto", rules="auto", memory_budget="250KiB", donate=False)
    first, example = make(), (batch_of(),)
    state, _ = first(first.init(make_state, jax.random.key(0), example=example), batch_of())
    with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
        checkpoints.save(1, state)
    again = make()
    with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
        restored = runtime.restore(checkpoints, again, make_state, jax.random.key(1), example=example).state
    assert again.mesh == first.mesh
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    np.testing.assert_array_equal(again(restored, batch_of())[1], first(state, batch_of())[1])


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(64, 512, rngs=rngs), nnx.Linear(512, 64, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


@pytest.mark.parametrize("options", [{"mesh": "auto"}, {"mesh": "auto", "rules": "auto"}], ids=str)
def test_nnx(options):
    def train(model, batch):
        loss, grads = splitjax.nnx.value_and_grad(lambda m: jnp.mean(m(batch) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), grads))
        return loss

    decorated = splitjax.nnx.parallelize(train, state_argnums=(0,), batch_argnums=(1,), **options)
    with pytest.raises(MeshError, match="chosen when the first call is planned"):
        _ = decorated.mesh
    batch = batch_of().astype(np.float32)
    model = decorated.init(lambda key: Net(nnx.Rngs(key)), jax.random.key(0), example=(batch,))
    alone = Net(nnx.Rngs(jax.random.key(0)))
    np.testing.assert_allclose(decorated(model, batch), jnp.mean(alone(batch) ** 2), rtol=1e-5)
    assert decorated.mesh.devices.size == 8 and decorated.choice.mesh.num_devices == 8


def test_calls_with_other_arguments_keep_what_was_chosen():
    """A call with more arguments is a plain step of its own, which would choose anew: 512 examples do not fit."""

    class Module(eqx.Module):
        up: jax.Array
        down: jax.Array

    def train(module, batch, rate=0.1):
        loss, grads = splitjax.equinox.value_and_grad(lambda m: loss_of({"up": m.up, "down": m.down}, batch))(module)
        return eqx.apply_updates(module, jax.tree.map(lambda g: -rate * g, grads)), loss

    options = {"mesh": "auto", "rules": "auto", "memory_budget": "250KiB", "donate": False}
    decorated = splitjax.equinox.parallelize(train, state_argnums=0, batch_argnums=1, **options)
    arrays = make_state(jax.random.key(0))
    first = decorated.plan(Module(**arrays), batch_of())
    mesh, choice = decorated.mesh, decorated.choice
    second = decorated.plan(Module(**arrays), batch_of(512), 0.2)
    assert decorated.mesh is mesh and decorated.choice is choice and len(decorated.compiles) == 2
    assert second.rules == first.rules and [leaf.spec for leaf in second.leaves] == [leaf.spec for leaf in first.leaves]
    evaluation = decorated.like(lambda module, batch: loss_of({"up": module.up, "down": module.down}, batch))
    assert evaluation.mesh is mesh


@pytest.mark.parametrize("frontend", ["plain", "equinox"])
def test_a_target_that_is_not_here(frontend):
    state, batch = jax.eval_shape(make_state, jax.random.key(0)), jax.ShapeDtypeStruct((256, 64), jnp.float32)
    decorate = splitjax.parallelize if frontend == "plain" else splitjax.equinox.parallelize
    options = {"mesh": "auto", "rules": "megatron", "target": "tpu:v5e:2x4", "state_argnums": 0, "batch_argnums": 1}
    decorated = decorate(step, **options)
    plan = decorated.plan(state, batch)
    assert decorated.mesh.abstract_device.platform == "tpu" and plan.mesh.num_devices == 8
    # By the figures of the target, and not by those of the processor that plans.
    target, graph = parse_target("tpu:v5e:2x4"), decorated.graph(state, batch)
    for each in decorated.choice.candidates:
        pricing = Pricing(graph, each.mesh, Prices.of_target(target, each.mesh), {}, True)
        assert each.seconds == pricing.candidate(each.rules, laid_out(pricing, each.rules)).seconds
    assert decorated.time(state, batch, on=target).seconds > 0
    with pytest.raises(MeshError, match="is of tpu:v5e, and JAX sees devices of the platform cpu"):
        decorated.init(make_state, jax.random.key(0), example=(batch,))


def test_targets_beside_other_meshes():
    state, batch = jax.eval_shape(make_state, jax.random.key(0)), jax.ShapeDtypeStruct((256, 64), jnp.float32)
    plan_on = lambda mesh, target: splitjax.parallelize(step, mesh=mesh, rules="megatron", target=target)
    open_size = plan_on({"data": -1, "model": 4}, "tpu:v5e:4x4")
    assert dict(open_size.plan(state, batch).mesh.axes) == {"data": 4, "model": 4}
    assert isinstance(plan_on({"data": 2, "model": 4}, "cpu:8").mesh, jax.sharding.Mesh)  # it is here
    for mesh in ({"data": 2, "model": 4}, splitjax.AutoMesh(num_devices=8)):
        with pytest.raises(TargetError, match="8 devices and the target (has )?"):
            plan_on(mesh, "tpu:v5e:4x4").plan(state, batch)
    for target in ("tpu:v9", 16, "somewhere"):
        with pytest.raises(TargetError) as caught:
            plan_on("auto", target)
        assert caught.value.place == "parallelize(step), target"
