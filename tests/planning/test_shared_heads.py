"""Attention with fewer heads of keys and values than devices along the tensor axis: these heads are copied in groups,
and all that is sent for that is planned, also where they lie in one weight with the queries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import splitjax
from splitjax.plan import PurposeKind

WIDTH, HEADS, SIZE, HIDDEN, VOCAB = 16, 4, 4, 32, 24
TWO, THREE = {"data": 2, "tensor": 4}, {"data": 1, "fsdp": 2, "tensor": 4}
OF_HEADS = (PurposeKind.SHARED_HEADS, PurposeKind.WHOLE_HEADS)


def repeated(q, k, v):
    """Keys and values are repeated for the heads that read them."""
    k, v = (jnp.repeat(each, HEADS // each.shape[2], 2) for each in (k, v))
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k), -1)
    return jnp.einsum("bhts,bshd->bthd", weights, v)


def grouped(q, k, v):
    """Queries are grouped by the head of keys that they read, as `jax.nn.dot_product_attention` has it."""
    q = q.reshape(*q.shape[:2], k.shape[2], -1, SIZE)
    weights = jax.nn.softmax(jnp.einsum("btkgd,bskd->bkgts", q, k), -1)
    return jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(*q.shape[:2], HEADS, SIZE)


def project(x, weight):
    if weight.ndim == 3:
        return jnp.einsum("btd,dhk->bthk", x, weight)
    return (x @ weight).reshape(*x.shape[:2], -1, SIZE)


def in_one(x, w, kv):
    """Query, key and value of one weight, with one bias: their columns side by side, or their heads."""
    if w["qkv"].ndim == 3:
        return jnp.split(jnp.einsum("btd,dhk->bthk", x, w["qkv"]) + w["bias"], [HEADS, HEADS + kv], 2)
    ends = [HEADS * SIZE, (HEADS + kv) * SIZE]
    return (part.reshape(*x.shape[:2], -1, SIZE) for part in jnp.split(x @ w["qkv"] + w["bias"], ends, -1))


def decoder(kv, attend=repeated, *, apart=False, scan=True, remat=True, fused=False, **options):
    """Returns (parameters, step, the same step on one device): two layers behind an embedding. `fused`: query, key and
    value in one weight, with a bias, and gate and up in one."""
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.normal(size=shape) / 4)
    columns = (lambda count: (count, SIZE)) if apart else (lambda count: (count * SIZE,))
    layers = {name: make(2, WIDTH, *columns(count)) for name, count in (("q", HEADS), ("k", kv), ("v", kv))}
    layers |= {"o": make(2, *columns(HEADS), WIDTH), "up": make(2, WIDTH, HIDDEN), "down": make(2, HIDDEN, WIDTH)}
    if fused:
        layers["qkv"] = jnp.concatenate([layers.pop(name) for name in "qkv"], 2)
        layers |= {"bias": make(2, *columns(HEADS + 2 * kv)), "gu": make(2, WIDTH, 2 * HIDDEN)}
        del layers["up"]
    params = {
        "table": make(VOCAB, WIDTH),
        "layers": layers if scan else [jax.tree.map(lambda leaf, n=n: leaf[n], layers) for n in range(2)],
    }

    def layer(x, w):
        attended = attend(*in_one(x, w, kv) if fused else (project(x, w[name]) for name in "qkv"))
        x += jnp.einsum("bthk,hkd->btd", attended, w["o"]) if apart else attended.reshape(x.shape) @ w["o"]
        if fused:
            gate, up = jnp.split(x @ w["gu"], 2, -1)
            return x + (jax.nn.silu(gate) * up) @ w["down"]
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"]

    def loss(params, batch):
        run, x = jax.checkpoint(layer) if remat else layer, params["table"][batch["tokens"]]
        if scan:
            x, _ = jax.lax.scan(lambda x, w: (run(x, w), None), x, params["layers"])
        for w in () if scan else params["layers"]:
            x = run(x, w)
        return jnp.mean((x - batch["y"]) ** 2)

    def stepping(value_and_grad):
        def step(params, batch):
            value, grads = value_and_grad(loss)(params, batch)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

        return step

    ours = stepping(lambda loss: splitjax.value_and_grad(loss, **options))
    return params, ours, stepping(jax.value_and_grad)


def examples(number=8):
    rng = np.random.default_rng(1)
    y = jnp.asarray(rng.normal(size=(number, 4, WIDTH)))
    return {"tokens": jnp.asarray(rng.integers(0, VOCAB, (number, 4)), jnp.int32), "y": y}


def run(mesh, rules, kv, attend=repeated, **options):
    """Returns the plan and the report of a step, whose results are one device's."""
    with jax.enable_x64(True):
        (params, step, alone), batch = decoder(kv, attend, **options), examples()
        parallel = splitjax.parallelize(step, mesh=mesh, rules=rules, donate=False)
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
        jax.tree.map(close, parallel(params, batch), jax.jit(alone)(params, batch))
        return parallel.plan(params, batch), parallel.report(params, batch)


