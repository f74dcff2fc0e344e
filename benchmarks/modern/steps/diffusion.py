"""Steps that learn to take noise away."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import splitjax
from benchmarks.modern.steps._drawn import Drawn
from benchmarks.modern.steps._parts import (
    Perceptron,
    apply_dense,
    apply_perceptron,
    attention,
    layer_norm,
    patches,
    perceptron,
    timestep_embedding,
)
from benchmarks.modern.steps.case import ModernStep, Problem

WIDTH = 32


class ResidualBlock(nn.Module):
    """Two convolutions; the time shifts and scales what is between them."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        y = nn.Conv(self.width, (3, 3))(nn.silu(nn.GroupNorm(8)(x)))
        scale, shift = jnp.split(nn.Dense(2 * self.width, name="time")(nn.silu(time))[:, None, None], 2, -1)
        y = nn.GroupNorm(8)(y) * (1 + scale) + shift
        y = nn.Conv(self.width, (3, 3))(nn.silu(y))
        return y + (x if x.shape == y.shape else nn.Conv(self.width, (1, 1), name="skip")(x))


class UNet(nn.Module):
    """One level down and up again, with attention over all positions at the bottom."""

    @nn.compact
    def __call__(self, x: jax.Array, t: jax.Array) -> jax.Array:
        channels = x.shape[-1]
        time = Perceptron((64, 64), name="time")(timestep_embedding(t, 32))
        top = ResidualBlock(16)(nn.Conv(16, (3, 3), name="stem")(x), time)
        x = ResidualBlock(WIDTH)(nn.Conv(16, (3, 3), strides=(2, 2), name="down")(top), time)
        b, h, w, c = x.shape
        y = nn.GroupNorm(8)(x).reshape(b, h * w, c)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4, name="attention")(y, y).reshape(x.shape)
        x = ResidualBlock(WIDTH)(x, time)
        x = nn.Conv(16, (3, 3), name="up")(jax.image.resize(x, (b, 2 * h, 2 * w, c), "nearest"))
        x = ResidualBlock(16)(jnp.concatenate([x, top], -1), time)
        return nn.Conv(channels, (3, 3), name="out")(nn.silu(nn.GroupNorm(8)(x)))


