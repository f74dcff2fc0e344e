"""Mixtures of experts: dealt out by capacity, sorted for `ragged_dot`, shared and routed, chosen by the experts."""

from __future__ import annotations

from collections.abc import Callable

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

INNER = 32  # hidden features of an expert
Mixture = Callable[[Tree, jax.Array], tuple[jax.Array, jax.Array]]


def _attended(w: Tree, x: jax.Array) -> jax.Array:
    b, s, _ = x.shape
    positions = jnp.arange(s)[None]
    q, k, v = ((x @ w[name]).reshape(b, s, HEADS, HEAD_DIM) for name in ("wq", "wk", "wv"))
    return attention(rotated(q, positions), rotated(k, positions), v, causal(s)).reshape(b, s, -1) @ w["wo"]


def _attention_weights(draws: Draws, *lead: int) -> Tree:
    return {name: draws.normal(*lead, WIDTH, WIDTH) for name in ("wq", "wk", "wv", "wo")}


def _expert_weights(draws: Draws, experts: int, *lead: int) -> Tree:
    return {
        "router": draws.normal(*lead, WIDTH, experts),
        "w1": draws.normal(*lead, experts, WIDTH, INNER),
        "w3": draws.normal(*lead, experts, WIDTH, INNER),
        "w2": draws.normal(*lead, experts, INNER, WIDTH),
    }


def _language_loss(mixture: Mixture, weight: float) -> Callable[[Tree, Tree], jax.Array]:
    """The loss of a decoder whose layers, a list, end with `mixture`, which gives its output and its own loss."""

    def loss_fn(params: Tree, batch: Tree) -> jax.Array:
        x, extra = params["embed"][batch["tokens"]], 0.0
        for layer in params["layers"]:
            x = x + _attended(layer["attention"], rms_norm(x, layer["norm1"]))
            out, own = mixture(layer["moe"], rms_norm(x, layer["norm2"]))
            x, extra = x + out, extra + own
        logits = rms_norm(x, params["norm"]) @ params["head"]
        return next_token_loss(logits, batch["targets"]) + weight * extra / LAYERS

    return loss_fn


def _language_params(draws: Draws, moe: Callable[[], Tree]) -> Tree:
    return {
        "embed": draws.normal(VOCAB, WIDTH, scale=0.5),
        "layers": [
            {
                "norm1": draws.near(1, WIDTH),
                "attention": _attention_weights(draws),
                "norm2": draws.near(1, WIDTH),
                "moe": moe(),
            }
            for _ in range(LAYERS)
        ],
        "norm": draws.near(1, WIDTH),
        "head": draws.normal(WIDTH, VOCAB),
    }


def _balance(gates: jax.Array, chosen: jax.Array) -> jax.Array:
    """The balance loss of Switch Transformer, over all tokens: `gates` [.., experts], `chosen` ones of the same
    shape."""
    axes = tuple(range(gates.ndim - 1))
    return gates.shape[-1] * jnp.sum(gates.mean(axes) * chosen.mean(axes))


