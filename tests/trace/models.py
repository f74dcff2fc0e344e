"""Models of every framework as `(loss(params, batch), params, batch)`; parameters may be abstract."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

from splitjax.trace.graph import Graph
from tests.trace.helpers import cross_entropy, trace_loss, zeros

Model = tuple[Callable, Any, Any]

B, T, D, V, C = 16, 12, 32, 50, 10
IMAGES = {"x": zeros(B, 8, 8, 3), "y": zeros(B, dtype="int32")}
TOKENS = {"x": zeros(B, T, dtype="int32"), "y": zeros(B, T, dtype="int32")}
TOKEN_CLASS = {"x": zeros(B, T, dtype="int32"), "y": zeros(B, dtype="int32")}
SEQUENCES = {"x": zeros(B, T, D), "y": zeros(B, dtype="int32")}
VECTORS = {"x": zeros(B, D), "y": zeros(B, dtype="int32")}
KEY = jax.eval_shape(lambda: jax.random.key(0))


def _linen(module: nn.Module, batch: Any) -> Model:
    params = jax.eval_shape(module.init, KEY, batch["x"])["params"]
    return lambda p, b: cross_entropy(module.apply({"params": p}, b["x"]), b["y"]), params, batch


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm(name="norm1")(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4, name="attention")(h, h)
        h = nn.LayerNorm(name="norm2")(x)
        return x + nn.Dense(D, name="fc2")(nn.gelu(nn.Dense(4 * D, name="fc1")(h)))


class LinenTransformer(nn.Module):
    num_blocks: int = 2

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(V, D, name="embed")(ids)
        for i in range(self.num_blocks):
            x = LinenBlock(name=f"block{i}")(x)
        return nn.Dense(V, name="head")(nn.LayerNorm(name="norm")(x))


class LinenConv(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.max_pool(nn.relu(nn.GroupNorm(4)(nn.Conv(8, (3, 3))(x))), (2, 2), (2, 2))
        x = nn.avg_pool(nn.relu(nn.Conv(16, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.relu(nn.Dense(64)(x.reshape(x.shape[0], -1)))
        return nn.Dense(C)(nn.relu(nn.Dense(64)(x)))


class _Stacked(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return LinenBlock()(x), None


class LinenStack(nn.Module):
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        block = nn.remat(_Stacked, prevent_cse=False) if self.remat else _Stacked
        blocks = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = blocks(name="blocks")(nn.Dense(D)(x), None)
        return nn.Dense(C)(x.mean(1))


class LinenRecurrent(nn.Module):
    cells: tuple[type, ...] = (nn.LSTMCell, nn.GRUCell, nn.OptimizedLSTMCell)
    time_major: bool = False

    @nn.compact
    def __call__(self, x):
        for cell in self.cells:
            x = nn.RNN(cell(D), time_major=self.time_major)(x)
        return nn.Dense(C)(x[-1] if self.time_major else x[:, -1])


def linen_transformer() -> Model:
    return _linen(LinenTransformer(), TOKENS)


def linen_conv() -> Model:
    return _linen(LinenConv(), IMAGES)


def linen_stack() -> Model:
    return _linen(LinenStack(), SEQUENCES)


def linen_remat_stack() -> Model:
    return _linen(LinenStack(remat=True), SEQUENCES)


def linen_recurrent() -> Model:
    return _linen(LinenRecurrent(), SEQUENCES)


def linen_time_major() -> Model:
    return _linen(LinenRecurrent((nn.LSTMCell,), True), {"x": zeros(T, B, D), "y": zeros(B, dtype="int32")})


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm1, self.norm2 = nnx.RMSNorm(D, rngs=rngs), nnx.RMSNorm(D, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, D, decode=False, rngs=rngs)
        self.fc1, self.fc2 = nnx.Linear(D, 2 * D, rngs=rngs), nnx.Linear(2 * D, D, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(nnx.gelu(self.fc1(self.norm2(x))))


class NnxLanguageModel(nnx.Module):
    """Embedding and softmax share one table."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.positions = nnx.Param(jnp.ones((T, D)))
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(2)])

    def __call__(self, ids):
        x = self.embed(ids) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


def nnx_tied() -> Model:
    graphdef, params, rest = nnx.split(nnx.eval_shape(lambda: NnxLanguageModel(nnx.Rngs(0))), nnx.Param, ...)
    return lambda p, b: cross_entropy(nnx.merge(graphdef, p, rest)(b["x"]), b["y"]), params, TOKENS


