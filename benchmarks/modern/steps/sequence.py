"""Models of sequences without softmax attention: state spaces, linear attention, recurrent networks."""

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
    layer_norm,
    next_token_loss,
    problem,
    rms_norm,
    token_batches,
)
from benchmarks.modern.steps.case import ModernStep, Problem

STATES = 8  # of a state space, for each feature


def _s4d(dtype: str) -> Problem:
    """Diagonal state spaces: a kernel as long as the sequence, from complex exponents, and a convolution by Fourier
    transforms; classifies waves."""
    draws = Draws(dtype)
    block = lambda: {
        "norm": {"scale": draws.near(1, WIDTH), "bias": draws.near(0, WIDTH)},
        "log_dt": draws.uniform(-4, -1, WIDTH),
        "log_a_real": draws.near(-0.7, WIDTH, STATES),
        "a_imag": jnp.asarray(np.pi * np.tile(np.arange(STATES), (WIDTH, 1)), dtype),
        "c": draws.normal(WIDTH, STATES, 2, scale=0.5),
        "d": draws.near(1, WIDTH),
        "out": draws.normal(WIDTH, 2 * WIDTH),
    }
    params = {
        "encoder": draws.normal(2, WIDTH),
        "blocks": [block() for _ in range(LAYERS)],
        "decoder": draws.normal(WIDTH, 8),
    }

    def convolve(w: Tree, u: jax.Array) -> jax.Array:
        """`u` [b, l, h]."""
        length = u.shape[1]
        dt = jnp.exp(w["log_dt"])[:, None]
        a = -jnp.exp(w["log_a_real"]) + 1j * w["a_imag"]
        c = (w["c"][..., 0] + 1j * w["c"][..., 1]) * (jnp.exp(a * dt) - 1) / a
        kernel = 2 * jnp.einsum("hn,hnl->hl", c, jnp.exp((a * dt)[..., None] * jnp.arange(length))).real
        spectrum = jnp.fft.rfft(kernel.T, n=2 * length, axis=0) * jnp.fft.rfft(u, n=2 * length, axis=1)
        return jnp.fft.irfft(spectrum, n=2 * length, axis=1)[:, :length] + u * w["d"]

    def loss_fn(params: Tree, batch: Tree) -> jax.Array:
        x = batch["wave"] @ params["encoder"]
        for w in params["blocks"]:
            y = jax.nn.gelu(convolve(w, layer_norm(x, w["norm"])))
            value, gate = jnp.split(y @ w["out"], 2, -1)
            x = x + value * jax.nn.sigmoid(gate)
        logits = x.mean(1) @ params["decoder"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    # State-space parameters have a rate of their own, and no decay.
    kinds = jax.tree_util.tree_map_with_path(
        lambda path, leaf: "space" if path[-1].key in ("log_dt", "log_a_real", "a_imag") else "rest", params
    )
    optimizer = optax.multi_transform({"space": optax.adam(1e-3), "rest": optax.adamw(1e-2)}, kinds)
    numbers = np.random.default_rng(1)
    batches = tuple(
        {
            "wave": numbers.normal(size=(EXAMPLES, LENGTH, 2)).astype(dtype),
            "label": numbers.integers(0, 8, EXAMPLES).astype(np.int32),
        }
        for _ in range(NUM_STEPS)
    )
    return problem(loss_fn, params, optimizer, batches=batches)


def _mamba(dtype: str) -> Problem:
    """A selective scan by `associative_scan`, behind a causal depthwise convolution, beside a gate."""
    inner, rank, taps = 2 * WIDTH, 4, 4
    draws = Draws(dtype)
    block = lambda: {
        "norm": draws.near(1, WIDTH),
        "in_proj": draws.normal(WIDTH, 2 * inner),
        "conv": draws.normal(taps, 1, inner, scale=0.5),
        "conv_bias": draws.near(0, inner),
        "x_proj": draws.normal(inner, rank + 2 * STATES),
        "dt_proj": draws.normal(rank, inner),
        "dt_bias": draws.near(-1, inner),
        "a_log": jnp.asarray(np.log(np.tile(np.arange(1, STATES + 1), (inner, 1))), dtype),
        "d": draws.near(1, inner),
        "out_proj": draws.normal(inner, WIDTH),
    }
    params = {
        "embed": draws.normal(VOCAB, WIDTH, scale=0.5),
        "blocks": [block() for _ in range(LAYERS)],
        "norm": draws.near(1, WIDTH),
    }

    def selective(w: Tree, x: jax.Array) -> jax.Array:
        """`x` [b, l, inner]."""
        dt, b, c = jnp.split(x @ w["x_proj"], [rank, rank + STATES], -1)
        dt = jax.nn.softplus(dt @ w["dt_proj"] + w["dt_bias"])
        decay = jnp.exp(-dt[..., None] * jnp.exp(w["a_log"]))  # b l inner states
        added = (dt * x)[..., None] * b[:, :, None]

        def join(first: tuple[Any, Any], second: tuple[Any, Any]) -> tuple[Any, Any]:
            return first[0] * second[0], first[1] * second[0] + second[1]

        _, states = jax.lax.associative_scan(join, (decay, added), axis=1)
        return jnp.einsum("blis,bls->bli", states, c) + x * w["d"]

    def loss_fn(params: Tree, batch: Tree) -> jax.Array:
        x = params["embed"][batch["tokens"]]
        for w in params["blocks"]:
            u, gate = jnp.split(rms_norm(x, w["norm"]) @ w["in_proj"], 2, -1)
            u = jax.lax.conv_general_dilated(
                u,
                w["conv"],
                window_strides=(1,),
                padding=[(taps - 1, 0)],
                dimension_numbers=("NWC", "WIO", "NWC"),
                feature_group_count=inner,
            )
            u = selective(w, jax.nn.silu(u + w["conv_bias"]))
            x = x + (u * jax.nn.silu(gate)) @ w["out_proj"]
        return next_token_loss(rms_norm(x, params["norm"]) @ params["embed"].T, batch["targets"])

    return problem(loss_fn, params, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)))