def ddpm_unet(dtype: str) -> Problem:
    """Predicts the noise; the state has a moving mean of the weights and the key of the noise."""
    drawn = Drawn.of(dtype, 60)
    model = UNet()
    batches = tuple({"image": drawn.normal(16, 8, 8, 3)} for _ in range(2))
    params = drawn.linen(model, batches[0]["image"], drawn.uniform(16))["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-4))
    kept = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000)).astype(dtype)
    state = {
        "params": params,
        "ema": jax.tree.map(np.copy, params),
        "opt": tx.init(params),
        "key": jax.random.key(11),
        "step": np.int32(0),
    }

    def train_step(state: Any, batch: Any) -> Any:
        x = batch["image"]
        time_key, noise_key = jax.random.split(jax.random.fold_in(state["key"], state["step"]))
        t = jax.random.randint(time_key, (x.shape[0],), 0, 1000)
        noise = jax.random.normal(noise_key, x.shape, x.dtype)
        share = jnp.asarray(kept)[t][:, None, None, None]
        noisy = jnp.sqrt(share) * x + jnp.sqrt(1 - share) * noise

        def loss_fn(params: Any) -> jax.Array:
            return ((model.apply({"params": params}, noisy, t.astype(dtype)) - noise) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        decay = jnp.minimum(0.999, (1 + state["step"]) / (10 + state["step"]))
        ema = jax.tree.map(lambda e, p: (decay * e + (1 - decay) * p).astype(e.dtype), state["ema"], params)
        return {"params": params, "ema": ema, "opt": opt, "key": state["key"], "step": state["step"] + 1}, {
            "loss": loss
        }

    return Problem(train_step, state, batches)


def _dit_block(drawn: Drawn) -> Any:
    return {
        "modulate": drawn.dense(WIDTH, 6 * WIDTH),
        "qkv": drawn.dense(WIDTH, 3 * WIDTH),
        "out": drawn.dense(WIDTH, WIDTH),
        "up": drawn.dense(WIDTH, 4 * WIDTH),
        "down": drawn.dense(4 * WIDTH, WIDTH),
    }


def _dit(drawn: Drawn, inputs: int, classes: int) -> Any:
    blocks = [_dit_block(drawn) for _ in range(2)]
    return {
        "embed": drawn.dense(inputs, WIDTH),
        "positions": drawn.normal(16, WIDTH, scale=0.02),
        "time": perceptron(drawn, 32, WIDTH, WIDTH),
        "labels": drawn.normal(classes + 8, WIDTH, scale=0.1),
        "blocks": jax.tree.map(lambda *leaves: np.stack(leaves), *blocks),
        "modulate": drawn.dense(WIDTH, 2 * WIDTH),
        "predict": drawn.dense(WIDTH, inputs),
    }


def _apply_dit(params: Any, x: jax.Array, t: jax.Array, labels: jax.Array) -> jax.Array:
    """Blocks whose norms and gates follow from time and label (adaLN-zero), in a scan: [b, n, c] -> [b, n, c]."""
    ones, zeros = jnp.ones(WIDTH, x.dtype), jnp.zeros(WIDTH, x.dtype)
    x = apply_dense(params["embed"], x) + params["positions"]
    given = apply_perceptron(params["time"], timestep_embedding(1000 * t, 32), jax.nn.silu) + params["labels"][labels]
    given = jax.nn.silu(given)

    def block(x: jax.Array, w: Any) -> Any:
        shift1, scale1, gate1, shift2, scale2, gate2 = jnp.split(apply_dense(w["modulate"], given)[:, None], 6, -1)
        y = layer_norm(x, ones, zeros) * (1 + scale1) + shift1
        x = x + gate1 * attention(y, w["qkv"], w["out"], 4)
        y = layer_norm(x, ones, zeros) * (1 + scale2) + shift2
        y = apply_dense(w["down"], jax.nn.gelu(apply_dense(w["up"], y), approximate=True))
        return x + gate2 * y, None

    x, _ = jax.lax.scan(block, x, params["blocks"])
    shift, scale = jnp.split(apply_dense(params["modulate"], given)[:, None], 2, -1)
    return apply_dense(params["predict"], layer_norm(x, ones, zeros) * (1 + scale) + shift)


def dit(dtype: str) -> Problem:
    """DiT that drops labels at random, so that it can be guided without a classifier."""
    classes = 24
    drawn = Drawn.of(dtype, 61)
    params = _dit(drawn, 12, classes)
    tx = optax.adamw(1e-4, weight_decay=0.0)
    state = {"params": params, "ema": params, "opt": tx.init(params), "step": np.int32(0)}
    draw = lambda: {"latent": drawn.normal(16, 8, 8, 3), "label": drawn.integers(classes, 16)}

    def train_step(state: Any, batch: Any) -> Any:
        keys = jax.random.split(jax.random.fold_in(jax.random.PRNGKey(2), state["step"]), 3)
        x = patches(batch["latent"], 2)
        t = jax.random.uniform(keys[0], (x.shape[0],), x.dtype)
        noise = jax.random.normal(keys[1], x.shape, x.dtype)
        dropped = jax.random.bernoulli(keys[2], 0.1, batch["label"].shape)
        labels = jnp.where(dropped, classes, batch["label"])
        angle = (jnp.pi / 2 * t)[:, None, None]
        noisy, velocity = jnp.cos(angle) * x + jnp.sin(angle) * noise, jnp.cos(angle) * noise - jnp.sin(angle) * x

        def loss_fn(params: Any) -> jax.Array:
            return ((_apply_dit(params, noisy, t, labels) - velocity) ** 2).mean()

        loss, grads = splitjax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        ema = jax.tree.map(lambda e, p: 0.999 * e + 0.001 * p, state["ema"], params)
        return {"params": params, "ema": ema, "opt": opt, "step": state["step"] + 1}, {"loss": loss}

    return Problem(train_step, state, tuple(draw() for _ in range(2)))


def flow_matching(dtype: str) -> Problem:
    """Rectified flow over sequences of vectors: logit-normal times, and the straight line's velocity."""
    drawn = Drawn.of(dtype, 62)
    params = _dit(drawn, 12, 8)
    tx = optax.chain(optax.scale_by_adam(b2=0.99), optax.scale_by_learning_rate(optax.constant_schedule(1e-4)))
    draw = lambda: {"x": drawn.normal(16, 16, 12), "label": drawn.integers(8, 16)}

    def train_step(state: Any, batch: Any) -> Any:
        key, time_key, noise_key = jax.random.split(state["key"], 3)
        x1 = batch["x"]
        t = jax.nn.sigmoid(jax.random.normal(time_key, (x1.shape[0],), x1.dtype))
        x0 = jax.random.normal(noise_key, x1.shape, x1.dtype)
        between = (1 - t[:, None, None]) * x0 + t[:, None, None] * x1

        @jax.value_and_grad
        def loss_and_grads(params: Any) -> jax.Array:
            return ((_apply_dit(params, between, t, batch["label"]) - (x1 - x0)) ** 2).mean()

        loss, grads = loss_and_grads(state["params"])
        updates, opt = tx.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "key": key}, {"loss": loss}

    state = {"params": params, "opt": tx.init(params), "key": jax.random.PRNGKey(13)}
    return Problem(train_step, state, tuple(draw() for _ in range(2)))


