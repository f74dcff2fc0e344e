"""Fourier transforms, which each device takes of its own examples: numbers of one device, and no batch is gathered."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import splitjax

LENGTH, WIDTH = 8, 16


def state():
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5)
    return {
        "embed": normal(WIDTH, WIDTH),
        "filter": normal(LENGTH, WIDTH),
        "up": normal(WIDTH, 4 * WIDTH),
        "down": normal(4 * WIDTH, WIDTH),
        "logits": normal(WIDTH, 8),
    }


def batch():
    rng = np.random.default_rng(1)
    return {"x": jnp.asarray(rng.normal(size=(16, LENGTH, WIDTH))), "y": jnp.asarray(rng.integers(0, 8, 16))}


def network(params, x):
    """Mixes positions as FNet does (arXiv 2105.03824, section 3.2) and by a long convolution as Hyena does (arXiv
    2302.10866, section 3): [B, length, width] -> [B, 8]."""
    x = jnp.tanh(x @ params["embed"])
    x = x + jnp.fft.fft2(x).real / LENGTH
    if params["filter"] is not None:
        spectrum = jnp.fft.rfft(x, n=2 * LENGTH, axis=1) * jnp.fft.rfft(params["filter"], n=2 * LENGTH, axis=0)
        x = x + jnp.fft.irfft(spectrum, n=2 * LENGTH, axis=1)[:, :LENGTH]
    hidden = jnp.fft.fft(jnp.tanh(x @ params["up"])).real  # along a dim that a rule splits
    return (x + hidden @ params["down"] / WIDTH).mean(1) @ params["logits"]


def step_of(value_and_grad, around=lambda fn: fn):
    def step(params, batch):
        def loss(params):
            logits = around(network)(params, batch["x"])
            return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, batch["y"][:, None], 1)[:, 0]).mean()

        value, gradients = value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


MESHES = {
    "megatron": {"data": 2, "model": 4},
    "splitbrain": {"data": 2, "model": 4},
    "fsdp": {"data": 8},
    "data_parallel": {"data": 4, "model": 2},
}
GRADIENTS = {"boundary": splitjax.value_and_grad, "plain": jax.value_and_grad}


def check(step, mesh, rules, tolerance=1e-12, **options):
    """Compares a step with one device in float64; returns the parallel step with what it was called with."""
    parallel = splitjax.parallelize(step, mesh=mesh, rules=rules, donate=False, **options)
    want, want_loss = jax.jit(step)(state(), batch())
    got, loss = parallel(state(), batch())
    np.testing.assert_allclose(loss, want_loss, rtol=tolerance)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=tolerance), got, want)
    return parallel


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("rules", MESHES)
def test_numbers_are_those_of_one_device(rules, gradient):
    with jax.enable_x64(True):
        parallel = check(step_of(GRADIENTS[gradient]), MESHES[rules], rules)
        assert any("fourier-transform" in note for note in parallel.plan(state(), batch()).notes)


@pytest.mark.parametrize(
    ("rules", "microbatches", "options"),
    [
        ("megatron", 2, {}),
        ("splitbrain", 2, {}),
        ("data_parallel", 1, {"shard_state": True}),
        ("data_parallel", 2, {"shard_state": True}),
    ],
)
def test_with_options(rules, microbatches, options):
    with jax.enable_x64(True):
        check(
            step_of(functools.partial(splitjax.value_and_grad, microbatches=microbatches)),
            MESHES[rules],
            rules,
            **options,
        )


def custom_jvp(fn):
    """The function behind a derivative rule of its own, inside which operations of the table run whole on every
    device."""
    ruled = jax.custom_jvp(fn)
    ruled.defjvp(lambda primals, tangents: jax.jvp(fn, primals, tangents))
    return ruled


AROUND = {
    "remat": jax.checkpoint,
    "vmap": lambda fn: lambda p, x: jax.vmap(lambda x: fn(p, x[None])[0])(x),
    "custom_jvp": custom_jvp,
}


@pytest.mark.parametrize("around", AROUND)
def test_inside_of_transformations(around):
    with jax.enable_x64(True):
        check(step_of(splitjax.value_and_grad, AROUND[around]), MESHES["megatron"], "megatron")


def test_no_device_gets_the_examples_of_others():
    """XLA alone gathers the whole batch for every transform. Without the long convolution, whose filter's gradient is
    summed as a spectrum."""

    def without_filter(network):
        return lambda params, x: network({**params, "filter": None}, x)

    params = {name: value for name, value in state().items() if name != "filter"}
    with jax.enable_x64(True):
        parallel = splitjax.parallelize(
            step_of(splitjax.value_and_grad, without_filter), mesh={"data": 8}, rules="data_parallel"
        )
        report = parallel.report(params, batch())
    assert not [one for one in report.collectives if one.op == "all-gather"]
    assert not report.missing and all(one.bytes < 64 for one in report.unplanned), report.unplanned


@functools.cache
def _lowered(mesh):
    with jax.enable_x64(True):
        return (
            splitjax.parallelize(step_of(splitjax.value_and_grad), mesh=dict(mesh), rules="data_parallel")
            .lower(state(), batch())
            .as_text()
        )


def test_one_device_transforms_as_it_stands():
    assert "fft" in _lowered((("data", 1),)) and "sdy.manual_computation" not in _lowered((("data", 1),))
    assert "sdy.manual_computation" in _lowered((("data", 8),))
