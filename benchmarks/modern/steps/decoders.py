"""Decoders of today's language models, in plain JAX: a dict of arrays and functions of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

import splitjax
from benchmarks.modern.steps._language import (
    EXAMPLES,
    HEAD_DIM,
    HEADS,
    LAYERS,
    LENGTH,
    NUM_STEPS,
    VOCAB,
    WIDTH,
    Draws,
    Tree,
    attention,
    causal,
    layer_norm,
    next_token_loss,
    problem,
    rms_norm,
    rotated,
)
from benchmarks.modern.steps.case import ModernStep, Problem

HIDDEN = 64


def _nanogpt(dtype: str) -> Problem:
    """GPT-2's shape: learned positions, query, key and value in one product, the head tied to the table."""
    draws = Draws(dtype)
    norm = lambda: {"scale": draws.near(1, WIDTH), "bias": draws.near(0, WIDTH)}
    linear = lambda into, out: {"w": draws.normal(into, out, scale=0.1), "b": draws.near(0, out)}
    params = {
        "wte": draws.normal(VOCAB, WIDTH, scale=0.1),
        "wpe": draws.normal(LENGTH, WIDTH, scale=0.1),
        "h": [
            {
                "ln_1": norm(),
                "attn": {"c_attn": linear(WIDTH, 3 * WIDTH), "c_proj": linear(WIDTH, WIDTH)},
                "ln_2": norm(),
                "mlp": {"c_fc": linear(WIDTH, 4 * WIDTH), "c_proj": linear(4 * WIDTH, WIDTH)},
            }
            for _ in range(LAYERS)
        ],
        "ln_f": norm(),
    }
    apply = lambda p, x: x @ p["w"] + p["b"]

    def block(p: Tree, x: jax.Array) -> jax.Array:
        b, t, c = x.shape
        q, k, v = jnp.split(apply(p["attn"]["c_attn"], layer_norm(x, p["ln_1"])), 3, axis=-1)
        q, k, v = (each.reshape(b, t, HEADS, c // HEADS) for each in (q, k, v))
        x = x + apply(p["attn"]["c_proj"], attention(q, k, v, causal(t)).reshape(b, t, c))
        return x + apply(p["mlp"]["c_proj"], jax.nn.gelu(apply(p["mlp"]["c_fc"], layer_norm(x, p["ln_2"]))))

    def loss_fn(params: Tree, batch: Tree) -> jax.Array:
        tokens = batch["tokens"]
        x = params["wte"][tokens] + params["wpe"][jnp.arange(tokens.shape[1])]
        for p in params["h"]:
            x = block(p, x)
        logits = layer_norm(x, params["ln_f"]) @ params["wte"].T
        return next_token_loss(logits, batch["targets"])

    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 2, 10),
            b2=0.95,
            weight_decay=0.1,
            mask=lambda params: jax.tree.map(lambda p: p.ndim >= 2, params),
        ),
    )
    return problem(loss_fn, params, optimizer)


def _llama_params(draws: Draws, kv_heads: int = 2) -> Tree:
    """A decoder's weights with those of its layers stacked."""
    many = lambda *shape: draws.normal(LAYERS, *shape)
    return {
        "embed": draws.normal(VOCAB, WIDTH, scale=0.5),
        "layers": {
            "attention_norm": draws.near(1, LAYERS, WIDTH),
            "wq": many(WIDTH, HEADS * HEAD_DIM),
            "wk": many(WIDTH, kv_heads * HEAD_DIM),
            "wv": many(WIDTH, kv_heads * HEAD_DIM),
            "wo": many(HEADS * HEAD_DIM, WIDTH),
            "ffn_norm": draws.near(1, LAYERS, WIDTH),
            "w1": many(WIDTH, HIDDEN),
            "w2": many(HIDDEN, WIDTH),
            "w3": many(WIDTH, HIDDEN),
        },
        "norm": draws.near(1, WIDTH),
        "output": draws.normal(WIDTH, VOCAB),
    }


