"""Boxes of Linen name the layout that a state has; what pins is what their user wrote, wherever the state goes then."""

from __future__ import annotations

import copy
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import splitjax
from splitjax.compile.boxes import name_layout
from splitjax.runtime.checkpoint import CheckpointOptions, Checkpoints

TX = optax.sgd(1e-2, momentum=0.9)
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
BOXES = {"logical": nn.with_logical_partitioning, "partitioned": nn.with_partitioning}
ROWS = splitjax.RuleSet("rows", (splitjax.Rule("by rows", kind="dense", shard=[{"in": "model"}]),))


def mesh_of(kind="auto", **axes):
    axes = axes or {"data": 2, "model": 4}
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(KINDS[kind],) * len(axes))


def linen(box, names):
    """The kernel has a box; the functions make a state and train it."""
    net = nn.Dense(32, kernel_init=BOXES[box](nn.initializers.lecun_normal(), names))

    def init(key):
        params = net.init(key, jnp.ones((1, 16)))["params"]
        return {"opt": TX.init(params), "params": params}

    def step(state, batch):
        loss_of = lambda params: jnp.mean(net.apply({"params": params}, batch) ** 2)
        loss, grads = splitjax.value_and_grad(loss_of)(state["params"])
        updates, opt = TX.update(grads, state["opt"], state["params"])
        return {"opt": opt, "params": optax.apply_updates(state["params"], updates)}, loss

    return init, step


BATCH = jnp.ones((16, 16))


def kernel(state):
    return state["params"]["kernel"]


def spec_of(state):
    """The entries of the kernel's sharding, without the whole dims at its end."""
    entries = list(kernel(state).value.sharding.spec)
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


def reasons(step, state):
    return {leaf.path: leaf.rule for leaf in step.plan(state, BATCH).leaves}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("box", BOXES)
def test_names_that_mean_nothing_pin_nothing_wherever_a_state_goes(box, kind, tmp_path):
    init, fn = linen(box, ("embed", "mlp"))
    first = splitjax.parallelize(fn, mesh=mesh_of(kind), rules="megatron", donate=False)
    bare = reasons(first, jax.eval_shape(init, jax.random.key(0)))
    state = first.init(init, jax.random.key(0), example=(BATCH,))
    assert spec_of(state) == (None, "model") and kernel(state).names == ("embed", "model")
    trained, _ = first(state, BATCH)
    target = first.abstract_state(init, jax.random.key(0), example=(BATCH,))
    assert jax.tree.structure(target) == jax.tree.structure(state)
    with Checkpoints(CheckpointOptions(str(tmp_path))) as checkpoints:
        checkpoints.save(1, trained)
        checkpoints.wait()
        restored = checkpoints.restore(target).state
    assert (
        first.like(lambda state, batch: jnp.mean(batch) * jnp.sum(nn.unbox(kernel(state))))(trained, BATCH).shape == ()
    )
    for known in (state, trained, restored, target):
        assert reasons(first, known) == bare  # no pin of a name that nobody meant, nor of where the arrays lie
        assert reasons(splitjax.parallelize(fn, mesh=mesh_of(kind), rules="megatron"), known) == bare

    whole = splitjax.parallelize(fn, mesh=mesh_of(kind), rules="data_parallel")
    placed = whole.place(trained, example=(BATCH,))
    assert spec_of(placed) == () and kernel(placed).names == ("embed", "mlp")
    assert type(kernel(placed).names) is tuple and getattr(kernel(placed), "rules", None) is None
    assert not any("pinned" in reason for reason in reasons(whole, placed).values())
    rows = splitjax.parallelize(fn, mesh=mesh_of(kind), rules=ROWS)
    assert spec_of(rows.place(state, example=(BATCH,))) == ("model",)

    three = mesh_of(kind, data=2, fsdp=2, tensor=2)
    large = splitjax.parallelize(fn, mesh=three, rules="transformer")
    placed = large.place(trained, example=(BATCH,))
    assert spec_of(placed) == spec_of(large(large.place(trained, example=(BATCH,)), BATCH)[0])
    assert spec_of(placed) == (("data", "fsdp"), "tensor") and kernel(placed).names == (("data", "fsdp"), "tensor")
    assert not any("pinned" in reason for reason in reasons(large, placed).values())
    assert spec_of(first.place(placed, example=(BATCH,))) == (None, "model")  # and back


@pytest.mark.parametrize(("box", "names"), [("partitioned", ("tensor", None)), ("logical", ("mlp", "embed"))])
def test_names_that_mean_something_pin_on_every_mesh(box, names):
    init, fn = linen(box, names)
    first = splitjax.parallelize(fn, mesh=mesh_of(), rules="megatron")
    second = splitjax.parallelize(fn, mesh=mesh_of(data=4, tp=2), rules="megatron")
    with nn.logical_axis_rules((("mlp", "tensor"), ("embed", None))):  # a role, of an axis of another name
        state = first.init(init, jax.random.key(0), example=(BATCH,))
        assert spec_of(state) == ("model",) and kernel(state).names[0] == "model"
        assert "pinned by nn.with_" in reasons(first, state)["params/kernel/value"]
        placed = second.place(state, example=(BATCH,))
        assert spec_of(placed) == ("tp",) and kernel(placed).names[0] == "tp"
        assert "pinned by nn.with_" in reasons(second, placed)["params/kernel/value"]
    whole = splitjax.parallelize(fn, mesh=mesh_of(), rules="data_parallel", donate=False)
    again = whole.place(placed, example=(BATCH,))  # outside of the logical rules, which were in force before
    assert spec_of(again) == spec_of(whole(again, BATCH)[0]) == ("model",)


