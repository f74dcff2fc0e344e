"""Sharded state: the numbers are one device's, each device holds its part, and each gradient is sent once, by a
reduce-scatter."""

from __future__ import annotations

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import splitjax
from splitjax import models
from splitjax.mesh import MeshShape
from splitjax.plan import Plan, spec_axes
from splitjax.report.hlo import compiled_collectives
from splitjax.step.options import OptionError
from tests.steps import conv_case, largest_difference, train

GROUPS, ONE_GROUP, ALONE = {"data": 2, "model": 4}, {"data": 1, "model": 8}, {"data": 8}
MOMENTUM = optax.sgd(0.05, momentum=0.9)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), MOMENTUM)


def batch(num=32, width=64):
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(num, 8, 8, 3)).astype(np.float32),
        "ids": rng.integers(0, width, (num, 6)).astype(np.int32),
        "y": rng.integers(0, 10, num).astype(np.int32),
    }


def normal(*shapes):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape) / np.prod(shape[:-1]) ** 0.5 for key, shape in zip(keys, shapes, strict=True)]


def step_of(forward, tx=MOMENTUM, value_and_grad=splitjax.value_and_grad, **options):
    def step(state, batch):
        def loss(params):
            return optax.softmax_cross_entropy_with_integer_labels(forward(params, batch), batch["y"]).mean()

        value, grads = value_and_grad(loss, **options)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    return step


def state_of(params, tx=MOMENTUM):
    return {"params": params, "opt": tx.init(params)}


def conv(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def network(params, batch):
    """Convolutions, statistics over the batch, dense layers."""
    x = conv(batch["x"], params["conv1"])
    x = jax.nn.relu((x - x.mean((0, 1, 2))) * jax.lax.rsqrt(x.var((0, 1, 2)) + 1e-5))
    x = jax.nn.relu(conv(x, params["conv2"])).reshape(len(x), -1)
    return jnp.tanh(jnp.tanh(x @ params["dense1"]) @ params["dense2"]) @ params["logits"]


def network_params():
    names = ("conv1", "conv2", "dense1", "dense2", "logits")
    shapes = ((3, 3, 3, 32), (3, 3, 32, 64), (256, 64), (64, 64), (64, 16))
    return dict(zip(names, normal(*shapes), strict=True))


def traffic(step, state, given, mesh):
    """Bytes by op and axes: compiled, planned; what is below a kilobyte left out."""
    sent, planned = collections.Counter(), collections.Counter()
    for one in compiled_collectives(step.lower(state, given).compile(), MeshShape.of(mesh)):
        if one.bytes > 1024:
            sent[one.op, one.axis] += one.bytes
    for one in step.plan(state, given).collectives:
        if one.bytes > 1024:
            planned[one.op, one.axis] += one.bytes
    return sent, planned


LAYOUTS = {
    "groups": (GROUPS, "splitbrain"),
    "one group": (ONE_GROUP, "splitbrain"),
    "data": (ALONE, "data_parallel"),
    "megatron": (GROUPS, "megatron"),
}


@functools.cache
def one_device(tx):
    """A case in float64, its state, and what one device makes of them: the state behind and the losses."""
    # Batch norm cancels a bias before it: an adaptive optimizer would amplify the rounding noise that is its gradient.
    case = conv_case(tx, steps=3, dtype=np.float64, batch_norm=tx is CLIPPED)
    state = case.init(jax.random.key(0))
    return case, state, *train(jax.jit(case.step), state, case.batches)


@pytest.mark.parametrize(
    ("layout", "tx"),
    [
        ("groups", CLIPPED),
        ("one group", optax.adam(1e-3)),
        ("data", CLIPPED),
        ("megatron", CLIPPED),
        ("groups", optax.adafactor(1e-2, min_dim_size_to_factor=8)),
    ],
    ids=["groups-clipped", "one-group-adam", "data-clipped", "megatron-clipped", "groups-adafactor"],
)
def test_numbers_are_those_of_one_device(layout, tx):
    mesh, rules = LAYOUTS[layout]
    with jax.enable_x64(True):
        case, state, want_state, want = one_device(tx)
        step = splitjax.parallelize(case.step, mesh=mesh, rules=rules, shard_state=True)
        got_state, got = train(step, step.place(state, example=(case.batches[0],)), case.batches)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)
        assert largest_difference(got_state, want_state) <= 1e-10
        assert any("sharded state" in leaf.rule for leaf in step.plan(got_state, case.batches[0]).leaves)


