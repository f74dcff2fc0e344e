"""What a plan wastes is said: products that devices repeat, parameters that do not lie as their rules would have
them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import splitjax
from splitjax.plan import Plan
from tests.report.programs import narrow

VOCAB = 1257  # odd, as GPT-2's 50,257


def tied_language_model(params, batch):
    hidden = params["embed"][batch["ids"]]
    hidden = hidden + jnp.tanh(hidden @ params["up"]) @ params["down"]
    logits = jax.nn.log_softmax(hidden @ params["embed"].T)
    return -jnp.mean(jnp.take_along_axis(logits, batch["next"][..., None], -1))


def separate_head(params, batch):
    hidden = jnp.tanh(params["embed"][batch["ids"]] @ params["up"]) @ params["down"]
    logits = jax.nn.log_softmax(hidden @ params["head"])
    return -jnp.mean(jnp.take_along_axis(logits, batch["next"][..., None], -1))


def sgd(loss):
    def step(params, batch):
        value, grads = splitjax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def shapes(**sizes):
    return {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}


IDS = {name: jax.ShapeDtypeStruct((8, 8), jnp.int32) for name in ("ids", "next")}


def planned(loss, params, mesh, rules, **options):
    return splitjax.parallelize(sgd(loss), mesh=mesh, rules=rules, **options).plan(params, IDS)


def test_a_vocabulary_that_does_not_divide_is_a_warning_with_its_size_and_remedy():
    params = shapes(embed=(VOCAB, 16), up=(16, 32), down=(32, 16))
    plan = planned(tied_language_model, params, {"data": 2, "model": 4}, "megatron")
    (warning,) = plan.warnings
    assert warning.kind == "whole" and warning.ratio == pytest.approx(VOCAB * 16 / (VOCAB * 16 + 1024), abs=1e-4)
    assert "embed: vocab 1257 does not divide by model=4" in warning.message and warning.remedy
    assert warning.message[:40] in str(plan).replace("\n          ", " ") and "warnings" in plan._repr_html_()
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.warnings == plan.warnings and again.compute == plan.compute
    # a size that divides needs no word
    params = shapes(embed=(VOCAB + 3, 16), up=(16, 32), down=(32, 16))
    assert planned(tied_language_model, params, {"data": 2, "model": 4}, "megatron").warnings == ()


def test_a_pinned_plan_warns_as_it_did_when_it_was_made():
    params = shapes(embed=(VOCAB, 16), up=(16, 32), down=(32, 16))
    plan = planned(tied_language_model, params, {"data": 2, "model": 4}, "megatron")
    pinned = planned(tied_language_model, params, {"data": 2, "model": 4}, "megatron", plan=plan)
    assert pinned.warnings == plan.warnings and pinned == plan


def test_a_hundredth_of_the_parameters_needs_no_warning():
    params = shapes(embed=(1000, 64), up=(64, 64), down=(64, 64), head=(64, 9))  # the head is 0.8 %
    plan = planned(separate_head, params, {"data": 2, "model": 4}, "megatron")
    assert not [warning for warning in plan.warnings if warning.kind == "whole"]


def test_a_head_that_stays_whole_is_computed_by_every_device_of_its_group():
    params = shapes(embed=(VOCAB, 18), up=(18, 32), down=(32, 18), head=(18, VOCAB))
    step = splitjax.parallelize(sgd(separate_head), mesh={"data": 2, "model": 4}, rules="megatron")
    plan = step.plan(params, IDS)
    whole, repeated = (next(w for w in plan.warnings if w.kind == kind) for kind in ("whole", "compute"))
    assert repeated.ratio == pytest.approx(plan.compute.over_ideal, abs=1e-4) and 3.8 < repeated.ratio < 4
    assert "model=4" in repeated.message and "head" in repeated.message and "does not divide" in repeated.remedy
    assert "head" in whole.message
    compute = step.report(params, IDS).compute
    assert compute.predicted == plan.compute and compute.compiled == plan.compute.flops


def test_layers_that_no_rule_splits_are_a_warning_that_names_them():
    step, arguments = narrow("resnet18", rules="megatron")
    (repeated,) = (warning for warning in step.plan(*arguments).warnings if warning.kind == "compute")
    assert repeated.ratio > 3.9 and "model=4" in repeated.message and "conv" in repeated.message


@pytest.mark.parametrize("rules", ["splitbrain", "data_parallel", "fsdp", "megatron"])
def test_what_is_shared_evenly_is_computed_once_in_the_compiled_step_too(rules):
    step, arguments = narrow("mlp", rules=rules)
    report = step.report(*arguments)
    assert report.compute.predicted.over_ideal == 1
    assert report.compute.compiled == report.compute.predicted.ideal_flops


def test_products_in_a_loop_count_as_often_as_they_run():
    def loss(params, batch):
        body = lambda hidden, weight: (jnp.tanh(hidden @ weight), None)
        return jnp.mean(jax.lax.scan(body, batch @ params["first"], params["stack"])[0] ** 2)

    def step(params, batch):
        value, grads = splitjax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    batch = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    compute = splitjax.parallelize(step, mesh={"data": 2}).report(shapes(first=(8, 8), stack=(5, 8, 8)), batch).compute
    product = 2 * (16 // 2) * 8 * 8
    # forward and for the weight; of the stack for the input, too
    assert compute.compiled == compute.predicted.flops == product * (2 + 5 * 3)


VECTORS = shapes(x=(32, 8), y=(32, 6))


def square(params, part):
    return jnp.mean((jnp.tanh(part["x"] @ params["up"]) @ params["down"] - part["y"]) ** 2)


def descended(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), 0.0


def turn_by_turn(size, value_and_grad=splitjax.value_and_grad):
    def step(params, batch):
        def body(turn, total):
            part = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, turn * size, size), batch)
            return jax.tree.map(jnp.add, total, value_and_grad(square)(params, part)[1])

        return descended(params, jax.lax.fori_loop(0, 32 // size, body, jax.tree.map(jnp.zeros_like, params)))

    return step


def one_after_the_other(params, batch):
    parts = [jax.tree.map(lambda x, start=start: x[start : start + 8], batch) for start in range(0, 32, 8)]
    grads = [splitjax.grad(square)(params, part) for part in parts]
    return descended(params, jax.tree.map(lambda *each: sum(each), *grads))


def clipped_one_by_one(params, batch):
    clipped = lambda total, example: (total, jax.tree.map(jnp.tanh, splitjax.grad(square)(params, example)))
    return descended(params, jax.tree.map(lambda g: g.mean(0), jax.lax.scan(clipped, 0.0, batch)[1]))


def but_the_last(params, batch):
    return descended(params, splitjax.grad(square)(params, jax.tree.map(lambda x: x[:-1], batch)))


def in_halves(params, batch):
    def contrast(params):
        one, two = (jnp.tanh(half @ params["up"]) @ params["down"] for half in jnp.split(batch["x"], 2))
        return jnp.mean(one * two)

    return descended(params, splitjax.grad(contrast)(params))


def reshaped(params, batch):
    parts = jax.tree.map(lambda x: x.reshape(8, 4, *x.shape[1:]), batch)
    body = lambda total, part: (jax.tree.map(jnp.add, total, splitjax.grad(square)(params, part)), None)
    return descended(params, jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), parts)[0])


@pytest.mark.parametrize(
    "step, remedies",
    [
        (turn_by_turn(8), ("8 of 32 examples at a time", "reshape the batch to [4, 8] and", "microbatches=4")),
        (turn_by_turn(8, jax.value_and_grad), ("test_waste.py:", "reshape the batch to [4, 8]", "microbatches=4")),
        (turn_by_turn(4), ("reshape the batch to [8, 4]", "with parts that divide by data=8")),
        (turn_by_turn(1), ("single examples", "jax.vmap")),
        (one_after_the_other, ("8 of 32 examples at a time", "reshape the batch to [4, 8] and", "microbatches=4")),
        (clipped_one_by_one, ("single examples", "jax.vmap")),
        (but_the_last, ("31 of 32", "let these layers read the whole batch")),
        (in_halves, ("16 of 32", "let these layers read the whole batch", "reshape the batch to [2, 16]")),
        (reshaped, ("let the number of examples in a batch, or in a microbatch, divide by data=8",)),
    ],
)
def test_a_part_of_the_batch_that_every_device_computes_has_a_remedy(step, remedies):
    plan = splitjax.parallelize(step, mesh={"data": 8}, rules="data_parallel").plan(
        shapes(up=(8, 64), down=(64, 6)), VECTORS
    )
    (warning,) = plan.warnings
    assert all(remedy in warning.remedy for remedy in remedies), warning.remedy
    assert {layer.kind for layer in plan.layers} == {"dense"}


def graph_loss(params, batch):
    nodes = jnp.tanh(batch["nodes"] @ params["up"])
    messages = nodes[batch["senders"]] * (batch["edges"] @ params["of_edges"])
    nodes = nodes + jax.ops.segment_sum(messages, batch["receivers"], nodes.shape[0]) @ params["down"]
    pooled = jax.ops.segment_sum(nodes, batch["graph_of"], batch["y"].shape[0])
    return ((pooled @ params["head"] - batch["y"]) ** 2).mean()


@pytest.mark.parametrize(("edges", "graphs"), [(40, 4), (37, 4), (37, 3)])
def test_arrays_with_leading_dims_of_their_own_are_counted_one_by_one(edges, graphs):
    """24 nodes lie over all devices, whatever edges and targets do; 37 edges are on every device, and said to be."""
    params = shapes(up=(8, 64), of_edges=(4, 64), down=(64, 64), head=(64, 3))
    ids = {
        name: jax.ShapeDtypeStruct((size,), jnp.int32)
        for name, size in {"senders": edges, "receivers": edges, "graph_of": 24}.items()
    }
    batch = shapes(nodes=(24, 8), edges=(edges, 4), y=(graphs, 3)) | ids
    step = splitjax.parallelize(sgd(graph_loss), mesh={"data": 2, "model": 4}, rules="data_parallel")
    plan = step.plan(params, batch)
    assert plan.compute.flops == pytest.approx(step.report(params, batch).compute.compiled, rel=0.01)
    assert "lie one by one" in str(plan) and "every device has all examples" not in str(plan)
    if edges == 40:
        assert not plan.warnings and plan.compute.over_ideal < 1.1
        return
    (repeated,) = plan.warnings
    assert repeated.message.split(" in ")[1].startswith("of_edges") and "leading dims" in repeated.remedy
    assert "up" not in repeated.message and "down" not in repeated.message


def grouped_attention(params, batch):
    """Eight heads of queries, and as many of keys and values as their weights have columns for, each of size 4."""
    hidden = params["embed"][batch["ids"]]
    heads = lambda name: (hidden @ params[name]).reshape(*hidden.shape[:2], -1, 4)
    groups = 8 * 4 // params["k"].shape[1]
    key, value = (jnp.repeat(heads(name), groups, 2) for name in ("k", "v"))
    weights = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", heads("q"), key), -1)
    mixed = jnp.einsum("bhst,bthd->bshd", weights, value).reshape(*hidden.shape[:2], 32) @ params["out"]
    return jnp.mean((mixed - batch["next"][..., None]) ** 2)


@pytest.mark.parametrize(
    ("loss", "params", "is_offered"),
    [
        (grouped_attention, {"embed": (32, 16), "q": (16, 32), "k": (16, 8), "v": (16, 8), "out": (32, 16)}, False),
        (separate_head, {"embed": (32, 16), "up": (16, 32), "down": (32, 16), "head": (16, VOCAB)}, True),
    ],
    ids=["two-heads", "vocabulary"],
)
def test_padding_is_offered_where_it_would_pad(loss, params, is_offered):
    """Two heads are fewer than four devices, and stay whole whatever is asked for."""
    params = shapes(**params)
    plan = planned(loss, params, {"data": 2, "model": 4}, "megatron")
    assert plan.warnings and all(("uneven=" in warning.remedy) == is_offered for warning in plan.warnings)
    padding = planned(loss, params, {"data": 2, "model": 4}, "megatron", uneven="pad")
    assert any(leaf.logical is not None for leaf in padding.leaves) == is_offered