@pytest.mark.parametrize(
    ("kv", "mesh", "rules", "attend", "options"),
    [
        (2, TWO, "megatron", repeated, {}),
        (1, TWO, "megatron", grouped, {"scan": False, "remat": False}),
        (2, TWO, "transformer", repeated, {"remat": False}),
        pytest.param(1, TWO, "megatron", repeated, {}, marks=pytest.mark.slow),
        pytest.param(1, THREE, "transformer", repeated, {}, marks=pytest.mark.slow),
        pytest.param(2, THREE, "transformer", grouped, {"apart": True}, marks=pytest.mark.slow),
        pytest.param(2, TWO, "megatron", grouped, {"apart": True, "scan": False}, marks=pytest.mark.slow),
        pytest.param(2, {"tensor": 4}, "megatron", repeated, {}, marks=pytest.mark.slow),
    ],
)
def test_heads_that_devices_share_are_copied_and_all_that_is_sent_is_planned(kv, mesh, rules, attend, options):
    plan, report = run(mesh, rules, kv, attend, **options)
    assert [one for one in report.unplanned if one.compiled.shape] == [] and report.missing == ()
    of_heads = {(one.op, one.axis) for one in plan.collectives if one.purpose.kind in OF_HEADS}
    parts = {("all_reduce", "tensor:(2)2"), ("all_gather", "tensor:(1)2")}
    assert of_heads == (parts if kv == 2 else {("all_reduce", "tensor")})
    assert report.total.compiled_bytes - 8 * len(report.unplanned) == report.total.predicted_bytes
    assert len([note for note in plan.notes if "copied to the 4 devices along tensor" in note]) == (
        2 if options.get("scan", True) else 4
    )


@pytest.mark.parametrize(
    ("kv", "mesh", "rules", "attend", "options"),
    [
        (2, TWO, "megatron", repeated, {"scan": False, "remat": False}),
        (2, TWO, "transformer", grouped, {}),
        pytest.param(1, TWO, "megatron", grouped, {}, marks=pytest.mark.slow),
        pytest.param(1, THREE, "transformer", repeated, {"remat": False}, marks=pytest.mark.slow),
        pytest.param(2, TWO, "megatron", repeated, {"apart": True, "remat": False}, marks=pytest.mark.slow),
        pytest.param(2, {"tensor": 4}, "megatron", repeated, {}, marks=pytest.mark.slow),
    ],
)
def test_heads_in_one_weight_with_the_queries_are_copied_to_the_devices_that_share_them(
    kv, mesh, rules, attend, options
):
    plan, report = run(mesh, rules, kv, attend, fused=True, **options)
    assert [one for one in report.unplanned if one.compiled.shape] == [] and report.missing == ()
    kinds = {one.purpose.kind for one in plan.collectives}
    assert {PurposeKind.DEALT_COLUMNS, PurposeKind.DEALT_GRADIENT, PurposeKind.COPIED_COLUMNS} <= kinds
    of_heads = {(one.op, one.axis) for one in plan.collectives if one.purpose.kind in OF_HEADS}
    parts = {("all_reduce", "tensor:(2)2"), ("all_gather", "tensor:(1)2")}
    assert of_heads == (parts if kv == 2 else {("all_reduce", "tensor")})
    assert report.total.compiled_bytes - 8 * len(report.unplanned) == report.total.predicted_bytes
    specs = {leaf.path.split("/")[-1]: leaf.spec for leaf in plan.leaves if leaf.role == "param"}
    assert "tensor" in specs["gu"][-1:] and "tensor" in specs["down"][-2]


def test_microbatches_have_the_numbers_of_one_device():
    plan, report = run(TWO, "megatron", 2, microbatches=2)
    assert [one for one in report.unplanned if one.compiled.shape] == []
    assert report.total.predicted_bytes == sum(one.bytes for one in plan.collectives)


def test_heads_of_which_there_are_as_many_as_devices_are_not_copied():
    with jax.enable_x64(True):
        (params, step, _), batch = decoder(HEADS), examples()
        plan = splitjax.parallelize(step, mesh=TWO, rules="megatron").plan(params, batch)
    assert not any("copied" in note for note in plan.notes)
    assert not any(one.purpose.kind in OF_HEADS or ":" in one.axis for one in plan.collectives)


def test_an_evaluation_sends_nothing_for_shared_heads():
    with jax.enable_x64(True):
        (params, step, _), batch = decoder(2), examples()
        parallel = splitjax.parallelize(step, mesh=TWO, rules="megatron")
        heads = lambda params, x: (project(x, params["layers"][name][0]) for name in "qkv")
        evaluate = parallel.like(lambda params, batch: repeated(*heads(params, batch["y"])).mean())
        plans = [parallel.plan(params, batch), evaluate.plan(params, batch)]
    sent = [[one for one in plan.collectives if one.purpose.kind in OF_HEADS] for plan in plans]
    assert sent[0] and not sent[1]


@pytest.mark.parametrize("scan", [True, False])
def test_heads_that_jax_differentiates_are_noted_with_the_remedy(scan):
    (params, ours, plain), batch = decoder(2, scan=scan), examples()
    planned = lambda step: splitjax.parallelize(step, mesh=TWO, rules="megatron").plan(params, batch)
    found = [note for note in planned(plain).notes if "take the gradient by splitjax.value_and_grad" in note]
    names = ["layers/k", "layers/v"] if scan else [f"layers/{n}/{name}" for n in range(2) for name in "kv"]
    assert [note.split(":")[0] for note in found] == names and "2 heads are read by the 4 devices" in found[0]
    assert not any("take the gradient" in note for note in planned(ours).notes)