def _grouped(x: jax.Array, w: Tree, positions: jax.Array, mask: jax.Array, kv_heads: int = 2) -> jax.Array:
    """Attention of grouped queries with rotary positions."""
    b, s, _ = x.shape
    q = rotated((x @ w["wq"]).reshape(b, s, HEADS, HEAD_DIM), positions)
    k = rotated((x @ w["wk"]).reshape(b, s, kv_heads, HEAD_DIM), positions)
    v = (x @ w["wv"]).reshape(b, s, kv_heads, HEAD_DIM)
    k, v = (jnp.repeat(each, HEADS // kv_heads, axis=2) for each in (k, v))
    return attention(q, k, v, mask).reshape(b, s, -1) @ w["wo"]


def _llama(dtype: str) -> Problem:
    """Grouped queries, rotary positions, SwiGLU; layers in a scan, each rematerialised."""

    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        positions = jnp.arange(x.shape[1])[None]
        x = x + _grouped(rms_norm(x, w["attention_norm"]), w, positions, causal(x.shape[1]))
        h = rms_norm(x, w["ffn_norm"])
        return x + (jax.nn.silu(h @ w["w1"]) * (h @ w["w3"])) @ w["w2"], None

    def loss_fn(params: Tree, batch: Tree) -> jax.Array:
        x, _ = jax.lax.scan(jax.checkpoint(layer), params["embed"][batch["tokens"]], params["layers"])
        return next_token_loss(rms_norm(x, params["norm"]) @ params["output"], batch["targets"])

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=0.1))
    return problem(loss_fn, _llama_params(Draws(dtype)), optimizer, splitjax.value_and_grad)


def _maxtext(dtype: str) -> Problem:
    """Products in bfloat16 over wide weights, packed sequences, a policy of what is saved, a loss with z-loss over the
    tokens that count."""
    compute = jnp.bfloat16

    def layer(x: jax.Array, w: Tree, positions: jax.Array, mask: jax.Array) -> jax.Array:
        w = jax.tree.map(lambda leaf: leaf.astype(compute), w)
        mixed = _grouped(rms_norm(x, w["attention_norm"]), w, positions, mask)
        x = x + checkpoint_name(mixed, "out_proj")
        h = rms_norm(x, w["ffn_norm"])
        gate = checkpoint_name(h @ w["w1"], "mlpwi_0")
        return x + (jax.nn.silu(gate) * (h @ w["w3"])) @ w["w2"]

    def loss_fn(params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        segments = batch["inputs_segmentation"]
        same = segments[:, None, :, None] == segments[:, None, None, :]
        mask = same & causal(segments.shape[1])
        body = jax.checkpoint(
            lambda x, w: (layer(x, w, batch["inputs_position"], mask), None),
            policy=jax.checkpoint_policies.save_only_these_names("out_proj"),
            prevent_cse=False,
        )
        x = params["embed"].astype(compute)[batch["inputs"]]
        x, _ = jax.lax.scan(body, x, params["layers"])
        logits = (rms_norm(x, params["norm"]) @ params["output"].astype(compute)).astype(jnp.float32)
        log_z = jax.nn.logsumexp(logits, -1)
        one_hot = jax.nn.one_hot(batch["targets"], VOCAB)
        xent = log_z - (logits * one_hot).sum(-1) + 1e-4 * log_z**2
        counts = (batch["targets_segmentation"] != 0).astype(jnp.float32)
        total = counts.sum()
        return (xent * counts).sum() / (total + 1e-8), {"total_weights": total, "z_loss": (log_z**2 * counts).sum()}

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.5, momentum=0.9))

    def step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        (loss, aux), grads = splitjax.value_and_grad(loss_fn, has_aux=True)(state["params"], batch)
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        state = {"step": state["step"] + 1, "params": optax.apply_updates(state["params"], updates), "opt": opt}
        return state, {"loss": loss, "grad_norm": optax.global_norm(grads), **aux}

    params = _llama_params(Draws(dtype))
    state = {"step": jnp.zeros((), jnp.int32), "params": params, "opt": optimizer.init(params)}
    return Problem(step, state, tuple(_packed(seed) for seed in range(NUM_STEPS)))


def _packed(seed: int) -> dict[str, np.ndarray]:
    """Two texts and padding in each sequence, as packing leaves them."""
    draws = np.random.default_rng(seed)
    tokens = draws.integers(1, VOCAB, (EXAMPLES, LENGTH + 1)).astype(np.int32)
    first, second = draws.integers(4, 8, (2, EXAMPLES, 1))
    place = np.arange(LENGTH)[None]
    segments = np.where(place < first, 1, np.where(place < first + second, 2, 0)).astype(np.int32)
    positions = np.where(place < first, place, place - first).astype(np.int32)
    ends = np.concatenate([segments[:, 1:], np.zeros((EXAMPLES, 1), np.int32)], 1)
    return {
        "inputs": tokens[:, :-1] * (segments > 0),
        "targets": tokens[:, 1:] * (segments > 0),
        "inputs_segmentation": segments,
        "targets_segmentation": np.where(ends == segments, segments, 0),
        "inputs_position": positions,
    }