@pytest.mark.parametrize(
    ("layout", "tx"),
    [*((layout, MOMENTUM) for layout in LAYOUTS), ("groups", optax.adam(1e-3))],
    ids=[*LAYOUTS, "groups-adam"],
)
def test_what_is_sent_is_what_was_planned(layout, tx):
    """To the byte, and no gradient is summed on every device."""
    mesh, rules = LAYOUTS[layout]
    step = splitjax.parallelize(step_of(network, tx), mesh=mesh, rules=rules, shard_state=True)
    state = state_of(network_params(), tx)
    sent, planned = traffic(step, state, batch(), mesh)
    assert sent == planned
    batch_axes = step.plan(state, batch()).batch_axes
    assert sent["reduce_scatter", "+".join(batch_axes)] and not sent["all_reduce", "+".join(batch_axes)]
    assert not sent["all_reduce", "data"]


@pytest.mark.parametrize("mesh", [ALONE, GROUPS], ids=["data", "groups"])
def test_stored_weights_are_gathered_for_each_pass_and_let_go(mesh):
    """fsdp: one gather forward, one backward (but for the first layer, whose input has no cotangent), one
    reduce-scatter of the gradient, to the byte."""
    width = 512
    names = ("conv1", "conv2", "dense1", "dense2", "logits")
    shapes = ((3, 3, 3, 32), (3, 3, 32, 64), (256, width), (width, width), (width, 16))
    state = state_of(dict(zip(names, normal(*shapes), strict=True)), MOMENTUM)
    step = splitjax.parallelize(step_of(network, MOMENTUM), mesh=mesh, rules="fsdp", donate=False)
    sent, planned = traffic(step, state, batch(), mesh)
    axes = "+".join(step.plan(state, batch()).batch_axes)
    assert sent == planned and sent["reduce_scatter", axes] > 0
    assert sent["all_gather", axes] > 1.9 * sent["reduce_scatter", axes]
    want_state, want = jax.jit(step_of(network, MOMENTUM))(state, batch())
    got_state, got = step(state, batch())
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert largest_difference(got_state, want_state) < 1e-5


def test_a_stored_kernel_of_a_convolution_without_any_position():
    """The window is longer than the sequence, so that the convolution's result is empty: its cotangent has no element
    that could tie the gather of the stored kernel to the backward pass."""

    def forward(params, batch):
        x = batch["x"].reshape(len(batch["x"]), 6, -1)
        empty = jax.lax.conv_general_dilated(
            x, params["conv"], (3,), "VALID", rhs_dilation=(2,), dimension_numbers=("NWC", "WIO", "NWC")
        )
        assert empty.shape[1] == 0
        return x.mean(1) @ params["logits"] + empty.sum()

    state = state_of(dict(zip(("conv", "logits"), normal((4, 32, 64), (32, 16)), strict=True)))
    step = splitjax.parallelize(step_of(forward), mesh=ALONE, rules="fsdp", donate=False)
    want_state, want = jax.jit(step_of(forward))(state, batch())
    got_state, got = step(state, batch())
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert largest_difference(got_state, want_state) <= 1e-6
    assert "data" in step.plan(state, batch()).leaf("params/conv").spec


def test_each_device_holds_its_part():
    tx = optax.adam(1e-3)
    state = state_of(network_params(), tx)
    step = splitjax.parallelize(step_of(network, tx), mesh=GROUPS, shard_state=True)
    plan = step.plan(state, batch())
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state["opt"]) if leaf.ndim)
    assert sum(leaf.bytes_per_device for leaf in plan.leaves if leaf.role == "optimizer") == whole // 8
    assert plan.memory.state_bytes == sum(leaf.bytes_per_device for leaf in plan.leaves if leaf.is_state)
    placed, _ = step(step.place(state, example=(batch(),)), batch())
    assert (
        sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(placed["opt"]) if leaf.ndim)
        == whole // 8
    )
    assert placed["params"]["conv2"].sharding.is_fully_replicated
    created = step.init(lambda key: state_of(network_params(), tx), jax.random.key(0), example=(batch(),))
    assert created["opt"][0].mu["conv2"].sharding == placed["opt"][0].mu["conv2"].sharding