def haiku_model() -> Model:
    hk = pytest.importorskip("haiku")

    def forward(ids):
        x = hk.LayerNorm(-1, True, True)(hk.Embed(V, D)(ids))
        x = x + hk.MultiHeadAttention(4, 8, w_init=hk.initializers.VarianceScaling())(x, x, x)
        x, _ = hk.dynamic_unroll(hk.LSTM(24), x.transpose(1, 0, 2), hk.LSTM(24).initial_state(B))
        x, _ = hk.dynamic_unroll(hk.GRU(24), x, jnp.zeros((B, 24)))
        return hk.Linear(C)(x[-1])

    model = hk.transform(forward)
    params = jax.eval_shape(model.init, KEY, TOKEN_CLASS["x"])
    return lambda p, b: cross_entropy(model.apply(p, None, b["x"]), b["y"]), params, TOKEN_CLASS


def equinox_model() -> Model:
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        embed: Any
        norm: Any
        attention: Any
        conv: Any
        cell: Any
        mlp: Any

        def __init__(self, key):
            keys = jax.random.split(key, 5)
            self.embed = eqx.nn.Embedding(V, D, key=keys[0])
            self.norm = eqx.nn.LayerNorm(D)
            self.attention = eqx.nn.MultiheadAttention(4, D, key=keys[1])
            self.conv = eqx.nn.Conv1d(D, D, 3, padding=1, key=keys[2])
            self.cell = eqx.nn.LSTMCell(D, D, key=keys[3])
            self.mlp = eqx.nn.MLP(D, C, 64, 2, key=keys[4])

        def __call__(self, ids):
            x = jax.vmap(self.embed)(ids)
            h = jax.vmap(self.norm)(x)
            x = x + self.attention(h, h, h)
            x = x + self.conv(x.T).T
            (h, _), _ = lax.scan(lambda c, x: (self.cell(x, c), None), (jnp.zeros(D), jnp.zeros(D)), x)
            return self.mlp(h)

    params, static = eqx.partition(eqx.filter_eval_shape(Net, KEY), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    return lambda p, b: cross_entropy(jax.vmap(eqx.combine(p, static))(b["x"]), b["y"]), params, TOKEN_CLASS


def lists_of_tuples() -> Model:
    params = [(zeros(D, 64), zeros(64)), (zeros(64, 64), zeros(64)), (zeros(64, C), zeros(C))]

    def loss(p, b):
        x = b["x"]
        for w, bias in p[:-1]:
            x = jnp.tanh(x @ w + bias)
        return cross_entropy(x @ p[-1][0] + p[-1][1], b["y"])

    return loss, params, VECTORS


def plain_dict() -> Model:
    params = {
        "w1": zeros(D, 64),
        "b1": zeros(64),
        "w2": zeros(64, 64),
        "b2": zeros(64),
        "w3": zeros(64, C),
        "b3": zeros(C),
    }

    def loss(p, b):
        x = jnp.tanh(jnp.tanh(b["x"] @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"])
        return cross_entropy(x @ p["w3"] + p["b3"], b["y"])

    return loss, params, VECTORS


def layer_norm(x, scale):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * scale


def fused_transformer(heads: int = 4) -> Model:
    """By hand: fused qkv, learned positions, table tied to the softmax, everything of a block in one dict."""
    size = D // heads
    block = {
        "ln1": zeros(D),
        "qkv": zeros(D, 3 * D),
        "qkv_b": zeros(3 * D),
        "o": zeros(D, D),
        "o_b": zeros(D),
        "ln2": zeros(D),
        "up": zeros(D, 64),
        "up_b": zeros(64),
        "down": zeros(64, D),
        "down_b": zeros(D),
    }
    params = {
        "emb": zeros(V, D),
        "pos": zeros(T, D),
        "blocks": [block, dict(block)],
        "norm": {"scale": zeros(D), "bias": zeros(D)},
    }

    def loss(p, b):
        x = p["emb"][b["x"]] + p["pos"]
        for q in p["blocks"]:
            h = layer_norm(x, q["ln1"]) @ q["qkv"] + q["qkv_b"]
            query, key, value = (one[:, :, 0] for one in jnp.split(h.reshape(B, T, 3, heads, size), 3, axis=2))
            scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / jnp.sqrt(size)
            scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e9)
            y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value).reshape(B, T, D)
            x = x + y @ q["o"] + q["o_b"]
            x = x + jax.nn.gelu(layer_norm(x, q["ln2"]) @ q["up"] + q["up_b"]) @ q["down"] + q["down_b"]
        x = layer_norm(x, p["norm"]["scale"]) + p["norm"]["bias"]
        return cross_entropy(x @ p["emb"].T, b["y"])

    return loss, params, TOKENS


def gated_transformer() -> Model:
    """By hand: separate q, k, v with heads as dims, RMS norms, gated MLP, `jax.nn.dot_product_attention`."""
    block = {
        "n1": zeros(D),
        "q": zeros(D, 4, 8),
        "k": zeros(D, 2, 8),
        "v": zeros(D, 2, 8),
        "o": zeros(4, 8, D),
        "n2": zeros(D),
        "gate": zeros(D, 64),
        "up": zeros(D, 64),
        "down": zeros(64, D),
    }
    params = {"embed": zeros(V, D), "blocks": {"0": block, "1": dict(block)}, "norm": zeros(D), "head": zeros(D, V)}

    def rms(x, scale):
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    def loss(p, b):
        x = p["embed"][b["x"]]
        for q in p["blocks"].values():
            h = rms(x, q["n1"])
            heads = [jnp.einsum("bsd,dhk->bshk", h, q[name]) for name in "qkv"]
            x = x + jnp.einsum("bqhk,hkd->bqd", jax.nn.dot_product_attention(*heads, is_causal=True), q["o"])
            h = rms(x, q["n2"])
            x = x + (jax.nn.silu(h @ q["gate"]) * (h @ q["up"])) @ q["down"]
        return cross_entropy(rms(x, p["norm"]) @ p["head"], b["y"])

    return loss, params, TOKENS


def experts() -> Model:
    """Tokens are dealt to experts by products; what an expert sees belongs to no example any more."""
    params = {"gate": zeros(D, 4), "up": zeros(4, D, 64), "down": zeros(4, 64, D), "head": zeros(D, C)}

    def loss(p, b):
        x = b["x"]
        gates = jax.nn.softmax(x @ p["gate"])
        deal = jax.nn.one_hot(jnp.argmax(gates, -1), 4)[..., None] * jax.nn.one_hot(jnp.arange(B) % 8, 8)[:, None]
        seen = jnp.einsum("bec,bd->ecd", deal, x)
        made = jnp.einsum("ecf,efd->ecd", jax.nn.relu(jnp.einsum("ecd,edf->ecf", seen, p["up"])), p["down"])
        x = x + jnp.einsum("bec,ecd->bd", deal * gates[..., None], made)
        return cross_entropy(x @ p["head"], b["y"])

    return loss, params, VECTORS


def ragged_experts() -> Model:
    params = {"gate": zeros(D, 4), "up": zeros(4, D, 64), "down": zeros(4, 64, D), "head": zeros(D, C)}

    def loss(p, b):
        x = b["x"]
        expert = jnp.argmax(x @ p["gate"], -1)
        order = jnp.argsort(expert)
        sizes = jnp.bincount(expert, length=4)
        made = lax.ragged_dot(jax.nn.relu(lax.ragged_dot(x[order], p["up"], sizes)), p["down"], sizes)
        return cross_entropy(jnp.zeros_like(x).at[order].set(made) @ p["head"], b["y"])

    return loss, params, VECTORS


def recurrent_by_hand() -> Model:
    params = {"wx": zeros(D, D), "wh": zeros(D, D), "b": zeros(D), "out": zeros(D, C), "out_b": zeros(C)}

    def loss(p, b):
        def cell(h, x):
            h = jnp.tanh(x @ p["wx"] + h @ p["wh"] + p["b"])
            return h, h

        h, _ = lax.scan(cell, jnp.zeros((B, D)), b["x"].transpose(1, 0, 2))
        return cross_entropy(h @ p["out"] + p["out_b"], b["y"])

    return loss, params, SEQUENCES


def shared_layers() -> Model:
    """One weight, applied over and over: no sequence is read, so nothing is recurrent."""
    params = {"w": zeros(D, D), "out": zeros(D, C)}

    def loss(p, b):
        x, _ = lax.scan(lambda x, _: (jnp.tanh(x @ p["w"]), None), b["x"], None, length=4)
        return cross_entropy(x @ p["out"], b["y"])

    return loss, params, VECTORS


def unrolled_recurrent() -> Model:
    params = {"wx": zeros(D, D), "wh": zeros(D, D), "out": zeros(D, C)}

    def loss(p, b):
        h = jnp.zeros((B, D))
        for t in range(4):
            h = jnp.tanh(b["x"][:, t] @ p["wx"] + h @ p["wh"])
        return cross_entropy(h @ p["out"], b["y"])

    return loss, params, SEQUENCES


MODELS: dict[str, Callable[[], Model]] = {
    fn.__name__: fn
    for fn in (
        linen_transformer,
        linen_conv,
        linen_stack,
        linen_remat_stack,
        linen_recurrent,
        linen_time_major,
        nnx_tied,
        haiku_model,
        equinox_model,
        lists_of_tuples,
        plain_dict,
        fused_transformer,
        gated_transformer,
        experts,
        ragged_experts,
        recurrent_by_hand,
        shared_layers,
        unrolled_recurrent,
    )
}


@functools.cache
def model(name: str) -> Model:
    return MODELS[name]()


@functools.cache
def traced(name: str, gradient: str = "boundary") -> Graph:
    """A model's graph under plain gradient descent."""
    loss, params, batch = model(name)
    return trace_loss(loss, params, batch, gradient=gradient)