def _rwkv(dtype: str) -> Problem:
    """Each position mixed with the one before; an average with decay, kept stable by its largest exponent, in a
    scan."""
    draws = Draws(dtype)
    mix = lambda: draws.uniform(0, 1, WIDTH)
    norm = lambda: {"scale": draws.near(1, WIDTH), "bias": draws.near(0, WIDTH)}
    block = lambda: {
        "ln1": norm(),
        "ln2": norm(),
        "time": {
            "mix_k": mix(),
            "mix_v": mix(),
            "mix_r": mix(),
            "decay": draws.uniform(-3, 1, WIDTH),
            "first": draws.near(0.5, WIDTH),
            **{name: draws.normal(WIDTH, WIDTH) for name in ("key", "value", "receptance", "output")},
        },
        "channel": {
            "mix_k": mix(),
            "mix_r": mix(),
            "key": draws.normal(WIDTH, 2 * WIDTH),
            "value": draws.normal(2 * WIDTH, WIDTH),
            "receptance": draws.normal(WIDTH, WIDTH),
        },
    }
    params = {
        "embed": draws.normal(VOCAB, WIDTH, scale=0.5),
        "blocks": [block() for _ in range(LAYERS)],
        "ln_out": norm(),
        "head": draws.normal(WIDTH, VOCAB),
    }
    shifted = lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    between = lambda x, last, share: x * share + last * (1 - share)

    def time_mixed(w: Tree, x: jax.Array) -> jax.Array:
        last = shifted(x)
        k = between(x, last, w["mix_k"]) @ w["key"]
        v = between(x, last, w["mix_v"]) @ w["value"]
        r = jax.nn.sigmoid(between(x, last, w["mix_r"]) @ w["receptance"])
        decay = -jnp.exp(w["decay"])

        def advance(carry: tuple[Any, ...], now: tuple[Any, Any]) -> tuple[tuple[Any, ...], jax.Array]:
            above, below, largest = carry
            k, v = now
            top = jnp.maximum(largest, k + w["first"])
            old, new = jnp.exp(largest - top), jnp.exp(k + w["first"] - top)
            out = (old * above + new * v) / (old * below + new)
            top = jnp.maximum(largest + decay, k)
            old, new = jnp.exp(largest + decay - top), jnp.exp(k - top)
            return (old * above + new * v, old * below + new, top), out

        zeros = jnp.zeros_like(k[:, 0])
        _, mixed = jax.lax.scan(advance, (zeros, zeros, zeros - 1e30), (k.swapaxes(0, 1), v.swapaxes(0, 1)))
        return (r * mixed.swapaxes(0, 1)) @ w["output"]

    def channel_mixed(w: Tree, x: jax.Array) -> jax.Array:
        last = shifted(x)
        k = jnp.square(jax.nn.relu(between(x, last, w["mix_k"]) @ w["key"]))
        return jax.nn.sigmoid(between(x, last, w["mix_r"]) @ w["receptance"]) * (k @ w["value"])

    def loss_fn(params: Tree, batch: Tree) -> jax.Array:
        x = params["embed"][batch["tokens"]]
        for w in params["blocks"]:
            x = x + time_mixed(w["time"], layer_norm(x, w["ln1"]))
            x = x + channel_mixed(w["channel"], layer_norm(x, w["ln2"]))
        return next_token_loss(layer_norm(x, params["ln_out"]) @ params["head"], batch["targets"])

    return problem(loss_fn, params, optax.adam(1e-2), splitjax.value_and_grad)