class LatentDenoiser(nnx.Module):
    """A perceptron over latents, with cross attention to a caption's embeddings."""

    def __init__(self, dtype: str, rngs: nnx.Rngs):
        self.time = nnx.Linear(32, WIDTH, rngs=rngs)
        self.into = nnx.Linear(8, WIDTH, rngs=rngs)
        self.words = nnx.Embed(64, WIDTH, dtype=dtype, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(num_heads=4, in_features=WIDTH, use_bias=False, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, 8, rngs=rngs)

    def __call__(self, z: jax.Array, t: jax.Array, caption: jax.Array) -> jax.Array:
        x = self.into(z) + self.time(timestep_embedding(t, 32))[:, None]
        x = x + self.attend(self.norm(x), self.words(caption))
        return self.down(nnx.gelu(self.up(x)))


class Encoder(nn.Module):
    """Means and log-variances of latents: [b, 16, 16, 3] -> two of [b, 16, 8]."""

    @nn.compact
    def __call__(self, images: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = nn.silu(nn.Conv(16, (4, 4), strides=(4, 4), padding="VALID")(images))
        x = nn.Dense(16)(nn.GroupNorm(8)(x)).reshape(x.shape[0], -1, 16)
        return jnp.split(x, 2, -1)


def latent_diffusion(dtype: str) -> Problem:
    """A frozen encoder in the state, of which no gradient is taken, and a denoiser that is NNX, split and merged.
    NNX's attention takes its softmax in float32 whatever it is given."""
    drawn = Drawn.of(dtype, 63)
    encoder = Encoder()
    graphdef, params, rest = nnx.split(nnx.eval_shape(lambda: LatentDenoiser(dtype, nnx.Rngs(0))), nnx.Param, ...)
    params, rest = drawn.weights(params), jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), rest)
    draw = lambda: {"image": drawn.normal(16, 16, 16, 3), "caption": drawn.integers(64, 16, 6)}
    batches = tuple(draw() for _ in range(2))
    frozen = drawn.linen(encoder, batches[0]["image"])["params"]
    tx = optax.adamw(1e-3, eps=1e-5)
    state = {
        "params": params,
        "opt": tx.init(params),
        "encoder": frozen,
        "key": jax.random.PRNGKey(21),
        "step": np.int32(0),
    }

    def train_step(state: Any, batch: Any) -> Any:
        keys = jax.random.split(jax.random.fold_in(state["key"], state["step"]), 3)
        mean, log_var = encoder.apply({"params": state["encoder"]}, batch["image"])
        z = mean + jnp.exp(0.5 * log_var) * jax.random.normal(keys[0], mean.shape, mean.dtype)
        z = jax.lax.stop_gradient(z) * 0.18
        t = jax.random.uniform(keys[1], (z.shape[0],), z.dtype, 1e-3)
        noise = jax.random.normal(keys[2], z.shape, z.dtype)
        signal = jnp.cos(jnp.pi / 2 * t)[:, None, None]
        noisy = signal * z + jnp.sqrt(1 - signal**2) * noise
        weight = jnp.minimum((signal**2 / (1 - signal**2))[:, 0, 0], 5.0)  # by the ratio of signal to noise, at most 5

        def loss_fn(params: Any) -> jax.Array:
            model = nnx.merge(graphdef, params, rest)
            error = ((model(noisy, 1000 * t, batch["caption"]) - z) ** 2).mean((1, 2))
            return (weight * error).mean()

        loss, grads = splitjax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        new = {"params": optax.apply_updates(state["params"], updates), "opt": opt}
        return {**state, **new, "step": state["step"] + 1}, {"loss": loss}

    return Problem(train_step, state, batches)


