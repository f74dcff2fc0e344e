"""Steps on the meshes that people have: Explicit, Auto and mixed axes, abstract meshes, sizes left open, under
`jax.set_mesh` or not, with every decorator and rule set; numbers are those of one device, in float64."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import splitjax
from splitjax.errors import MeshError, TraceError
from splitjax.mesh.device_order import arrange
from splitjax.runtime.checkpoint import CheckpointOptions, Checkpoints
from tests.processes import run_processes

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = {"explicit": (EXPLICIT, EXPLICIT), "auto": (AUTO, AUTO), "mixed": (EXPLICIT, AUTO)}
RULES = ("splitbrain", "splitbrain_fsdp", "megatron", "fsdp", "data_parallel", "embedding_owner")
TX = optax.adam(1e-2)


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def mesh_of(kind, sizes=(2, 4), names=("data", "model")):
    types = KINDS[kind] if len(names) == 2 else (*KINDS[kind], KINDS[kind][0])
    return jax.make_mesh(sizes, names, axis_types=types)


def storage_rules():
    """Weights stored over `fsdp`, and split over `model`: three axes with the batch's."""
    rules = (
        splitjax.Rule("dense", kind="dense", shard=({"out": "model", "in": "fsdp"},)),
        splitjax.Rule("table", kind="embedding", shard=({"vocab": "fsdp"},)),
    )
    return splitjax.RuleSet("storage", rules, replicated_batch="data")


def batch_of(seed=0, num_examples=8):
    rng = np.random.default_rng(seed)
    return {"ids": rng.integers(0, 64, (num_examples, 4)), "label": rng.integers(0, 8, (num_examples,))}


class Tagger(nn.Module):
    """An embedding, a hidden layer and a head: every shipped rule set has something to say about them."""

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(64, 32, param_dtype=jnp.float64)(ids).mean(axis=1)
        x = nn.relu(nn.Dense(64, param_dtype=jnp.float64)(x))
        return nn.Dense(8, param_dtype=jnp.float64)(x)


