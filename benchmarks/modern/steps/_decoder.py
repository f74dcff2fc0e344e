"""A small decoder for steps that say how one is trained, rather than what it is."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.modern.steps._language import (
    HEAD_DIM,
    HEADS,
    LAYERS,
    VOCAB,
    WIDTH,
    Draws,
    Tree,
    attention,
    causal,
    rms_norm,
    rotated,
)

NAMES = ("q", "k", "v", "o", "up", "down")
Product = Callable[[jax.Array, Tree], jax.Array]


def decoder(draws: Draws) -> Tree:
    """Draws its weights."""
    shape = {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
    return {
        "embed": draws.normal(VOCAB, WIDTH, scale=0.5),
        "blocks": [
            {name: draws.normal(*shape.get(name, (WIDTH, WIDTH))) for name in NAMES}
            | {"norm": draws.near(1, WIDTH), "norm2": draws.near(1, WIDTH)}
            for _ in range(LAYERS)
        ],
        "norm": draws.near(1, WIDTH),
        "head": draws.normal(WIDTH, VOCAB),
    }


def hidden(params: Tree, tokens: jax.Array, product: Product = lambda x, w: x @ w) -> jax.Array:
    """The decoder up to its last norm. `product`: of an input with what stands for a weight."""
    x = params["embed"][tokens]
    b, s, _ = x.shape
    positions = jnp.arange(s)[None]
    for w in params["blocks"]:
        h = rms_norm(x, w["norm"])
        q, k, v = (product(h, w[name]).reshape(b, s, HEADS, HEAD_DIM) for name in "qkv")
        mixed = attention(rotated(q, positions), rotated(k, positions), v, causal(s))
        x = x + product(mixed.reshape(b, s, -1), w["o"])
        x = x + product(jax.nn.gelu(product(rms_norm(x, w["norm2"]), w["up"])), w["down"])
    return rms_norm(x, params["norm"])


def logits_of(params: Tree, tokens: jax.Array) -> jax.Array:
    """The decoder with its head."""
    return hidden(params, tokens) @ params["head"]
