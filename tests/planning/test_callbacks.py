"""Callbacks see whole arrays: what they read is gathered, and the plan says so."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import splitjax
from splitjax.errors import MicrobatchError, TraceError


def a_sum_each(h):
    return jax.ShapeDtypeStruct(h.shape[:1], "float32")


def sums(seen, value):
    seen.append(value.shape)
    return np.asarray(value).sum(-1)


def train(call, **options):
    """A step whose hidden values go through `call`."""
    differentiate = splitjax.value_and_grad if "microbatches" in options else options.pop("differentiate")

    def step(params, x):
        def loss_fn(params, x):
            return ((call(x @ params["up"]) @ params["down"]) ** 2).mean()

        loss, gradients = differentiate(loss_fn, **options)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    return step


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    params = {"up": rng.normal(size=(8, 32)).astype("f"), "down": rng.normal(size=(32, 8)).astype("f")}
    return params, rng.normal(size=(16, 8)).astype("f")


def calls(seen):
    fixed = jax.lax.stop_gradient

    def pure(h):
        return (
            h * jax.pure_callback(lambda v: sums(seen, v), a_sum_each(h), fixed(h), vmap_method="sequential")[:, None]
        )

    def with_effect(h):
        return h * io_callback(lambda v: sums(seen, v), a_sum_each(h), fixed(h))[:, None]

    def debug(h):
        jax.debug.callback(lambda v: seen.append(v.shape), h)
        return h

    return {"pure_callback": pure, "io_callback": with_effect, "debug_callback": debug}


@pytest.mark.parametrize(
    ("kind", "differentiate"),
    [
        ("pure_callback", splitjax.value_and_grad),
        ("io_callback", jax.value_and_grad),
        ("debug_callback", splitjax.value_and_grad),
    ],
)
def test_what_it_reads_is_gathered(kind, differentiate, data):
    seen = []
    call = calls(seen)[kind]
    expected = jax.device_get(jax.jit(train(call, differentiate=jax.value_and_grad))(*data))
    jax.effects_barrier()
    seen.clear()
    step = splitjax.parallelize(
        train(call, differentiate=differentiate), mesh={"data": 2, "model": 2}, rules="megatron", donate=False
    )
    state = step.place(data[0], example=(data[1],))
    (note,) = [note for note in step.plan(state, data[1]).notes if note.startswith(kind)]
    assert "test_callbacks.py" in note and "gathered over data, model" in note
    got = step(state, data[1])
    jax.effects_barrier()
    assert set(seen) == {(16, 32)}
    if kind != "pure_callback":  # JAX may call a pure one as often as it likes
        assert len(seen) == 1
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


def test_in_microbatches_it_is_refused_or_runs_once(data):
    seen = []
    made = calls(seen)
    refused = splitjax.parallelize(
        train(made["pure_callback"], microbatches=2), mesh={"data": 2}, rules="data_parallel"
    )
    with pytest.raises(MicrobatchError, match="pure_callback"):
        refused.plan(*data)
    step = splitjax.parallelize(
        train(made["debug_callback"], microbatches=2), mesh={"data": 2}, rules="data_parallel", donate=False
    )
    got = step(step.place(data[0], example=(data[1],)), data[1])[1]
    jax.effects_barrier()
    assert seen == [(16, 32)]
    assert float(got) == pytest.approx(float(((data[1] @ data[0]["up"] @ data[0]["down"]) ** 2).mean()), rel=1e-5)


def test_what_is_not_split_is_not_gathered(data):
    seen = []

    def total(h):
        jax.debug.callback(lambda v: seen.append(float(v)), h.sum())
        return h

    step = splitjax.parallelize(
        train(total, differentiate=splitjax.value_and_grad), mesh={"data": 2}, rules="data_parallel", donate=False
    )
    state = step.place(data[0], example=(data[1],))
    assert not [note for note in step.plan(state, data[1]).notes if "callback" in note]
    step(state, data[1])
    jax.effects_barrier()
    assert seen == pytest.approx([float((data[1] @ data[0]["up"]).sum())], rel=1e-4)


@pytest.mark.parametrize("kind", ["io", "debug", "print"])
def test_ordered_callbacks_are_refused_on_several_devices(kind, data):
    def ordered(h):
        if kind == "io":
            io_callback(lambda v: None, None, h, ordered=True)
        elif kind == "debug":
            jax.debug.callback(lambda v: None, h, ordered=True)
        else:
            jax.debug.print("{}", jnp.sum(h), ordered=True)
        return h

    step = splitjax.parallelize(
        train(ordered, differentiate=splitjax.value_and_grad), mesh={"data": 2}, rules="data_parallel"
    )
    with pytest.raises(TraceError, match="ordered callback") as caught:
        step.plan(*data)
    assert "ordered=False" in caught.value.remedy and "test_callbacks.py" in caught.value.place
