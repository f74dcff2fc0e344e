"""Optimizers beyond Adam, each on the same small decoder with grouped queries."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import splitjax
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
    next_token_loss,
    problem,
    rms_norm,
    rotated,
    token_batches,
)
from benchmarks.modern.steps.case import ModernStep, Problem

KV_HEADS = 2


def _params(dtype: str) -> Tree:
    draws = Draws(dtype)
    return {
        "embed": draws.normal(VOCAB, WIDTH, scale=0.3),
        "blocks": [
            {
                "norm": draws.near(1, WIDTH),
                "q": draws.normal(WIDTH, HEADS * HEAD_DIM),
                "kv": draws.normal(WIDTH, 2 * KV_HEADS * HEAD_DIM),
                "out": draws.normal(HEADS * HEAD_DIM, WIDTH),
                "norm2": draws.near(1, WIDTH),
                "up": draws.normal(WIDTH, 2 * WIDTH),
                "down": draws.normal(2 * WIDTH, WIDTH),
            }
            for _ in range(LAYERS)
        ],
        "norm": draws.near(1, WIDTH),
        "head": draws.normal(WIDTH, VOCAB),
    }


def _loss(params: Tree, batch: Tree) -> jax.Array:
    x = params["embed"][batch["tokens"]]
    b, s, _ = x.shape
    positions = jnp.arange(s)[None]
    for w in params["blocks"]:
        h = rms_norm(x, w["norm"])
        q = (h @ w["q"]).reshape(b, s, HEADS, HEAD_DIM)
        k, v = jnp.split((h @ w["kv"]).reshape(b, s, 2 * KV_HEADS, HEAD_DIM), 2, axis=2)
        k, v = (jnp.repeat(each, HEADS // KV_HEADS, axis=2) for each in (rotated(k, positions), v))
        x = x + attention(rotated(q, positions), k, v, causal(s)).reshape(b, s, -1) @ w["out"]
        x = x + jnp.square(jax.nn.relu(rms_norm(x, w["norm2"]) @ w["up"])) @ w["down"]
    return next_token_loss(rms_norm(x, params["norm"]) @ params["head"], batch["targets"])


def _muon(dtype: str) -> Problem:
    """Matrices of the layers by orthogonalised momentum (Newton and Schulz), tables and scales by Adam."""

    def dims(params: Tree) -> Tree:
        inner = optax.contrib.MuonDimensionNumbers()
        of = lambda path, leaf: inner if leaf.ndim == 2 and path[0].key == "blocks" else None
        return jax.tree_util.tree_map_with_path(of, params)

    optimizer = optax.contrib.muon(0.02, weight_decay=0.01, adam_learning_rate=3e-3, muon_weight_dimension_numbers=dims)
    return problem(_loss, _params(dtype), optimizer)


class ShampooState(NamedTuple):
    """Sums of outer products of the gradients, from the left and from the right; None for what is no matrix."""

    left: Tree
    right: Tree
    momentum: Tree


def _shampoo_transform(rate: float, epsilon: float = 1e-4) -> optax.GradientTransformation:
    is_matrix = lambda leaf: leaf.ndim == 2

    def init(params: Tree) -> ShampooState:
        square = lambda leaf, dim: jnp.eye(leaf.shape[dim], dtype=leaf.dtype) * epsilon
        return ShampooState(
            jax.tree.map(lambda leaf: square(leaf, 0) if is_matrix(leaf) else jnp.zeros_like(leaf), params),
            jax.tree.map(lambda leaf: square(leaf, 1) if is_matrix(leaf) else jnp.zeros(()), params),
            jax.tree.map(jnp.zeros_like, params),
        )

    def root(statistic: jax.Array) -> jax.Array:
        values, vectors = jnp.linalg.eigh(statistic)
        return (vectors * jnp.maximum(values, epsilon) ** -0.25) @ vectors.T

    def update(grads: Tree, state: ShampooState, params: Tree = None) -> tuple[Tree, ShampooState]:
        left = jax.tree.map(lambda g, s: s + (g @ g.T if is_matrix(g) else g * g), grads, state.left)
        right = jax.tree.map(lambda g, s: s + g.T @ g if is_matrix(g) else s, grads, state.right)

        def scaled(g: jax.Array, one: jax.Array, two: jax.Array) -> jax.Array:
            return root(one) @ g @ root(two) if is_matrix(g) else g * jax.lax.rsqrt(one + epsilon)

        found = jax.tree.map(scaled, grads, left, right)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state.momentum, found)
        return jax.tree.map(lambda m: -rate * m, momentum), ShampooState(left, right, momentum)

    return optax.GradientTransformation(init, update)


def _shampoo(dtype: str) -> Problem:
    """Preconditions both sides of a matrix by inverse fourth roots of sums of outer products."""
    return problem(_loss, _params(dtype), _shampoo_transform(0.02))


def _sam(dtype: str) -> Problem:
    """Sharpness-aware: a second gradient at the place to which the first one climbs."""
    optimizer, radius = optax.sgd(0.3, momentum=0.9, nesterov=True), 0.05

    def step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        params = state["params"]
        loss, grads = splitjax.value_and_grad(_loss)(params, batch)
        norm = optax.global_norm(grads)
        above = jax.tree.map(lambda p, g: p + radius * g / (norm + 1e-12), params, grads)
        sharp, grads = splitjax.value_and_grad(_loss)(above, batch)
        updates, opt = optimizer.update(grads, state["opt"], params)
        return {"params": optax.apply_updates(params, updates), "opt": opt}, {"loss": loss, "sharpness": sharp - loss}

    params = _params(dtype)
    return Problem(step, {"params": params, "opt": optimizer.init(params)}, token_batches())


def _schedule_free(dtype: str) -> Problem:
    """Averages instead of a schedule of the rate."""
    return problem(_loss, _params(dtype), optax.contrib.schedule_free_adamw(1e-2, warmup_steps=2, weight_decay=0.01))


def _lookahead(dtype: str) -> Problem:
    """Lion as the fast optimizer, whose weights are drawn back to slow ones after every second step."""
    optimizer = optax.lookahead(optax.lion(3e-3, weight_decay=0.1), sync_period=2, slow_step_size=0.5)

    def step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        loss, grads = splitjax.value_and_grad(_loss)(state["params"].fast, batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    params = optax.LookaheadParams.init_synced(_params(dtype))
    return Problem(step, {"params": params, "opt": optimizer.init(params)}, token_batches())


class Eight(NamedTuple):
    """Moments in eight bits: whole numbers in blocks of one row each, and a scale for each row."""

    count: jax.Array
    first: Tree
    first_scale: Tree
    second: Tree
    second_scale: Tree


def _adam_8bit(dtype: str) -> Problem:
    """Adam whose moments are stored in eight bits, the second as its root, with a scale for each row."""

    def stored(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
        return jnp.round(x / jnp.where(scale > 0, scale, 1)).astype(jnp.int8), scale

    def init(params: Tree) -> Eight:
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.int8), params)
        scales = jax.tree.map(lambda p: jnp.zeros((*p.shape[:-1], 1), p.dtype), params)
        return Eight(jnp.zeros((), jnp.int32), zeros, scales, zeros, scales)

    def update(grads: Tree, state: Eight, params: Tree) -> tuple[Tree, Eight]:
        count = state.count + 1

        def of_leaf(g: Any, m: Any, m_scale: Any, r: Any, r_scale: Any, p: Any) -> tuple[Any, ...]:
            first = 0.9 * m.astype(g.dtype) * m_scale + 0.1 * g
            second = 0.999 * (r.astype(g.dtype) * r_scale) ** 2 + 0.001 * g * g
            step = (first / (1 - 0.9**count)) / (jnp.sqrt(second / (1 - 0.999**count)) + 1e-6)
            return -1e-2 * (step + 0.01 * p), *stored(first), *stored(jnp.sqrt(second))

        rows = jax.tree.map(of_leaf, grads, *state[1:], params)
        parts = jax.tree.transpose(jax.tree.structure(grads), jax.tree.structure((0,) * 5), rows)
        return parts[0], Eight(count, *parts[1:])

    return problem(_loss, _params(dtype), optax.GradientTransformation(init, update), splitjax.value_and_grad)


STEPS: tuple[ModernStep, ...] = (
    ModernStep("Muon", "Muon", _muon, ("table", "newton-schulz", "two optimizers")),
    ModernStep("Shampoo", "Shampoo", _shampoo, ("table", "eigendecomposition", "outer products")),
    ModernStep("Sharpness-aware minimisation", "SAM", _sam, ("table", "splitjax gradient", "two gradients")),
    ModernStep("Schedule-free AdamW", "schedule-free", _schedule_free, ("table", "averaged weights")),
    ModernStep("Lion with lookahead", "Lookahead", _lookahead,
               ("table", "splitjax gradient", "lion", "slow weights", "cond")),
    ModernStep("Adam in eight bits", "8-bit Adam", _adam_8bit,
               ("table", "splitjax gradient", "int8 moments", "scales by row")),
)  # fmt: skip
