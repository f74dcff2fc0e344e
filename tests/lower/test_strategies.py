"""`microbatches=N` inside a parallel step: the same numbers as the whole batch, one exchange, and errors where it
cannot."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest

import splitjax
from splitjax.errors import MicrobatchError
from splitjax.mesh import MeshShape
from splitjax.report.hlo import compiled_collectives
from tests.steps import attention_case, conv_case, largest_difference, train

MESH = {"data": 2, "model": 4}


@functools.cache
def whole_batch():
    """The step in parts, a state, batches, and what one device makes of them whole: the state behind and the losses."""
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.05, momentum=0.9))
    options = {"dtype": np.float64, "batch_norm": False, "dropout": 0.3, "size": 32, "steps": 4}
    whole, parts = conv_case(tx, **options), conv_case(tx, microbatches=4, **options)
    state = whole.init(jax.random.key(0))
    return parts.step, state, whole.batches, *train(jax.jit(whole.step), state, whole.batches)


@pytest.mark.parametrize("rules", ["splitbrain", "megatron", "fsdp", "data_parallel"])
def test_same_numbers_as_the_whole_batch(rules):
    """Dropout slices the global bits, the mask's sum is the whole batch's, clipping sees the whole gradient."""
    with jax.enable_x64(True):
        in_parts, state, batches, want_state, want = whole_batch()
        step = splitjax.parallelize(in_parts, mesh=MESH, rules=rules)
        got_state, got = train(step, step.place(state, example=(batches[0],)), batches)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-10)
        assert largest_difference(got_state, want_state) < 1e-10


def test_attention_with_dropout():
    whole, parts = attention_case(dropout=0.2), attention_case(dropout=0.2, microbatches=2)
    state = whole.init(jax.random.key(0))
    want_state, want = train(jax.jit(whole.step), state, whole.batches)
    step = splitjax.parallelize(parts.step, mesh=MESH, rules="megatron")
    got_state, got = train(step, step.place(state, example=(whole.batches[0],)), whole.batches)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert largest_difference(got_state, want_state) < 1e-5


def test_batch_norm_across_microbatches_is_an_error():
    case = conv_case(batch_norm=True, microbatches=2)
    step = splitjax.parallelize(case.step, mesh={"data": 8}, rules="data_parallel")
    state = case.init(jax.random.key(0))
    with pytest.raises(MicrobatchError, match="cannot be accumulated"):
        step.plan(state, case.batches[0])


def test_a_batch_that_does_not_divide():
    case = conv_case(batch_norm=False, microbatches=3)
    step = splitjax.parallelize(case.step, mesh={"data": 8}, rules="data_parallel")
    with pytest.raises(MicrobatchError, match="24"):
        step.plan(case.init(jax.random.key(0)), case.batches[0])


@pytest.mark.parametrize(("microbatches", "how", "num_parts"), [(None, "whole", 1), (2, "microbatches", 2)])
def test_the_plan_records_how_a_gradient_runs(microbatches, how, num_parts):
    case = conv_case(batch_norm=False, microbatches=microbatches)
    step = splitjax.parallelize(case.step, mesh={"data": 8}, rules="data_parallel")
    plan = step.plan(case.init(jax.random.key(0)), case.batches[0])
    (boundary,) = plan.boundaries
    assert (boundary.how, boundary.num_parts) == (how, num_parts) and boundary.label
    assert ("is differentiated in 2 microbatches" in str(plan)) == (microbatches == 2)
    assert splitjax.Plan.from_json(plan.to_json()) == plan


def test_what_was_prepared_while_planning_is_not_derived_again(monkeypatch):
    """A boundary is analysed once, however often its step is traced for the compiler."""
    from splitjax.lower.microbatch import microbatched

    counted = []
    prepare = microbatched.prepare
    monkeypatch.setattr(microbatched, "prepare", lambda *arguments: counted.append(1) or prepare(*arguments))
    case = conv_case(batch_norm=False, microbatches=2)
    step = splitjax.parallelize(case.step, mesh={"data": 8}, rules="data_parallel")
    arguments = case.init(jax.random.key(0)), case.batches[0]
    step.plan(*arguments)
    assert len(counted) == 1
    step.lower(*arguments)
    assert len(counted) == 1


def looped(step, *arguments):
    """The collectives of a compiled step that run in a loop, and those that run once."""
    found = compiled_collectives(step.lower(*arguments).compile(), MeshShape.of(MESH))
    return [one for one in found if one.trips > 1], [one for one in found if one.trips == 1]


def test_gradients_of_replicated_layers_are_exchanged_once_beside_split_ones():
    """Over `data` and over `model`: the loop holds what crosses, and nothing of a parameter's shape."""
    case = conv_case(optax.sgd(0.05), microbatches=4, batch_norm=False, dropout=0.3, size=32)
    state = case.init(jax.random.key(0))
    step = splitjax.parallelize(case.step, mesh=MESH, rules="splitbrain")
    inside, outside = looped(step, state, case.batches[0])
    assert inside and all("splitjax:" in one.op_name for one in inside)
    shapes = {leaf.shape for leaf in jax.tree.leaves(state)}
    assert not any(one.shape in shapes for one in inside)
    sent = {one.shape for one in outside if one.op == "all_reduce" and one.axis == "data+model"}
    assert sent >= {leaf.shape for leaf in jax.tree.leaves(state["params"]) if leaf.ndim == 4}


