"""Inputs of rematerialised layers that lie in parts until the backward pass: what is stored and sent is what the plan
says, and the numbers are those of one device."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import splitjax
from benchmarks.modern.models import Decoder, make_step, state_of
from splitjax import Plan
from splitjax._compat import CPU_DROPS_BARRIERS
from splitjax.choosing import Prices, Pricing, laid_out
from splitjax.machines import parse_target
from splitjax.mesh import MeshShape
from splitjax.plan import Phase, PurposeKind
from splitjax.rules import load_rules

LAYERS, EXAMPLES, SEQ, WIDTH, HIDDEN = 3, 8, 4, 16, 32
MESH = {"fsdp": 2, "tensor": 4}
WHOLE = dataclasses.replace(load_rules("transformer"), saved=())


def mlp(x, weights):
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"]


def scanned(params, batch, remat=jax.checkpoint):
    out, _ = jax.lax.scan(remat(lambda x, each: (mlp(x, each), None)), batch["x"] * params["scale"], params["layers"])
    return jnp.mean((out - batch["y"]) ** 2)


def unrolled(params, batch):
    x = batch["x"] * params["scale"]
    for index in range(LAYERS):
        x = jax.checkpoint(mlp)(x, jax.tree.map(lambda weight, at=index: weight[at], params["layers"]))
    return jnp.mean((x - batch["y"]) ** 2)


def with_dropout(params, batch):
    """Its layers read a key and a number besides, and give a number and what nobody reads."""

    def layer(x, key, count):
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        return (
            jnp.where(kept, jnp.tanh(x @ params["layers"]["up"][0]) @ params["layers"]["down"][0], x),
            count + 1,
            x.sum(),
        )

    x, count = batch["x"] * params["scale"], 0
    for index in range(2):
        x, count, _ = jax.checkpoint(layer)(x, jax.random.key(index), count)
    return jnp.mean((x - batch["y"]) ** 2) * count


def train_with(loss, **options):
    def train(params, batch):
        value, grads = splitjax.value_and_grad(loss, **options)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return train


def arguments(dtype=np.float32):
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape, scale=shape[-2] ** -0.5).astype(dtype)
    layers = {"up": normal(LAYERS, WIDTH, HIDDEN), "down": normal(LAYERS, HIDDEN, WIDTH)}
    batch = {name: normal(EXAMPLES, SEQ, WIDTH) for name in ("x", "y")}
    return {"scale": 1 + normal(1, WIDTH)[0], "layers": layers}, batch


def gathers(plan):
    return [each for each in plan.collectives if each.purpose.kind == PurposeKind.SAVED_INPUT]


def test_each_device_keeps_its_part_and_gathers_it_once_a_layer():
    plan = splitjax.parallelize(train_with(scanned), mesh=MESH, rules="transformer").plan(*arguments())
    (gather,) = gathers(plan)
    whole = LAYERS * EXAMPLES * SEQ * WIDTH * 4 // MESH["fsdp"]
    assert (gather.op, gather.axis, gather.bytes) == ("all_gather", "tensor", whole * 3 // 4)
    assert gather.layer == "layers/up" and gather.purpose.phase == Phase.BACKWARD
    assert plan.saved == ("tensor",) and "inputs of rematerialised layers lie in parts over tensor" in str(plan)
    plan = splitjax.parallelize(train_with(unrolled), mesh=MESH, rules="transformer").plan(*arguments())
    assert [each.bytes for each in gathers(plan)] == [whole // LAYERS * 3 // 4] * LAYERS


@pytest.mark.parametrize(
    ("remat", "mesh", "rules"),
    [
        (lambda layer: layer, MESH, "transformer"),
        (lambda layer: jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable), MESH, "transformer"),
        (jax.checkpoint, {"fsdp": 8}, "transformer"),
        (jax.checkpoint, {"fsdp": 1, "tensor": 8}, WHOLE),
        (jax.checkpoint, MESH, WHOLE),
        (jax.checkpoint, {"data": 2, "tensor": 4}, "megatron"),
    ],
    ids=["no remat", "products kept", "no tensor axis", "one worker", "set without it", "megatron"],
)
def test_nothing_else_is_kept_in_parts(remat, mesh, rules):
    train = train_with(lambda params, batch: scanned(params, batch, remat))
    plan = splitjax.parallelize(train, mesh=mesh, rules=rules).plan(*arguments())
    assert gathers(plan) == [] and plan.saved == () and "rematerialised" not in str(plan)


def test_a_width_that_does_not_divide_leaves_another_dim():
    params, batch = arguments()
    cut = lambda weight: weight[..., : WIDTH - 2]
    params = {
        "scale": cut(params["scale"]),
        "layers": {"up": params["layers"]["up"][:, :-2], "down": cut(params["layers"]["down"])},
    }
    batch = {name: cut(array) for name, array in batch.items()}
    step = splitjax.parallelize(train_with(scanned), mesh=MESH, rules="transformer")
    (gather,) = gathers(step.plan(params, batch))
    assert gather.bytes == LAYERS * EXAMPLES * SEQ * (WIDTH - 2) * 4 // MESH["fsdp"] * 3 // 4
    report = step.report(params, batch)
    assert gather in [each.planned for each in report.collectives if not each.differs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_compiled_is_what_was_planned(dtype):
    decoder = Decoder(layers=2, width=32, hidden=64, vocab=64, seq=8, examples=8, heads=4, kv_heads=4, dtype=dtype)
    sent, stored = {}, {}
    for rules in ("transformer", WHOLE):
        step = splitjax.parallelize(make_step(decoder, splitjax.value_and_grad), mesh=MESH, rules=rules)
        report = step.report(state_of(decoder), decoder.batch())
        assert report.missing == ()
        assert [each for each in report.unplanned if each.compiled.shape != ()] == []
        assert [each for each in report.collectives if each.planned is not None and each.differs] == []
        name = getattr(rules, "name", rules) + str(getattr(rules, "saved", ""))
        sent[name] = sum(each.bytes for each in step.plan(state_of(decoder), decoder.batch()).collectives)
        stored[name] = report.memory.compiled.temporary_bytes
    assert sent["transformer"] > sent["transformer()"] and stored["transformer"] < stored["transformer()"]


def read_twice(params, batch, remat=jax.checkpoint):
    """Two calls read one activation."""
    x = batch["x"] * params["scale"]
    layer = lambda at: remat(mlp)(x, jax.tree.map(lambda weight: weight[at], params["layers"]))
    return jnp.mean((layer(0) * layer(1) - batch["y"]) ** 2)


def scanned_twice(params, batch, remat=jax.checkpoint):
    """Two calls read one activation in every turn of a loop over layers."""

    def pair(x, weights):
        return remat(mlp)(x, weights["one"]) + jnp.tanh(remat(mlp)(x, weights["other"])), None

    layers = {"one": params["layers"], "other": jax.tree.map(lambda weight: weight[::-1], params["layers"])}
    out, _ = jax.lax.scan(pair, batch["x"] * params["scale"], layers)
    return jnp.mean((out - batch["y"]) ** 2)


def read_twice_in_turns(params, batch):
    """A loop around the gradient, over halves of the batch."""

    def turn(total, part):
        return jax.tree.map(jnp.add, total, splitjax.value_and_grad(read_twice)(params, part)), None

    halves = jax.tree.map(lambda x: x.reshape(2, EXAMPLES // 2, SEQ, WIDTH), batch)
    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    (value, grads), _ = jax.lax.scan(turn, zeros, halves)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def with_remat(loss, prevent_cse):
    return train_with(functools.partial(loss, remat=functools.partial(jax.checkpoint, prevent_cse=prevent_cse)))


@pytest.mark.parametrize(
    ("train", "times", "runs"),
    [
        (with_remat(read_twice, True), 1 if CPU_DROPS_BARRIERS else 2, 1),
        (with_remat(read_twice, False), 1, 1),
        (read_twice_in_turns, 1 if CPU_DROPS_BARRIERS else 2, 1),
        (with_remat(scanned_twice, True), 2, LAYERS),
        (with_remat(scanned_twice, False), 2, LAYERS),
    ],
    ids=["calls", "calls that may be merged", "in turns", "in a scan", "in a scan, calls that may be merged"],
)
def test_what_two_calls_read_is_gathered_as_often_as_planned(train, times, runs):
    """Once for each call in a loop over layers, and elsewhere behind barriers, if the compiler keeps these."""
    step = splitjax.parallelize(train, mesh=MESH, rules="transformer")
    planned = gathers(step.plan(*arguments()))
    sent = runs * EXAMPLES * SEQ * WIDTH * 4 // MESH["fsdp"] * 3 // 4
    assert [(each.op, each.axis, each.bytes) for each in planned] == [("all_gather", "tensor", sent)] * times
    report = step.report(*arguments())
    found = [each for each in report.collectives if (each.op, each.axis) == ("all_gather", "tensor")]
    assert [(each.planned, each.bytes, each.differs) for each in found] == [(each, sent, "") for each in planned]
    assert not set(planned) & set(report.missing)


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_on_a_tpu_calls_gather_for_themselves_behind_barriers(prevent_cse):
    """Its compiler keeps the barriers between a call and its second computation."""
    train = with_remat(read_twice, prevent_cse)
    step = splitjax.parallelize(train, mesh=MESH, rules="transformer", target="tpu:v5e:2x4")
    assert len(gathers(step.plan(*arguments()))) == (2 if prevent_cse else 1)


def test_a_call_behind_barriers_gathers_apart_from_one_without():
    def mixed(params, batch):
        x = batch["x"] * params["scale"]
        calls = [functools.partial(jax.checkpoint, prevent_cse=behind)(mlp) for behind in (True, False, False)]
        weights = lambda at: jax.tree.map(lambda weight: weight[at], params["layers"])
        return jnp.mean((sum(call(x, weights(at)) for at, call in enumerate(calls)) - batch["y"]) ** 2)

    step = splitjax.parallelize(train_with(mixed), mesh=MESH, rules="transformer", target="tpu:v5e:2x4")
    assert [each.purpose.phase for each in gathers(step.plan(*arguments()))] == [Phase.BACKWARD] * 2


@pytest.mark.parametrize("loss", [scanned, unrolled, with_dropout, read_twice, scanned_twice])
@pytest.mark.parametrize("explicit", [False, True])
def test_numbers_are_those_of_one_device(loss, explicit):
    kinds = (AxisType.Explicit if explicit else AxisType.Auto,) * 2
    mesh = jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=kinds)
    with jax.enable_x64(True):
        params, batch = arguments(np.float64)
        alone, value_alone = jax.jit(train_with(loss))(params, batch)
        step = splitjax.parallelize(train_with(loss), mesh=mesh, rules="transformer", donate=False)
        assert step.plan(params, batch).saved == ("tensor",)
        new, value = step(params, batch)
        np.testing.assert_allclose(value, value_alone, rtol=1e-10)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), new, alone)


def test_numbers_stay_in_microbatches_and_with_sharded_state():
    with jax.enable_x64(True):
        params, batch = arguments(np.float64)
        optimizer = optax.adam(1e-2)

        def train(state, batch):
            value, grads = splitjax.value_and_grad(scanned, microbatches=2)(state["params"], batch)
            updates, opt = optimizer.update(grads, state["opt"])
            return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

        state = {"params": params, "opt": optimizer.init(params)}
        alone, _ = jax.jit(train)(state, batch)
        step = splitjax.parallelize(train, mesh=MESH, rules="transformer", shard_state=True, donate=False)
        assert step.plan(state, batch).saved == ("tensor",)
        new, _ = step(state, batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), new, alone)


def test_an_activation_that_is_split_otherwise_is_left_alone():
    """Over fsdp and tensor, of which fsdp has examples of its own; and with the sequence over an axis of its own."""
    both = dataclasses.replace(load_rules("transformer"), saved=("fsdp", "tensor"))
    assert splitjax.parallelize(train_with(scanned), mesh=MESH, rules=both).plan(*arguments()).saved == ("tensor",)
    mesh = jax.make_mesh((2, 2, 2), ("fsdp", "rows", "tensor"), axis_types=(AxisType.Auto,) * 3)
    params, batch = arguments()
    placed = {name: jax.device_put(array, NamedSharding(mesh, P("fsdp", "rows"))) for name, array in batch.items()}
    step = splitjax.parallelize(train_with(scanned), mesh=mesh, roles={"rows": "tensor"}, rules="transformer")
    assert gathers(step.plan(params, placed)) == []


def test_a_pinned_plan_keeps_it():
    plan = splitjax.parallelize(train_with(scanned), mesh=MESH, rules="transformer").plan(*arguments())
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.saved == ("tensor",)
    pinned = splitjax.parallelize(train_with(scanned), mesh=MESH, plan=again)
    assert pinned.plan(*arguments()) == plan
    whole = splitjax.parallelize(train_with(scanned), mesh=MESH, rules=WHOLE).plan(*arguments())
    assert any(line.startswith("saved: ") for line in whole.diff(plan))


def test_a_search_for_rules_prices_what_the_plan_sends():
    step = splitjax.parallelize(train_with(scanned), mesh=MESH, rules="transformer")
    mesh = MeshShape.of(MESH)
    pricing = Pricing(step.graph(*arguments()), mesh, Prices.of_target(parse_target("tpu:v5e:2x4"), mesh), {}, True)
    priced = [laid_out(pricing, rules) for rules in (load_rules("transformer"), WHOLE)]
    of_saved = [each for each in priced[0].collectives if each.purpose.kind == PurposeKind.SAVED_INPUT]
    assert of_saved == gathers(step.plan(*arguments()))
    assert pricing.prices.seconds(priced[0]) > pricing.prices.seconds(priced[1])