def test_rules_that_come_later_read_the_names_that_the_user_wrote():
    init, fn = linen("logical", ("embed", "mlp"))
    state = splitjax.parallelize(fn, mesh=mesh_of(), rules="megatron").init(init, jax.random.key(0), example=(BATCH,))
    assert kernel(state).names == ("embed", "model")
    step = splitjax.parallelize(fn, mesh=mesh_of(), rules="megatron")
    with nn.logical_axis_rules((("embed", "model"), ("mlp", None))):
        assert spec_of(step.place(state, example=(BATCH,))) == ("model",)


def test_the_layout_of_a_pinned_plan_is_no_annotation():
    fn = linen("partitioned", ("embed", "mlp"))[1]
    columns = splitjax.parallelize(fn, mesh=mesh_of(), rules="megatron")
    plan = columns.plan(jax.eval_shape(linen("partitioned", ("embed", "mlp"))[0], jax.random.key(0)), BATCH)
    init, fn = linen("partitioned", ("model", None))
    state = splitjax.parallelize(fn, mesh=mesh_of(), plan=plan).init(init, jax.random.key(0), example=(BATCH,))
    assert spec_of(state) == (None, "model") and kernel(state).names == (None, "model")
    rows = splitjax.parallelize(fn, mesh=mesh_of(), rules=ROWS)  # as the user's names have it
    assert spec_of(rows.place(state, example=(BATCH,))) == ("model",)


def test_what_splitjax_wrote_is_taken_back_and_travels():
    mesh = mesh_of()
    value, where = jax.ShapeDtypeStruct((16, 32), jnp.float32), NamedSharding(mesh, P(None, "model"))
    rules = (("embed", "data"),)
    mine = {"b": nn.LogicallyPartitioned(value, names=("embed", "mlp"), rules=rules)}
    said = name_layout(mine, {"b": nn.LogicallyPartitioned(where, names=("embed", "mlp"), rules=rules)})
    assert said["b"].names == ("embed", "model") and said["b"].rules == (("model", "model"),)
    for box in (said["b"], copy.deepcopy(said["b"]), pickle.loads(pickle.dumps(said["b"]))):
        back = name_layout({"b": box}, {"b": box.replace(value=NamedSharding(mesh, P("data")))})
        assert (back["b"].names, back["b"].rules) == (("embed", "mlp"), rules)


class Scanned(nn.Module):
    """Layers in a loop, each with an average in a box, which is rebuilt as it goes in and comes out."""

    @nn.compact
    def __call__(self, x):
        def layer(module, x, _):
            x = nn.Dense(16)(x)
            average = module.variable("averages", "mean", nn.with_logical_partitioning(lambda: jnp.zeros(16), ("mlp",)))
            if module.is_mutable_collection("averages"):
                average.value = 0.9 * average.value + 0.1 * x.mean(0)
            return jnp.tanh(x), None

        names = {nn.PARTITION_NAME: "layers"}
        axes = {"params": 0, "averages": 0}
        loop = nn.scan(layer, variable_axes=axes, split_rngs={"params": True}, length=4, metadata_params=names)
        return loop(self, x, None)[0]


def test_names_survive_a_loop_over_layers_that_makes_their_boxes_anew():
    def fn(state, batch):
        def loss_of(params):
            variables = {"params": params, "averages": state["averages"]}
            out, new = Scanned().apply(variables, batch, mutable=["averages"])
            return jnp.mean(out**2), new

        (loss, new), grads = splitjax.value_and_grad(loss_of, has_aux=True)(state["params"])
        return loss, {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads), **new}

    first = splitjax.parallelize(fn, mesh=mesh_of(), rules="megatron")
    second = splitjax.parallelize(fn, mesh=mesh_of(data=4, tp=2), rules="megatron", donate=False)
    with nn.logical_axis_rules((("mlp", "tensor"),)):  # a role: the box comes to name the axis
        state = first.init(lambda key: Scanned().init(key, BATCH), jax.random.key(0), example=(BATCH,))
        _, state = first(state, BATCH)
        assert state["averages"]["mean"].names == ("layers", "model")
        place = reasons(second, state)["averages/mean/value"]
    assert place == "pinned by nn.with_logical_partitioning of averages.mean"
    assert dict(state["averages"]["mean"].names.users)["names"] == ("layers", "mlp")


@pytest.mark.parametrize("is_first", [True, False])
def test_names_of_a_user_and_those_of_a_layout_are_planned_apart(is_first):
    init, fn = linen("logical", ("embed", "mlp"))
    named = splitjax.parallelize(fn, mesh=mesh_of(), rules="megatron").init(init, jax.random.key(0), example=(BATCH,))
    users = jax.tree.map(
        lambda box: box.replace(names=tuple(box.names)) if isinstance(box, nn.Partitioned) else box,
        jax.eval_shape(lambda state: state, named),
        is_leaf=lambda node: isinstance(node, nn.Partitioned),
    )
    bare = jax.eval_shape(lambda state: state, named)
    assert jax.tree.structure(bare) == jax.tree.structure(users)
    whole = splitjax.parallelize(fn, mesh=mesh_of(), rules="data_parallel")
    plans = {
        name: reasons(whole, state)
        for name, state in ({"users": users, "bare": bare} if is_first else {"bare": bare, "users": users}).items()
    }
    assert plans["users"]["params/kernel/value"].startswith("pinned by nn.with_logical_partitioning")
    assert plans["bare"]["params/kernel/value"] == "all"
