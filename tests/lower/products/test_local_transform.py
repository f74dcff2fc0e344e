"""Fourier transforms, which each device takes of its own examples: numbers of one device, no batch is gathered, and
what brings a split dim together is what the plan has."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import splitjax
from splitjax.rules import Rule, RuleSet

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
    if params.get("filter") is not None:
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


def without_filter():
    return {name: value for name, value in state().items() if name != "filter"}


def real_along_a_split_dim(params, x):
    """Transforms from and to real numbers along a dim that rules split: the last of it changes its size, and leaves
    whole."""
    x = jnp.tanh(x @ params["embed"])
    spectrum = jnp.fft.rfft(jnp.tanh(x @ params["up"]))
    hidden = jnp.fft.irfft(spectrum * jnp.exp(-jnp.arange(spectrum.shape[-1]) / 8), n=4 * WIDTH)
    return jnp.fft.ifftn(hidden @ params["down"], axes=(1, 2)).imag.mean(1) @ params["logits"]


NETWORKS = {
    "mixing": (network, without_filter),
    "long_convolution": (network, state),
    "real": (real_along_a_split_dim, without_filter),
}
PLAIN = functools.partial(splitjax.value_and_grad, microbatches=1)
IN_TWO = functools.partial(splitjax.value_and_grad, microbatches=2)


@pytest.mark.parametrize(
    ("rules", "name", "around"),
    [
        ("megatron", "long_convolution", ""),
        ("megatron", "real", ""),
        ("megatron", "mixing", "remat"),
        ("megatron", "mixing", "vmap"),
        ("splitbrain", "long_convolution", ""),
        ("splitbrain", "real", ""),
    ],
)
def test_what_brings_a_split_dim_together_is_planned(rules, name, around):
    """The plan has a collective for each crossing, and XLA no crossing beside them. Rematerialisation repeats some,
    which the plan counts once, as for other layers."""
    fn, make = NETWORKS[name]
    wrapped = lambda _: AROUND[around](fn) if around else fn
    with jax.enable_x64(True):
        parallel = splitjax.parallelize(step_of(PLAIN, wrapped), mesh=MESHES[rules], rules=rules, donate=False)
        want, _ = jax.jit(step_of(PLAIN, wrapped))(make(), batch())
        got, _ = parallel(make(), batch())
        report = parallel.report(make(), batch())
        planned = [each for each in parallel.plan(make(), batch()).collectives if "Fourier transform" in each.why]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), got, want)
    assert {each.op for each in planned} == {"all_gather" if rules == "megatron" else "all_to_all"}
    assert {each.layer for each in planned} <= {"embed", "up", "down"}
    if around == "remat":
        sent = [each for each in report.collectives if each.op == planned[0].op]
        assert sum(each.bytes for each in sent) >= sum(each.bytes for each in planned)
        return
    realised = [each for each in report.collectives if each.planned in planned]
    assert len(realised) == len(planned)
    assert all((each.op, each.axis, each.bytes) == _sent(each.planned) for each in realised)
    assert not report.missing
    # scalars and per-example sums, and what splitbrain makes of a whole weight that a split layer reads
    assert [each for each in report.unplanned if each.bytes >= 100 and each.layer != "filter"] == []


def _sent(planned):
    return planned.op, planned.axis, planned.bytes


@pytest.mark.parametrize(
    ("rules", "gradient", "options"),
    [
        ("megatron", PLAIN, {"shard_state": True}),
        ("splitbrain", IN_TWO, {}),
        ("megatron", jax.value_and_grad, {}),
    ],
)
def test_it_is_planned_with_options(rules, gradient, options):
    with jax.enable_x64(True):
        parallel = splitjax.parallelize(step_of(gradient), mesh=MESHES[rules], rules=rules, donate=False, **options)
        report = parallel.report(without_filter(), batch())
        planned = [
            each for each in parallel.plan(without_filter(), batch()).collectives if "Fourier transform" in each.why
        ]
    assert planned and not set(planned) & set(report.missing)
    sizes = {each.bytes for each in planned}
    unplanned = [each for each in report.unplanned if each.op in ("all_gather", "all_to_all") and each.bytes in sizes]
    assert unplanned == []  # nor is the batch laid out anew for the loop


@pytest.mark.parametrize("rules", ["fsdp", "data_parallel"])
def test_whole_features_need_nothing(rules):
    with jax.enable_x64(True):
        parallel = splitjax.parallelize(step_of(PLAIN), mesh=MESHES[rules], rules=rules, donate=False)
        assert not [each for each in parallel.plan(state(), batch()).collectives if "Fourier" in each.why]
        report = parallel.report(state(), batch())
    assert not report.missing and all(each.bytes < 100 for each in report.unplanned), report.unplanned


def test_layers_around_a_transform_are_split_to_fit_each_other():
    """A transformed dim lies behind the transform as before it: columns are followed by rows."""
    with jax.enable_x64(True):
        plan = splitjax.parallelize(step_of(PLAIN), mesh=MESHES["megatron"], rules="megatron").plan(state(), batch())
    assert plan.leaf("embed").spec == (None, "model") and plan.leaf("up").spec == ("model", None)


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_a_split_dim_of_one_element_a_device(gradient):
    """What a gather along such a dim leaves is in a memory layout that the CPU backend's transform does not take."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(2)
        params = {"up": jnp.asarray(rng.normal(size=(WIDTH, 4))), "down": jnp.asarray(rng.normal(size=(4, 8)))}

        def step(params, batch):
            def loss(params):
                hidden = jnp.tanh(batch["x"] @ params["up"])
                hidden = jnp.fft.ifft(jnp.fft.fft(hidden, axis=-1) ** 2, axis=-1).real
                logits = (hidden @ params["down"]).mean(1)
                picked = jnp.take_along_axis(logits, batch["y"][:, None], 1)[:, 0]
                return (jax.nn.logsumexp(logits, -1) - picked).mean()

            value, gradients = GRADIENTS[gradient](loss)(params)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

        mesh = {"data": 2, "model": 4}
        parallel = splitjax.parallelize(step, mesh=mesh, rules="megatron", donate=False)
        want, want_loss = jax.jit(step)(params, batch())
        got, loss = parallel(params, batch())
        np.testing.assert_allclose(loss, want_loss, rtol=1e-12)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), got, want)
        assert {leaf.path: leaf.spec for leaf in parallel.plan(params, batch()).leaves}["up"] == (None, "model")


def test_a_split_dim_behind_another():
    """A gather along a dim that is not the first asks for a memory layout that XLA hands on to the transforms around
    it, where the CPU backend's fail to compile."""

    def step(params, batch):
        def loss(params):
            filtered = lambda w: jnp.fft.irfftn(jnp.fft.rfftn(w) * 0.5, s=(8, 3, 6)) + w
            return (jnp.sin(jax.vmap(filtered)(params["w"])) * batch["x"].mean()).sum()

        value, gradients = splitjax.value_and_grad(loss)(params)
        return {"w": params["w"] - gradients["w"]}, value

    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        params, examples = {"w": rng.normal(size=(2, 8, 3, 6))}, {"x": rng.normal(size=(8, 2))}
        own = RuleSet("own", (Rule("w", path="w", shard={1: ("model",)}, ties="hard"),), replicated_batch="data")
        parallel = splitjax.parallelize(step, mesh={"data": 2, "model": 4}, rules=own, donate=False)
        got, want = parallel(params, examples), jax.jit(step)(params, examples)
        np.testing.assert_allclose(got[0]["w"], want[0]["w"], rtol=1e-10, atol=1e-12)


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