@pytest.mark.parametrize("mesh", [MESH, {"data": 1, "model": 8}], ids=["data and model", "model alone"])
def test_replicated_layers_before_and_behind_split_ones(mesh):
    """Two islands with split layers between them, a penalty on the parameters, and a cast that several layers share."""

    def loss(p, b):
        half = {name: w.astype(np.float32) for name, w in p.items()}
        x = jax.numpy.tanh(b["x"] @ half["conv"] + p["bias"])
        x = jax.numpy.tanh(x @ half["d1"]) @ half["rows"]
        x = jax.numpy.tanh(x @ half["conv2"]) * p["scale"]
        penalty = sum((w * w).sum() for w in p.values())
        return optax.softmax_cross_entropy_with_integer_labels(x, b["y"]).mean() + 1e-3 * penalty

    def step_with(microbatches):
        def step(state, batch):
            value, grads = splitjax.value_and_grad(loss, microbatches=microbatches)(state, batch)
            return jax.tree.map(lambda p, g: p - 0.3 * g, state, grads), value

        return step

    rng = np.random.default_rng(0)
    shapes = {"conv": (16, 32), "bias": (32,), "d1": (32, 64), "rows": (64, 32), "conv2": (32, 16), "scale": (16,)}
    state = {name: rng.normal(size=shape).astype(np.float32) / 4 for name, shape in shapes.items()}
    b = {"x": rng.normal(size=(192, 16)).astype(np.float32), "y": rng.integers(0, 16, 192).astype(np.int32)}
    rules = splitjax.RuleSet(
        name="islands",
        replicated_batch="all",
        rules=(
            splitjax.Rule(name="whole", path="**conv**", shard=[]),
            splitjax.Rule(name="rows", path="**rows**", shard=[{"in": "model"}], ties="hard"),
            splitjax.Rule(name="columns", kind="dense", shard=[{"out": "model"}], ties="hard"),
        ),
    )
    step = splitjax.parallelize(step_with(4), mesh=mesh, rules=rules, donate=False)
    want_state, want = jax.jit(step_with(None))(state, b)
    got_state, got = step(state, b)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert largest_difference(got_state, want_state) < 1e-6
    inside = [one for one in compiled_collectives(step.lower(state, b).compile(), MeshShape.of(mesh)) if one.trips > 1]
    assert inside and not any(one.shape in shapes.values() for one in inside)