class NNXTagger(nnx.Module):
    """The same over NNX."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 32, param_dtype=jnp.float64, rngs=rngs)
        self.hidden = nnx.Linear(32, 64, param_dtype=jnp.float64, rngs=rngs)
        self.head = nnx.Linear(64, 8, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, ids):
        return self.head(nnx.relu(self.hidden(self.embed(ids).mean(axis=1))))


def loss_of(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def linen_init(key):
    params = Tagger().init(key, batch_of()["ids"])["params"]
    return {"params": params, "opt": TX.init(params)}


def linen_step(state, batch):
    value_and_grad = splitjax.value_and_grad(lambda p: loss_of(Tagger().apply({"params": p}, batch["ids"]), batch))
    loss, grads = value_and_grad(state["params"])
    updates, opt = TX.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}


def evaluate(state, batch):
    return Tagger().apply({"params": state["params"]}, batch["ids"])


@pytest.fixture(scope="module")
def alone():
    """Losses, the state and logits after two steps on one device."""
    state, losses = linen_init(jax.random.key(0)), []
    for number in range(2):
        state, metrics = jax.jit(linen_step)(state, batch_of(number))
        losses.append(metrics["loss"])
    return losses, state, evaluate(state, batch_of())


def assert_on(mesh, tree):
    for leaf in jax.tree.leaves(tree):
        assert leaf.sharding.mesh == mesh, leaf.sharding
        # What JAX makes of the array next has the mesh's types too.
        explicit = [axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == EXPLICIT]
        typed = {a for entry in jax.typeof(leaf).sharding.spec if entry for a in np.atleast_1d(entry)}
        split = {a for entry in leaf.sharding.spec if entry for a in np.atleast_1d(entry)}
        assert typed == split & set(explicit)


def assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=1e-10)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("kind", ["explicit", "mixed"])
def test_linen_trains_like_one_device_and_results_carry_the_mesh(kind, rules, alone):
    losses, final, logits = alone
    mesh = mesh_of(kind)
    step = splitjax.parallelize(linen_step, mesh=mesh, rules=rules)
    assert step.mesh is mesh
    state = step.init(linen_init, jax.random.key(0), example=(batch_of(),))
    assert_on(mesh, state)
    for number, loss in enumerate(losses):
        state, metrics = step(state, batch_of(number))
        assert_on(mesh, (state, metrics))
        assert_close(metrics["loss"], loss)
    assert_close(state, final)
    out = step.like(evaluate)(state, batch_of())
    assert_on(mesh, out)
    assert_close(out, logits)
    assert len(step.compiles) == 1
    # The plan is that of the same mesh with Auto axes, but for the note.
    auto = splitjax.parallelize(linen_step, mesh={"data": 2, "model": -1}, rules=rules).plan(state, batch_of())
    plan = step.plan(state, batch_of())
    assert plan.leaves == auto.leaves and plan.collectives == auto.collectives
    notes = set(plan.notes) - set(auto.notes)
    assert len(notes) == 1 and "are Auto inside the step" in notes.pop()


@pytest.mark.parametrize("kind", KINDS)
def test_set_mesh_around_any_call(kind, alone):
    losses, final, logits = alone
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        step = splitjax.parallelize(linen_step, mesh=mesh, rules="megatron")
        state = step.init(linen_init, jax.random.key(0), example=(batch_of(),))
    first = step.plan(state, batch_of())
    state, metrics = step(state, batch_of(0))
    with jax.set_mesh(mesh):
        state, metrics = step(state, jax.device_put(batch_of(1), step.shardings(state, batch_of())[1]))
        assert_on(mesh, (state, metrics))
        assert_close(metrics["loss"], losses[1])
        assert step.plan(state, batch_of()) == first and len(step.compiles) == 1
        assert_close(state, final)
        out = step.like(evaluate)(state, batch_of())
        assert_close(out, logits)
        assert step.report(state, batch_of()).collectives
        described = step.abstract_state(linen_init, jax.random.key(0), example=(batch_of(),))
        assert jax.tree.map(lambda x: x.sharding, described) == jax.tree.map(lambda x: x.sharding, state)
        assert_close(step.place(jax.tree.map(np.asarray, final), example=(batch_of(),)), state)


def nnx_objects(key):
    model = NNXTagger(nnx.Rngs(key))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


def nnx_step(model, optimizer, batch):
    loss, grads = splitjax.nnx.value_and_grad(lambda m: loss_of(m(batch["ids"]), batch))(model)
    optimizer.update(model, grads)
    return loss


@pytest.mark.parametrize(
    ("kind", "rules", "is_set"),
    [("explicit", "splitbrain", True), ("explicit", "fsdp", False), ("mixed", "megatron", False)],
)
def test_nnx_trains_like_one_device(kind, rules, is_set):
    model, optimizer = nnx_objects(jax.random.key(0))
    losses = [nnx_step(model, optimizer, batch_of(number)) for number in range(2)]
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        step = splitjax.nnx.parallelize(nnx_step, mesh=mesh, rules=rules)
        mine, opt = step.init(nnx_objects, jax.random.key(0), example=(batch_of(),))
        of_model, of_opt, of_batch = step.shardings(mine, opt, batch_of())
        for number, loss in enumerate(losses):
            got = step(mine, opt, jax.device_put(batch_of(number), of_batch))
            assert_on(mesh, got)
            assert_close(got, loss)
        assert_on(mesh, nnx.state((mine, opt)))
        assert_close(nnx.state(mine), nnx.state(model))
        for value, where in ((mine, of_model), (opt, of_opt)):
            held = jax.tree.map(lambda x: x.sharding, nnx.state(value))
            assert jax.tree.leaves(held) == jax.tree.leaves(where)
        logits = step.like(lambda model, batch: model(batch["ids"]))(mine, batch_of())
        assert_on(mesh, logits)
        assert_close(logits, model(batch_of()["ids"]))


def plain_init(key):
    keys = jax.random.split(key, 3)
    return [jax.random.normal(k, shape) for k, shape in zip(keys, ((64, 32), (32, 64), (64, 8)), strict=True)]


def plain_logits(params, ids):
    table, hidden, head = params
    return jnp.tanh(table[ids].mean(axis=1) @ hidden) @ head


@pytest.mark.parametrize("kind", ["explicit", "mixed"])
def test_equinox_style_steps(kind):
    def step_with(value_and_grad, params, moments, batch):
        loss, grads = value_and_grad(lambda p: loss_of(plain_logits(p, batch["ids"]), batch))(params)
        moments = [0.9 * m + g for m, g in zip(moments, grads, strict=True)]
        return [p - 0.1 * m for p, m in zip(params, moments, strict=True)], moments, loss

    def train(params, moments, batch):
        return step_with(splitjax.equinox.value_and_grad, params, moments, batch)

    def states(key):
        params = plain_init(key)
        return params, [jnp.zeros_like(p) for p in params]

    mesh = mesh_of(kind)
    step = splitjax.equinox.parallelize(train, mesh=mesh, rules="megatron", state_outnums=(0, 1))
    want = step_with(jax.value_and_grad, *states(jax.random.key(0)), batch_of())
    got = step(*step.init(states, jax.random.key(0), example=(batch_of(),)), batch_of())
    assert_on(mesh, got)
    assert_close(got, want)
    shown = step.shardings(*got[:2], batch_of())
    assert [s.spec for s in shown[0]] == [p.sharding.spec for p in got[0]] and shown[2]["ids"].mesh == mesh


def test_states_of_another_kind_of_mesh_and_of_one_device_are_taken():
    auto, explicit = mesh_of("auto"), mesh_of("explicit")
    batch, results = batch_of(), []
    for mine, theirs in ((auto, explicit), (explicit, auto)):
        step = splitjax.parallelize(linen_step, mesh=mine, rules="fsdp")
        foreign = splitjax.parallelize(linen_step, mesh=theirs, rules="fsdp")
        state = foreign.init(linen_init, jax.random.key(0), example=(batch,))
        results.append(step(state, batch))
        assert_on(mine, results[-1])
    assert_close(*results)


@pytest.mark.parametrize("options", [{"microbatches": 2}, {"group_comm": "turns"}, {"shard_state": True}], ids=str)
def test_ways_to_run_a_boundary_on_an_explicit_mesh(options):
    micro = options.get("microbatches")
    options = {name: value for name, value in options.items() if name != "microbatches"}

    def train(state, batch):
        fn = splitjax.value_and_grad(lambda p: loss_of(plain_logits(p, batch["ids"]), batch), microbatches=micro)
        loss, grads = fn(state)
        return [p - 0.1 * g for p, g in zip(state, grads, strict=True)], loss

    state, mesh, batch = plain_init(jax.random.key(0)), mesh_of("explicit"), batch_of(num_examples=16)
    want = jax.jit(train)(state, batch)
    step = splitjax.parallelize(train, mesh=mesh, **options)
    got = step(step.place(state, example=(batch,)), batch)
    assert_on(mesh, got)
    assert_close(got, want)


@pytest.mark.parametrize("kind", ["explicit", "mixed"])
def test_three_axes_and_their_checkpoints(kind, alone, tmp_path):
    losses, final, _ = alone
    mesh, batch = mesh_of(kind, (2, 2, 2), ("data", "fsdp", "model")), batch_of()
    step = splitjax.parallelize(linen_step, mesh=mesh, rules=storage_rules())
    on_auto = splitjax.parallelize(linen_step, mesh={"data": 2, "fsdp": 2, "model": 2}, rules=storage_rules())
    state, metrics = step(step.init(linen_init, jax.random.key(0), example=(batch,)), batch)
    assert_close(metrics["loss"], losses[0])
    with Checkpoints(CheckpointOptions(str(tmp_path))) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        here, there = (
            checkpoints.restore(each.abstract_state(linen_init, jax.random.key(0), example=(batch,))).state
            for each in (step, on_auto)
        )
    assert_on(mesh, here)
    assert here["params"]["Dense_0"]["kernel"].sharding.spec == PartitionSpec("fsdp", "model")
    for resumed, its_step in ((here, step), (there, on_auto)):
        new, metrics = its_step(resumed, batch_of(1))
        assert_close(metrics["loss"], losses[1])
        assert_close(new, final)


@pytest.mark.parametrize("rules", ["megatron", "fsdp", "transformer"])
def test_shipped_rule_sets_on_three_explicit_axes(rules, alone):
    losses, final, logits = alone
    mesh = mesh_of("explicit", (2, 2, 2), ("data", "fsdp", "tensor"))
    step = splitjax.parallelize(linen_step, mesh=mesh, rules=rules)
    state = step.init(linen_init, jax.random.key(0), example=(batch_of(),))
    for number, loss in enumerate(losses):
        state, metrics = step(state, batch_of(number))
        assert_on(mesh, (state, metrics))
        assert_close(metrics["loss"], loss)
    assert_close((state, step.like(evaluate)(state, batch_of())), (final, logits))


@pytest.mark.slow
def test_several_processes_on_three_explicit_axes():
    for output in run_processes(pathlib.Path(__file__).parent / "meshes_worker.py", num=2, devices=4):
        assert output.splitlines()[-1] == "all well"


@pytest.mark.parametrize("decorator", ["linen", "nnx"])
def test_an_initialiser_may_name_axes(decorator):
    mesh, spec = mesh_of("explicit"), PartitionSpec("data", "model")

    def linen_named(key):
        state = linen_init(key)
        kernel = state["params"]["Dense_0"]["kernel"]
        state["params"]["Dense_0"]["kernel"] = jax.sharding.reshard(kernel, spec)
        return state

    def nnx_named(key):
        model, optimizer = nnx_objects(key)
        model.hidden.kernel.set_raw_value(jax.sharding.reshard(model.hidden.kernel.get_raw_value(), spec))
        return model, optimizer

    if decorator == "linen":
        step = splitjax.parallelize(linen_step, mesh=mesh, rules="megatron")
        made, plain = (step.init(f, jax.random.key(0), example=(batch_of(),)) for f in (linen_named, linen_init))
    else:
        nnx_stepped = splitjax.nnx.parallelize(nnx_step, mesh=mesh, rules="megatron")
        made, plain = (
            nnx.state(nnx_stepped.init(f, jax.random.key(0), example=(batch_of(),))) for f in (nnx_named, nnx_objects)
        )
    assert_on(mesh, made)
    assert_close(made, plain)


ABSTRACT = {
    "auto": AbstractMesh((2, 4), ("data", "model"), (AUTO, AUTO)),
    "explicit": AbstractMesh((2, 4), ("data", "model"), (EXPLICIT, EXPLICIT)),
}


@pytest.mark.parametrize("kind", ABSTRACT)
def test_an_abstract_mesh_plans_and_lowers(kind):
    step = splitjax.parallelize(linen_step, mesh=ABSTRACT[kind], rules="megatron")
    shapes = jax.eval_shape(linen_init, jax.random.key(0))
    real = splitjax.parallelize(linen_step, mesh=mesh_of(kind), rules="megatron")
    assert step.plan(shapes, batch_of()) == real.plan(shapes, batch_of())
    assert step.shardings(shapes, batch_of())[1]["ids"] == NamedSharding(ABSTRACT[kind], PartitionSpec("data", None))
    described = step.abstract_state(linen_init, jax.random.key(0), example=(batch_of(),))
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(described)} == {ABSTRACT[kind]}
    lowered = step.lower(shapes, batch_of()).as_text()
    assert lowered == real.lower(shapes, batch_of()).as_text()


def test_arrays_that_lie_here_are_lowered_by_their_shapes_for_a_mesh_that_is_not():
    placed = jax.device_put(jax.jit(linen_init)(jax.random.key(0)), NamedSharding(mesh_of("auto"), PartitionSpec()))
    batch = jax.tree.map(jnp.asarray, batch_of())
    shapes = jax.eval_shape(linen_init, jax.random.key(0))
    for mesh in (*ABSTRACT.values(), {"data": 16, "model": 4}):
        examples = jax.tree.map(lambda x: jnp.tile(x, (2, *[1] * (x.ndim - 1))), batch)
        step = splitjax.parallelize(linen_step, mesh=mesh, rules="megatron")
        assert step.lower(placed, examples).as_text() == step.lower(shapes, jax.device_get(examples)).as_text()
    nnx_stepped = splitjax.nnx.parallelize(nnx_step, mesh=ABSTRACT["explicit"], rules="megatron")
    assert "num_partitions = 8" in nnx_stepped.lower(*nnx_objects(jax.random.key(0)), batch).as_text()


@pytest.mark.tpu_aot
def test_arrays_that_lie_here_are_lowered_by_their_shapes_for_a_topology_description():
    with jax.enable_x64(False):
        topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")
        mesh = topologies.make_mesh(topology, (2, 4), ("data", "model"))
        state = jax.device_put({"w": np.ones((8, 8), np.float32)}, NamedSharding(mesh_of("auto"), PartitionSpec()))
        step = splitjax.parallelize(_small_step(), mesh=mesh, rules="megatron")
        assert "num_partitions = 8" in step.lower(state, jnp.ones((8, 8))).as_text()
        assert step.report(state, jnp.ones((8, 8))).collectives


def test_an_abstract_mesh_does_not_run():
    step, batch = splitjax.parallelize(linen_step, mesh=ABSTRACT["explicit"], rules="megatron"), batch_of()
    for place, use in (
        ("linen_step", lambda: step(linen_init(jax.random.key(0)), batch)),
        ("linen_step.init", lambda: step.init(linen_init, jax.random.key(0), example=(batch,))),
        ("linen_step.place", lambda: step.place(linen_init(jax.random.key(0)), example=(batch,))),
        ("linen_step.report", lambda: step.report(linen_init(jax.random.key(0)), batch)),
    ):
        with pytest.raises(MeshError, match="no devices") as caught:
            use()
        assert caught.value.value is ABSTRACT["explicit"] and caught.value.place.endswith(place)
        assert "{'data': 2, 'model': 4}" in caught.value.remedy
    with pytest.raises(MeshError, match="no devices"):
        splitjax.nnx.parallelize(nnx_step, mesh=ABSTRACT["auto"])(*nnx_objects(jax.random.key(0)), batch)


def test_a_constraint_may_name_axes_alone():
    def constrained(state, batch):
        def loss(w):
            return (jax.lax.with_sharding_constraint(jnp.tanh(batch @ w), PartitionSpec(None, "model")) ** 2).mean()

        value, gradient = splitjax.value_and_grad(loss)(state)
        return state - gradient, value

    state, batch = np.ones((8, 8)), np.ones((8, 8))
    step = splitjax.parallelize(constrained, mesh={"data": 2, "model": 4}, rules="megatron")
    assert_close(step(state, batch)[1], (np.tanh(batch @ state) ** 2).mean())


def annotated_step(how, microbatches=None):
    """A two-layer network whose user says where the hidden layer and the result are."""

    def train(state, batch):
        def loss(params):
            hidden = jnp.tanh(batch["x"] @ params["w"])
            if how == "reshard":
                hidden = jax.sharding.reshard(hidden, PartitionSpec("data", "model"))
            if how == "assert":
                hidden = jax.lax.with_sharding_constraint(hidden, PartitionSpec("data", "model"))
            if how == "scan":
                keep = lambda h, _: (jax.sharding.reshard(h, PartitionSpec("data", "model")), None)
                hidden, _ = jax.lax.scan(keep, keep(hidden, None)[0], None, length=2)
            logits = (
                jnp.dot(hidden, params["v"], out_sharding=PartitionSpec("data", None)) if how else hidden @ params["v"]
            )
            return ((logits - batch["y"]) ** 2).mean()

        value, gradient = splitjax.value_and_grad(loss, microbatches=microbatches)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradient), value

    return train


def numbers_for_annotated():
    rng = np.random.default_rng(0)
    state = {"w": rng.normal(size=(32, 64)), "v": rng.normal(size=(64, 16))}
    return state, {"x": rng.normal(size=(16, 32)), "y": rng.normal(size=(16, 16))}


@pytest.mark.parametrize(
    ("how", "rules", "options"),
    [
        ("reshard", "megatron", {}),
        ("reshard", "splitbrain", {"group_comm": "turns"}),
        ("assert", "megatron", {"shard_state": True}),
        ("out_sharding", "splitbrain", {}),
        ("scan", "megatron", {"microbatches": 2}),
    ],
)
def test_annotations_under_explicit_axes_are_pins(how, rules, options):
    state, batch = numbers_for_annotated()
    want = jax.jit(annotated_step(""))(state, batch)
    micro, mesh = options.get("microbatches"), mesh_of("explicit")
    options = {name: value for name, value in options.items() if name != "microbatches"}
    step = splitjax.parallelize(annotated_step(how, micro), mesh=mesh, rules=rules, **options)
    plan = step.plan(state, batch)
    got = step(step.place(state, example=(batch,)), batch)
    assert_on(mesh, got)
    assert_close(got, want)
    pins = [note for note in plan.notes if note.startswith("pinned: ")]
    assert any("float64[16,16] to P('data', None) by out_sharding=" in pin and "test_meshes.py" in pin for pin in pins)
    assert any("to P('data', 'model') by jax.reshard" in pin for pin in pins) == (how in ("reshard", "scan"))
    assert not any("are Auto inside" in note for note in plan.notes)


@pytest.mark.parametrize("kind", ["adam", "adafactor"])
def test_annotations_go_with_optimizer_state_in_parts(kind):
    """JAX adds a moment to a gradient only where both lie alike, and the moment lies in parts of its own."""
    mesh = mesh_of("explicit", (2, 2, 2), ("data", "fsdp", "tensor"))
    tx = {
        "adam": optax.chain(optax.scale_by_adam(), optax.ema(0.9)),
        "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    }[kind]

    def network(params, x, is_annotated):
        hidden, where = jnp.tanh(x @ params["w"] + params["b"]), PartitionSpec(("data", "fsdp"), None)
        return jnp.dot(hidden, params["v"], out_sharding=where) if is_annotated else hidden @ params["v"]

    def train(state, batch, is_annotated=True):
        loss = lambda params: ((network(params, batch["x"], is_annotated) - batch["y"]) ** 2).mean()
        value, gradient = splitjax.value_and_grad(loss)(state["params"])
        updates, opt = tx.update(gradient, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    params, batch = numbers_for_annotated()
    params["b"] = np.linspace(-1, 1, 64)
    state = {"params": params, "opt": tx.init(params)}
    want = jax.jit(lambda *args: train(*args, is_annotated=False))(state, batch)
    step = splitjax.parallelize(train, mesh=mesh, rules="megatron", shard_state=True, static_argnums=(2,), donate=False)
    plan = step.plan(state, batch)
    assert sum("sharded state" in leaf.rule for leaf in plan.leaves) >= 3
    got = step(step.place(state, example=(batch,)), batch)
    assert_close(got, want)
    pinned = splitjax.parallelize(train, mesh=mesh, plan=plan, static_argnums=(2,), donate=False)
    assert pinned.plan(state, batch).leaves == plan.leaves
    if kind == "adam":
        average = step.like(lambda state, batch: network(state["opt"][1].ema, batch["x"], True))(got[0], batch)
        assert_close(average, network(jax.device_get(got[0]["opt"][1].ema), batch["x"], False))


@pytest.mark.parametrize("function", ["repeat", "map", "scan"])
def test_what_jax_places_unasked_is_no_annotation(function):
    """Under Explicit axes `jnp.repeat`, `jax.lax.map` in batches, and the loops of a plain `jax.grad` say where their
    results are without being asked. A step with them, such as one of Flax's group norm, is one that says nothing."""

    def train(state, batch):
        def loss(params):
            hidden = jnp.tanh(batch["x"] @ params["w"])
            if function == "repeat":
                hidden = jnp.repeat(hidden[:, ::2], 2, axis=-1)
            elif function == "scan":
                layer = lambda x, scale: (jnp.sin(x / x.sum(-1, keepdims=True) * scale), None)
                hidden, _ = jax.lax.scan(layer, hidden, batch["y"][:3, 0])
            else:
                hidden = jax.lax.map(jnp.sin, hidden, batch_size=6)
            return ((hidden @ params["v"] - batch["y"]) ** 2).mean()

        value_and_grad = jax.value_and_grad if function == "scan" else splitjax.value_and_grad
        value, gradient = value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradient), value

    state, batch = numbers_for_annotated()
    mesh = mesh_of("explicit")
    step = splitjax.parallelize(train, mesh=mesh, rules="megatron")
    plan = step.plan(state, batch)
    assert any("are Auto inside" in note for note in plan.notes)
    assert not any(note.startswith("pinned: ") for note in plan.notes)
    assert_close(step(step.place(state, example=(batch,)), batch), jax.jit(train)(state, batch))


