"""ResNet of basic blocks, in Flax Linen and in Flax NNX.

Source: He et al. 2015, "Deep residual learning for image recognition" (arXiv 1512.03385), table 1 (ImageNet) and
section 4.2 (the 3x3 stem for 32x32 images); shortcuts are option B, a projection where the shape changes. Both versions
name their layers alike (`stem_conv`, `stage1_block1.conv1`, `logits`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from splitjax.models._common import (
    LINEAR_INIT,
    RESIDUAL_INIT,
    ModelError,
    check_positive,
    check_rate,
    check_widths,
    scaled,
)

STEMS = ("cifar", "imagenet")
# Explicit, because "SAME" pads strided convolutions on one side only, unlike the original.
_PAD1 = ((1, 1), (1, 1))
_PAD3 = ((3, 3), (3, 3))
# Running statistics keep 0.9 of the old value a step, as in the original.
_MOMENTUM = 0.9


@dataclasses.dataclass(frozen=True)
class ResNetConfig:
    """The options of a ResNet.

    **Arguments:**

    - `stage_sizes`: basic blocks in each stage; `(2, 2, 2, 2)` is ResNet-18.
    - `num_classes`: width of the last layer.
    - `width`: multiplies the channels (64, 128, 256, 512) of the stages.
    - `stem`: `"cifar"`, one 3x3 convolution, or `"imagenet"`, a 7x7 one of stride 2 and a pooling.
    - `image_size`, `channels`: images are f32[B, image_size, image_size, channels].
    - `dropout`: rate before the last layer; the original has none.
    - `dtype`, `param_dtype`: of the computation, of the parameters.
    """

    stage_sizes: tuple[int, ...] = (2, 2, 2, 2)
    num_classes: int = 10
    width: float = 1.0
    stem: str = "cifar"
    image_size: int = 32
    channels: int = 3
    dropout: float = 0.0
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    def __post_init__(self):
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
    def blocks(self) -> tuple[tuple[str, int, int], ...]:
        """For each block in order: its name, its number of output channels, its stride."""
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

    @property
    def dtypes(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}

    @property
    def conv_options(self) -> dict[str, Any]:
        # No biases: batch norm follows every convolution and would cancel them.
        return {"use_bias": False, "kernel_init": RESIDUAL_INIT, **self.dtypes}


class LinenBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut: [B, H, W, C] -> [B, H / stride, W / stride, features]."""

    config: ResNetConfig
    features: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        options = self.config.conv_options
        strides = (self.stride, self.stride)

        def norm(name):
            return nn.BatchNorm(use_running_average=not train, momentum=_MOMENTUM, name=name, **self.config.dtypes)

        y = nn.Conv(self.features, (3, 3), strides, padding=_PAD1, name="conv1", **options)(x)
        y = nn.relu(norm("norm1")(y))
        y = nn.Conv(self.features, (3, 3), padding=_PAD1, name="conv2", **options)(y)
        y = norm("norm2")(y)
        if x.shape != y.shape:
            x = nn.Conv(self.features, (1, 1), strides, name="shortcut_conv", **options)(x)
            x = norm("shortcut_norm")(x)
        return nn.relu(x + y)


class LinenResNet(nn.Module):
    """f32[B, S, S, C] -> [B, num_classes] logits in `config.dtype`."""

    config: ResNetConfig

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        config = self.config
        stem = scaled(64, config.width)
        x = nn.Conv(stem, name="stem_conv", **config.stem_convolution, **config.conv_options)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=_MOMENTUM, name="stem_norm", **config.dtypes)(x)
        x = nn.relu(x)
        if config.stem == "imagenet":
            x = nn.max_pool(x, (3, 3), (2, 2), padding=_PAD1)
        for name, features, stride in config.blocks:
            x = LinenBlock(config, features, stride, name=name)(x, train=train)
        x = jnp.mean(x, axis=(1, 2))
        if config.dropout:
            x = nn.Dropout(config.dropout, deterministic=not train)(x)
        return nn.Dense(config.num_classes, kernel_init=LINEAR_INIT, name="logits", **config.dtypes)(x)


class NnxBlock(nnx.Module):
    """Two 3x3 convolutions beside a shortcut: [B, H, W, C] -> [B, H / stride, W / stride, features]."""

    def __init__(self, config: ResNetConfig, inputs: int, features: int, stride: int, *, rngs: nnx.Rngs):
        options = {"rngs": rngs, **config.conv_options}
        strides = (stride, stride)

        def norm():
            return nnx.BatchNorm(features, momentum=_MOMENTUM, rngs=rngs, **config.dtypes)

        self.conv1 = nnx.Conv(inputs, features, (3, 3), strides, padding=_PAD1, **options)
        self.norm1 = norm()
        self.conv2 = nnx.Conv(features, features, (3, 3), padding=_PAD1, **options)
        self.norm2 = norm()
        self.projects = inputs != features or stride != 1
        if self.projects:
            self.shortcut_conv = nnx.Conv(inputs, features, (1, 1), strides, **options)
            self.shortcut_norm = norm()

    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x), use_running_average=not train))
        y = self.norm2(self.conv2(y), use_running_average=not train)
        if self.projects:
            x = self.shortcut_norm(self.shortcut_conv(x), use_running_average=not train)
        return nnx.relu(x + y)


class NnxResNet(nnx.Module):
    """f32[B, S, S, C] -> [B, num_classes] logits in `config.dtype`."""

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs):
        self.config = config
        inputs = scaled(64, config.width)
        self.stem_conv = nnx.Conv(config.channels, inputs, rngs=rngs, **config.stem_convolution, **config.conv_options)
        self.stem_norm = nnx.BatchNorm(inputs, momentum=_MOMENTUM, rngs=rngs, **config.dtypes)
        for name, features, stride in config.blocks:
            setattr(self, name, NnxBlock(config, inputs, features, stride, rngs=rngs))
            inputs = features
        if config.dropout:
            self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.logits = nnx.Linear(inputs, config.num_classes, kernel_init=LINEAR_INIT, rngs=rngs, **config.dtypes)

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        x = nnx.relu(self.stem_norm(self.stem_conv(x), use_running_average=not train))
        if self.config.stem == "imagenet":
            x = nnx.max_pool(x, (3, 3), (2, 2), padding=_PAD1)
        for name, _, _ in self.config.blocks:
            x = getattr(self, name)(x, train=train)
        x = jnp.mean(x, axis=(1, 2))
        if self.config.dropout:
            x = self.dropout(x, deterministic=not train)
        return self.logits(x)
