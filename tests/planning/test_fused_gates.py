"""Weights that a step lays side by side before a product, as the gates of recurrent cells are: each is dealt out by
itself, where it is, and nothing is sent for it. What a recurrent layer's state takes in every iteration is planned."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import splitjax
from splitjax.plan import PurposeKind
from splitjax.primitives.dealt import DEAL
from splitjax.step.dealing.rewriting import Parts, find_parts, rewritten
from splitjax.step.dealing.values import FusedProduct

WIDTH, HIDDEN, LENGTH, GATES = 8, 16, 3, "ifgo"
MESH = {"data": 2, "model": 4}


def parameters():
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.normal(size=shape) / 4)
    kernels = {f"i{gate}": make(WIDTH, HIDDEN) for gate in GATES} | {f"h{gate}": make(HIDDEN, HIDDEN) for gate in GATES}
    return {**kernels, **{f"b{gate}": make(HIDDEN) for gate in GATES}}


def examples():
    rng = np.random.default_rng(1)
    return {"x": jnp.asarray(rng.normal(size=(LENGTH, 8, WIDTH))), "y": jnp.asarray(rng.normal(size=(8, HIDDEN)))}


def loss(params, batch):
    """Of an LSTM whose gates are laid side by side, as Flax's `OptimizedLSTMCell` has them."""
    beside = lambda kind: jnp.concatenate([params[f"{kind}{gate}"] for gate in GATES], -1)

    def cell(carry, x):
        memory, state = carry
        both = x @ beside("i") + (state @ beside("h") + beside("b").reshape(1, -1))
        i, f, g, o = jnp.split(both, 4, -1)
        memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (memory, jax.nn.sigmoid(o) * jnp.tanh(memory)), None

    zeros = jnp.zeros_like(batch["y"])
    (_, state), _ = jax.lax.scan(cell, (zeros, zeros), batch["x"])
    return jnp.mean((state - batch["y"]) ** 2)


def train(params, batch):
    value, grads = splitjax.value_and_grad(loss)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def batched(batch):
    """With the examples first, as a batch has them."""
    return {"x": batch["x"].swapaxes(0, 1), "y": batch["y"]}


def batched_train(params, batch):
    return train(params, {"x": batch["x"].swapaxes(0, 1), "y": batch["y"]})