@pytest.mark.parametrize("how", ["reshard", "out_sharding"])
@pytest.mark.parametrize("kind", ["explicit", "mixed"])
def test_a_pin_is_where_the_array_is(kind, how):
    state, batch = numbers_for_annotated()
    step = splitjax.parallelize(annotated_step(""), mesh=mesh_of(kind), rules="megatron")
    step.plan(state, batch)

    def hidden(state, batch):
        where = PartitionSpec(None, "data")
        if how == "reshard":
            return jax.sharding.reshard(batch["x"] @ state["w"], where)
        return jnp.dot(batch["x"], state["w"], out_sharding=where)

    out = step.like(hidden)(state, batch)
    assert_close(out, batch["x"] @ state["w"])
    entry = out.sharding.spec[1]
    assert out.sharding.spec[0] is None and (entry if isinstance(entry, str) else entry[0]) == "data"
    assert kind == "mixed" or entry == "data"


def test_constants_that_a_step_under_explicit_axes_closes_over():
    shift = np.arange(8.0)

    def step(state, batch):
        placed = jax.sharding.reshard(batch["x"] @ state["w"], PartitionSpec("data", "model"))
        return state, (placed + shift).sum()

    state, batch = {"w": jnp.ones((4, 8))}, {"x": jnp.ones((8, 4))}
    parallel = splitjax.parallelize(step, mesh=mesh_of("explicit"), rules="megatron", donate=False)
    assert float(parallel(state, batch)[1]) == 8 * (4 * 8 + shift.sum())