def _gated_linear(dtype: str) -> Problem:
    """Linear attention with a decay for each head, chunk by chunk: products within a chunk, a state between chunks, in
    a scan."""
    chunk = 4
    draws = Draws(dtype)
    names = ("q", "k", "v", "gate")
    params = {
        "embed": draws.normal(VOCAB, WIDTH, scale=0.5),
        "layers": {
            **{name: draws.normal(LAYERS, WIDTH, WIDTH) for name in names},
            "out": draws.normal(LAYERS, WIDTH, WIDTH),
            "norm": draws.near(1, LAYERS, WIDTH),
            "group_norm": draws.near(1, LAYERS, HEADS, HEAD_DIM),
            "norm2": draws.near(1, LAYERS, WIDTH),
            "up": draws.normal(LAYERS, WIDTH, 2 * WIDTH),
            "down": draws.normal(LAYERS, 2 * WIDTH, WIDTH),
        },
        "head": draws.normal(WIDTH, VOCAB),
    }
    log_decay = np.log(1 - 2.0 ** -(2 + np.arange(HEADS)))
    steps = np.arange(chunk)
    within = np.where(steps[:, None] >= steps, np.exp(log_decay[:, None, None] * (steps[:, None] - steps)), 0.0).astype(
        dtype
    )
    before = np.exp(log_decay[:, None] * (steps + 1)).astype(dtype)  # of the state, at each place of a chunk
    after = np.exp(log_decay[:, None] * (chunk - 1 - steps)).astype(dtype)
    whole = np.exp(log_decay * chunk).astype(dtype)

    def retained(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        b, s, n, h = q.shape
        cut = lambda x: x.reshape(b, s // chunk, chunk, n, h).transpose(1, 0, 3, 2, 4)

        def advance(state: jax.Array, now: tuple[Any, Any, Any]) -> tuple[jax.Array, jax.Array]:
            q, k, v = now  # b n c h
            inside = jnp.einsum("bnch,bndh->bncd", q, k) * within
            out = inside @ v + jnp.einsum("bnch,bnhe->bnce", q * before[:, :, None], state)
            state = state * whole[:, None, None] + jnp.einsum("bnch,bnce->bnhe", k * after[:, :, None], v)
            return state, out

        start = jnp.zeros((b, n, h, h), q.dtype)
        _, out = jax.lax.scan(advance, start, (cut(q), cut(k) * h**-0.5, cut(v)))
        return out.transpose(1, 0, 3, 2, 4).reshape(b, s, n, h)

    def layer(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        b, s, _ = x.shape
        normed = rms_norm(x, w["norm"])
        q, k, v = ((normed @ w[name]).reshape(b, s, HEADS, HEAD_DIM) for name in ("q", "k", "v"))
        mixed = rms_norm(retained(q, k, v), w["group_norm"]).reshape(b, s, -1)
        x = x + (mixed * jax.nn.silu(normed @ w["gate"])) @ w["out"]
        return x + jax.nn.gelu(rms_norm(x, w["norm2"]) @ w["up"]) @ w["down"], None

    def loss_fn(params: Tree, batch: Tree) -> jax.Array:
        x, _ = jax.lax.scan(jax.checkpoint(layer), params["embed"][batch["tokens"]], params["layers"])
        return next_token_loss(x @ params["head"], batch["targets"])

    return problem(loss_fn, params, optax.adamw(1e-2), splitjax.value_and_grad)


class _Recurrent(nn.Module):
    """Two LSTM layers over a table, in Flax."""

    dtype: str

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCAB, WIDTH, dtype=self.dtype, param_dtype=self.dtype)(tokens)
        for _ in range(LAYERS):
            x = nn.RNN(nn.OptimizedLSTMCell(WIDTH, dtype=self.dtype, param_dtype=self.dtype))(x)
        return nn.Dense(VOCAB, dtype=self.dtype, param_dtype=self.dtype)(x)


def _lstm(dtype: str) -> Problem:
    """An LSTM of Flax linen with a `TrainState`, trained by clipped SGD."""
    model = _Recurrent(dtype)
    params = model.init(jax.random.key(0), np.zeros((1, LENGTH), np.int32))["params"]
    optimizer = optax.chain(optax.clip_by_global_norm(0.25), optax.sgd(1.0))
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    def step(state: train_state.TrainState, batch: Tree) -> tuple[train_state.TrainState, dict[str, jax.Array]]:
        def loss_fn(params: Tree) -> jax.Array:
            return next_token_loss(state.apply_fn({"params": params}, batch["tokens"]), batch["targets"])

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, "perplexity": jnp.exp(loss)}

    return Problem(step, state, token_batches())


def _griffin(dtype: str) -> Problem:
    """A gated linear recurrence by `associative_scan` whose gates are products block by block, and a GeGLU MLP."""
    blocks = 4
    draws = Draws(dtype)
    layer_weights = lambda: {
        "norm": draws.near(1, WIDTH),
        "linear_x": draws.normal(WIDTH, WIDTH),
        "linear_y": draws.normal(WIDTH, WIDTH),
        "input_gate": draws.normal(blocks, WIDTH // blocks, WIDTH // blocks),
        "a_gate": draws.normal(blocks, WIDTH // blocks, WIDTH // blocks),
        "a_param": draws.uniform(-1, 1, WIDTH),
        "linear_out": draws.normal(WIDTH, WIDTH),
        "norm2": draws.near(1, WIDTH),
        "mlp_up": draws.normal(2, WIDTH, 2 * WIDTH),
        "mlp_down": draws.normal(2 * WIDTH, WIDTH),
    }
    params = {
        "embed": draws.normal(VOCAB, WIDTH, scale=0.3),
        "layers": [layer_weights() for _ in range(LAYERS)],
        "norm": draws.near(1, WIDTH),
    }

    def gated(w: jax.Array, x: jax.Array) -> jax.Array:
        parts = x.reshape(*x.shape[:-1], blocks, -1)
        return jax.nn.sigmoid(jnp.einsum("bsni,nij->bsnj", parts, w)).reshape(x.shape)

    def recurrent(w: Tree, x: jax.Array) -> jax.Array:
        log_a = -8.0 * gated(w["a_gate"], x) * jax.nn.softplus(w["a_param"])
        a = jnp.exp(log_a)
        added = jnp.sqrt(-jnp.expm1(2 * log_a)) * gated(w["input_gate"], x) * x
        join = lambda one, two: (one[0] * two[0], two[0] * one[1] + two[1])
        return jax.lax.associative_scan(join, (a, added), axis=1)[1]

    def loss_fn(params: Tree, batch: Tree) -> jax.Array:
        x = params["embed"][batch["tokens"]]
        for w in params["layers"]:
            h = rms_norm(x, w["norm"])
            y = jax.nn.gelu(h @ w["linear_y"])
            x = x + (recurrent(w, h @ w["linear_x"]) * y) @ w["linear_out"]
            gate, up = jnp.einsum("bsd,cdf->cbsf", rms_norm(x, w["norm2"]), w["mlp_up"])
            x = x + (jax.nn.gelu(gate) * up) @ w["mlp_down"]
        logits = 30 * jnp.tanh(rms_norm(x, params["norm"]) @ params["embed"].T / 30)
        return next_token_loss(logits, batch["targets"])

    return problem(loss_fn, params, optax.adamw(1e-2))


STEPS: tuple[ModernStep, ...] = (
    ModernStep("S4D", "S4", _s4d, ("state space", "complex numbers", "fft", "rates by group")),
    ModernStep("Mamba", "Mamba", _mamba,
               ("table", "tied head", "state space", "associative scan", "depthwise convolution")),
    ModernStep("RWKV", "RWKV", _rwkv, ("table", "splitjax gradient", "scan over time", "token shift")),
    ModernStep("Retention, chunk by chunk", "RetNet", _gated_linear,
               ("table", "splitjax gradient", "scan", "remat", "scan over chunks", "linear attention")),
    ModernStep("LSTM in Flax", "Flax linen", _lstm, ("table", "scan over time", "train state", "clipping")),
    ModernStep("Griffin", "Griffin", _griffin,
               ("table", "tied head", "associative scan", "block-diagonal", "geglu", "soft cap")),
)  # fmt: skip
