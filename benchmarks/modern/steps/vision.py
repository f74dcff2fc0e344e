"""Steps that classify images."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
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

CLASSES = 16
WIDTH = 32


def _batches(drawn: Drawn) -> tuple[dict[str, Any], ...]:
    draw = lambda: {"image": drawn.normal(16, 16, 16, 3), "label": drawn.integers(CLASSES, 16)}
    return tuple(draw() for _ in range(2))


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class ViT(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(WIDTH, (4, 4), strides=(4, 4), padding="VALID", name="embedding")(images)
        x = x.reshape(x.shape[0], -1, WIDTH)
        token = self.param("cls", nn.initializers.zeros, (1, 1, WIDTH))
        x = jnp.concatenate([jnp.tile(token, (x.shape[0], 1, 1)), x], 1)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], WIDTH))
        for number in range(2):
            x = EncoderBlock(4, name=f"block_{number}")(x)
        return nn.Dense(CLASSES, name="head")(nn.LayerNorm(name="norm")(x)[:, 0])


def vit_with_class_token(dtype: str) -> Problem:
    drawn = Drawn.of(dtype, 0)
    model, batches = ViT(), _batches(drawn)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 2, 10)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.05))
    params = drawn.linen(model, batches[0]["image"])["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            logits = state.apply_fn({"params": params}, batch["image"])
            return _cross_entropy(logits, batch["label"]), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        accuracy = (logits.argmax(-1) == batch["label"]).mean()
        return state.apply_gradients(grads=grads), {"loss": loss, "accuracy": accuracy}

    return Problem(train_step, state, batches)


def vit_scanned(dtype: str) -> Problem:
    drawn = Drawn.of(dtype, 1)
    params = {
        "embed": drawn.dense(48, WIDTH),
        "positions": drawn.normal(16, WIDTH, scale=0.02),
        "layers": transformer_layer(drawn, WIDTH, 2),
        "norm": {"scale": np.ones(WIDTH, dtype), "bias": np.zeros(WIDTH, dtype)},
        "head": drawn.dense(WIDTH, CLASSES),
    }
    tx = optax.lamb(1e-3, weight_decay=1e-2)

    def forward(params: Any, images: jax.Array) -> jax.Array:
        x = apply_dense(params["embed"], patches(images, 4)) + params["positions"]
        layer = jax.checkpoint(lambda x, w: (apply_transformer_layer(w, x, 4), None))
        x, _ = jax.lax.scan(layer, x, params["layers"])
        return apply_dense(params["head"], layer_norm(x, **params["norm"]).mean(1))

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            smooth = optax.smooth_labels(jax.nn.one_hot(batch["label"], CLASSES, dtype=dtype), 0.1)
            return optax.softmax_cross_entropy(forward(params, batch["image"]), smooth).mean()

        loss, grads = splitjax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    return Problem(train_step, {"params": params, "opt": tx.init(params)}, _batches(drawn))


class ConvNeXt(nn.Module):
    """Patches, and blocks of a depthwise convolution and a perceptron over channels, some of which an example skips."""

    rate: float = 0.2

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.LayerNorm()(nn.Conv(WIDTH, (2, 2), strides=(2, 2), padding="VALID", name="stem")(x))
        for number in range(2):
            y = nn.Conv(WIDTH, (7, 7), feature_group_count=WIDTH, name=f"depthwise_{number}")(x)
            y = nn.Dense(4 * WIDTH, name=f"up_{number}")(nn.LayerNorm()(y))
            y = nn.Dense(WIDTH, name=f"down_{number}")(nn.gelu(y))
            y = y * self.param(f"layer_scale_{number}", nn.initializers.constant(1e-2), (WIDTH,))
            kept = jax.random.bernoulli(self.make_rng("dropout"), 1 - self.rate, (x.shape[0], 1, 1, 1))
            x = x + jnp.where(kept, y / (1 - self.rate), 0)
        return nn.Dense(CLASSES, name="head")(nn.LayerNorm()(x.mean((1, 2))))


def convnext(dtype: str) -> Problem:
    drawn = Drawn.of(dtype, 2)
    model, batches = ConvNeXt(), _batches(drawn)
    params = drawn.linen(model, batches[0]["image"])["params"]
    tx = optax.adamw(1e-3, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params))
    state = {"params": params, "opt": tx.init(params), "key": jax.random.PRNGKey(3), "step": np.int32(0)}

    def train_step(state: Any, batch: Any) -> Any:
        key = jax.random.fold_in(state["key"], state["step"])

        def loss_fn(params: Any) -> jax.Array:
            logits = model.apply({"params": params}, batch["image"], rngs={"dropout": key})
            return _cross_entropy(logits, batch["label"])

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "key": state["key"], "step": state["step"] + 1}, {"loss": loss}

    return Problem(train_step, state, batches)


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Dense(WIDTH, name="stem")(patches(images, 4))
        for number in range(2):
            y = nn.LayerNorm()(x).swapaxes(1, 2)
            y = nn.Dense(16, name=f"tokens_down_{number}")(nn.gelu(nn.Dense(32, name=f"tokens_up_{number}")(y)))
            x = x + y.swapaxes(1, 2)
            y = nn.Dense(4 * WIDTH, name=f"channels_up_{number}")(nn.LayerNorm()(x))
            x = x + nn.Dense(WIDTH, name=f"channels_down_{number}")(nn.gelu(y))
        return nn.Dense(CLASSES, name="head")(nn.LayerNorm()(x).mean(1))


def mlp_mixer(dtype: str) -> Problem:
    drawn = Drawn.of(dtype, 3)
    model, batches = Mixer(), _batches(drawn)
    state = TrainState.create(
        apply_fn=model.apply,
        params=drawn.linen(model, batches[0]["image"])["params"],
        tx=optax.adamw(1e-3, nesterov=True),
    )

    def train_step(state: Any, batch: Any) -> Any:
        # Mixup as big_vision has it: each example is mixed with its neighbour, and so are the labels.
        weight = jax.random.beta(jax.random.fold_in(jax.random.PRNGKey(0), state.step), 0.4, 0.4, dtype=dtype)
        mix = lambda x: weight * x + (1 - weight) * jnp.roll(x, 1, 0)
        images, labels = mix(batch["image"]), mix(jax.nn.one_hot(batch["label"], CLASSES, dtype=dtype))

        def loss_fn(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, images)
            return optax.sigmoid_binary_cross_entropy(logits, labels).sum(-1).mean()

        loss, grads = splitjax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, "gradient_norm": optax.global_norm(grads)}

    return Problem(train_step, state, batches)


def swin(dtype: str) -> Problem:
    """Attention in windows of 4x4 patches, every second layer shifted by half a window, with a bias by offset."""
    side, window, heads = 8, 4, 4
    drawn = Drawn.of(dtype, 4)
    where = np.stack(np.meshgrid(*[np.arange(window)] * 2, indexing="ij")).reshape(2, -1)
    offsets = where[:, :, None] - where[:, None] + window - 1
    offset_index = offsets[0] * (2 * window - 1) + offsets[1]  # [16, 16]
    layers = [
        transformer_layer(drawn, WIDTH) | {"offsets": drawn.normal((2 * window - 1) ** 2, heads, scale=0.1)}
        for _ in range(2)
    ]
    params = {"embed": drawn.dense(12, WIDTH), "layers": layers, "head": drawn.dense(WIDTH, CLASSES)}
    tx = optax.adamw(optax.linear_schedule(1e-3, 1e-4, 10))

    def windows(x: jax.Array) -> jax.Array:
        x = x.reshape(*x.shape[:-3], side // window, window, side // window, window, x.shape[-1])
        return x.swapaxes(-4, -3).reshape(*x.shape[:-5], -1, window * window, x.shape[-1])

    def image(x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], side // window, side // window, window, window, x.shape[-1])
        return x.swapaxes(2, 3).reshape(x.shape[0], side, side, x.shape[-1])

    # After a shift, patches meet in a window that are not neighbours: those must not attend to each other.
    regions = (np.arange(side) >= side - window).astype(int) + (np.arange(side) >= side - window // 2)
    regions = windows((3 * regions[:, None] + regions)[..., None])[..., 0]
    strange = np.where(regions[:, :, None] != regions[:, None], -100.0, 0.0).astype(dtype)[:, None]

    def forward(params: Any, images: jax.Array) -> jax.Array:
        x = apply_dense(params["embed"], patches(images, 2)).reshape(-1, side, side, WIDTH)
        for number, layer in enumerate(params["layers"]):
            shift = number % 2 * window // 2
            bias = layer["offsets"][offset_index].transpose(2, 0, 1)
            rolled = jnp.roll(x, (-shift, -shift), (1, 2)) if shift else x
            y = apply_transformer_layer(layer, windows(rolled), heads, bias + strange if shift else bias)
            x = jnp.roll(image(y), (shift, shift), (1, 2)) if shift else image(y)
        return apply_dense(params["head"], x.mean((1, 2)))

    def train_step(state: Any, batch: Any) -> Any:
        params, opt = state
        loss_fn = lambda params: _cross_entropy(forward(params, batch["image"]), batch["label"])
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), {"loss": loss}

    return Problem(train_step, (params, tx.init(params)), _batches(drawn))


class ResNet(nn.Module):
    """Two residual blocks and a dense head, normalised over groups of channels, or over the batch."""

    batch_norm: bool

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        def norm() -> Any:
            return nn.BatchNorm(not train, momentum=0.9) if self.batch_norm else nn.GroupNorm(8)

        x = nn.relu(norm()(nn.Conv(16, (3, 3), use_bias=False)(x)))
        for width, stride in ((16, 1), (32, 2)):
            y = nn.relu(norm()(nn.Conv(width, (3, 3), (stride, stride), use_bias=False)(x)))
            y = norm()(nn.Conv(width, (3, 3), use_bias=False)(y))
            if y.shape != x.shape:
                x = norm()(nn.Conv(width, (1, 1), (stride, stride), use_bias=False)(x))
            x = nn.relu(x + y)
        x = nn.relu(nn.Dense(64, name="hidden")(nn.avg_pool(x, (4, 4), (4, 4)).reshape(x.shape[0], -1)))
        return nn.Dense(CLASSES, name="head")(x)


def resnet_with_group_norm(dtype: str) -> Problem:
    drawn = Drawn.of(dtype, 5)
    model, batches = ResNet(batch_norm=False), _batches(drawn)
    params = drawn.linen(model, batches[0]["image"])["params"]
    tx = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.05, momentum=0.9, nesterov=True))

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return _cross_entropy(model.apply({"params": params}, batch["image"]), batch["label"])

        loss, grads = splitjax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    return Problem(train_step, {"params": params, "opt": tx.init(params)}, batches)


class BatchNormState(TrainState):
    batch_stats: Any


def resnet_with_batch_norm(dtype: str) -> Problem:
    drawn = Drawn.of(dtype, 6)
    model, batches = ResNet(batch_norm=True), _batches(drawn)
    variables = drawn.linen(model, batches[0]["image"])
    state = BatchNormState.create(apply_fn=model.apply, tx=optax.sgd(0.05, momentum=0.9), **variables)

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            logits, updated = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats}, batch["image"], mutable=["batch_stats"]
            )
            decay = 0.5 * sum((p**2).sum() for p in jax.tree.leaves(params) if p.ndim > 1)
            return _cross_entropy(logits, batch["label"]) + 1e-4 * decay, updated

        (loss, updated), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=updated["batch_stats"]), {"loss": loss}

    return Problem(train_step, state, batches)


class SqueezedBlock(nnx.Module):
    """An inverted residual with squeeze and excitation, as EfficientNet has it."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        inner = 2 * width
        self.expand = nnx.Conv(width, inner, (1, 1), use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(inner, rngs=rngs)
        self.depthwise = nnx.Conv(inner, inner, (3, 3), feature_group_count=inner, use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(inner, rngs=rngs)
        self.squeeze = nnx.Linear(inner, 16, rngs=rngs)
        self.excite = nnx.Linear(16, inner, rngs=rngs)
        self.project = nnx.Conv(inner, width, (1, 1), use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.silu(self.norm1(self.expand(x)))
        y = nnx.silu(self.norm2(self.depthwise(y)))
        gate = jax.nn.sigmoid(self.excite(nnx.silu(self.squeeze(y.mean((1, 2))))))
        return x + self.project(y * gate[:, None, None])


class EfficientNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, 16, (3, 3), strides=(2, 2), rngs=rngs)
        self.blocks = nnx.List([SqueezedBlock(16, rngs) for _ in range(2)])
        self.hidden = nnx.Linear(16, 64, rngs=rngs)
        self.head = nnx.Linear(64, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(nnx.silu(self.hidden(x.mean((1, 2)))))


def efficientnet(dtype: str) -> Problem:
    """Split into definition and states outside of the step, and merged inside, as NNX's guides do for jax.jit."""
    drawn = Drawn.of(dtype, 7)
    graphdef, params, stats = nnx.split(nnx.eval_shape(lambda: EfficientNet(nnx.Rngs(0))), nnx.Param, ...)
    params, stats = drawn.weights(params), drawn.weights(stats)
    tx = optax.rmsprop(1e-3, decay=0.9, momentum=0.9, eps=1e-3)

    def train_step(state: Any, batch: Any) -> Any:
        params, stats, opt = state

        def loss_fn(params: Any) -> Any:
            model = nnx.merge(graphdef, params, stats, copy=True)
            loss = _cross_entropy(model(batch["image"]), batch["label"])
            return loss, nnx.state(model, nnx.BatchStat)

        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), stats, opt), {"loss": loss}

    return Problem(train_step, (params, stats, tx.init(params)), _batches(drawn))


STEPS: tuple[ModernStep, ...] = (
    ModernStep("ViT with a class token", "ViT", vit_with_class_token, ("attention", "TrainState", "aux", "clip")),
    ModernStep(
        "ViT, scanned and rematerialised",
        "ViT",
        vit_scanned,
        ("splitjax gradient", "scan", "remat", "fused qkv", "lamb"),
    ),
    ModernStep("ConvNeXt", "ConvNeXt", convnext, ("depthwise convolution", "stochastic depth", "keys")),
    ModernStep(
        "MLP-Mixer with mixup",
        "MLP-Mixer",
        mlp_mixer,
        ("splitjax gradient", "transpose", "mixup", "nesterov", "TrainState"),
    ),
    ModernStep("Swin, shifted windows", "Swin", swin, ("table", "windows", "roll", "position bias", "attention")),
    ModernStep(
        "ResNet with group norm",
        "ResNet",
        resnet_with_group_norm,
        ("splitjax gradient", "convolution", "group norm", "nesterov"),
    ),
    ModernStep("ResNet with batch norm", "ResNet", resnet_with_batch_norm, ("convolution", "batch norm", "TrainState")),
    ModernStep("EfficientNet in NNX", "EfficientNet", efficientnet, ("NNX", "batch norm", "depthwise convolution")),
)