def _capacity(dtype: str) -> Problem:
    """Each token to its two best of four experts, dealt out within a sequence to places of equal number; layers in a
    scan."""
    experts, top, factor = 4, 2, 1.25
    draws = Draws(dtype)
    params = {
        "embed": draws.normal(VOCAB, WIDTH, scale=0.5),
        "layers": {
            "norm1": draws.near(1, LAYERS, WIDTH),
            "attention": _attention_weights(draws, LAYERS),
            "norm2": draws.near(1, LAYERS, WIDTH),
            "moe": _expert_weights(draws, experts, LAYERS),
        },
        "norm": draws.near(1, WIDTH),
        "head": draws.normal(WIDTH, VOCAB),
    }

    def mixture(w: Tree, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        b, s, _ = x.shape
        capacity = int(factor * s * top / experts)
        gates = jax.nn.softmax(x @ w["router"])
        best, chosen = jax.lax.top_k(gates, top)
        best = best / best.sum(-1, keepdims=True)
        routed = jax.nn.one_hot(chosen, experts, dtype=x.dtype)  # b s k e
        # First choices take their places before second ones do.
        in_turn = routed.swapaxes(1, 2).reshape(b, top * s, experts)
        place = (jnp.cumsum(in_turn, 1) - in_turn).reshape(b, top, s, experts).swapaxes(1, 2)
        kept = routed * (place < capacity)
        seat = jax.nn.one_hot((place * routed).sum(-1).astype(jnp.int32), capacity, dtype=x.dtype)
        combine = jnp.einsum("bsk,bske,bskc->bsec", best, kept, seat)
        tokens = jnp.einsum("bsec,bsd->becd", (combine > 0).astype(x.dtype), x)
        hidden = jax.nn.silu(jnp.einsum("becd,edf->becf", tokens, w["w1"]))
        hidden = hidden * jnp.einsum("becd,edf->becf", tokens, w["w3"])
        out = jnp.einsum("becf,efd->becd", hidden, w["w2"])
        return jnp.einsum("bsec,becd->bsd", combine, out), _balance(gates, routed.sum(2) / top)

    def loss_fn(params: Tree, batch: Tree) -> jax.Array:
        def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, jax.Array]:
            x = x + _attended(w["attention"], rms_norm(x, w["norm1"]))
            out, own = mixture(w["moe"], rms_norm(x, w["norm2"]))
            return x + out, own

        x, own = jax.lax.scan(jax.checkpoint(layer), params["embed"][batch["tokens"]], params["layers"])
        logits = rms_norm(x, params["norm"]) @ params["head"]
        return next_token_loss(logits, batch["targets"]) + 0.01 * own.mean()

    return problem(loss_fn, params, optax.adamw(1e-2), splitjax.value_and_grad)


def _ragged(dtype: str) -> Problem:
    """Tokens sorted by their expert, and a product of groups of unequal size, so that no token is dropped."""
    experts, top = 4, 2
    draws = Draws(dtype)

    def mixture(w: Tree, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        b, s, d = x.shape
        flat = x.reshape(b * s, d)
        logits = flat @ w["router"]
        best, chosen = jax.lax.top_k(logits, top)
        weights = jax.nn.softmax(best)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=experts)
        tokens = jnp.repeat(flat, top, axis=0)[order]
        hidden = jax.nn.silu(jax.lax.ragged_dot(tokens, w["w1"], sizes)) * jax.lax.ragged_dot(tokens, w["w3"], sizes)
        out = jax.lax.ragged_dot(hidden, w["w2"], sizes)[jnp.argsort(order)]
        mixed = (out.reshape(b * s, top, d) * weights[..., None]).sum(1)
        routed = jax.nn.one_hot(chosen, experts, dtype=x.dtype).mean(1)
        return mixed.reshape(b, s, d), _balance(jax.nn.softmax(logits), routed)

    params = _language_params(draws, lambda: _expert_weights(draws, experts))
    return problem(_language_loss(mixture, 0.01), params, optax.adamw(1e-2))