def test_gates_of_a_recurrent_cell_stay_where_they_are():
    with jax.enable_x64(True):
        params, batch = parameters(), batched(examples())
        parallel = splitjax.parallelize(batched_train, mesh=MESH, rules="megatron", donate=False)
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
        jax.tree.map(close, parallel(params, batch), jax.jit(batched_train)(params, batch))
        plan, report = parallel.plan(params, batch), parallel.report(params, batch)
    layouts = {leaf.path: leaf.axes for leaf in plan.leaves}
    assert all(layouts[f"{kind}{gate}"] == ("model",) for kind in "ih" for gate in GATES)
    # Neither gates nor activations change places.
    assert {each.op for each in report.collectives} <= {"all_reduce", "all_gather"}
    assert report.missing == ()
    states = [
        each for each in report.collectives if each.planned and each.planned.purpose.kind == PurposeKind.WHOLE_STATE
    ]
    # Of 4 devices' parts of 4 examples, three come from others, in each of the iterations.
    sent = LENGTH * 4 * HIDDEN * 8 * 3 // 4
    assert [(each.op, each.bytes) for each in states] == [("all_gather", sent)] * 2 and not any(
        each.differs for each in states
    )
    # What is left are the biases, of which XLA updates parts.
    assert {each.bytes for each in report.unplanned if each.compiled.shape} <= {HIDDEN * 8 * 3 // 4}


def twice(batch):
    """With as many examples again."""
    return {"x": jnp.concatenate([batch["x"], -batch["x"]], 1), "y": jnp.concatenate([batch["y"], 2 * batch["y"]])}


STORED = splitjax.RuleSet(
    "stored",
    (
        splitjax.Rule("kernels", path="[ih]?", shard=[{"largest": ["data", "model"]}]),
        splitjax.Rule("rest", path="**", shard=[]),
    ),
    replicated_batch="all",
)


@pytest.mark.parametrize("number", [None, 2])
@pytest.mark.parametrize("rules", ["splitbrain", STORED], ids=["splitbrain", "stored"])
def test_a_recurrent_cell_trains_as_on_one_device_with_what_is_planned(rules, number):
    with jax.enable_x64(True):
        params, batch = parameters(), batched(examples() if number is None else twice(examples()))
        options = {} if number is None else {"microbatches": number}
        parallel = splitjax.parallelize(batched_train, mesh=MESH, rules=rules, donate=False, **options)
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
        jax.tree.map(close, parallel(params, batch), jax.jit(batched_train)(params, batch))
        plan, report = parallel.plan(params, batch), parallel.report(params, batch)
    assert report.missing == () and {each.compiled.shape for each in report.unplanned} <= {(), (HIDDEN,)}
    gradients = [
        each for each in report.collectives if each.planned and each.planned.purpose.kind == PurposeKind.GRADIENT
    ]
    of_kernels = [each for each in gradients if each.planned.purpose.leaf[0] in "ih"]
    assert of_kernels and all(each.compiled.trips == 1 for each in of_kernels)
    (boundary,) = plan.boundaries
    assert (boundary.how, boundary.num_parts) == ("microbatches", number or 1)


def test_gates_are_dealt_out_once():
    """What was laid side by side in shares is a weight that is dealt out: its shares are not cut again."""

    def function(x, a, b):
        return jnp.split(x @ jnp.concatenate([a, b], -1), 2, -1)

    jaxpr = jax.make_jaxpr(function)(np.ones((4, 6)), np.ones((6, 16)), np.ones((6, 16)))
    at = lambda jaxpr: next((n,) for n, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "dot_general")
    assert find_parts(jaxpr, [(at(jaxpr), 1, 1, 2)]) == [Parts((16, 16), (16, 16), (None, None))]
    again = rewritten(jaxpr, [FusedProduct(at(jaxpr), 1, 1, (16, 16), (16, 16), 2)])
    assert again.eqns[at(again)[0]].invars[1].aval.shape == (6, 2, 16)
    assert find_parts(again, [(at(again), 1, dim, 2) for dim in (1, 2)]) == [None, None]


def test_numbers_that_are_reshaped_hide_no_weight():
    """A scalar that stands in the program has no variable."""

    def function(x, a, b):
        return [part * jnp.reshape(2.0, (1, 1)) for part in jnp.split(x @ jnp.concatenate([a, b], -1), 2, -1)]

    jaxpr = jax.make_jaxpr(function)(np.ones((4, 6)), np.ones((6, 16)), np.ones((6, 16)))
    site = next((n,) for n, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "dot_general")
    assert find_parts(jaxpr, [(site, 1, 1, 2)]) == [Parts((16, 16), (16, 16), (None, None))]


def test_other_weights_are_not_held_whole_for_a_recurrence():
    """Where workers would have more of other layers' weights whole than of the recurrence's, gradients are summed in
    its loop over the devices that store them, and behind it over the others."""

    def deeper(params, batch):
        return loss(params, batch) + jnp.mean((jnp.tanh(batch["y"] @ params["wide"]) @ params["back"]) ** 2)

    def step(params, batch):
        value, grads = splitjax.value_and_grad(deeper)(params, {"x": batch["x"].swapaxes(0, 1), "y": batch["y"]})
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = parameters() | {"wide": jnp.ones((HIDDEN, 256)), "back": jnp.ones((256, HIDDEN))}
    plan = splitjax.parallelize(step, mesh={"fsdp": 8}, rules="fsdp").plan(params, batched(examples()))
    (boundary,) = plan.boundaries
    assert boundary.how == "whole" and "32768 bytes of other layers' weights whole" in boundary.why
    stored = [splitjax.Rule(path, path=path, shard=[{"largest": "fsdp"}]) for path in ("[ih]?", "wide", "back")]
    rules = splitjax.RuleSet("stored", (*stored, splitjax.Rule("rest", path="**", shard=[])), replicated_batch="data")
    parallel = splitjax.parallelize(step, mesh={"data": 2, "fsdp": 4}, rules=rules)
    (boundary,) = parallel.plan(params, batched(examples())).boundaries
    assert boundary.how == "microbatches" and "32768 bytes of other layers' weights whole" in boundary.why
    twice_as_many = splitjax.parallelize(step, mesh={"fsdp": 8}, rules="fsdp", microbatches=2)
    (looped,) = twice_as_many.plan(params, batched(twice(examples()))).boundaries
    assert (looped.how, looped.num_parts) == (
        "microbatches",
        2,
    ) and "bytes of other layers' weights whole" in looped.why
    over_data = [each for each in parallel.report(params, batched(examples())).collectives if each.axis == "data"]
    assert over_data and all(each.compiled.trips == 1 for each in over_data)


def dealt(function, *shapes, dim=1, sizes=(8, 8, 8, 8), num=4):
    """The sizes of what is dealt out where the weight of the one product of a function is; its numbers stay."""
    jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    (site,) = [(n,) for n, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "dot_general"]
    changed = rewritten(jaxpr, [FusedProduct(site, 1, dim, sizes, sizes, num)])
    rng = np.random.default_rng(0)
    values = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    before, after = (jax.core.eval_jaxpr(each.jaxpr, each.consts, *values) for each in (jaxpr, changed))
    for one, other in zip(before, after, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    return [eqn.params["sizes"] for eqn in changed.eqns if eqn.primitive.name == DEAL]


def beside_each_other(a, b):
    return jnp.concatenate([a.astype(jnp.float16), b.astype(jnp.float16)], -1).astype(jnp.float32)


def parts_of(y):
    return jnp.split(y, 4, -1)


@pytest.mark.parametrize(
    ("function", "shapes", "deals"),
    [
        (lambda x, a, b: parts_of(x @ jnp.concatenate([a, b], -1)), ((4, 6), (6, 8), (6, 24)), [(8, 8, 8)]),
        (
            lambda x, a, b: parts_of(x @ jnp.concatenate([a, b], -1).astype(x.dtype)),
            ((4, 6), (6, 16), (6, 16)),
            [(8, 8)] * 2,
        ),
        (lambda x, a, b: parts_of(x @ jnp.concatenate([a, b], -1)), ((4, 6), (6, 12), (6, 20)), [(8, 8, 8, 8)]),
        (lambda x, a, b: parts_of(x @ jnp.concatenate([a, b], 0)), ((4, 6), (2, 32), (4, 32)), [(8, 8, 8, 8)]),
    ],
    ids=["of two sizes", "in another dtype", "across", "along the other dim"],
)
def test_what_is_laid_side_by_side_is_dealt_out_apart(function, shapes, deals):
    assert dealt(function, *shapes) == deals


def test_biases_that_are_laid_side_by_side_are_dealt_out_apart():
    def function(x, a, b, c, d):
        return jnp.split(x @ jnp.concatenate([a, b], -1) + jnp.concatenate([c, d]).reshape(1, -1), 2, -1)

    assert dealt(function, (4, 6), (6, 16), (6, 16), (16,), (16,), sizes=(16, 16)) == []


def test_biases_that_are_broadcast_are_dealt_out_apart():
    def function(x, a, b, c, d):
        return jnp.split(x @ jnp.concatenate([a, b], -1) + jnp.concatenate([c, d]), 2, -1)

    assert dealt(function, (4, 6), (6, 16), (6, 16), (16,), (16,), sizes=(16, 16)) == []


def test_nothing_is_dealt_out_of_what_has_no_columns():
    def function(x, a, empty, b):
        return jnp.split(x @ jnp.concatenate([a, empty, b], -1), 2, -1)

    assert dealt(function, (4, 6), (6, 16), (6, 0), (6, 16), sizes=(16, 16)) == []


def parts_found(function, nums, widths=(24, 24)):
    jaxpr = jax.make_jaxpr(function)(np.ones((4, 6)), *(np.ones((6, width)) for width in widths))
    sites = [(n,) for n, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == "dot_general"]
    return find_parts(jaxpr, [(site, 1, 1, num) for site, num in zip(sites, nums, strict=True)])


def test_products_that_are_added_up_are_cut_alike():
    cut = lambda x: jnp.split(x, 3, -1)
    assert parts_found(lambda x, a, b: cut(x @ a + x @ b), (2, 2)) == [Parts((8, 8, 8), (8, 8, 8), (None,) * 3)] * 2

    def finer(x, a, b):
        y = x @ a
        return *cut(y + x @ b), y[:, :4]

    assert parts_found(finer, (2, 2)) == [Parts((4, 4, 8, 8), (4, 4, 8, 8), (None,) * 4)] * 2

    def used_whole(x, a, b):
        y = x @ a
        return *cut(y + x @ b), jax.nn.softmax(y)

    assert parts_found(used_whole, (2, 2)) == [None, None]
    assert parts_found(lambda x, a, b: cut(x @ a + x @ b), (2, 4)) == [None, None]


def test_products_for_different_numbers_of_devices_are_added_up():
    def step(params, batch):
        def of(params):
            first, second, third = jnp.split(batch["x"] @ params["wx"] + batch["h"] @ params["wh"], 3, -1)
            return jnp.mean((first * second + third) ** 2)

        value, grads = splitjax.value_and_grad(of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        params = {name: jnp.asarray(rng.normal(size=(8, 48))) for name in ("wx", "wh")}
        batch = {name: jnp.asarray(rng.normal(size=(8, 8))) for name in ("x", "h")}
        split = lambda name, axes: splitjax.Rule(name, path=name, shard=[{"out": axes}])
        rules = splitjax.RuleSet(
            "two", (split("wx", ["model", "extra"]), split("wh", "model")), replicated_batch="data"
        )
        mesh = {"data": 1, "model": 2, "extra": 2}
        found = splitjax.parallelize(step, mesh=mesh, rules=rules, donate=False)(params, batch)
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
        jax.tree.map(close, found, jax.jit(step)(params, batch))
