"""Steps over frames of speech."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state

import splitjax
from benchmarks.modern.steps._drawn import Drawn
from benchmarks.modern.steps._parts import EncoderBlock, timestep_embedding
from benchmarks.modern.steps.case import ModernStep, Problem

WIDTH, MELS, FRAMES = 32, 8, 32


class ConformerBlock(nn.Module):
    """Half a perceptron, attention, a gated depthwise convolution over frames, half a perceptron."""

    @nn.compact
    def __call__(self, x: jax.Array, padding: jax.Array, train: bool) -> jax.Array:
        def half(x: jax.Array) -> jax.Array:
            y = nn.silu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
            return x + 0.5 * nn.Dense(WIDTH)(nn.Dropout(0.1, deterministic=not train)(y))

        x = half(x)
        real = padding == 0
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(y, y, mask=nn.make_attention_mask(real, real))
        y = nn.glu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))
        y = nn.Conv(WIDTH, (7,), feature_group_count=WIDTH, use_bias=False)(y * real[..., None])
        y = nn.silu(nn.BatchNorm(not train, momentum=0.9)(y))
        x = x + nn.Dense(WIDTH)(y)
        return nn.LayerNorm()(half(x))


class Conformer(nn.Module):
    tokens: int = 16

    @nn.compact
    def __call__(self, frames: jax.Array, padding: jax.Array, train: bool = True) -> tuple[jax.Array, jax.Array]:
        x = nn.relu(nn.Conv(WIDTH, (3,), strides=(2,))(frames))
        padding = padding[:, ::2]
        x = nn.Dense(WIDTH)(x)
        for _ in range(2):
            x = ConformerBlock()(x, padding, train)
        return nn.Dense(self.tokens)(x), padding


class State(train_state.TrainState):
    batch_stats: Any
    key: jax.Array


def conformer(dtype: str) -> Problem:
    """Trained by connectionist temporal classification, over frames and labels that are padded."""
    labels = 6
    drawn = Drawn.of(dtype, 90)
    model = Conformer()

    def draw() -> Any:
        lengths, words = 20 + drawn.integers(FRAMES - 19, 16), 2 + drawn.integers(labels - 1, 16)
        return {
            "frames": drawn.normal(16, FRAMES, MELS),
            "padding": (np.arange(FRAMES) >= lengths[:, None]).astype(dtype),
            "labels": 1 + drawn.integers(15, 16, labels),
            "label_padding": (np.arange(labels) >= words[:, None]).astype(dtype),
        }

    batches = tuple(draw() for _ in range(2))
    variables = drawn.linen(model, batches[0]["frames"], batches[0]["padding"])
    tx = optax.adamw(optax.join_schedules([optax.linear_schedule(1e-4, 1e-3, 5), optax.constant_schedule(1e-3)], [5]))
    state = State.create(apply_fn=model.apply, tx=tx, key=jax.random.PRNGKey(51), **variables)

    def train_step(state: Any, batch: Any) -> Any:
        key = jax.random.fold_in(state.key, state.step)

        def loss_fn(params: Any) -> Any:
            (logits, padding), updated = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                batch["frames"],
                batch["padding"],
                rngs={"dropout": key},
                mutable=["batch_stats"],
            )
            losses = optax.ctc_loss(logits, padding, batch["labels"], batch["label_padding"])
            return losses.mean(), updated["batch_stats"]

        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=stats), {"loss": loss}

    return Problem(train_step, state, batches)


class Whisper(nn.Module):
    """Convolutions over frames and an encoder; a decoder over tokens that attends to it, with a tied head."""

    vocab: int = 64

    @nn.compact
    def __call__(self, frames: jax.Array, tokens: jax.Array) -> jax.Array:
        x = nn.gelu(nn.Conv(WIDTH, (3,))(frames))
        x = nn.gelu(nn.Conv(WIDTH, (3,), strides=(2,))(x))
        x = x + timestep_embedding(jnp.arange(x.shape[1], dtype=x.dtype), WIDTH)
        for number in range(2):
            x = EncoderBlock(4, name=f"encoder_{number}")(x)
        memory = nn.LayerNorm()(x)
        embed = nn.Embed(self.vocab, WIDTH, name="embed")
        y = embed(tokens) + self.param("positions", nn.initializers.normal(0.02), (tokens.shape[1], WIDTH))
        mask = nn.make_causal_mask(tokens)
        for number in range(2):
            y = EncoderBlock(4, name=f"decoder_{number}")(y, mask, memory)
        return embed.attend(nn.LayerNorm()(y))


def whisper(dtype: str) -> Problem:
    """Frames are masked in time and frequency, as SpecAugment does, and padding is no target."""
    drawn = Drawn.of(dtype, 91)
    model = Whisper()
    draw = lambda: {"frames": drawn.normal(16, FRAMES, MELS), "tokens": drawn.integers(64, 16, 9)}
    batches = tuple(draw() for _ in range(2))
    params = drawn.linen(model, batches[0]["frames"], batches[0]["tokens"][:, :-1])["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = {"params": params, "opt": tx.init(params), "key": jax.random.PRNGKey(53), "step": np.int32(0)}

    def masked(frames: jax.Array, key: jax.Array) -> jax.Array:
        for dim, width in ((1, 6), (2, 2)):
            key, own = jax.random.split(key)
            size = frames.shape[dim]
            start = jax.random.randint(own, (frames.shape[0], 1), 0, size - width)
            at = jnp.arange(size)
            hidden = (at >= start) & (at < start + width)
            frames = jnp.where(jnp.expand_dims(hidden, 3 - dim), 0, frames)
        return frames

    def train_step(state: Any, batch: Any) -> Any:
        frames = masked(batch["frames"], jax.random.fold_in(state["key"], state["step"]))
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]

        def loss_fn(params: Any) -> jax.Array:
            logits = model.apply({"params": params}, frames, inputs)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
            real = targets > 3
            return jnp.where(real, losses, 0).sum() / real.sum()

        loss, grads = splitjax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "key": state["key"], "step": state["step"] + 1}, {"loss": loss}

    return Problem(train_step, state, batches)


STEPS: tuple[ModernStep, ...] = (
    ModernStep("Conformer with CTC", "Conformer", conformer, ("ctc", "depthwise convolution", "batch norm", "dropout")),
    ModernStep(
        "Whisper",
        "Whisper",
        whisper,
        ("table", "splitjax gradient", "encoder and decoder", "tied head", "convolution", "keys", "mask"),
    ),
)