def _gemma(dtype: str) -> Problem:
    """Norms with a scale of one more, GeGLU, one head of keys and values, soft caps, a tied table times the root of the
    width."""
    draws = Draws(dtype)
    layer_weights = lambda: {
        "pre_attention_norm": draws.near(0, WIDTH),
        "q_einsum": draws.normal(HEADS, WIDTH, HEAD_DIM),
        "kv_einsum": draws.normal(2, 1, WIDTH, HEAD_DIM),
        "attn_vec_einsum": draws.normal(HEADS, HEAD_DIM, WIDTH),
        "pre_ffw_norm": draws.near(0, WIDTH),
        "gating_einsum": draws.normal(2, WIDTH, HIDDEN),
        "linear": draws.normal(HIDDEN, WIDTH),
    }
    params = {
        "embedder": draws.normal(VOCAB, WIDTH, scale=0.2),
        **{f"layer_{number}": layer_weights() for number in range(LAYERS)},
        "final_norm": draws.near(0, WIDTH),
    }
    cap = lambda x, limit: jnp.tanh(x / limit) * limit

    def attend(w: Tree, x: jax.Array, positions: jax.Array) -> jax.Array:
        q = rotated(jnp.einsum("btd,ndh->btnh", x, w["q_einsum"]), positions) * HEAD_DIM**-0.5
        k, v = jnp.einsum("bsd,ckdh->cbskh", x, w["kv_einsum"])
        k = rotated(k, positions)
        q = q.reshape(*q.shape[:2], 1, HEADS, HEAD_DIM)
        logits = cap(jnp.einsum("btkgh,bskh->btkgs", q, k), 50.0)
        logits = jnp.where(causal(x.shape[1])[:, None, None, :], logits, -2.3819763e38)
        mixed = jnp.einsum("btkgs,bskh->btkgh", jax.nn.softmax(logits), v)
        return jnp.einsum("btnh,nhd->btd", mixed.reshape(*x.shape[:2], HEADS, HEAD_DIM), w["attn_vec_einsum"])

    def loss_fn(params: Tree, batch: Tree) -> jax.Array:
        tokens = batch["tokens"]
        x = params["embedder"][tokens] * jnp.sqrt(WIDTH).astype(dtype)
        positions = jnp.arange(tokens.shape[1])[None]
        for number in range(LAYERS):
            w = params[f"layer_{number}"]
            x = x + attend(w, rms_norm(x, 1 + w["pre_attention_norm"]), positions)
            gate, up = jnp.einsum("btd,cdf->cbtf", rms_norm(x, 1 + w["pre_ffw_norm"]), w["gating_einsum"])
            x = x + (jax.nn.gelu(gate) * up) @ w["linear"]
        logits = cap(jnp.einsum("btd,vd->btv", rms_norm(x, 1 + params["final_norm"]), params["embedder"]), 30.0)
        return next_token_loss(logits, batch["targets"])

    return problem(loss_fn, params, optax.adamw(optax.cosine_decay_schedule(1e-2, 10)))