def test_state_and_gradient_of_a_parameter_are_split_alike():
    tx = optax.adam(1e-3)
    step = splitjax.parallelize(step_of(network, tx), mesh=GROUPS, shard_state=True)
    plan = step.plan(state_of(network_params(), tx), batch())
    for name in network_params():
        param, mu, nu = (plan.leaf(path) for path in (f"params/{name}", f"opt/0/mu/{name}", f"opt/0/nu/{name}"))
        assert mu.spec == nu.spec == param.gradient
        assert set(spec_axes(param.gradient)) == {"data", "model"}
        assert mu.rule == f"follows params/{name}, sharded state"
    assert sum("ZeRO" in note for note in plan.notes) == 1
    # The gradients in the quick sum of the memory are parts, and the largest once more.
    parts = sum(plan.leaf(f"params/{name}").whole_bytes(plan.mesh) // 8 for name in network_params())
    largest = max(plan.leaf(f"params/{name}").bytes_per_device for name in network_params())
    memory = step._programs.entry((state_of(network_params(), tx), batch())).summed
    assert memory.peak_bytes == memory.state_bytes + memory.activation_bytes + parts + largest
    assert plan.memory.state_bytes == memory.state_bytes and plan.memory.bound_bytes > plan.memory.peak_bytes


def test_averaged_parameters_are_state_too():
    inner = step_of(network)

    def step(state, batch):
        new, loss = inner(state, batch)
        return {**new, "average": jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state["average"], new["params"])}, loss

    state = {**state_of(network_params()), "average": network_params()}
    parallel = splitjax.parallelize(step, mesh=GROUPS, shard_state=True, donate=False)
    want_state, _ = jax.jit(step)(state, batch())
    got_state, _ = parallel(state, batch())
    assert largest_difference(got_state, want_state) <= 1e-6
    plan = parallel.plan(state, batch())
    assert plan.leaf("average/conv2").spec == plan.leaf("params/conv2").gradient != plan.leaf("params/conv2").spec
    sent, planned = traffic(parallel, state, batch(), GROUPS)
    assert sent == planned


def test_what_does_not_divide_is_noted():
    tx = optax.adam(1e-3)
    params = dict(zip(("odd", "even", "logits"), normal((192, 9), (9, 6), (6, 10)), strict=True))
    step = splitjax.parallelize(
        step_of(lambda p, b: jnp.tanh(b["x"].reshape(len(b["x"]), -1) @ p["odd"]) @ p["even"] @ p["logits"], tx),
        mesh=GROUPS,
        rules="data_parallel",
        shard_state=True,
    )
    state = state_of(params, tx)
    plan = step.plan(state, batch())
    assert plan.leaf("opt/0/mu/odd").spec == (("data", "model"), None)
    # 9 x 6 divides by 2 and not by 4, 6 x 10 likewise.
    assert plan.leaf("opt/0/mu/even").spec == (None, "data")
    for path in ("opt/0/mu/even", "params/even", "params/logits"):
        assert "stays whole over model=4" in plan.leaf(path).note
        assert plan.leaf(path).note in " ".join(str(plan).split())
    want_state, want = jax.jit(
        step_of(lambda p, b: jnp.tanh(b["x"].reshape(len(b["x"]), -1) @ p["odd"]) @ p["even"] @ p["logits"], tx)
    )(state, batch())
    got_state, got = step(step.place(state, example=(batch(),)), batch())
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert largest_difference(got_state, want_state) <= 1e-5


def test_three_axes_keep_the_order_of_the_mesh():
    """On data x fsdp x tensor a table has fsdp and tensor along its two dims: data behind either would be against the
    order of the mesh, which XLA computes wrongly. It was refused; it stays whole over data, and says so."""

    def forward(params, batch):
        x = params["embed"][batch["ids"]].mean(1)
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None), x, params["layers"])
        return x @ params["embed"][:10].T

    def run(mesh):
        embed, up, down = normal((64, 16), (4, 16, 32), (4, 32, 16))
        state, tx = {"embed": embed, "layers": {"up": up, "down": down}}, optax.adam(1e-2)
        step = splitjax.parallelize(step_of(forward, tx), mesh=mesh, rules="megatron", shard_state=True, donate=False)
        expected = jax.jit(step_of(forward, tx))(state_of(state, tx), batch())
        assert largest_difference(step(state_of(state, tx), batch()), expected) < 1e-10
        return {leaf.path: leaf for leaf in step.plan(state_of(state, tx), batch()).leaves}

    with jax.enable_x64(True):
        leaves = run({"data": 2, "fsdp": 2, "tensor": 2})
        assert leaves["params/layers/up"].gradient == ("data", "fsdp", "tensor")
        assert leaves["params/embed"].gradient is None and "lists data last may do" in leaves["params/embed"].note
        behind = run({"fsdp": 2, "data": 2, "tensor": 2})
    assert behind["params/embed"].gradient == ("tensor", ("fsdp", "data"))


