"""The tracer keeps up with large models: what it does grows with the number of equations, not with its square."""

from __future__ import annotations

import gc
import time

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from splitjax.trace.flow import Argument
from splitjax.trace.tracer import build_graph
from tests.trace.helpers import _compat, cross_entropy, path_of, train_step, zeros
from tests.trace.models import B

D, HEADS, FF, VOCAB, T = 4096, 32, 11008, 32000, 64


def llama(num_layers: int):
    """The 7B model of Touvron et al. (arXiv 2302.13971), abstractly."""
    block = {
        "n1": zeros(D),
        "q": zeros(D, HEADS, D // HEADS),
        "k": zeros(D, HEADS, D // HEADS),
        "v": zeros(D, HEADS, D // HEADS),
        "o": zeros(HEADS, D // HEADS, D),
        "n2": zeros(D),
        "gate": zeros(D, FF),
        "up": zeros(D, FF),
        "down": zeros(FF, D),
    }
    params = {"embed": zeros(VOCAB, D), "norm": zeros(D), "head": zeros(D, VOCAB)} | {
        f"block_{i}": dict(block) for i in range(num_layers)
    }

    def rms(x, scale):
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    def loss(p, b):
        x = p["embed"][b["x"]]
        for i in range(num_layers):
            q = p[f"block_{i}"]
            h = rms(x, q["n1"])
            query, key, value = (jnp.einsum("bsd,dhk->bshk", h, q[name]) for name in "qkv")
            scores = jnp.einsum("bqhk,bshk->bhqs", query, key) / jnp.sqrt(D // HEADS)
            scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e9)
            x = x + jnp.einsum("bqhk,hkd->bqd", jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores), value), q["o"])
            h = rms(x, q["n2"])
            x = x + (jax.nn.silu(h @ q["gate"]) * (h @ q["up"])) @ q["down"]
        return cross_entropy(rms(x, p["norm"]) @ p["head"], b["y"])

    return loss, params, {"x": zeros(B, T, dtype="int32"), "y": zeros(B, T, dtype="int32")}


def vgg16():
    widths = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
    params, last = {}, 3
    for i, width in enumerate(widths):
        if width:
            params[f"conv{i}"] = {"w": zeros(3, 3, last, width), "b": zeros(width)}
            last = width
    for i, (rows, columns) in enumerate(((512 * 49, 4096), (4096, 4096), (4096, 1000))):
        params[f"fc{i}"] = {"w": zeros(rows, columns), "b": zeros(columns)}

    def loss(p, b):
        x = b["x"]
        for i, width in enumerate(widths):
            if width:
                x = lax.conv_general_dilated(
                    x, p[f"conv{i}"]["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
                x = jax.nn.relu(x + p[f"conv{i}"]["b"])
            else:
                x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = x.reshape(x.shape[0], -1)
        for i in range(3):
            x = x @ p[f"fc{i}"]["w"] + p[f"fc{i}"]["b"]
            x = jax.nn.relu(x) if i < 2 else x
        return cross_entropy(x, b["y"])

    return loss, params, {"x": zeros(B, 224, 224, 3), "y": zeros(B, dtype="int32")}


def seconds(model, gradient: str, repeat: int = 1) -> tuple[float, float, object]:
    """CPU seconds of the trace and of the graph (the best of several), and the graph."""
    loss, params, batch = model
    step, init = train_step(loss, optax.adamw(1e-4), gradient)
    args = jax.eval_shape(init, params), batch
    paths = jax.tree_util.tree_leaves_with_path(args)
    arguments = [Argument(path_of(path[1:]), path[0].idx == 0, path[0].idx == 1) for path, _ in paths]
    results = {i: i for i in range(sum(one.is_state for one in arguments))}
    gc.collect()
    # a full collection of what hundreds of other tests left behind takes a second, whoever happens to start it
    gc.disable()
    try:
        start = time.process_time()
        closed, _ = _compat.trace(step, *args)
        traced = time.process_time() - start
        built = []
        for _ in range(repeat):
            start = time.process_time()
            graph = build_graph(closed, arguments, results)
            built.append(time.process_time() - start)
    finally:
        gc.enable()
    return traced, min(built), graph


@pytest.mark.parametrize("gradient", ["boundary", "plain"])
def test_vgg16_in_a_second(gradient):
    trace, build, graph = seconds(vgg16(), gradient)
    assert len(graph.layers) == 16 and [layer.kind for layer in graph.layers] == ["conv"] * 13 + ["dense"] * 3
    # Simonyan and Zisserman (arXiv 1409.1556) count 15.3 G multiply-adds of convolutions and 0.12 G of dense layers an
    # image.
    assert graph.flops / B / 2 == pytest.approx(15.47e9, rel=0.01)
    assert sum(leaf.size for leaf in graph.params) == pytest.approx(138e6, rel=0.01)
    assert trace + build < 1


@pytest.mark.parametrize("gradient, limit", [("boundary", 5), ("plain", 10)])
def test_a_transformer_of_7b(gradient, limit):
    trace, build, graph = seconds(llama(32), gradient)
    assert sum(leaf.size for leaf in graph.params) == pytest.approx(6.74e9, rel=0.01)
    assert len(graph.layers) == 32 * 9 + 3
    assert all(leaf.follows for leaf in graph.state if leaf.role != "param" and leaf.shape)
    assert trace + build < limit


def test_work_grows_with_the_model():
    """Four times the layers, about four times the time (sixteen times would be a square)."""
    small, large = (seconds(llama(num), "boundary", repeat=3)[1] for num in (4, 16))
    assert large < 10 * small
