"""Experts of equal capacity: tokens travel to them by all-to-alls, as planned, compiled and predicted in seconds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import splitjax

EXPERTS, WIDTH, HIDDEN, SEQ, EXAMPLES, CLASSES = 4, 16, 32, 8, 16, 8
LAST = {"data": 2, "expert": 4}
OF_EXPERTS = ("gate", "up", "down")


def experts(params, x):
    """`x` [examples, seq, width] through experts of equal capacity, of which each token takes the best one."""
    gates = jax.nn.softmax(x @ params["router"])
    routed = jax.nn.one_hot(jnp.argmax(gates, -1), EXPERTS, dtype=x.dtype)
    place = jnp.cumsum(routed, 1) * routed - 1
    deal = jax.nn.one_hot(place.astype(jnp.int32), SEQ // 2, dtype=x.dtype)
    tokens = jnp.einsum("bsec,bsd->becd", deal, x)
    hidden = jax.nn.silu(jnp.einsum("becd,edf->becf", tokens, params["gate"]))
    hidden = hidden * jnp.einsum("becd,edf->becf", tokens, params["up"])
    made = jnp.einsum("becf,efd->becd", hidden, params["down"])
    return jnp.einsum("bsec,becd->bsd", deal * gates[..., None], made)


def loss(params, batch):
    x = jnp.tanh(batch["x"] @ params["first"])
    x = x + experts(params, x)
    return jnp.mean((x @ params["last"] - batch["y"]) ** 2)


def make_step(value_and_grad):
    def step(params, batch):
        value, grads = value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def arguments(dtype):
    rng = np.random.default_rng(0)
    shapes = {
        "first": (WIDTH, WIDTH),
        "router": (WIDTH, EXPERTS),
        "gate": (EXPERTS, WIDTH, HIDDEN),
        "up": (EXPERTS, WIDTH, HIDDEN),
        "down": (EXPERTS, HIDDEN, WIDTH),
        "last": (WIDTH, CLASSES),
    }
    params = {name: (rng.normal(size=shape) * shape[-2] ** -0.5).astype(dtype) for name, shape in shapes.items()}
    return params, {
        "x": rng.normal(size=(EXAMPLES, SEQ, WIDTH)).astype(dtype),
        "y": rng.normal(size=(EXAMPLES, SEQ, CLASSES)).astype(dtype),
    }


@pytest.mark.parametrize(
    "mesh", [LAST, {"data": 2, "fsdp": 2, "expert": 2}, {"data": 2, "expert": 2, "tensor": 2}], ids=str
)
def test_tokens_travel_as_planned(mesh):
    params, batch = arguments(np.float32)
    step = splitjax.parallelize(make_step(splitjax.value_and_grad), mesh=mesh, rules="transformer")
    plan, report = step.plan(params, batch), step.report(params, batch)
    travels = [each for each in plan.collectives if each.op == "all_to_all"]
    share = EXAMPLES // (8 // mesh.get("tensor", 1)) * EXPERTS * SEQ // 2 * WIDTH * 4
    # Gate and up read the same tokens, which are sent once.
    assert [(each.layer, each.axis) for each in travels] == [("gate", "expert")] * 2 + [("down", "expert")] * 2
    assert {each.bytes for each in travels} == {(mesh["expert"] - 1) * share // mesh["expert"]}
    assert not report.missing
    # Under tensor parallelism the first layer of this small step leaves its columns split, which the dealing gathers.
    compiled, planned = (
        [each for each in side if each.axis != "tensor"]
        for side in ([each.compiled for each in report.collectives], plan.collectives)
    )
    assert sum(each.bytes for each in compiled) == pytest.approx(sum(each.bytes for each in planned), rel=0.01)
    gathered = [each for each in report.collectives if each.compiled.op == "all_gather" and "expert" in each.axis]
    assert gathered and not [each for each in gathered if each.planned is None or each.layer in OF_EXPERTS]
    assert all(each.compiled.shape == () or each.compiled.axis == "tensor" for each in report.unplanned)


@pytest.mark.parametrize(
    ("mesh", "value_and_grad"),
    [
        (LAST, splitjax.value_and_grad),
        (LAST, jax.value_and_grad),
        ({"expert": 4, "data": 2}, splitjax.value_and_grad),
        ({"data": 2, "fsdp": 2, "expert": 2}, splitjax.value_and_grad),
        ({"data": 2, "expert": 2, "tensor": 2}, splitjax.value_and_grad),
    ],
    ids=lambda value: getattr(value, "__module__", None) or "-".join(value),
)
def test_numbers_are_those_of_one_device(mesh, value_and_grad):
    with jax.enable_x64(True):
        params, batch = arguments(np.float64)
        step = make_step(value_and_grad)
        expected = jax.jit(step)(params, batch)
        found = splitjax.parallelize(step, mesh=mesh, rules="transformer")(params, batch)
        for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("mesh", "value_and_grad", "phases", "remedy"),
    [
        ({"expert": 4, "data": 2}, splitjax.value_and_grad, ("forward", "backward"), "in the order data, expert"),
        (
            LAST,
            jax.value_and_grad,
            ("forward",),
            "splitjax.value_and_grad",
        ),  # XLA keeps what is gathered for the backward pass
    ],
    ids=["axes in another order", "no gradient boundary"],
)
def test_where_tokens_cannot_travel_weights_are_gathered(mesh, value_and_grad, phases, remedy):
    params, batch = arguments(np.float32)
    step = splitjax.parallelize(make_step(value_and_grad), mesh=mesh, rules="transformer")
    plan, report = step.plan(params, batch), step.report(params, batch)
    assert not [each for each in plan.collectives if each.op == "all_to_all"]
    planned = [each for each in plan.collectives if each.purpose.phase in phases]
    compiled = [each.compiled for each in report.collectives if each.layer in OF_EXPERTS]
    gathered = [
        sum(each.bytes for each in side if each.op == "all_gather")
        for side in ([each for each in planned if each.layer in OF_EXPERTS], compiled)
    ]
    assert gathered[0] == gathered[1] > 0
    notes = [note for note in plan.notes if "no token travels" in note]
    assert [note.split(":")[0] for note in notes] == ["gate", "up", "down"]
    assert all(remedy in note for note in notes)


def test_predicted_seconds_have_the_same_exchanges():
    params, batch = arguments(np.float32)
    step = splitjax.parallelize(make_step(splitjax.value_and_grad), mesh=LAST, rules="transformer")
    planned = step.plan(params, batch).collectives
    predicted = step.time(params, batch, on="tpu:v5e:2x4").collectives
    over_experts = [each for each in predicted if "expert" in each.axes]
    gathered = {each.layer for each in planned if each.op == "all_gather" and "expert" in each.axis}
    assert not gathered & set(OF_EXPERTS)
    for op in ("all_gather", "all_to_all"):
        sent = sum(each.sent_bytes for each in over_experts if each.op == op)
        assert sent == sum(each.bytes for each in planned if each.op == op and "expert" in each.axis) > 0


def test_evaluation_sends_tokens_once_each_way():
    params, batch = arguments(np.float32)
    train = splitjax.parallelize(make_step(splitjax.value_and_grad), mesh=LAST, rules="transformer")
    train.plan(params, batch)
    step = train.like(loss)
    plan, report = step.plan(params, batch), step.report(params, batch)
    assert [each.layer for each in plan.collectives if each.op == "all_to_all"] == ["gate", "down"]
    assert not report.missing
