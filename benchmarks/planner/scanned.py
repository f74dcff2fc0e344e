"""A decoder whose blocks are stacked and run in a scan, and a step that trains any model on tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import splitjax


def adamw() -> optax.GradientTransformation:
    """AdamW behind gradients that are clipped by their global norm."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))


def trained(loss_of: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A step that trains with `adamw`. `loss_of`: of parameters and a batch."""
    tx = adamw()

    def step(state: Any, batch: Any) -> Any:
        loss, grads = splitjax.value_and_grad(loss_of)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    return step


def token_step(
    logits_of: Callable[[Any, Any], Any], init_params: Callable[[Any], Any], batch: int, length: int
) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """A step that trains on the next of `length` tokens, and the shapes of its state and of a batch.

    `logits_of`: of parameters and ids. `init_params`: of a key."""

    def loss_of(params: Any, batch: Any) -> Any:
        logits = logits_of(params, batch["tokens"][:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()

    state = jax.eval_shape(state_init(init_params), jax.random.key(0))
    return trained(loss_of), (state, {"tokens": jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)})


def state_init(init_params: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What makes the state of such a step of a key."""
    tx = adamw()

    def init(key: Any) -> Any:
        params = init_params(key)
        return {"params": params, "opt": tx.init(params)}

    return init


def scanned_params(key: Any, vocab: int, width: int, heads: int, layers: int, length: int) -> Any:
    """Parameters of a decoder whose blocks are stacked, as f32[layers, ...]."""
    shapes = {
        "q": (width, heads, width // heads), "k": (width, heads, width // heads), "v": (width, heads, width // heads),
        "o": (heads, width // heads, width), "up": (width, 4 * width), "down": (4 * width, width),
    }  # fmt: skip
    keys = iter(jax.random.split(key, len(shapes) + 3))
    blocks = {name: 0.02 * jax.random.normal(next(keys), (layers, *shape)) for name, shape in shapes.items()}
    blocks |= {"scale1": jnp.ones((layers, width)), "scale2": jnp.ones((layers, width))}
    return {
        "embed": 0.02 * jax.random.normal(next(keys), (vocab, width)),
        "positions": 0.02 * jax.random.normal(next(keys), (length, width)),
        "blocks": blocks,
        "logits": 0.02 * jax.random.normal(next(keys), (width, vocab)),
    }


def scanned_logits(params: Any, ids: Any, heads: int, keeps: str) -> Any:
    """Logits [B, T, vocab] of such a decoder for ids i32[B, T]; its blocks run in `jax.lax.scan`.

    `keeps`: what the backward pass finds of a block: "" all of it, "_remat" what goes in, "_dots" the products of
    weights too."""

    def norm(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    def block(x: Any, p: Any) -> tuple[Any, None]:
        h = norm(x, p["scale1"])
        q, k, v = (jnp.einsum("btd,dhk->bthk", h, p[n]) for n in "qkv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
        x = x + jnp.einsum("bthk,hkd->btd", jnp.einsum("bhqk,bkhd->bqhd", weights, v), p["o"])
        h = jax.nn.gelu(norm(x, p["scale2"]) @ p["up"])
        return x + h @ p["down"], None

    policies = {"_remat": None, "_dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
    if keeps in policies:
        block = jax.checkpoint(block, policy=policies[keeps])
    x = params["embed"][ids] + params["positions"]
    x, _ = jax.lax.scan(block, x, params["blocks"])
    return x @ params["logits"]
