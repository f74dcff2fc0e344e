"""Columns that a replicated layer meets return to the workers whose examples they are, once each way, and all that is
sent is planned."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import splitjax
from benchmarks.corpus.cells import Unit
from benchmarks.corpus.steps import ready
from splitjax import models
from splitjax.plan import PurposeKind
from splitjax.rules.ruleset import load_rules

MESH = {"data": 2, "model": 2}
EXAMPLES, SIZE, CHANNELS = 8, 4, 8
LEAVE, RETURN = PurposeKind.LEAVE_COLUMNS, PurposeKind.COTANGENTS_TO_COLUMNS


def convolved(x, kernel):
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=x.shape[-1]
    )


def block(x, params):
    """A depthwise convolution and two dense layers, scaled, added to their input, as in a ConvNeXt."""
    y = jax.nn.relu(convolved(x, params["depthwise"]["kernel"]) @ params["up"]["kernel"])
    return x + (y @ params["down"]["kernel"] + params["down"]["bias"]) * params["norm"]["scale"]


def loss_fn(params, batch):
    x = jax.lax.conv_general_dilated(
        batch["x"], params["stem"]["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    for name in ("first", "second"):
        x = block(x, params[name])
    return jnp.mean((x.mean((1, 2)) @ params["last"]["kernel"] - batch["y"]) ** 2)


def setup():
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.normal(size=shape) / 4)
    params = {"stem": {"kernel": make(3, 3, 3, CHANNELS)}, "last": {"kernel": make(CHANNELS, 4)}}
    for name in ("first", "second"):
        params[name] = {
            "depthwise": {"kernel": make(3, 3, 1, CHANNELS)},
            "up": {"kernel": make(CHANNELS, 16)},
            "down": {"kernel": make(16, CHANNELS), "bias": make(CHANNELS)},
            "norm": {"scale": make(CHANNELS)},
        }
    return params, {"x": make(EXAMPLES, SIZE, SIZE, 3), "y": make(EXAMPLES, 4)}


def stepping(value_and_grad):
    def step(params, batch):
        value, grads = value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def arrays_beside_the_plan(report):
    return [one for one in report.unplanned if one.compiled.shape]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_columns_that_are_added_to_what_a_convolution_made_return_to_their_workers(microbatches):
    with jax.enable_x64(True):
        params, batch = setup()
        gradient = lambda fn: splitjax.value_and_grad(fn, microbatches=microbatches)
        parallel = splitjax.parallelize(stepping(gradient), mesh=MESH, rules="splitbrain", donate=False)
        alone = jax.jit(stepping(jax.value_and_grad))(params, batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), parallel(params, batch), alone)
        plan, report = parallel.plan(params, batch), parallel.report(params, batch)
    assert report.missing == () and arrays_beside_the_plan(report) == []
    # Half of a worker's examples' activations: 2 examples of 4 x 4 places.
    sent = EXAMPLES // 4 * SIZE * SIZE * CHANNELS * 8 // 2
    exchanged = [
        (one.layer, one.op, one.bytes, one.purpose.kind)
        for one in plan.collectives
        if one.purpose.kind in (LEAVE, RETURN)
    ]
    assert exchanged == [
        (f"{name}/down", "all_to_all", sent, kind) for name in ("first", "second") for kind in (LEAVE, RETURN)
    ]


def test_columns_return_behind_a_bias_whose_gradient_is_summed_into_parts():
    """Examples lie over all workers behind it, so that the gradients of scales there are summed into parts as well."""
    optimizer = optax.sgd(0.1, momentum=0.9)

    def stepping_with(value_and_grad):
        def step(state, batch):
            params, moments = state
            value, grads = value_and_grad(loss_fn)(params, batch)
            updates, moments = optimizer.update(grads, moments, params)
            return (optax.apply_updates(params, updates), moments), value

        return step

    with jax.enable_x64(True):
        params, batch = setup()
        state = params, optimizer.init(params)
        parallel = splitjax.parallelize(
            stepping_with(splitjax.value_and_grad), mesh=MESH, rules="splitbrain", shard_state=True, donate=False
        )
        alone = jax.jit(stepping_with(jax.value_and_grad))(state, batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), parallel(state, batch), alone)
        report = parallel.report(state, batch)
    assert report.missing == () and arrays_beside_the_plan(report) == []


@pytest.mark.parametrize("model", ["convnext_tiny", "dlrm"])
@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_of_a_model_nothing_is_compiled_that_is_not_planned(model, library):
    made = ready(Unit(model, library, "1"))
    report = made.parallelize(made.step, mesh={"data": 2, "model": 4}, rules="splitbrain").report(*made.arguments)
    assert report.missing == () and arrays_beside_the_plan(report) == []


def test_joined_columns_return_to_their_workers_beside_those_of_a_whole_layer():
    """The dense tower of a DLRM stays whole: beside its examples, rows of the table would lie in parts of a group's."""
    spec = models.build("dlrm", field_sizes=(200, 32, 80), num_dense=4, embedding_width=32, bottom_features=(32,))
    init, step, _ = models.make_step(spec, optax.sgd(0.1), value_and_grad=splitjax.value_and_grad)
    arguments = jax.eval_shape(init, jax.eval_shape(jax.random.key, 0)), spec.example(64)
    rules = load_rules("splitbrain")
    whole = splitjax.Rule("tower", path="params/bottom*/*", shard=[])
    rules = dataclasses.replace(rules, name="tower", rules=(whole, *rules.rules))
    parallel = splitjax.parallelize(step, mesh=MESH, rules=rules)
    plan, report = parallel.plan(*arguments), parallel.report(*arguments)
    assert [one.layer for one in plan.collectives if one.purpose.kind == LEAVE] == ["params/embedding"]
    assert report.missing == () and arrays_beside_the_plan(report) == []


def test_split_layers_behind_one_convolution_alone_run_in_turns():
    """A ViT: what its blocks add to the patches stays in the group, so that no layer in between ends the turns, which
    take a fraction of the memory."""

    def loss_fn(params, batch):
        patches = jax.lax.conv_general_dilated(
            batch["x"], params["patch"]["kernel"], (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = patches.reshape(patches.shape[0], -1, CHANNELS)
        for name in ("first", "second"):
            x = x + jax.nn.relu(x @ params[name]["up"]["kernel"]) @ params[name]["down"]["kernel"]
        return jnp.mean((x.mean(1) @ params["last"]["kernel"] - batch["y"]) ** 2)

    def step(params, batch):
        value, grads = splitjax.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    made, batch = setup()
    params = {name: {part: made[name][part] for part in ("up", "down")} for name in ("first", "second")}
    params |= {"patch": {"kernel": made["stem"]["kernel"][:2, :2]}, "last": made["last"]}
    plan = splitjax.parallelize(step, mesh=MESH, rules="splitbrain", group_comm="modulo").plan(params, batch)
    assert plan.group_comm == "modulo"
    assert not any(one.purpose.kind in (LEAVE, RETURN) for one in plan.collectives)