def test_types_are_those_of_the_layout_and_a_mismatch_is_said():
    seen = []

    def looks(state, batch):
        seen.append(jax.typeof(state["w"]).sharding.spec)
        return annotated_step("reshard")(state, batch)

    state, batch = numbers_for_annotated()
    splitjax.parallelize(looks, mesh=mesh_of("explicit"), rules="megatron").plan(state, batch)
    assert seen[-1] == PartitionSpec(None, "model")
    with pytest.raises(TraceError, match="under the Explicit axes") as caught:
        splitjax.parallelize(annotated_step("reshard"), mesh=mesh_of("explicit"), rules="fsdp").plan(state, batch)
    assert caught.value.value == "ShardingTypeError" and "out_sharding=" in caught.value.remedy
    assert "Auto" not in caught.value.remedy

    def asserts(state, batch):
        hidden = jax.lax.with_sharding_constraint(batch["x"] @ state["w"], PartitionSpec("data", "model"))
        return state, hidden @ state["v"]

    with pytest.raises(TraceError, match="under the Explicit axes") as caught:
        splitjax.parallelize(asserts, mesh=mesh_of("explicit"), rules="megatron").plan(state, batch)
    assert "give the mesh Auto axes" in caught.value.remedy
    splitjax.parallelize(asserts, mesh=mesh_of("auto"), rules="megatron").plan(state, batch)

    def wrong(state, batch):
        return state, state["w"] @ batch["y"]

    with pytest.raises(TypeError):  # as without a mesh
        splitjax.parallelize(wrong, mesh=mesh_of("explicit"), rules="megatron").plan(state, batch)


