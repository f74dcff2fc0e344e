"""Defines ResNets of basic or bottleneck blocks, in Flax Linen and in Flax NNX.

A `ResNetConfig` goes in, a Flax model comes out; the models with batch norm whose training is best known.

Source: He et al. 2015, "Deep residual learning for image recognition" (arXiv 1512.03385), table 1 (ImageNet), figure 5
(bottleneck) and section 4.2 (the 3x3 stem for 32x32 images); shortcuts are option B, a projection where the shape
changes. A bottleneck has its stride in the 3x3 convolution, not in the first, as in most implementations since Goyal et
al. 2017 (arXiv 1706.02677, section 5.1). Both versions name their layers alike (`stem_conv`, `stage1_block1.conv1`,
`logits`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.typing import DTypeLike

from splitjax.models._common import (
    LINEAR_INIT,
    RESIDUAL_INIT,
    ModelError,
    SharedOptions,
    check_positive,
    check_rate,
    check_widths,
    image_inputs,
    scaled,
)

STEMS: tuple[str, ...] = ("cifar", "imagenet")
# Explicit, because "SAME" pads strided convolutions on one side only, unlike the original.
_PAD1 = ((1, 1), (1, 1))
_PAD3 = ((3, 3), (3, 3))
# Running statistics keep 0.9 of the old value a step, as in the original.
_MOMENTUM = 0.9


@dataclasses.dataclass(frozen=True)
class ResNetConfig(SharedOptions):
    """Holds the options of a ResNet.

    **Arguments:**

    - `stage_sizes`: blocks in each stage; `(2, 2, 2, 2)` is ResNet-18.
    - `bottleneck`: blocks of three convolutions, 1x1, 3x3, 1x1, the last four times as wide: with stages
      `(3, 4, 6, 3)` ResNet-50. Otherwise basic ones, of two 3x3 convolutions.
    - `num_classes`: width of the last layer.
    - `width`: multiplies the channels (64, 128, 256, 512) of the stages.
    - `stem`: `"cifar"`, one 3x3 convolution, or `"imagenet"`, a 7x7 one of stride 2 and a pooling.
    - `image_size`, `channels`: images are f32[B, image_size, image_size, channels].
    - `dropout`: rate before the last layer; the original has none.
    - `dtype`, `param_dtype`: of the computation, of the parameters.
    """

    stage_sizes: tuple[int, ...] = (2, 2, 2, 2)
    bottleneck: bool = False
    num_classes: int = 10
    width: float = 1.0
    stem: str = "cifar"
    image_size: int = 32
    channels: int = 3
    dropout: float = 0.0
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        place = "ResNetConfig"
        object.__setattr__(self, "stage_sizes", tuple(self.stage_sizes))
        if self.stem not in STEMS:
            raise ModelError(
                "no such ResNet stem",
                value=self.stem,
                place=f"{place}, option 'stem'",
                remedy=f"choose one of {', '.join(map(repr, STEMS))}",
            )
        check_positive(place, width=self.width)
        check_widths(
            place,
            stage_sizes=self.stage_sizes,
            num_classes=(self.num_classes,),
            image_size=(self.image_size,),
            channels=(self.channels,),
        )
        check_rate(place, self.dropout)

    @property
    def inputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """An image, f32[image_size, image_size, channels]."""
        return image_inputs(self.image_size, self.channels)

    @property
    def has_batch_stats(self) -> bool:
        """True: batch norm follows every convolution."""
        return True

    @property
    def blocks(self) -> tuple[tuple[str, int, int], ...]:
        """For each block in order: its name, its number of channels (a bottleneck puts out four times as many), its
        stride."""
        return tuple(
            (f"stage{stage}_block{block}", scaled(64 * 2 ** (stage - 1), self.width), 2 if block == 1 < stage else 1)
            for stage, size in enumerate(self.stage_sizes, start=1)
            for block in range(1, size + 1)
        )

    @property
    def stem_convolution(self) -> dict[str, Any]:
        """Kernel size, stride and padding of the first convolution."""
        if self.stem == "cifar":
            return {"kernel_size": (3, 3), "strides": (1, 1), "padding": _PAD1}
        return {"kernel_size": (7, 7), "strides": (2, 2), "padding": _PAD3}

    def convolutions(self, features: int, stride: int) -> tuple[tuple[int, dict[str, Any]], ...]:
        """Lists the convolutions of a block of `features` channels and a `stride`: (output channels, options) of each.

        The options are kernel size, stride and padding, as Flax's convolutions take them.
        """
        strides = (stride, stride)
        if self.bottleneck:
            pointwise = {"kernel_size": (1, 1)}
            return (
                (features, pointwise),
                (features, {"kernel_size": (3, 3), "strides": strides, "padding": _PAD1}),
                (4 * features, pointwise),
            )
        return (
            (features, {"kernel_size": (3, 3), "strides": strides, "padding": _PAD1}),
            (features, {"kernel_size": (3, 3), "padding": _PAD1}),
        )

    @property
    def conv_options(self) -> dict[str, Any]:
        """The options that all convolutions share."""
        # No biases: batch norm follows every convolution and would cancel them.
        return {"use_bias": False, "kernel_init": RESIDUAL_INIT, **self.dtypes}


def _pooled(x: jax.Array) -> jax.Array:
    """Pools `x` by the maximum of 3x3 windows of stride 2: [B, H, W, C] -> [B, H / 2, W / 2, C]."""
    return nn.max_pool(x, (3, 3), (2, 2), padding=_PAD1)  # pyright: ignore[reportArgumentType]  # Flax takes pairs too


class LinenBlock(nn.Module):
    """Adds two or three convolutions to a shortcut: [B, H, W, C] -> [B, H / stride, W / stride, outputs].

    There are `features` outputs, of a bottleneck four times as many.
    """

    config: ResNetConfig
    features: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        options = self.config.conv_options

        def norm(name: str) -> nn.BatchNorm:
            return nn.BatchNorm(use_running_average=not train, momentum=_MOMENTUM, name=name, **self.config.dtypes)

        y = x
        for number, (channels, shape) in enumerate(self.config.convolutions(self.features, self.stride), start=1):
            y = nn.relu(y) if number > 1 else y
            y = nn.Conv(channels, name=f"conv{number}", **shape, **options)(y)
            y = norm(f"norm{number}")(y)
        if x.shape != y.shape:
            x = nn.Conv(y.shape[-1], (1, 1), (self.stride, self.stride), name="shortcut_conv", **options)(x)
            x = norm("shortcut_norm")(x)
        return nn.relu(x + y)


class LinenResNet(nn.Module):
    """Classifies images, f32[B, S, S, C] -> [B, num_classes] logits in `config.dtype`; `train`: while it learns."""

    config: ResNetConfig

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        config = self.config
        stem = scaled(64, config.width)
        x = nn.Conv(stem, name="stem_conv", **config.stem_convolution, **config.conv_options)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=_MOMENTUM, name="stem_norm", **config.dtypes)(x)
        x = nn.relu(x)
        if config.stem == "imagenet":
            x = _pooled(x)
        for name, features, stride in config.blocks:
            x = LinenBlock(config, features, stride, name=name)(x, train=train)
        x = jnp.mean(x, axis=(1, 2))
        if config.dropout:
            x = nn.Dropout(config.dropout, deterministic=not train)(x)
        return nn.Dense(config.num_classes, kernel_init=LINEAR_INIT, name="logits", **config.dtypes)(x)


class NnxBlock(nnx.Module):
    """Adds two or three convolutions to a shortcut: [B, H, W, inputs] -> [B, H / stride, W / stride, outputs].

    There are `features` outputs, of a bottleneck four times as many.
    """

    def __init__(self, config: ResNetConfig, inputs: int, features: int, stride: int, *, rngs: nnx.Rngs) -> None:
        options = {"rngs": rngs, **config.conv_options}
        convolutions = config.convolutions(features, stride)
        self.depth: int = len(convolutions)
        self.outputs: int = convolutions[-1][0]
        channels = inputs
        for number, (outputs, shape) in enumerate(convolutions, start=1):
            setattr(self, f"conv{number}", nnx.Conv(channels, outputs, **shape, **options))
            setattr(self, f"norm{number}", nnx.BatchNorm(outputs, momentum=_MOMENTUM, rngs=rngs, **config.dtypes))
            channels = outputs
        self.projects: bool = inputs != self.outputs or stride != 1
        if self.projects:
            self.shortcut_conv: nnx.Conv = nnx.Conv(inputs, self.outputs, (1, 1), (stride, stride), **options)
            self.shortcut_norm: nnx.BatchNorm = nnx.BatchNorm(
                self.outputs, momentum=_MOMENTUM, rngs=rngs, **config.dtypes
            )

    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        y = x
        for number in range(1, self.depth + 1):
            y = nnx.relu(y) if number > 1 else y
            y = getattr(self, f"norm{number}")(getattr(self, f"conv{number}")(y), use_running_average=not train)
        if self.projects:
            x = self.shortcut_norm(self.shortcut_conv(x), use_running_average=not train)
        return nnx.relu(x + y)


class NnxResNet(nnx.Module):
    """Classifies images, f32[B, S, S, C] -> [B, num_classes] logits in `config.dtype`; `train`: while it learns."""

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        inputs = scaled(64, config.width)
        self.stem_conv: nnx.Conv = nnx.Conv(
            config.channels, inputs, rngs=rngs, **config.stem_convolution, **config.conv_options
        )
        self.stem_norm: nnx.BatchNorm = nnx.BatchNorm(inputs, momentum=_MOMENTUM, rngs=rngs, **config.dtypes)
        for name, features, stride in config.blocks:
            block = NnxBlock(config, inputs, features, stride, rngs=rngs)
            setattr(self, name, block)
            inputs = block.outputs
        if config.dropout:
            self.dropout: nnx.Dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.logits: nnx.Linear = nnx.Linear(
            inputs, config.num_classes, kernel_init=LINEAR_INIT, rngs=rngs, **config.dtypes
        )

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        x = nnx.relu(self.stem_norm(self.stem_conv(x), use_running_average=not train))
        if self.config.stem == "imagenet":
            x = _pooled(x)
        for name, _, _ in self.config.blocks:
            x = getattr(self, name)(x, train=train)
        x = jnp.mean(x, axis=(1, 2))
        if self.config.dropout:
            x = self.dropout(x, deterministic=not train)
        return self.logits(x)
