"""Models of the sizes that people train, from splitjax's own, from `benchmarks.modern` and two that stand here: what
memory on TPUs is predicted of. Smaller ones live in a TPU's vector memory as a whole, and show nothing of its main one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import splitjax
from benchmarks.modern.models import Decoder, make_step, state_of
from benchmarks.modern.steps._parts import EncoderBlock, Perceptron, timestep_embedding
from benchmarks.modern.steps.diffusion import ResidualBlock
from benchmarks.planner.scanned import scanned_logits, scanned_params, state_init, token_step, trained
from splitjax.models import build
from splitjax.models import make_step as make_own_step

Made = tuple[Callable[..., Any], tuple[Any, Any]]  # a step, and the shapes of its state and of a batch

_CLICKS = {
    "field_sizes": (2_000_000, 500_000, 200_000, 50_000, 10_000, 10_000, 1_000, 1_000, 100, 100), "num_dense": 13,
    "embedding_width": 64,
}  # fmt: skip
OWN: Mapping[str, tuple[str, dict[str, Any], optax.GradientTransformation]] = {
    "vgg16_cifar": ("vgg16", {}, optax.sgd(0.1, momentum=0.9)),
    "vgg16_imagenet": ("vgg16", {"image_size": 224, "num_classes": 1000}, optax.sgd(0.1, momentum=0.9)),
    "resnet50": (
        "resnet50", {"image_size": 224, "num_classes": 1000, "stem": "imagenet"}, optax.sgd(0.1, momentum=0.9)
    ),
    "lstm": (
        "lstm", {"vocab_size": 800_000, "embedding_width": 512, "hidden_width": 2048, "negatives": 8192},
        optax.adagrad(0.1),
    ),
    "deepfm": ("deepfm", {**_CLICKS, "features": (1024, 512)}, optax.adagrad(0.1)),
    "gpt2_medium": (
        "transformer",
        {"vocab_size": 50_257, "max_len": 1024, "d_model": 1024, "num_heads": 16, "num_layers": 24, "tied": True},
        optax.adamw(3e-4),
    ),
}  # fmt: skip
_LLAMA: dict[str, Any] = {
    "vocab": 128_256, "kv_heads": 8, "head_dim": 128, "seq": 4096, "dtype": "bfloat16", "rotary": True,
}  # fmt: skip
DECODERS: Mapping[str, dict[str, Any]] = {
    "llama_8b": {**_LLAMA, "layers": 32, "width": 4096, "hidden": 14_336, "heads": 32},
    "llama_70b": {**_LLAMA, "layers": 80, "width": 8192, "hidden": 28_672, "heads": 64},
    "mixture": {**_LLAMA, "layers": 32, "width": 4096, "hidden": 14_336, "heads": 32, "vocab": 32_000, "experts": 8},
}  # fmt: skip


class ViT(nn.Module):
    """A vision Transformer (Dosovitskiy et al., arXiv 2010.11929) over patches of 16 x 16; ViT-L by its sizes."""

    width: int = 1024
    heads: int = 16
    layers: int = 24

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(self.width, (16, 16), strides=(16, 16), padding="VALID", name="embedding")(images)
        x = x.reshape(x.shape[0], -1, self.width)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], self.width))
        for number in range(self.layers):
            x = EncoderBlock(self.heads, name=f"block_{number}")(x)
        return nn.Dense(1000, name="head")(nn.LayerNorm(name="norm")(x).mean(1))


class UNet(nn.Module):
    """Three resolutions down and up, with attention over all positions at the lowest (Ho et al., arXiv 2006.11239)."""

    widths: tuple[int, ...] = (128, 256, 512)

    @nn.compact
    def __call__(self, x: jax.Array, t: jax.Array) -> jax.Array:
        channels = x.shape[-1]
        time = Perceptron((512, 512), name="time")(timestep_embedding(t, 128))
        x = nn.Conv(self.widths[0], (3, 3), name="stem")(x)
        passed = []
        for number, width in enumerate(self.widths[:-1]):
            x = ResidualBlock(width, name=f"down_{number}")(x, time)
            passed.append(x)
            x = nn.Conv(width, (3, 3), strides=(2, 2), name=f"half_{number}")(x)
        x = ResidualBlock(self.widths[-1], name="low_0")(x, time)
        b, h, w, c = x.shape
        y = nn.GroupNorm(8)(x).reshape(b, h * w, c)
        x = x + nn.MultiHeadDotProductAttention(num_heads=8, name="attention")(y, y).reshape(x.shape)
        x = ResidualBlock(self.widths[-1], name="low_1")(x, time)
        for number, width in reversed(list(enumerate(self.widths[:-1]))):
            b, h, w, c = x.shape
            x = nn.Conv(width, (3, 3), name=f"double_{number}")(jax.image.resize(x, (b, 2 * h, 2 * w, c), "nearest"))
            x = ResidualBlock(width, name=f"up_{number}")(jnp.concatenate([x, passed[number]], -1), time)
        return nn.Conv(channels, (3, 3), name="out")(nn.silu(nn.GroupNorm(8)(x)))


def made_large(name: str, batch: int) -> Made:
    """The step of a model by its name, and its arguments as shapes, for a batch of so many examples."""
    if name in OWN:
        kind, options, optimizer = OWN[name]
        spec = build(kind, **options)
        init, step, _ = make_own_step(spec, optimizer, value_and_grad=splitjax.value_and_grad)
        return step, (jax.eval_shape(init, jax.random.key(0)), spec.example(batch))
    if name in DECODERS:
        decoder = Decoder(examples=batch, **DECODERS[name])
        return make_step(decoder, splitjax.value_and_grad), (state_of(decoder), decoder.batch())
    return {"gpt2_xl": _gpt2_xl, "vit_large": _vit_large, "unet": _unet}[name](batch)


def _gpt2_xl(batch: int) -> Made:
    """GPT-2 XL, its blocks in a scan and rematerialised."""
    config = {"vocab": 50_257, "width": 1600, "heads": 25, "layers": 48, "length": 1024}
    logits_of = functools.partial(scanned_logits, heads=config["heads"], keeps="_remat")
    return token_step(logits_of, functools.partial(scanned_params, **config), batch, config["length"])


def _vit_large(batch: int) -> Made:
    model = ViT()

    def loss_of(params: Any, batch: Any) -> Any:
        logits = model.apply({"params": params}, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    shapes = {
        "image": jax.ShapeDtypeStruct((batch, 224, 224, 3), jnp.float32),
        "label": jax.ShapeDtypeStruct((batch,), jnp.int32),
    }
    return _linen_step(model, loss_of, shapes, ("image",))


def _unet(batch: int) -> Made:
    model = UNet()

    def loss_of(params: Any, batch: Any) -> Any:
        found = model.apply({"params": params}, batch["noisy"], batch["time"])
        return jnp.mean((found - batch["noise"]) ** 2)

    image = jax.ShapeDtypeStruct((batch, 64, 64, 3), jnp.float32)
    shapes = {"noisy": image, "noise": image, "time": jax.ShapeDtypeStruct((batch,), jnp.float32)}
    return _linen_step(model, loss_of, shapes, ("noisy", "time"))


def _linen_step(model: nn.Module, loss_of: Callable[..., Any], shapes: Any, read: tuple[str, ...]) -> Made:
    """A step of a Linen model. `shapes`: of a batch. `read`: its entries that the model is called with."""

    def init_params(key: Any) -> Any:
        values = [jnp.zeros((1, *shapes[name].shape[1:]), shapes[name].dtype) for name in read]
        return model.init(key, *values)["params"]

    return trained(loss_of), (jax.eval_shape(state_init(init_params), jax.random.key(0)), shapes)