@pytest.mark.parametrize("how", ["reshard", "out_sharding"])
@pytest.mark.parametrize("kind", ["auto", "mixed", "sizes", "chosen"])
def test_what_only_explicit_axes_take_is_told_of_auto_ones(kind, how):
    state, batch = numbers_for_annotated()
    mesh = {"sizes": {"data": 2, "model": 4}, "chosen": "auto"}.get(kind) or mesh_of(kind)
    where = PartitionSpec(None, "model")

    def step(state, batch):
        if how == "reshard":
            return state, jax.sharding.reshard(batch["x"] @ state["w"], where)
        return state, jnp.dot(batch["x"], state["w"], out_sharding=where)

    around = contextlib.nullcontext() if isinstance(mesh, (str, dict)) else jax.set_mesh(mesh)
    with around, pytest.raises(TraceError, match="along mesh axes of type Explicit") as caught:
        splitjax.parallelize(step, mesh=mesh, rules="megatron").plan(state, batch)
    assert caught.value.place == "trace of step" and "with_sharding_constraint" in caught.value.remedy
    with pytest.raises(TraceError, match="along mesh axes of type Explicit") as caught:
        named = lambda: {name: jax.sharding.reshard(jnp.asarray(leaf), where) for name, leaf in state.items()}
        splitjax.parallelize(step, mesh=mesh, rules="megatron").init(named, example=(batch,))
    assert caught.value.place == "step.init"