def _deepseek(dtype: str) -> Problem:
    """Keys and values from a narrow latent, shared experts beside eight routed ones, sigmoid gates with a bias that
    balances them and has no gradient: the step moves it by the load."""
    experts, top, latent = 8, 2, 16
    draws = Draws(dtype)
    params = {
        "embed": draws.normal(VOCAB, WIDTH, scale=0.5),
        "layers": [
            {
                "norm1": draws.near(1, WIDTH),
                "attention": {
                    "q_proj": draws.normal(WIDTH, HEADS * 2 * HEAD_DIM),
                    "kv_a": draws.normal(WIDTH, latent + HEAD_DIM),
                    "kv_norm": draws.near(1, latent),
                    "kv_b": draws.normal(latent, HEADS * 2 * HEAD_DIM),
                    "o_proj": draws.normal(WIDTH, WIDTH),
                },
                "norm2": draws.near(1, WIDTH),
                "moe": _expert_weights(draws, experts)
                | {
                    "shared_gate_up": draws.normal(WIDTH, 2 * INNER),
                    "shared_down": draws.normal(INNER, WIDTH),
                },
            }
            for _ in range(LAYERS)
        ],
        "norm": draws.near(1, WIDTH),
        "head": draws.normal(WIDTH, VOCAB),
    }

    def latent_attention(w: Tree, x: jax.Array) -> jax.Array:
        b, s, _ = x.shape
        positions = jnp.arange(s)[None]
        q = (x @ w["q_proj"]).reshape(b, s, HEADS, 2 * HEAD_DIM)
        q_plain, q_turned = q[..., :HEAD_DIM], rotated(q[..., HEAD_DIM:], positions)
        compressed, k_turned = jnp.split(x @ w["kv_a"], [latent], -1)
        k_turned = rotated(k_turned[:, :, None], positions)
        kv = (rms_norm(compressed, w["kv_norm"]) @ w["kv_b"]).reshape(b, s, HEADS, 2 * HEAD_DIM)
        k_plain, v = jnp.split(kv, 2, -1)
        k = jnp.concatenate([k_plain, jnp.broadcast_to(k_turned, k_plain.shape)], -1)
        mixed = attention(jnp.concatenate([q_plain, q_turned], -1), k, v, causal(s))
        return mixed.reshape(b, s, -1) @ w["o_proj"]

    def mixture(w: Tree, bias: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        scores = jax.nn.sigmoid(x @ w["router"])
        _, chosen = jax.lax.top_k(scores + bias, top)
        best = jnp.take_along_axis(scores, chosen, -1)
        best = best / (best.sum(-1, keepdims=True) + 1e-20)
        routed = jax.nn.one_hot(chosen, experts, dtype=x.dtype)
        gates = jnp.einsum("bsk,bske->bse", best, routed)
        hidden = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, w["w1"])) * jnp.einsum("bsd,edf->bsef", x, w["w3"])
        out = jnp.einsum("bsef,efd,bse->bsd", hidden, w["w2"], gates)
        gate, up = jnp.split(x @ w["shared_gate_up"], 2, -1)
        # Balance within each sequence, and the load over the whole batch.
        share = scores / scores.sum(-1, keepdims=True)
        balance = experts / top * (routed.sum(2).mean(1) * share.mean(1)).sum(-1).mean()
        return out + (jax.nn.silu(gate) * up) @ w["shared_down"], balance, routed.sum((0, 1, 2))

    def loss_fn(params: Tree, biases: list[jax.Array], batch: Tree) -> tuple[jax.Array, list[jax.Array]]:
        x, extra, loads = params["embed"][batch["tokens"]], 0.0, []
        for layer, bias in zip(params["layers"], biases, strict=True):
            x = x + latent_attention(layer["attention"], rms_norm(x, layer["norm1"]))
            out, balance, load = mixture(layer["moe"], bias, rms_norm(x, layer["norm2"]))
            x, extra = x + out, extra + balance
            loads.append(load)
        logits = rms_norm(x, params["norm"]) @ params["head"]
        return next_token_loss(logits, batch["targets"]) + 1e-3 * extra, loads

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, b2=0.95))

    def step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        differentiate = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, loads), grads = differentiate(state["params"], state["biases"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        biases = [bias + 0.01 * jnp.sign(load.mean() - load) for bias, load in zip(state["biases"], loads, strict=True)]
        new = {"params": optax.apply_updates(state["params"], updates), "opt": opt, "biases": biases}
        return new, {"loss": loss, "busiest": jnp.stack(loads).max()}

    biases = [jnp.zeros((experts,), dtype) for _ in range(LAYERS)]
    return Problem(step, {"params": params, "opt": optimizer.init(params), "biases": biases}, token_batches())


def _switch(dtype: str) -> Problem:
    """Each token to one expert, of all tokens of the batch in one line; who finds no place goes past; a loss of the
    router's logits."""
    experts = 4
    draws = Draws(dtype)

    def mixture(w: Tree, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        b, s, d = x.shape
        flat = x.reshape(b * s, d)
        capacity = b * s // experts
        logits = flat @ w["router"]
        gates = jax.nn.softmax(logits)
        chosen = jax.nn.one_hot(gates.argmax(-1), experts, dtype=x.dtype)
        place = (jnp.cumsum(chosen, 0) - 1) * chosen
        kept = chosen * (place < capacity)
        seats = jax.nn.one_hot(place.sum(-1).astype(jnp.int32), capacity, dtype=x.dtype)
        dispatch = kept[:, :, None] * seats[:, None]
        tokens = jnp.einsum("tec,td->ecd", dispatch, flat)
        hidden = jax.nn.relu(jnp.einsum("ecd,edf->ecf", tokens, w["w1"]))
        out = jnp.einsum("ecf,efd->ecd", hidden, w["w2"])
        mixed = jnp.einsum("tec,ecd,te->td", dispatch, out, gates)
        own = _balance(gates, chosen) + 0.1 * jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)
        return mixed.reshape(b, s, d), own

    params = _language_params(
        draws,
        lambda: {
            "router": draws.normal(WIDTH, experts),
            "w1": draws.normal(experts, WIDTH, 2 * INNER),
            "w2": draws.normal(experts, 2 * INNER, WIDTH),
        },
    )
    return problem(_language_loss(mixture, 0.01), params, optax.adafactor(1e-2, min_dim_size_to_factor=8))


def _expert_choice(dtype: str) -> Problem:
    """Experts choose the tokens that they take, the best of each sequence."""
    experts, taken = 4, 8
    draws = Draws(dtype)

    def mixture(w: Tree, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        gates = jax.nn.softmax(x @ w["router"])
        best, places = jax.lax.top_k(gates.swapaxes(1, 2), taken)  # b e c
        tokens = jax.vmap(lambda text, at: text[at])(x, places)  # b e c d
        hidden = jax.nn.silu(jnp.einsum("becd,edf->becf", tokens, w["w1"]))
        hidden = hidden * jnp.einsum("becd,edf->becf", tokens, w["w3"])
        out = jnp.einsum("becf,efd->becd", hidden, w["w2"]) * best[..., None]
        back = jax.vmap(lambda at, rows: jnp.zeros(x.shape[1:], x.dtype).at[at].add(rows))(places, out)
        return back, jnp.zeros((), x.dtype)

    params = _language_params(draws, lambda: _expert_weights(draws, experts))
    return problem(_language_loss(mixture, 0.0), params, optax.lion(1e-3, weight_decay=0.1), splitjax.value_and_grad)


STEPS: tuple[ModernStep, ...] = (
    ModernStep("Mixtral, capacity", "Mixtral", _capacity,
               ("table", "splitjax gradient", "experts", "top-2", "capacity", "scan", "remat", "balance loss"),
               num_experts=4),
    ModernStep("Mixtral, ragged_dot", "Mixtral", _ragged,
               ("table", "experts", "top-2", "argsort", "ragged_dot", "balance loss"), num_experts=4),
    ModernStep("DeepSeek-V3, latent attention", "DeepSeek", _deepseek,
               ("table", "experts", "shared expert", "latent attention", "balance loss", "balancing bias"),
               num_experts=8),
    ModernStep("Switch Transformer", "Switch", _switch,
               ("table", "experts", "top-1", "capacity of the batch", "router z-loss", "adafactor"), num_experts=4),
    ModernStep("Expert choice", "Expert choice", _expert_choice,
               ("table", "splitjax gradient", "experts", "gather", "scatter-add", "lion"), num_experts=4),
)  # fmt: skip
