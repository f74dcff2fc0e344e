"""Steps that learn from images without labels: by masking, by contrast within the batch, from a moving teacher."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import splitjax
from benchmarks.modern.steps._drawn import Drawn
from benchmarks.modern.steps._parts import (
    EncoderBlock,
    apply_dense,
    apply_transformer_layer,
    layer_norm,
    patches,
    transformer_layer,
)
from benchmarks.modern.steps.case import ModernStep, Problem

WIDTH = 32


def _normalised(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x**2).sum(-1, keepdims=True) + 1e-12)


class MaskedAutoencoder(nn.Module):
    """Encodes a quarter of the patches of each image, drawn by `key`, and predicts the others from them."""

    kept: int = 4

    @nn.compact
    def __call__(self, images: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        target = patches(images, 4)
        b, n, _ = target.shape
        position = lambda name: self.param(name, nn.initializers.normal(0.02), (1, n, WIDTH))
        x = nn.Dense(WIDTH, name="embed")(target) + position("positions")
        order = jnp.argsort(jax.random.uniform(key, (b, n)), 1)
        back = jnp.argsort(order, 1)
        x = jnp.take_along_axis(x, order[:, : self.kept, None], 1)
        x = nn.LayerNorm()(EncoderBlock(4, name="encoder")(x))
        x = nn.Dense(WIDTH, name="to_decoder")(x)
        token = self.param("mask_token", nn.initializers.normal(0.02), (1, 1, WIDTH))
        x = jnp.concatenate([x, jnp.broadcast_to(token, (b, n - self.kept, WIDTH))], 1)
        x = jnp.take_along_axis(x, back[..., None], 1) + position("decoder_positions")
        x = nn.Dense(target.shape[-1], name="predict")(nn.LayerNorm()(EncoderBlock(4, name="decoder")(x)))
        return x, (back >= self.kept).astype(x.dtype)


def mae(dtype: str) -> Problem:
    drawn = Drawn.of(dtype, 40)
    batches = tuple({"image": drawn.normal(16, 16, 16, 3)} for _ in range(2))
    model = MaskedAutoencoder()
    params = drawn.linen(model, batches[0]["image"], jax.random.PRNGKey(0))["params"]
    tx = optax.adamw(optax.warmup_constant_schedule(1e-4, 1e-3, 5), b2=0.95)
    state = {"params": params, "opt": tx.init(params), "key": jax.random.PRNGKey(8), "step": np.int32(0)}

    def train_step(state: Any, batch: Any) -> Any:
        key = jax.random.fold_in(state["key"], state["step"])

        def loss_fn(params: Any) -> jax.Array:
            predicted, hidden = model.apply({"params": params}, batch["image"], key)
            target = patches(batch["image"], 4)
            target = jax.nn.standardize(target, -1, epsilon=1e-6)
            return (((predicted - target) ** 2).mean(-1) * hidden).sum() / hidden.sum()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "key": state["key"], "step": state["step"] + 1}, {"loss": loss}

    return Problem(train_step, state, batches)


def _backbone(drawn: Drawn, outputs: int) -> Any:
    return {
        "embed": drawn.dense(48, WIDTH),
        "positions": drawn.normal(16, WIDTH, scale=0.02),
        "layers": [transformer_layer(drawn, WIDTH) for _ in range(2)],
        "norm": {"scale": np.ones(WIDTH, drawn.dtype), "bias": np.zeros(WIDTH, drawn.dtype)},
        "hidden": drawn.dense(WIDTH, 64),
        "out": drawn.dense(64, outputs),
    }


def _encode(params: Any, images: jax.Array) -> jax.Array:
    x = apply_dense(params["embed"], patches(images, 4))
    x = x + params["positions"][: x.shape[1]]
    for layer in params["layers"]:
        x = apply_transformer_layer(layer, x, 4)
    x = layer_norm(x, **params["norm"]).mean(1)
    return apply_dense(params["out"], jax.nn.gelu(apply_dense(params["hidden"], x)))


def dino(dtype: str) -> Problem:
    """A student matches, on small crops too, what a moving mean of itself says of large crops, centred and sharp."""
    drawn = Drawn.of(dtype, 41)
    params = _backbone(drawn, 64)
    tx = optax.chain(optax.clip_by_global_norm(3.0), optax.adamw(5e-4))
    state = {
        "student": params,
        "teacher": jax.tree.map(np.copy, params),
        "opt": tx.init(params),
        "center": np.zeros((1, 64), dtype),
        "step": np.int32(0),
    }
    draw = lambda: {"global": drawn.normal(16, 2, 16, 16, 3), "local": drawn.normal(16, 2, 8, 8, 3)}

    def train_step(state: Any, batch: Any) -> Any:
        large = batch["global"].swapaxes(0, 1)
        said = [_encode(state["teacher"], view) for view in large]
        targets = [jax.nn.softmax((each - state["center"]) / 0.04, -1) for each in said]

        def loss_fn(student: Any) -> jax.Array:
            views = [*large, *batch["local"].swapaxes(0, 1)]
            guesses = [jax.nn.log_softmax(_encode(student, view) / 0.1, -1) for view in views]
            losses = [
                -(target * guess).sum(-1).mean()
                for i, target in enumerate(targets)
                for j, guess in enumerate(guesses)
                if i != j
            ]
            return sum(losses) / len(losses)

        loss, grads = splitjax.value_and_grad(loss_fn)(state["student"])
        updates, opt = tx.update(grads, state["opt"], state["student"])
        student = optax.apply_updates(state["student"], updates)
        momentum = 1 - 0.004 * (jnp.cos(jnp.pi * state["step"] / 100) + 1) / 2
        teacher = jax.tree.map(
            lambda t, s: (momentum * t + (1 - momentum) * s).astype(t.dtype), state["teacher"], student
        )
        center = 0.9 * state["center"] + 0.1 * jnp.concatenate(said).mean(0, keepdims=True)
        new = {"student": student, "teacher": teacher, "opt": opt, "center": center, "step": state["step"] + 1}
        return new, {"loss": loss}

    return Problem(train_step, state, tuple(draw() for _ in range(2)))


def simclr(dtype: str) -> Problem:
    """Every other view of the whole batch is a negative."""
    drawn = Drawn.of(dtype, 42)
    params = _backbone(drawn, 32)
    tx = optax.lars(0.1, weight_decay=1e-6)
    draw = lambda: {"first": drawn.normal(16, 16, 16, 3), "second": drawn.normal(16, 16, 16, 3)}

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            z = _normalised(_encode(params, jnp.concatenate([batch["first"], batch["second"]])))
            count = z.shape[0]
            similar = z @ z.T / 0.5
            similar = jnp.where(jnp.eye(count, dtype=bool), -1e9, similar)
            partner = (jnp.arange(count) + count // 2) % count
            loss = optax.softmax_cross_entropy_with_integer_labels(similar, partner).mean()
            return loss, (similar.argmax(-1) == partner).mean()

        (loss, right), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        new = {"params": optax.apply_updates(state["params"], updates), "opt": opt}
        return new, {"loss": loss, "accuracy": right}

    return Problem(train_step, {"params": params, "opt": tx.init(params)}, tuple(draw() for _ in range(2)))


class TextTower(nn.Module):
    vocab: int = 64

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocab, WIDTH)(tokens)
        x = x + self.param("positions", nn.initializers.normal(0.02), (tokens.shape[1], WIDTH))
        for _ in range(2):
            x = EncoderBlock(4)(x, nn.make_causal_mask(tokens))
        last = tokens.argmax(-1)  # the end of a text has the highest number
        x = nn.LayerNorm()(x)[jnp.arange(x.shape[0]), last]
        return nn.Dense(WIDTH, use_bias=False, name="projection")(x)


class ImageTower(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Dense(WIDTH, name="embed")(patches(images, 4))
        x = x + self.param("positions", nn.initializers.normal(0.02), (x.shape[1], WIDTH))
        for _ in range(2):
            x = EncoderBlock(4)(x)
        # Attention pooling, as big_vision has it: a probe asks all patches.
        probe = self.param("probe", nn.initializers.xavier_uniform(), (1, 1, WIDTH))
        probe = jnp.tile(probe, (x.shape[0], 1, 1))
        x = nn.MultiHeadDotProductAttention(num_heads=4, name="pool")(probe, nn.LayerNorm()(x))
        return nn.Dense(WIDTH, use_bias=False, name="projection")(x[:, 0])


class TwoTowers(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        scale = self.param("logit_scale", nn.initializers.constant(2.0), ())
        return _normalised(ImageTower()(images)), _normalised(TextTower()(tokens)), jnp.exp(scale)


def clip(dtype: str) -> Problem:
    drawn = Drawn.of(dtype, 43)
    model = TwoTowers()
    draw = lambda: {"image": drawn.normal(16, 16, 16, 3), "text": drawn.integers(64, 16, 8)}
    batches = tuple(draw() for _ in range(2))
    params = drawn.linen(model, batches[0]["image"], batches[0]["text"])["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(5e-4, b2=0.98, eps=1e-6))

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            image, text, scale = state.apply_fn({"params": params}, batch["image"], batch["text"])
            logits = scale * image @ text.T
            own = jnp.arange(logits.shape[0])
            losses = [optax.softmax_cross_entropy_with_integer_labels(each, own).mean() for each in (logits, logits.T)]
            return sum(losses) / 2

        loss, grads = splitjax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return Problem(train_step, state, batches)


class Projector(nn.Module):
    """A perceptron with batch norm inside, as BYOL and SimSiam have it."""

    inner: int = 64
    outputs: int = 32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        x = nn.BatchNorm(not train, momentum=0.9)(nn.Dense(self.inner, use_bias=False)(x))
        return nn.Dense(self.outputs)(nn.relu(x))


class Online(nn.Module):
    """Patches and their mean, a projector, and a predictor, which the target does not have."""

    @nn.compact
    def __call__(self, images: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = EncoderBlock(4)(nn.Dense(WIDTH)(patches(images, 4))).mean(1)
        z = Projector(name="projector")(x)
        return z, Projector(name="predictor")(z)


def byol(dtype: str) -> Problem:
    drawn = Drawn.of(dtype, 44)
    model = Online()
    draw = lambda: {"views": drawn.normal(16, 2, 16, 16, 3)}
    batches = tuple(draw() for _ in range(2))
    variables = drawn.linen(model, batches[0]["views"][:, 0])
    tx = optax.adam(3e-4, eps=1e-6)
    state = {
        "online": variables["params"],
        "target": jax.tree.map(np.copy, variables["params"]),
        "stats": variables["batch_stats"],
        "opt": tx.init(variables["params"]),
    }

    def train_step(state: Any, batch: Any) -> Any:
        first, second = batch["views"][:, 0], batch["views"][:, 1]

        def run(params: Any, stats: Any, images: jax.Array) -> Any:
            (z, p), new = model.apply({"params": params, "batch_stats": stats}, images, mutable=["batch_stats"])
            return z, p, new["batch_stats"]

        def loss_fn(params: Any) -> Any:
            _, guess1, stats = run(params, state["stats"], first)
            _, guess2, stats = run(params, stats, second)
            target1, target2 = (
                jax.lax.stop_gradient(run(state["target"], state["stats"], each)[0]) for each in (first, second)
            )
            distance = lambda p, z: 2 - 2 * (_normalised(p) * _normalised(z)).sum(-1)
            return (distance(guess1, target2) + distance(guess2, target1)).mean(), stats

        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["online"])
        updates, opt = tx.update(grads, state["opt"], state["online"])
        online = optax.apply_updates(state["online"], updates)
        target = optax.incremental_update(online, state["target"], 0.01)
        return {"online": online, "target": target, "stats": stats, "opt": opt}, {"loss": loss}

    return Problem(train_step, state, batches)


STEPS: tuple[ModernStep, ...] = (
    ModernStep("MAE", "MAE", mae, ("argsort", "take_along_axis", "mask", "keys", "attention")),
    ModernStep(
        "DINO, large and small crops", "DINO", dino, ("splitjax gradient", "ema", "attention", "fused qkv", "views")
    ),
    ModernStep("SimCLR", "SimCLR", simclr, ("negatives in the batch", "lars", "aux", "attention")),
    ModernStep(
        "CLIP, two towers",
        "CLIP",
        clip,
        ("table", "splitjax gradient", "negatives in the batch", "TrainState", "attention"),
    ),
    ModernStep("BYOL", "BYOL", byol, ("ema", "batch norm", "views", "attention")),
)