def test_a_size_that_is_left_open():
    assert dict(splitjax.parallelize(linen_step, mesh={"data": -1, "model": 4}).mesh.shape) == {"data": 2, "model": 4}
    assert dict(splitjax.parallelize(linen_step, mesh={"model": -1}).mesh.shape) == {"model": 8}
    for mesh, message, value in (
        ({"data": -1, "model": -1}, "2 mesh axes are left open", {"data": -1, "model": -1}),
        ({"data": -2}, "positive whole size", -2),
        ({"data": {"dcn": 2, "lan": 4}}, "networks that it crosses", {"dcn": 2, "lan": 4}),
        ({"data": {"dcn": -1, "ici": 4}}, "positive whole size", -1),
    ):
        with pytest.raises(MeshError, match=message) as caught:
            splitjax.parallelize(linen_step, mesh=mesh)
        assert caught.value.value == value and caught.value.place == "mesh" and caught.value.remedy
    with pytest.raises(MeshError, match="8 devices do not divide by 3") as caught:
        _ = splitjax.parallelize(linen_step, mesh={"data": -1, "model": 3}).mesh
    assert "divisor of 8" in caught.value.remedy


def test_a_slow_network_that_is_not_there():
    step = splitjax.parallelize(linen_step, mesh={"data": {"dcn": 2, "ici": 2}, "model": 2})
    with pytest.raises(MeshError, match="stand in 1 processes") as caught:
        _ = step.mesh
    assert caught.value.value["data"] == {"dcn": 2, "ici": 2} and "whole sizes alone" in caught.value.remedy


