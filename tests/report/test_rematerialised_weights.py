"""Stored weights of rematerialised blocks are gathered as the plan says, byte for byte: to compute a block again, its
first weight, too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import splitjax

LAYERS, WIDTH, HIDDEN, EXAMPLES = 2, 32, 64, 16
MESHES = {"fsdp": {"data": 4}, "transformer": {"data": 2, "fsdp": 2, "tensor": 2}}


def setup():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 8, jnp.float32)
    params = [{"up": draw(WIDTH, HIDDEN), "down": draw(HIDDEN, WIDTH)} for _ in range(LAYERS)]
    return params, {"x": draw(EXAMPLES, WIDTH), "y": draw(EXAMPLES, WIDTH)}


def stepping(first, second):
    """A step of two blocks, each of which runs as its function says."""
    block = lambda x, layer: x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]

    def loss(params, batch):
        x = batch["x"]
        for wrap, layer in zip((first, second), params, strict=True):
            x = wrap(block)(x, layer)
        return jnp.mean((x - batch["y"]) ** 2)

    def step(params, batch):
        value, grads = splitjax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def as_it_is(function):
    return function


def dots_kept(function):
    return jax.checkpoint(function, policy=jax.checkpoint_policies.dots_saveable)


@pytest.mark.parametrize("rules", MESHES)
@pytest.mark.parametrize(
    "wraps",
    [(jax.checkpoint, jax.checkpoint), (jax.checkpoint, as_it_is), (as_it_is, jax.checkpoint), (dots_kept, dots_kept)],
)
def test_the_gathers_of_stored_weights_are_those_that_are_compiled(rules, wraps):
    params, batch = setup()
    report = splitjax.parallelize(stepping(*wraps), mesh=MESHES[rules], rules=rules).report(params, batch)
    assert report.missing == () and [one for one in report.unplanned if one.compiled.shape] == []
    extra = sum(one.compiled.bytes for one in report.unplanned)
    assert report.total.compiled_bytes - extra == report.total.predicted_bytes
