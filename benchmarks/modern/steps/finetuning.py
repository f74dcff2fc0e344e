"""How a decoder is trained in less memory: factors of low rank, products in eight bits, gradients that are added up by
hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

import splitjax
from benchmarks.modern.steps._decoder import NAMES, decoder, hidden, logits_of
from benchmarks.modern.steps._language import LAYERS, Draws, Tree, next_token_loss, problem, token_batches
from benchmarks.modern.steps.case import ModernStep, Problem


def _lora(dtype: str) -> Problem:
    """Factors of low rank beside frozen weights, the only ones that are trained and have moments."""
    rank = 4
    draws = Draws(dtype)
    base = decoder(draws)
    low = [
        {
            name: {
                "a": draws.normal(block[name].shape[0], rank),
                "b": draws.normal(rank, block[name].shape[1], scale=0.1),
            }
            for name in ("q", "v")
        }
        for block in base["blocks"]
    ]
    optimizer = optax.adamw(1e-2)

    def merged(base: Tree, low: Tree) -> Tree:
        blocks = [
            block | {name: (block[name], part[name]) for name in part}
            for block, part in zip(base["blocks"], low, strict=True)
        ]
        return base | {"blocks": blocks}

    def product(x: jax.Array, w: Tree) -> jax.Array:
        if isinstance(w, tuple):
            frozen, part = w
            return x @ frozen + (16 / rank) * (x @ part["a"]) @ part["b"]
        return x @ w

    def step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        base = state["base"]

        def loss_fn(low: Tree) -> jax.Array:
            return next_token_loss(hidden(merged(base, low), batch["tokens"], product) @ base["head"], batch["targets"])

        loss, grads = splitjax.value_and_grad(loss_fn)(state["lora"])
        updates, opt = optimizer.update(grads, state["opt"], state["lora"])
        return {"base": base, "lora": optax.apply_updates(state["lora"], updates), "opt": opt}, {"loss": loss}

    return Problem(step, {"base": base, "lora": low, "opt": optimizer.init(low)}, token_batches())


@jax.custom_vjp
def _int8_product(x: jax.Array, w: jax.Array) -> jax.Array:
    """A product of whole numbers of eight bits: a scale for each row of `x` and for each column of `w`."""
    x_scale = jnp.max(jnp.abs(x), -1, keepdims=True) / 127
    w_scale = jnp.max(jnp.abs(w), 0, keepdims=True) / 127
    whole = lambda value, scale: jnp.round(value / scale).astype(jnp.int8)
    out = jax.lax.dot_general(
        whole(x, x_scale),
        whole(w, w_scale),
        (((x.ndim - 1,), (0,)), ((), ())),
        preferred_element_type=jnp.int32,
    )
    return out.astype(x.dtype) * x_scale * w_scale


def _int8_forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, Tree]:
    return _int8_product(x, w), (x, w)


def _int8_backward(saved: Tree, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved  # as if nothing had been rounded
    return g @ w.T, jnp.einsum("...i,...o->io", x, g)


_int8_product.defvjp(_int8_forward, _int8_backward)


def _int8(dtype: str) -> Problem:
    """Products forward in eight bits, gradients past the rounding (a straight-through `custom_vjp`)."""

    def loss_fn(params: Tree, batch: Tree) -> jax.Array:
        return next_token_loss(hidden(params, batch["tokens"], _int8_product) @ params["head"], batch["targets"])

    return problem(loss_fn, decoder(Draws(dtype)), optax.adamw(1e-2))


def _fp8(dtype: str) -> Problem:
    """Operands of products rounded to eight-bit floats by scales from the largest values of past steps, which the state
    keeps."""
    limit, history = 448.0, 4
    params = decoder(Draws(dtype))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.5, momentum=0.9))

    def rounded(x: jax.Array, largest: jax.Array) -> jax.Array:
        scale = jnp.maximum(largest.max(), 1e-3) / limit
        narrow = jnp.clip(x / scale, -limit, limit).astype(jnp.float8_e4m3fn).astype(x.dtype) * scale
        return x + jax.lax.stop_gradient(narrow - x)

    def loss_fn(params: Tree, histories: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        seen = {"x": [], "w": []}

        def product(x: jax.Array, w: jax.Array) -> jax.Array:
            place = len(seen["x"])
            seen["x"].append(jnp.abs(jax.lax.stop_gradient(x)).max())
            seen["w"].append(jnp.abs(jax.lax.stop_gradient(w)).max())
            return rounded(x, histories["x"][place]) @ rounded(w, histories["w"][place])

        logits = product(hidden(params, batch["tokens"], product), params["head"])
        return next_token_loss(logits, batch["targets"]), {name: jnp.stack(values) for name, values in seen.items()}

    def step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        differentiate = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, largest), grads = differentiate(state["params"], state["largest"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        kept = {
            name: jnp.concatenate([values[:, None], state["largest"][name][:, :-1]], 1)
            for name, values in largest.items()
        }
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "largest": kept}, {"loss": loss}

    products = LAYERS * len(NAMES) + 1
    largest = {name: jnp.full((products, history), 4.0, dtype) for name in ("x", "w")}
    return Problem(step, {"params": params, "opt": optimizer.init(params), "largest": largest}, token_batches())


def _accumulated(dtype: str) -> Problem:
    """Gradients of four parts of the batch, added up in a scan, as written before there was an option for it."""
    parts = 4
    params = decoder(Draws(dtype))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))

    def loss_fn(params: Tree, batch: Tree) -> jax.Array:
        return next_token_loss(logits_of(params, batch["tokens"]), batch["targets"])

    def step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        small = jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), batch)

        def add(total: Tree, part: Tree) -> tuple[Tree, None]:
            found = jax.value_and_grad(loss_fn)(state["params"], part)
            return jax.tree.map(jnp.add, total, found), None

        start = (jnp.zeros((), dtype), jax.tree.map(jnp.zeros_like, state["params"]))
        total, _ = jax.lax.scan(add, start, small)
        loss, grads = jax.tree.map(lambda x: x / parts, total)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    return Problem(step, {"params": params, "opt": optimizer.init(params)}, token_batches())


STEPS: tuple[ModernStep, ...] = (
    ModernStep("LoRA", "LoRA", _lora, ("table", "splitjax gradient", "frozen weights", "low rank")),
    ModernStep("Products in int8", "AQT", _int8, ("table", "int8", "custom_vjp")),
    ModernStep("Products in fp8", "Transformer Engine", _fp8, ("table", "float8", "history of scales")),
    ModernStep("Accumulation by hand", "accumulation", _accumulated, ("table", "gradients in a scan", "clipping")),
)  # fmt: skip