@dataclasses.dataclass(frozen=True)
class SliceDevice:
    """A device of a slice or node, as far as JAX orders devices by it."""

    id: int
    slice_index: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"


@pytest.mark.parametrize("by_process", [False, True], ids=["slices", "processes"])
def test_slow_axes_cross_slices_or_nodes(by_process):
    devices = [SliceDevice(n, 0 if by_process else n % 2, n % 2) for n in range(8)]
    unit = np.vectorize(lambda device: device.process_index)
    order = arrange(devices, {"data": (2, 2), "model": (1, 2)})
    assert order.shape == (4, 2)
    np.testing.assert_array_equal(unit(order)[:, 0], [0, 0, 1, 1])  # the slow network is the major part of its axis
    np.testing.assert_array_equal(unit(order)[:, 0], unit(order)[:, 1])
    if not by_process:  # not said: the major axis that divides crosses it
        np.testing.assert_array_equal(unit(arrange(devices, {"data": (1, 4), "model": (1, 2)})), unit(order))
    with pytest.raises(MeshError, match="crosses 4 slices"):
        arrange(devices, {"data": (4, 2)})


@pytest.mark.tpu_aot
@pytest.mark.parametrize(("topology", "sizes"), [("v5e:4x4", (2, 8)), ("v5p:4x4x4", (4, 4, 4)), ("v5p:4x4x4", (8, 8))])
def test_devices_stand_as_jax_has_them_on_a_tpu(topology, sizes):
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    names = ("a", "b", "c")[: len(sizes)]
    arranged = arrange(devices, {name: (1, size) for name, size in zip(names, sizes, strict=True)})
    try:
        want = jax.make_mesh(sizes, names, devices=devices).devices
    except NotImplementedError:  # no dims of the torus have these sizes: they are split, where JAX gives up
        want = None
    assert arranged.shape == sizes and {device.id for device in arranged.flat} == set(range(len(devices)))
    assert want is None or (arranged == want).all()