def test_a_pinned_plan_reproduces_it(tmp_path):
    state = state_of(network_params())
    step = splitjax.parallelize(step_of(network), mesh=GROUPS, shard_state=True, donate=False)
    plain = splitjax.parallelize(step_of(network), mesh=GROUPS)
    plan = step.plan(state, batch())
    assert Plan.from_json(plan.to_json()) == plan
    changes = plain.plan(state, batch()).diff(plan)
    assert any(line.startswith("leaf opt/0/trace/conv2: spec") for line in changes)
    assert any(line.startswith("leaf params/conv2: gradient") for line in changes)
    plan.save(tmp_path / "plan.json")
    pinned = splitjax.parallelize(step_of(network), mesh=GROUPS, plan=tmp_path / "plan.json", donate=False)
    assert pinned.plan(state, batch()).diff(plan) == ()
    assert traffic(pinned, state, batch(), GROUPS)[0] == traffic(step, state, batch(), GROUPS)[0]


def test_of_what_is_sharded_already_nothing_is_left():
    state = state_of(network_params())
    make = lambda **options: splitjax.parallelize(step_of(network), mesh=ALONE, rules="fsdp", **options).plan(
        state, batch()
    )
    plain, sharded = make(), make(shard_state=True)
    # Only what fsdp leaves whole for being small.
    assert plain.leaf("opt/0/trace/conv2").spec == sharded.leaf("opt/0/trace/conv2").spec
    assert plain.leaf("opt/0/trace/conv1").spec != (None,) * 4 or sharded.leaf("opt/0/trace/conv1").spec != (None,) * 4
    assert sharded.memory.state_bytes <= plain.memory.state_bytes


# What reaches its parameter other than as the whole of one product.


def stacked(params, batch):
    """Weights of four layers, sliced by a loop."""
    x = batch["x"].reshape(len(batch["x"]), -1) @ params["first"]
    x, _ = jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, params["layers"])
    return x @ params["logits"]


def tied(params, batch):
    """A table that embeds and decodes."""
    x = params["table"][batch["ids"]].mean(1)
    return (jnp.tanh(x @ params["first"]) @ params["table"].T)[:, :10]


def recurrent(params, batch):
    """One weight in every turn of a loop."""
    x = batch["x"].reshape(len(batch["x"]), -1) @ params["first"]
    x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ params["again"]), None), x, length=5)
    return x @ params["logits"]


SPECIAL = {
    "stacked": (stacked, {"first": (192, 64), "layers": (4, 64, 64), "logits": (64, 16)}),
    "tied": (tied, {"table": (64, 32), "first": (32, 32)}),
    "recurrent": (recurrent, {"first": (192, 64), "again": (64, 64), "logits": (64, 16)}),
}


@pytest.mark.parametrize("case", SPECIAL)
def test_weights_in_loops_and_tables(case):
    forward, shapes = SPECIAL[case]
    state = state_of(dict(zip(shapes, normal(*shapes.values()), strict=True)))
    step = splitjax.parallelize(step_of(forward), mesh=ALONE, rules="data_parallel", shard_state=True, donate=False)
    want_state, want = jax.jit(step_of(forward))(state, batch())
    got_state, got = step(state, batch())
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert largest_difference(got_state, want_state) <= 1e-6
    sent, planned = traffic(step, state, batch(), ALONE)
    if case == "stacked":
        assert sent == planned
    elif case == "tied":  # both uses send their summand of the table
        assert not sent["all_reduce", "data"] and sent["all_gather", "data"] == planned["all_gather", "data"]
    else:  # left to XLA, and not a reduce-scatter in each of the five turns
        again = np.prod(shapes["again"]) * 4 * 7 // 8
        assert sent["reduce_scatter", "data"] == planned["reduce_scatter", "data"] - again


