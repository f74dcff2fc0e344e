"""What steps over text share: drawn weights and tokens, norms, rotary positions, attention, and a step of an optimizer.

Sizes are small, and divide by two and by four. Arrays are `[examples, length, ...]`, heads `[.., heads, head_dim]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.modern.steps.case import Problem

VOCAB, WIDTH, LENGTH, EXAMPLES, HEADS, HEAD_DIM, LAYERS = 64, 32, 16, 16, 4, 8, 2
NUM_STEPS = 3
Tree = Any


class Draws:
    """Draws weights of one dtype, the same ones for the same seed."""

    def __init__(self, dtype: str, seed: int = 0) -> None:
        self.dtype = dtype
        self._draws = np.random.default_rng(seed)

    def normal(self, *shape: int, scale: float | None = None) -> jax.Array:
        """Normal values; without a `scale` that of the fan-in, which is the last dim but one."""
        deviation = shape[-2] ** -0.5 if scale is None else scale
        return jnp.asarray(self._draws.normal(size=shape) * deviation, self.dtype)

    def near(self, center: float, *shape: int) -> jax.Array:
        """Values around `center`: scales of norms around one, biases around zero."""
        return jnp.asarray(center + 0.1 * self._draws.normal(size=shape), self.dtype)

    def uniform(self, low: float, high: float, *shape: int) -> jax.Array:
        """Values between `low` and `high`."""
        return jnp.asarray(self._draws.uniform(low, high, shape), self.dtype)

    def integers(self, limit: int, *shape: int) -> np.ndarray:
        """Whole numbers from 0 to below `limit`, int32."""
        return self._draws.integers(0, limit, shape).astype(np.int32)


def token_batches(
    seed: int = 1, *, examples: int = EXAMPLES, length: int = LENGTH, vocab: int = VOCAB
) -> tuple[dict[str, np.ndarray], ...]:
    """Batches of `tokens` and of the `targets` that follow them."""
    draws = np.random.default_rng(seed)
    texts = draws.integers(0, vocab, (NUM_STEPS, examples, length + 1)).astype(np.int32)
    return tuple({"tokens": text[:, :-1], "targets": text[:, 1:]} for text in texts)


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """Root mean square norm, in at least float32."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + epsilon) * scale).astype(x.dtype)


def layer_norm(x: jax.Array, weights: Tree) -> jax.Array:
    """Layer norm with `scale` and `bias`."""
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * weights["scale"] + weights["bias"]


def rotated(x: jax.Array, positions: jax.Array, base: float = 10000.0) -> jax.Array:
    """Turns heads `[b, s, h, d]` by their `positions` `[b or 1, s]` (RoFormer, arXiv 2104.09864; halves make
    planes)."""
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half) / half)
    angle = positions[..., None, None] * frequency
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, bias: jax.Array | None = None
) -> jax.Array:
    """Softmax attention of heads `[b, s, h, d]`, where `mask` (bool) allows it; returns `[b, s, h, d]`."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)


def causal(length: int) -> jax.Array:
    """Whether a position may look at another one."""
    return jnp.tril(jnp.ones((length, length), bool))


def next_token_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


Differentiate = Callable[..., Any]


def trained(
    loss_fn: Callable[..., Any], optimizer: optax.GradientTransformation, value_and_grad: Differentiate
) -> Callable[..., Any]:
    """Returns a step over `{"params", "opt"}` that lowers `loss_fn(params, batch)`."""

    def step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        loss, grads = value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    return step


def problem(
    loss_fn: Callable[..., Any],
    params: Tree,
    optimizer: optax.GradientTransformation,
    value_and_grad: Differentiate = jax.value_and_grad,
    batches: tuple[Tree, ...] | None = None,
) -> Problem:
    """Returns the problem of `trained`, by default on `token_batches`."""
    state = {"params": params, "opt": optimizer.init(params)}
    return Problem(trained(loss_fn, optimizer, value_and_grad), state, token_batches() if batches is None else batches)
