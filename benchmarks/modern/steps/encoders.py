"""Encoders, and encoders with decoders: masked words, spans, translation, and sentences that are told from each
other."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

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
    problem,
    rms_norm,
    token_batches,
)
from benchmarks.modern.steps.case import ModernStep, Problem

MASKED = 4  # words of a text


class _Encoder(nn.Module):
    """BERT in Flax linen: words, positions and kinds of text; norms behind; a head over the table."""

    dtype: str

    @nn.compact
    def __call__(self, batch: Tree, train: bool) -> jax.Array:
        options: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.dtype}
        words = nn.Embed(VOCAB, WIDTH, name="words", **options)
        x = words(batch["tokens"])
        x = x + nn.Embed(LENGTH, WIDTH, name="positions", **options)(jnp.arange(LENGTH)[None])
        x = x + nn.Embed(2, WIDTH, name="kinds", **options)(batch["kinds"])
        x = nn.Dropout(0.1, deterministic=not train)(nn.LayerNorm(**options)(x))
        mask = nn.make_attention_mask(batch["mask"], batch["mask"], dtype=self.dtype)
        for _ in range(LAYERS):
            attended = nn.MultiHeadDotProductAttention(HEADS, dropout_rate=0.1, deterministic=not train, **options)(
                x, mask=mask
            )
            x = nn.LayerNorm(**options)(x + nn.Dropout(0.1, deterministic=not train)(attended))
            hidden = nn.Dense(WIDTH, **options)(nn.gelu(nn.Dense(4 * WIDTH, **options)(x)))
            x = nn.LayerNorm(**options)(x + nn.Dropout(0.1, deterministic=not train)(hidden))
        # The words that are masked, and no others.
        x = jnp.take_along_axis(x, batch["places"][..., None], axis=1)
        x = nn.LayerNorm(**options)(nn.gelu(nn.Dense(WIDTH, **options)(x)))
        return words.attend(x) + self.param("bias", nn.initializers.zeros, (VOCAB,), self.dtype)


class _KeyedState(train_state.TrainState):
    key: jax.Array


def _bert(dtype: str) -> Problem:
    """Masked words with weights, dropout by a key in the state, LAMB."""
    model = _Encoder(dtype)
    batches = tuple(map(_masked, range(NUM_STEPS)))
    one = {name: value[:1] for name, value in batches[0].items()}
    params = model.init(jax.random.key(0), one, train=False)["params"]
    optimizer = optax.lamb(optax.linear_schedule(1e-3, 1e-2, 3), weight_decay=0.01)
    state = _KeyedState.create(apply_fn=model.apply, params=params, tx=optimizer, key=jax.random.key(7))

    def step(state: _KeyedState, batch: Tree) -> tuple[_KeyedState, dict[str, jax.Array]]:
        dropout = jax.random.fold_in(state.key, state.step)

        def loss_fn(params: Tree) -> tuple[jax.Array, jax.Array]:
            logits = state.apply_fn({"params": params}, batch, train=True, rngs={"dropout": dropout})
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["words"])
            right = (logits.argmax(-1) == batch["words"]) * batch["weights"]
            return (losses * batch["weights"]).sum() / batch["weights"].sum(), right.sum() / batch["weights"].sum()

        (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, "accuracy": accuracy}

    return Problem(step, state, batches)


def _masked(seed: int) -> dict[str, np.ndarray]:
    draws = np.random.default_rng(seed)
    lengths = draws.integers(LENGTH // 2, LENGTH + 1, (EXAMPLES, 1))
    place = np.arange(LENGTH)[None]
    counts = draws.integers(1, MASKED + 1, (EXAMPLES, 1))
    return {
        "tokens": draws.integers(0, VOCAB, (EXAMPLES, LENGTH)).astype(np.int32),
        "kinds": (place > lengths // 2).astype(np.int32),
        "mask": (place < lengths).astype(np.int32),
        "places": np.sort(draws.integers(0, LENGTH // 2, (EXAMPLES, MASKED))).astype(np.int32),
        "words": draws.integers(0, VOCAB, (EXAMPLES, MASKED)).astype(np.int32),
        "weights": (np.arange(MASKED)[None] < counts).astype(np.float32),
    }


def _t5(dtype: str) -> Problem:
    """An encoder and a decoder with biases by relative position in buckets, smoothed labels, Adafactor."""
    buckets, inner = 8, HEADS * HEAD_DIM
    draws = Draws(dtype)
    heads = lambda: {name: draws.normal(WIDTH, inner) for name in "qkv"} | {"o": draws.normal(inner, WIDTH)}
    mlp = lambda: {"wi": draws.normal(WIDTH, 2 * WIDTH), "wo": draws.normal(2 * WIDTH, WIDTH)}
    norm = lambda: draws.near(1, WIDTH)
    params = {
        "shared": draws.normal(VOCAB, WIDTH, scale=0.5),
        "encoder": {
            "bias": draws.normal(buckets, HEADS, scale=0.3),
            "blocks": [{"norm": norm(), "attention": heads(), "norm_mlp": norm(), "mlp": mlp()} for _ in range(LAYERS)],
            "norm": norm(),
        },
        "decoder": {
            "bias": draws.normal(buckets, HEADS, scale=0.3),
            "blocks": [
                {
                    "norm": norm(),
                    "attention": heads(),
                    "norm_cross": norm(),
                    "cross": heads(),
                    "norm_mlp": norm(),
                    "mlp": mlp(),
                }
                for _ in range(LAYERS)
            ],
            "norm": norm(),
        },
    }

    def relative(table: jax.Array, length: int, both_ways: bool) -> jax.Array:
        """Biases [1, heads, length, length] of a table of buckets: near ones apart, far ones by logarithm."""
        distance = np.arange(length)[None] - np.arange(length)[:, None]
        count, offset = (buckets // 2, np.where(distance > 0, buckets // 2, 0)) if both_ways else (buckets, 0)
        away = np.abs(distance) if both_ways else np.maximum(-distance, 0)
        near = count // 2
        far = near + (np.log(np.maximum(away, 1) / near) / np.log(2 * length / near) * (count - near)).astype(int)
        return table[offset + np.where(away < near, away, np.minimum(far, count - 1))].transpose(2, 0, 1)[None]

    def attend(w: Tree, x: jax.Array, memory: jax.Array, mask: jax.Array, bias: jax.Array | None) -> jax.Array:
        split = lambda y: y.reshape(*y.shape[:2], HEADS, HEAD_DIM)
        mixed = attention(split(x @ w["q"]), split(memory @ w["k"]), split(memory @ w["v"]), mask, bias)
        return mixed.reshape(*x.shape[:2], inner) @ w["o"]

    feed = lambda w, x: jax.nn.relu(x @ w["wi"]) @ w["wo"]

    def loss_fn(params: Tree, batch: Tree) -> jax.Array:
        source, target = batch["source"], batch["target"]
        seen = (source > 0)[:, None, None]
        x, part = params["shared"][source], params["encoder"]
        bias = relative(part["bias"], source.shape[1], True)
        for w in part["blocks"]:
            h = rms_norm(x, w["norm"])
            x = x + attend(w["attention"], h, h, seen, bias)
            x = x + feed(w["mlp"], rms_norm(x, w["norm_mlp"]))
        memory, part = rms_norm(x, part["norm"]), params["decoder"]
        y = params["shared"][jnp.pad(target, ((0, 0), (1, 0)))[:, :-1]]
        bias = relative(part["bias"], target.shape[1], False)
        for w in part["blocks"]:
            h = rms_norm(y, w["norm"])
            y = y + attend(w["attention"], h, h, causal(target.shape[1]), bias)
            y = y + attend(w["cross"], rms_norm(y, w["norm_cross"]), memory, seen, None)
            y = y + feed(w["mlp"], rms_norm(y, w["norm_mlp"]))
        logits = (rms_norm(y, part["norm"]) * WIDTH**-0.5) @ params["shared"].T
        labels = optax.smooth_labels(jax.nn.one_hot(target, VOCAB, dtype=logits.dtype), 0.1)
        weights = (target > 0).astype(logits.dtype)
        return (optax.softmax_cross_entropy(logits, labels) * weights).sum() / weights.sum()

    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=16, decay_rate=0.8)
    return problem(loss_fn, params, optimizer, splitjax.value_and_grad, tuple(map(_pairs, range(NUM_STEPS))))


def _pairs(seed: int) -> dict[str, np.ndarray]:
    """Texts of unequal lengths with zeros behind them."""
    draws = np.random.default_rng(seed)

    def texts(length: int) -> np.ndarray:
        ends = draws.integers(length // 2, length + 1, (EXAMPLES, 1))
        words = draws.integers(1, VOCAB, (EXAMPLES, length))
        return np.where(np.arange(length)[None] < ends, words, 0).astype(np.int32)

    return {"source": texts(LENGTH), "target": texts(8)}


def _seq2seq(dtype: str) -> Problem:
    """GRUs that read and write, with additive attention at each word that is written, in a scan whose first word is
    given (teacher forcing)."""
    draws = Draws(dtype)
    gru = lambda into: {
        "w": draws.normal(into, 3 * WIDTH),
        "u": draws.normal(WIDTH, 3 * WIDTH),
        "b": draws.near(0, 3 * WIDTH),
    }
    params = {
        "source": draws.normal(VOCAB, WIDTH, scale=0.5),
        "target": draws.normal(VOCAB, WIDTH, scale=0.5),
        "forward": gru(WIDTH),
        "backward": gru(WIDTH),
        "bridge": draws.normal(2 * WIDTH, WIDTH),
        "writer": gru(3 * WIDTH),
        "attend": {
            "query": draws.normal(WIDTH, WIDTH),
            "key": draws.normal(2 * WIDTH, WIDTH),
            "score": draws.normal(WIDTH, 1),
        },
        "head": draws.normal(3 * WIDTH, VOCAB),
    }

    def cell(w: Tree, h: jax.Array, x: jax.Array) -> jax.Array:
        from_x, from_h = jnp.split(x @ w["w"] + w["b"], 3, -1), jnp.split(h @ w["u"], 3, -1)
        r, z = jax.nn.sigmoid(from_x[0] + from_h[0]), jax.nn.sigmoid(from_x[1] + from_h[1])
        return (1 - z) * jnp.tanh(from_x[2] + r * from_h[2]) + z * h

    def read(w: Tree, words: jax.Array, reverse: bool) -> tuple[jax.Array, jax.Array]:
        advance = lambda h, x: ((new := cell(w, h, x)), new)
        start = jnp.zeros_like(words[:, 0])
        last, states = jax.lax.scan(advance, start, words.swapaxes(0, 1), reverse=reverse)
        return last, states.swapaxes(0, 1)

    def loss_fn(params: Tree, batch: Tree) -> jax.Array:
        source, target = batch["source"], batch["target"]
        words = params["source"][source]
        (last, ahead), (first, back) = (
            read(params["forward"], words, False),
            read(params["backward"], words, True),
        )
        memory = jnp.concatenate([ahead, back], -1)
        keys = memory @ params["attend"]["key"]

        def write(h: jax.Array, word: jax.Array) -> tuple[jax.Array, jax.Array]:
            score = jnp.tanh(keys + (h @ params["attend"]["query"])[:, None]) @ params["attend"]["score"]
            score = jnp.where(source[..., None] > 0, score, -1e9)
            context = (jax.nn.softmax(score, axis=1) * memory).sum(1)
            h = cell(params["writer"], h, jnp.concatenate([word, context], -1))
            return h, jnp.concatenate([h, context], -1)

        given = params["target"][jnp.pad(target, ((0, 0), (1, 0)))[:, :-1]]
        start = jnp.tanh(jnp.concatenate([last, first], -1) @ params["bridge"])
        _, out = jax.lax.scan(write, start, given.swapaxes(0, 1))
        logits = out.swapaxes(0, 1) @ params["head"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, target)
        return jnp.mean(losses, where=target > 0)

    return problem(loss_fn, params, optax.adam(1e-2), batches=tuple(map(_pairs, range(NUM_STEPS))))


def _sentences(dtype: str) -> Problem:
    """Each text twice under other masks of dropout, told from all texts of the batch (SimCSE)."""
    draws = Draws(dtype)
    block = lambda: {
        "norm": draws.near(1, WIDTH),
        "qkv": draws.normal(WIDTH, 3, HEADS, HEAD_DIM, scale=0.2),
        "out": draws.normal(HEADS, HEAD_DIM, WIDTH, scale=0.2),
        "norm2": draws.near(1, WIDTH),
        "up": draws.normal(WIDTH, 2 * WIDTH),
        "down": draws.normal(2 * WIDTH, WIDTH),
    }
    params = {"embed": draws.normal(VOCAB, WIDTH, scale=0.5), "blocks": [block() for _ in range(LAYERS)]}
    optimizer = optax.adamw(1e-2)

    def dropped(key: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)

    def encoded(params: Tree, tokens: jax.Array, key: jax.Array) -> jax.Array:
        x = params["embed"][tokens]
        for number, w in enumerate(params["blocks"]):
            first, second = jax.random.split(jax.random.fold_in(key, number))
            q, k, v = jnp.einsum("bsd,dcnh->cbsnh", rms_norm(x, w["norm"]), w["qkv"])
            mixed = jnp.einsum("bsnh,nhd->bsd", attention(q, k, v, None), w["out"])
            x = x + dropped(first, mixed)
            x = x + dropped(second, jax.nn.gelu(rms_norm(x, w["norm2"]) @ w["up"]) @ w["down"])
        pooled = x.mean(1)
        return pooled / jnp.linalg.norm(pooled, axis=-1, keepdims=True)

    def step(state: Tree, batch: Tree) -> tuple[Tree, dict[str, jax.Array]]:
        key, one, two = jax.random.split(state["key"], 3)

        def loss_fn(params: Tree) -> jax.Array:
            similar = encoded(params, batch["tokens"], one) @ encoded(params, batch["tokens"], two).T / 0.05
            same = jnp.arange(similar.shape[0])
            losses = optax.softmax_cross_entropy_with_integer_labels
            return (losses(similar, same).mean() + losses(similar.T, same).mean()) / 2

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "key": key}, {"loss": loss}

    state = {"params": params, "opt": optimizer.init(params), "key": jax.random.key(5)}
    batches = tuple({"tokens": batch["tokens"]} for batch in token_batches())
    return Problem(step, state, batches)


STEPS: tuple[ModernStep, ...] = (
    ModernStep("BERT in Flax", "BERT", _bert,
               ("table", "tied head", "dropout", "masked mean", "take_along_axis", "train state", "lamb")),
    ModernStep("T5", "T5", _t5,
               ("table", "splitjax gradient", "tied head", "cross attention", "relative positions", "label smoothing",
                "adafactor")),
    ModernStep("Translation by GRUs with attention", "seq2seq", _seq2seq,
               ("table", "scan over time", "reversed scan", "additive attention", "masked mean")),
    ModernStep("Sentences told from each other", "SimCSE", _sentences,
               ("table", "dropout", "contrastive over the batch")),
)  # fmt: skip