def test_biases_and_scales():
    """Before the first split layer, within one split by columns, over all dims at once, and with the rank of the
    result."""

    def forward(params, batch):
        x = batch["x"].reshape(len(batch["x"]), -1) @ params["first"]
        x = jnp.tanh(x * params["scale"] + jnp.broadcast_to(params["bias"], x.shape))
        return jnp.tanh(x @ params["dense"] + params["dense_bias"]) @ params["logits"]

    shapes = {
        "first": (192, 512),
        "scale": (512,),
        "bias": (512,),
        "dense": (512, 4096),
        "dense_bias": (4096,),
        "logits": (4096, 16),
    }
    state = state_of(
        {name: jnp.full(shape, 0.5) if len(shape) == 1 else normal(shape)[0] for name, shape in shapes.items()}
    )
    whole = splitjax.Rule(name="whole", path="**/first", shard=[])
    columns = splitjax.Rule(name="columns", path="**dense**", shard=[{"out": "model"}], ties="local")
    rows = splitjax.Rule(name="rows", path="**/logits", shard=[{"in": "model"}])
    for mesh, rules in (
        (ALONE, "data_parallel"),
        (GROUPS, splitjax.RuleSet(name="mine", rules=(whole, columns, rows), replicated_batch="all")),
    ):
        step = splitjax.parallelize(step_of(forward), mesh=mesh, rules=rules, shard_state=True, donate=False)
        want_state, want = jax.jit(step_of(forward))(state, batch())
        got_state, got = step(state, batch())
        np.testing.assert_allclose(got, want, rtol=1e-5)
        assert largest_difference(got_state, want_state) <= 1e-6
        sent, planned = traffic(step, state, batch(), mesh)
        assert sent == planned
        assert not any(op == "all_reduce" and "data" in axis for op, axis in sent)


@pytest.mark.parametrize("split", ["features", "vocab"])
@pytest.mark.parametrize("num", [32, 128])
def test_a_split_table_has_its_gradient_summed_into_parts(split, num):
    """By columns each device of a group looks its own up, of all of the group's examples; by rows it is left to XLA."""

    def forward(params, batch):
        return jnp.tanh(jnp.take(params["table"], batch["ids"], axis=0).mean(1) @ params["dense"]) @ params["logits"]

    shapes = {"table": (512, 64), "dense": (64, 64), "logits": (64, 16)}
    state = state_of({name: normal(shape)[0] for name, shape in shapes.items()})
    rules = splitjax.RuleSet(
        name="mine",
        replicated_batch="all",
        rules=(
            splitjax.Rule(name="table", path="**/table", shard=[{split: "model"}]),
            splitjax.Rule(name="dense", kind="dense", shard=[{"out": "model"}]),
        ),
    )
    step = splitjax.parallelize(step_of(forward), mesh=GROUPS, rules=rules, shard_state=True, donate=False)
    given = batch(num)
    want_state, want = jax.jit(step_of(forward))(state, given)
    got_state, got = step(state, given)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert largest_difference(got_state, want_state) <= 1e-6
    if split == "features":
        assert any(step.plan(state, given).leaf("params/table").spec), "the table is not split"
        sent, planned = traffic(step, state, given, GROUPS)
        assert sent["reduce_scatter", "data"] == planned["reduce_scatter", "data"]
        assert not any(op == "all_reduce" and axis == "data" for op, axis in sent)


def test_behind_a_split_layer_examples_lie_otherwise():
    """A scale between two split layers meets examples of the whole group: it must not call each worker's back."""

    def forward(params, batch):
        x = batch["x"].reshape(len(batch["x"]), -1) @ params["first"]
        return (
            jnp.tanh(jnp.tanh(jnp.tanh(x) @ params["dense1"]) * params["scale"] @ params["dense2"]) @ params["logits"]
        )

    shapes = {"first": (192, 64), "dense1": (64, 512), "scale": (512,), "dense2": (512, 64), "logits": (64, 16)}
    state = state_of(
        {name: jnp.full(shape, 0.5) if len(shape) == 1 else normal(shape)[0] for name, shape in shapes.items()}
    )
    rules = splitjax.RuleSet(
        name="mine",
        replicated_batch="all",
        rules=(
            splitjax.Rule(name="whole", path="**/first", shard=[]),
            splitjax.Rule(name="scale", path="**/scale", shard=[]),
            splitjax.Rule(name="dense", kind="dense", shard=[{"out": "model"}], ties="hard"),
        ),
    )
    make = lambda sharded: splitjax.parallelize(
        step_of(forward), mesh=ONE_GROUP, rules=rules, shard_state=sharded, donate=False
    )
    want_state, _ = jax.jit(step_of(forward))(state, batch())
    assert largest_difference(make(True)(state, batch())[0], want_state) <= 1e-6
    plain, sharded = (traffic(make(one), state, batch(), ONE_GROUP)[0] for one in (False, True))
    # Summing into parts and gathering new values sends what the all-reduce did; nothing is sent besides.
    assert not any(op in ("all_to_all", "collective_permute") for op, _ in sharded)
    assert sum(sharded.values()) <= sum(plain.values())


