"""Layers that several steps share: in Linen, and in plain JAX over dicts of arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks.modern.steps._drawn import Drawn

Weights = Any


class EncoderBlock(nn.Module):
    """Attention and a perceptron of four times the width, normalised before, as ViT has them: [b, n, d] -> [b, n, d].
    With `memory` [b, m, d] it attends to that in between."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array | None = None, memory: jax.Array | None = None) -> jax.Array:
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=self.heads)(y, y, mask=mask)
        if memory is not None:
            x = x + nn.MultiHeadDotProductAttention(num_heads=self.heads)(nn.LayerNorm()(x), memory)
        y = nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(y))


class Perceptron(nn.Module):
    """Dense layers of these widths with an activation between them."""

    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in self.widths[:-1]:
            x = nn.silu(nn.Dense(width)(x))
        return nn.Dense(self.widths[-1])(x)


def perceptron(drawn: Drawn, *widths: int) -> list[Weights]:
    """Draws the weights of dense layers of these widths, for `apply_perceptron`."""
    return [drawn.dense(inputs, outputs) for inputs, outputs in zip(widths[:-1], widths[1:])]


def apply_perceptron(layers: list[Weights], x: jax.Array, activation: Any = jax.nn.relu) -> jax.Array:
    """Runs dense layers with an activation between them."""
    for layer in layers[:-1]:
        x = activation(apply_dense(layer, x))
    return apply_dense(layers[-1], x)


def apply_dense(layer: Weights, x: jax.Array) -> jax.Array:
    """`x @ kernel + bias`, over the last dim."""
    return x @ layer["kernel"] + layer["bias"]


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Normalises the last dim."""
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-6) * scale + bias


def attention(x: jax.Array, qkv: Weights, out: Weights, heads: int, bias: jax.Array | None = None) -> jax.Array:
    """Attention over the last dim but one of [..., n, d], with query, key and value in one weight; `bias` is added to
    the scores [..., heads, n, n]."""
    parts = apply_dense(qkv, x).reshape(*x.shape[:-1], 3, heads, x.shape[-1] // heads)
    q, k, v = parts[..., 0, :, :], parts[..., 1, :, :], parts[..., 2, :, :]
    scores = jnp.einsum("...qhd,...khd->...hqk", q, k) * q.shape[-1] ** -0.5
    scores = scores if bias is None else scores + bias
    mixed = jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores, -1), v)
    return apply_dense(out, mixed.reshape(x.shape))


def transformer_layer(drawn: Drawn, width: int, *lead: int) -> Weights:
    """Draws the weights of a layer for `apply_transformer_layer`; `lead` stacks that many of them in front."""

    def dense(inputs: int, outputs: int) -> Weights:
        return {
            "kernel": drawn.normal(*lead, inputs, outputs, scale=inputs**-0.5),
            "bias": drawn.normal(*lead, outputs, scale=0.02),
        }

    norm = lambda: {"scale": 1 + drawn.normal(*lead, width, scale=0.1), "bias": drawn.normal(*lead, width, scale=0.02)}
    return {
        "norm1": norm(),
        "qkv": dense(width, 3 * width),
        "out": dense(width, width),
        "norm2": norm(),
        "up": dense(width, 4 * width),
        "down": dense(4 * width, width),
    }


def apply_transformer_layer(w: Weights, x: jax.Array, heads: int, bias: jax.Array | None = None) -> jax.Array:
    """A layer of a pre-norm Transformer: [..., n, d] -> [..., n, d]."""
    x = x + attention(layer_norm(x, **w["norm1"]), w["qkv"], w["out"], heads, bias)
    return x + apply_dense(w["down"], jax.nn.gelu(apply_dense(w["up"], layer_norm(x, **w["norm2"]))))


def timestep_embedding(t: jax.Array, width: int) -> jax.Array:
    """Sines and cosines of times [b] -> [b, width]."""
    frequencies = jnp.exp(-jnp.log(10000.0) * jnp.arange(width // 2, dtype=t.dtype) / (width // 2))
    angles = t[:, None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


def patches(images: jax.Array, size: int) -> jax.Array:
    """Cuts images [b, h, w, c] into [b, (h / size) * (w / size), size * size * c]."""
    b, h, w, c = images.shape
    x = images.reshape(b, h // size, size, w // size, size, c)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(b, (h // size) * (w // size), size * size * c)