def _gemma3(dtype: str) -> Problem:
    """Layers by turns with a window and with the whole text, norms of queries and keys and behind each block; pairs of
    layers in a scan."""
    draws = Draws(dtype)

    def weights() -> Tree:
        many = lambda *shape: draws.normal(LAYERS, *shape)
        norm = lambda size=WIDTH: draws.near(0, LAYERS, size)
        return {
            "q": many(WIDTH, HEADS, HEAD_DIM),
            "k": many(WIDTH, 2, HEAD_DIM),
            "v": many(WIDTH, 2, HEAD_DIM),
            "o": many(HEADS, HEAD_DIM, WIDTH),
            "gate": many(WIDTH, HIDDEN),
            "up": many(WIDTH, HIDDEN),
            "down": many(HIDDEN, WIDTH),
            "norms": {"pre": norm(), "post": norm(), "pre_mlp": norm(), "post_mlp": norm()},
            "q_norm": norm(HEAD_DIM),
            "k_norm": norm(HEAD_DIM),
        }

    params = {
        "table": draws.normal(VOCAB, WIDTH, scale=0.2),
        "blocks": {"local": weights(), "global": weights()},
        "norm": draws.near(0, WIDTH),
    }

    def block(x: jax.Array, w: Tree, mask: jax.Array, base: float) -> jax.Array:
        positions, norms = jnp.arange(x.shape[1])[None], w["norms"]
        h = rms_norm(x, 1 + norms["pre"])
        q = rotated(rms_norm(jnp.einsum("bsd,dnh->bsnh", h, w["q"]), 1 + w["q_norm"]), positions, base)
        k = rotated(rms_norm(jnp.einsum("bsd,dnh->bsnh", h, w["k"]), 1 + w["k_norm"]), positions, base)
        v = jnp.einsum("bsd,dnh->bsnh", h, w["v"])
        mixed = attention(q, jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2), mask)
        x = x + rms_norm(jnp.einsum("bsnh,nhd->bsd", mixed, w["o"]), 1 + norms["post"])
        h = rms_norm(x, 1 + norms["pre_mlp"])
        return x + rms_norm((jax.nn.gelu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], 1 + norms["post_mlp"])

    def loss_fn(params: Tree, batch: Tree) -> jax.Array:
        length = batch["tokens"].shape[1]
        window = causal(length) & ~jnp.tril(jnp.ones((length, length), bool), -4)

        def pair(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
            return block(block(x, w["local"], window, 1e4), w["global"], causal(length), 1e6), None

        x = params["table"][batch["tokens"]] * WIDTH**0.5
        x, _ = jax.lax.scan(pair, x, params["blocks"])
        return next_token_loss(rms_norm(x, 1 + params["norm"]) @ params["table"].T, batch["targets"])

    optimizer = optax.chain(optax.scale_by_adam(b2=0.95), optax.add_decayed_weights(0.01), optax.scale(-1e-2))
    return problem(loss_fn, params, optimizer, splitjax.value_and_grad)


def _neox(dtype: str) -> Problem:
    """Attention and MLP side by side, query, key and value head by head in one product, a part of each head rotated."""
    draws = Draws(dtype)
    norm = lambda: {"scale": draws.near(1, WIDTH), "bias": draws.near(0, WIDTH)}
    linear = lambda into, out: {"kernel": draws.normal(into, out), "bias": draws.near(0, out)}
    params: dict[str, Any] = {
        "embed_in": draws.normal(VOCAB, WIDTH, scale=0.3),
        "layers": [
            {
                "input_layernorm": norm(),
                "post_attention_layernorm": norm(),
                "query_key_value": linear(WIDTH, 3 * WIDTH),
                "dense": linear(WIDTH, WIDTH),
                "dense_h_to_4h": linear(WIDTH, 4 * WIDTH),
                "dense_4h_to_h": linear(4 * WIDTH, WIDTH),
            }
            for _ in range(LAYERS)
        ],
        "final_layer_norm": norm(),
        "embed_out": draws.normal(WIDTH, VOCAB),
    }
    apply = lambda p, x: x @ p["kernel"] + p["bias"]
    turned = HEAD_DIM // 2

    def partly(x: jax.Array) -> jax.Array:
        positions = jnp.arange(x.shape[1])[None]
        return jnp.concatenate([rotated(x[..., :turned], positions), x[..., turned:]], -1)

    @jax.checkpoint
    def block(p: Tree, x: jax.Array) -> jax.Array:
        b, t, _ = x.shape
        fused = apply(p["query_key_value"], layer_norm(x, p["input_layernorm"]))
        q, k, v = jnp.split(fused.reshape(b, t, HEADS, 3 * HEAD_DIM), 3, axis=-1)
        attended = apply(p["dense"], attention(partly(q), partly(k), v, causal(t)).reshape(b, t, -1))
        hidden = jax.nn.gelu(apply(p["dense_h_to_4h"], layer_norm(x, p["post_attention_layernorm"])))
        return x + attended + apply(p["dense_4h_to_h"], hidden)

    def loss_fn(params: Tree, batch: Tree) -> jax.Array:
        x = params["embed_in"][batch["tokens"]]
        for p in params["layers"]:
            x = block(p, x)
        return next_token_loss(layer_norm(x, params["final_layer_norm"]) @ params["embed_out"], batch["targets"])

    return problem(loss_fn, params, optax.adam(1e-2))


STEPS: tuple[ModernStep, ...] = (
    ModernStep("nanoGPT", "nanoGPT", _nanogpt, ("table", "tied head", "fused qkv", "learned positions", "decay mask")),
    ModernStep("LLaMA, scanned and rematerialised", "LLaMA", _llama,
               ("table", "splitjax gradient", "scan", "remat", "rope", "grouped heads", "swiglu")),
    ModernStep("MaxText, packed, in bfloat16", "MaxText", _maxtext,
               ("table", "splitjax gradient", "scan", "remat policy", "rope", "segments", "z-loss", "bfloat16"),
               dtype="float32", tolerance=5e-3),
    ModernStep("Gemma", "Gemma", _gemma, ("table", "tied head", "rope", "one kv head", "geglu", "soft cap")),
    ModernStep("Gemma 3, windows by turns", "Gemma", _gemma3,
               ("table", "splitjax gradient", "tied head", "scan", "rope", "window", "qk norm", "grouped heads")),
    ModernStep("GPT-NeoX, blocks side by side", "GPT-NeoX", _neox,
               ("table", "remat", "rope", "fused qkv by head", "parallel blocks")),
)  # fmt: skip