def half_precision(state, batch):
    """A step whose parameters and images are cast to bfloat16 before the boundary."""

    def loss(params):
        return optax.softmax_cross_entropy_with_integer_labels(
            network(params, half).astype(jnp.float32), batch["y"]
        ).mean()

    half = {**batch, "x": batch["x"].astype(jnp.bfloat16)}
    value, grads = splitjax.value_and_grad(loss)(jax.tree.map(lambda x: x.astype(jnp.bfloat16), state["params"]))
    grads = jax.tree.map(lambda x: x.astype(jnp.float32), grads)
    updates, opt = MOMENTUM.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value


@pytest.mark.parametrize("kind", ["modulo", "turns"])
def test_half_precision_crosses_in_turns_with_its_cotangents(kind):
    """numpy does not count bfloat16 among floating point: layers before the crossing had gradients of zero."""
    state = state_of(network_params())
    want_state, _ = jax.jit(half_precision)(state, batch())
    parallel = splitjax.parallelize(half_precision, mesh=GROUPS, group_comm=kind, donate=False)
    assert parallel.plan(state, batch()).group_comm == kind
    moments, wanted = parallel(state, batch())[0]["opt"][0].trace, want_state["opt"][0].trace
    for name, want in wanted.items():
        assert float(jnp.max(jnp.abs(moments[name] - want))) <= 0.05 * float(jnp.max(jnp.abs(want))), name


def test_half_precision_and_a_cast_before_the_boundary():
    state = state_of(network_params())
    parallel = splitjax.parallelize(half_precision, mesh=GROUPS, shard_state=True, donate=False)
    want_state, want = jax.jit(half_precision)(state, batch())
    got_state, got = parallel(state, batch())
    np.testing.assert_allclose(got, want, rtol=1e-2)
    assert largest_difference(got_state, want_state) <= 1e-2
    sent, _ = traffic(parallel, state, batch(), GROUPS)
    assert sent["reduce_scatter", "data+model"] and not sent["all_reduce", "data+model"]


@pytest.mark.parametrize(
    ("mesh", "options"),
    [(GROUPS, {"value_and_grad": jax.value_and_grad}), (GROUPS, {"microbatches": 2}), (ONE_GROUP, {"microbatches": 2})],
    ids=["no boundary", "microbatches", "microbatches in one group"],
)
def test_where_xla_chooses_the_collective(mesh, options):
    """Numbers and memory as ever; the sums may be all-reduces."""

    def forward(params, batch):
        return jnp.tanh(conv(batch["x"], params["conv1"])).reshape(len(batch["x"]), -1) @ params["logits"]

    state = state_of(dict(zip(("conv1", "logits"), normal((3, 3, 3, 32), (512, 16)), strict=True)))
    step = splitjax.parallelize(step_of(forward, **options), mesh=mesh, shard_state=True, donate=False)
    want_state, want = jax.jit(step_of(forward))(state, batch())
    got_state, got = step(state, batch())
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert largest_difference(got_state, want_state) <= 1e-6
    assert (
        got_state["opt"][0].trace["conv1"].addressable_shards[0].data.nbytes * 8 == got_state["params"]["conv1"].nbytes
    )


