"""What a replicated layer made becomes columns where a split layer's columns are first added to it, once each way."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import splitjax
from splitjax.plan import PurposeKind

MESH = {"data": 2, "model": 2}
EXAMPLES, SIDE, CHANNELS, WIDE = 16, 4, 8, 32
STREAM = PurposeKind.STREAM_TO_COLUMNS, PurposeKind.STREAM_COTANGENT


def normed(x, scale):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-6) * scale


def block(x, params):
    y = jax.nn.gelu(normed(x, params["norm"]["scale"]) @ params["up"]["kernel"])
    return x + (y @ params["down"]["kernel"] + params["down"]["bias"])


def both(x, params):
    return block(block(x, params["first"]), params["second"])


def loss_fn(params, batch, blocks=both):
    """A convolution cuts images into patches, and two blocks of dense layers are added to what it makes (ViT)."""
    x = jax.lax.conv_general_dilated(
        batch["x"], params["patch"]["kernel"], (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x = x.reshape(x.shape[0], -1, x.shape[-1])
    x = blocks(x, params)
    return jnp.mean((x.mean(1) @ params["last"]["kernel"] - batch["y"]) ** 2)


def setup():
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.normal(size=shape) / 4)
    params = {"patch": {"kernel": make(2, 2, 3, CHANNELS)}, "last": {"kernel": make(CHANNELS, 4)}}
    for name in ("first", "second"):
        params[name] = {
            "norm": {"scale": make(CHANNELS)},
            "up": {"kernel": make(CHANNELS, WIDE)},
            "down": {"kernel": make(WIDE, CHANNELS), "bias": make(CHANNELS)},
        }
    return params, {"x": make(EXAMPLES, SIDE, SIDE, 3), "y": make(EXAMPLES, 4)}


def stepping(value_and_grad, blocks=both):
    def step(params, batch):
        value, grads = value_and_grad(functools.partial(loss_fn, blocks=blocks))(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


@pytest.mark.parametrize("group_comm", ["gather", "modulo", "turns"])
def test_a_residual_stream_that_a_convolution_begins_becomes_columns_once(group_comm):
    with jax.enable_x64(True):
        params, batch = setup()
        step = stepping(splitjax.value_and_grad)
        parallel = splitjax.parallelize(step, mesh=MESH, rules="splitbrain", group_comm=group_comm, donate=False)
        alone = jax.jit(stepping(jax.value_and_grad))(params, batch)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), parallel(params, batch), alone)
        plan, report = parallel.plan(params, batch), parallel.report(params, batch)
    assert report.missing == () and [one for one in report.unplanned if one.compiled.shape] == []
    # Half of a worker's examples' activations: 4 examples of 2 x 2 patches.
    sent = EXAMPLES // 4 * (SIDE // 2) ** 2 * CHANNELS * 8 // 2
    exchanged = [(one.layer, one.op, one.bytes, one.purpose.kind) for one in plan.collectives if one.op == "all_to_all"]
    assert exchanged == [("first/down", "all_to_all", sent, kind) for kind in STREAM]


def test_rematerialised_blocks_take_their_stream_to_columns_again():
    """What is kept for the backward pass are the workers' examples."""
    params, batch = setup()
    step = stepping(splitjax.value_and_grad, jax.checkpoint(both))
    parallel = splitjax.parallelize(step, mesh=MESH, rules="splitbrain", group_comm="gather")
    plan, report = parallel.plan(params, batch), parallel.report(params, batch)
    assert report.missing == () and [one for one in report.unplanned if one.compiled.shape] == []
    again = [one.purpose.again for one in plan.collectives if one.purpose.kind in STREAM]
    assert again == [False, False, True]


def test_nothing_becomes_columns_where_the_layer_that_adds_them_is_whole():
    split = splitjax.Rule("up", path="*/up/*", shard=[{"out": "model"}])
    rules = splitjax.RuleSet("one", (split, splitjax.Rule("rest", shard=[])), replicated_batch="all")
    params, batch = setup()
    parallel = splitjax.parallelize(stepping(splitjax.value_and_grad), mesh=MESH, rules=rules)
    assert {one.purpose.kind for one in parallel.plan(params, batch).collectives}.isdisjoint(STREAM)