@pytest.mark.tpu_aot
def test_slices_of_a_tpu_are_crossed_by_the_axes_that_say_so():
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4", num_slices=2).devices
    slices = lambda networks: np.vectorize(lambda device: device.slice_index)(arrange(devices, networks))
    along_data = slices({"data": (2, 4), "model": (1, 4)})
    np.testing.assert_array_equal(along_data, np.repeat([0, 1], 4)[:, None].repeat(4, axis=1))
    np.testing.assert_array_equal(slices({"data": (1, 8), "model": (1, 4)}), along_data)
    np.testing.assert_array_equal(slices({"data": (1, 4), "model": (2, 4)})[0], np.repeat([0, 1], 4))


def _small_step():
    def step(state, batch):
        loss, grad = splitjax.value_and_grad(lambda w: ((batch @ w) ** 2).mean())(state["w"])
        return {"w": state["w"] - 0.1 * grad}, loss

    return step


def test_a_mesh_larger_than_this_machine_plans_and_lowers():
    step = splitjax.parallelize(_small_step(), mesh={"data": 16, "model": 4})
    example = (jax.ShapeDtypeStruct((64, 8), np.float32),)
    state = step.abstract_state(lambda: {"w": np.ones((8, 8), np.float32)}, example=example)
    assert step.plan(state, *example).mesh.num_devices == 64
    lowered = step.lower(state, *example)
    assert "num_partitions = 64" in lowered.as_text() and lowered.out_info is not None
    with pytest.raises(MeshError, match="needs 64 devices") as caught:
        lowered.compile()
    assert "compile" in caught.value.place
    whole = {"w": np.ones((8, 8), np.float32)}
    for call in (
        lambda: step(whole, np.ones((64, 8), np.float32)),
        lambda: step.init(lambda: whole, example=example),
        lambda: step.place(whole, example=example),
    ):
        with pytest.raises(MeshError, match="needs 64 devices, and JAX sees 8") as caught:
            call()
        assert "plan" in caught.value.remedy


def test_a_topology_description_without_names_says_how_to_name_its_axes():
    from jax.experimental.topologies import TopologyDescription

    with pytest.raises(MeshError, match="names none") as caught:
        splitjax.parallelize(_small_step(), mesh=TopologyDescription(jax.devices()))
    assert 'make_mesh(topology, (8,), ("data",))' in caught.value.remedy