def test_parameters_that_are_not_trained_are_not_gathered():
    """A frozen copy that the loss reads is handed through: no new value of it is computed, in parts or otherwise."""

    def step(state, batch):
        def loss(params):
            x = jnp.tanh(batch["x"].reshape(len(batch["x"]), -1) @ state["frozen"]) @ params["logits"]
            return optax.softmax_cross_entropy_with_integer_labels(x, batch["y"]).mean()

        value, grads = splitjax.value_and_grad(loss)(state["params"])
        return {**state, "params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, value

    frozen, logits = normal((192, 64), (64, 16))
    state = {"frozen": frozen, "params": {"logits": logits}}
    parallel = splitjax.parallelize(step, mesh=ALONE, rules="data_parallel", shard_state=True)
    plan = parallel.plan(state, batch())
    assert plan.leaf("frozen").gradient is None and plan.leaf("params/logits").gradient is not None
    sent, _ = traffic(parallel, state, batch(), ALONE)
    assert sent == {("reduce_scatter", "data"): 64 * 16 * 4 * 7 // 8, ("all_gather", "data"): 64 * 16 * 4 * 7 // 8}


def test_evaluation_reads_the_sharded_state():
    state = state_of(network_params())
    step = splitjax.parallelize(step_of(network), mesh=GROUPS, shard_state=True, donate=False)
    state, _ = step(step.place(state, example=(batch(),)), batch())
    evaluate = step.like(lambda state, batch: (network(state["params"], batch).argmax(-1) == batch["y"]).mean())
    want = (network(jax.device_get(state["params"]), batch()).argmax(-1) == batch()["y"]).mean()
    np.testing.assert_allclose(evaluate(state, batch()), want)


def test_nnx():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.conv, self.head = nnx.Conv(3, 16, (3, 3), rngs=rngs), nnx.Linear(1024, 16, rngs=rngs)

        def __call__(self, x):
            return self.head(nnx.relu(self.conv(x)).reshape(len(x), -1))

    def step(model, optimizer, batch):
        loss, grads = splitjax.nnx.value_and_grad(
            lambda model: optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()
        )(model)
        optimizer.update(model, grads)
        return loss

    def objects():
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, MOMENTUM, wrt=nnx.Param)

    want_model, want_optimizer = objects()
    want = [step(want_model, want_optimizer, batch()) for _ in range(2)]
    parallel = splitjax.nnx.parallelize(step, mesh=GROUPS, shard_state=True)
    model, optimizer = parallel.place(*objects(), example=(batch(),))
    got = [parallel(model, optimizer, batch()) for _ in range(2)]
    np.testing.assert_allclose(got, want, rtol=1e-5)
    traces = [x for x in jax.tree.leaves(nnx.state(optimizer)) if x.shape == (3, 3, 3, 16)]
    assert traces and all(x.addressable_shards[0].data.nbytes * 8 == x.nbytes for x in traces)


@pytest.mark.tpu_aot
def test_a_tpu_sums_into_parts():
    """The real compiler, ahead of time. It makes small sums all-reduces again; nearly all bytes must leave by
    reduce-scatters."""
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh

    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    mesh = Mesh(np.array(devices).reshape(2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    spec = models.build("vgg11", head_features=1024)
    init_fn, train_step, _ = models.make_step(spec, MOMENTUM, value_and_grad=splitjax.value_and_grad)
    step = splitjax.parallelize(train_step, mesh=mesh, shard_state=True)
    state = jax.eval_shape(init_fn, jax.random.key(0))
    found = compiled_collectives(step.lower(state, spec.example(64)).compile(), MeshShape.of(mesh))
    sent = sum(one.bytes for one in found if one.op == "reduce_scatter")
    assert sent >= 0.98 * sum(
        one.bytes for one in step.plan(state, spec.example(64)).collectives if one.op == "reduce_scatter"
    )


@pytest.mark.parametrize("value", [1, "yes", None])
def test_the_option_is_a_bool(value):
    with pytest.raises(OptionError, match="true or false"):
        splitjax.parallelize(step_of(network), shard_state=value)


def test_a_deep_stack_of_convolutions_where_another_axis_is_whole():
    """VGG-16 under megatron: a `shard_map` over `model` inside that over `data` ended the process on JAX 0.10."""
    spec = models.build("vgg16", width=1 / 16, head_features=32)
    init, step, _ = models.make_step(spec, optax.sgd(0.1))
    state = init(jax.random.key(0))
    rng = np.random.default_rng(0)
    given = {
        name: rng.normal(size=shape.shape).astype(shape.dtype)
        if jnp.issubdtype(shape.dtype, jnp.floating)
        else rng.integers(0, 10, shape.shape).astype(shape.dtype)
        for name, shape in spec.example(16).items()
    }
    want_state, want = jax.jit(step)(state, given)
    parallel = splitjax.parallelize(step, mesh=GROUPS, rules="megatron", shard_state=True, donate=False)
    got_state, got = parallel(state, given)
    assert largest_difference(got, want) <= 1e-5
    assert largest_difference(got_state, want_state) <= 1e-5