def consistency_distillation(dtype: str) -> Problem:
    """A student agrees with its moving mean one step nearer to the data, where a teacher's solver has led."""
    drawn = Drawn.of(dtype, 64)
    widths = (WIDTH + 32, 128, 128, WIDTH)
    student, teacher = perceptron(drawn, *widths), perceptron(drawn, *widths)
    tx = optax.radam(1e-3)
    sigmas = np.geomspace(0.02, 20.0, 18).astype(dtype)
    state = {
        "student": student,
        "target": jax.tree.map(np.copy, student),
        "teacher": teacher,
        "opt": tx.init(student),
        "key": jax.random.PRNGKey(17),
    }

    def denoise(params: Any, x: jax.Array, sigma: jax.Array) -> jax.Array:
        skip = 1 / (sigma**2 + 1)
        into = x / jnp.sqrt(sigma**2 + 1)
        time = timestep_embedding(250 * jnp.log(sigma[:, 0] + 1e-3), 32)
        y = apply_perceptron(params, jnp.concatenate([into, time], -1), jax.nn.silu)
        return skip * x + sigma / jnp.sqrt(sigma**2 + 1) * y

    def train_step(state: Any, batch: Any) -> Any:
        key, index_key, noise_key = jax.random.split(state["key"], 3)
        x = batch["x"]
        index = jax.random.randint(index_key, (x.shape[0],), 0, len(sigmas) - 1)
        low, high = (jnp.asarray(sigmas)[index + i][:, None] for i in (0, 1))
        noisy = x + high * jax.random.normal(noise_key, x.shape, x.dtype)
        slope = (noisy - denoise(state["teacher"], noisy, high)) / high
        guess = noisy + (low - high) * slope
        slope = (slope + (guess - denoise(state["teacher"], guess, low)) / low) / 2  # Heun's second order
        nearer = noisy + (low - high) * slope
        goal = denoise(state["target"], nearer, low)

        def loss_fn(student: Any) -> jax.Array:
            difference = denoise(student, noisy, high) - goal
            return (jnp.sqrt((difference**2).sum(-1) + 1e-4) - 1e-2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["student"])
        updates, opt = tx.update(grads, state["opt"], state["student"])
        student = optax.apply_updates(state["student"], updates)
        target = optax.incremental_update(student, state["target"], 0.05)
        return {**state, "student": student, "target": target, "opt": opt, "key": key}, {"loss": loss}

    return Problem(train_step, state, tuple({"x": drawn.normal(16, WIDTH)} for _ in range(2)))


STEPS: tuple[ModernStep, ...] = (
    ModernStep("DDPM, U-Net", "U-Net", ddpm_unet, ("convolution", "attention", "ema", "keys", "typed key", "resize")),
    ModernStep(
        "DiT, adaLN-zero, dropped labels",
        "DiT",
        dit,
        ("table", "splitjax gradient", "scan", "adaLN", "ema", "fused qkv"),
    ),
    ModernStep("rectified flow", "DiT", flow_matching, ("table", "scan", "adaLN", "keys", "decorated gradient")),
    ModernStep(
        "latent diffusion in NNX",
        "Stable Diffusion",
        latent_diffusion,
        ("table", "splitjax gradient", "NNX", "frozen weights", "keys", "softmax in float32"),
        dtype="float32",
        tolerance=1e-5,
    ),
    ModernStep(
        "consistency distillation", "consistency", consistency_distillation, ("ema", "teacher", "keys", "radam")
    ),
)
