"""Defines EfficientNet in Flax Linen and in Flax NNX.

An `EfficientNetConfig` goes in, a Flax model comes out: inverted residual blocks with squeeze-and-excitation, scaled in
width and depth together.

Source: Tan and Le 2019, "EfficientNet: rethinking model scaling for convolutional neural networks" (arXiv 1905.11946),
table 1 (B0) and section 5.2 (batch norm, SiLU, dropout, stochastic depth). The larger ones are B0 with its compound
scaling: B1 is `depth=1.1`, B2 is `width=1.1, depth=1.2`, and so on, each with larger images. Both libraries name their
layers alike (`stem_conv`, `stage2_block1.depthwise_conv`, `last_conv`, `logits`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.typing import DTypeLike

from splitjax.models._common import (
    LINEAR_INIT,
    RESIDUAL_INIT,
    SharedOptions,
    check_positive,
    check_rate,
    check_widths,
    image_inputs,
)
from splitjax.models._inverted_residual import (
    InvertedResidual,
    LinenInvertedResidual,
    NnxInvertedResidual,
    around,
    check_stem,
    divisible,
)

# Of each stage: its kernel, its expansion, its channels, its number of blocks, the stride of its first.
STAGES: tuple[tuple[int, int, int, int, int], ...] = (
    (3, 1, 16, 1, 1),
    (3, 6, 24, 2, 2),
    (5, 6, 40, 2, 2),
    (3, 6, 80, 3, 2),
    (5, 6, 112, 3, 1),
    (5, 6, 192, 4, 2),
    (3, 6, 320, 1, 1),
)
_FIRST_STRIDED_STAGE = 2
_STEM_CHANNELS, _LAST_CHANNELS = 32, 1280
_NORM: dict[str, Any] = {"momentum": 0.99, "epsilon": 1e-3}


@dataclasses.dataclass(frozen=True)
class EfficientNetConfig(SharedOptions):
    """Holds the options of an EfficientNet.

    **Arguments:**

    - `num_classes`: width of the last layer.
    - `width`: multiplies the channels of every convolution, rounded to multiples of 8.
    - `depth`: multiplies the number of blocks of each stage, rounded up.
    - `stem`: `"cifar"`, for 32x32 images: the first two strides of 2 are 1; `"imagenet"`, as in the paper.
    - `image_size`, `channels`: images are f32[B, image_size, image_size, channels].
    - `dropout`: rate before the last layer; the paper's is 0.2 for B0, the default is none.
    - `drop_path`: stochastic depth, the probability that an example skips a block that has a shortcut, rising from 0 at
      the first block; the paper's is 0.2, the default is none.
    - `dtype`, `param_dtype`: of the computation, of the parameters.
    """

    num_classes: int = 10
    width: float = 1.0
    depth: float = 1.0
    stem: str = "cifar"
    image_size: int = 32
    channels: int = 3
    dropout: float = 0.0
    drop_path: float = 0.0
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        place = "EfficientNetConfig"
        check_stem(place, self.stem)
        check_positive(place, width=self.width, depth=self.depth)
        check_widths(place, num_classes=(self.num_classes,), image_size=(self.image_size,), channels=(self.channels,))
        check_rate(place, self.dropout)
        check_rate(place, self.drop_path, "drop_path")

    @property
    def inputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """An image, f32[image_size, image_size, channels]."""
        return image_inputs(self.image_size, self.channels)

    @property
    def has_batch_stats(self) -> bool:
        """True: batch norm follows every convolution."""
        return True

    @property
    def has_dropout(self) -> bool:
        """True with dropout or stochastic depth."""
        return self.dropout > 0 or self.drop_path > 0

    @property
    def stem_channels(self) -> int:
        """Output channels of the first convolution."""
        return divisible(_STEM_CHANNELS, self.width)

    @property
    def last_channels(self) -> int:
        """Output channels of the last convolution, which is 1x1."""
        return divisible(_LAST_CHANNELS, self.width)

    @property
    def stem_convolution(self) -> dict[str, Any]:
        """Kernel size, stride and padding of the first convolution."""
        stride = 1 if self.stem == "cifar" else 2
        return {"kernel_size": (3, 3), "strides": (stride, stride), "padding": around(3)}

    @property
    def blocks(self) -> tuple[InvertedResidual, ...]:
        """All blocks in order."""
        blocks, inputs = [], self.stem_channels
        for stage, (kernel, expansion, channels, count, stride) in enumerate(STAGES, start=1):
            outputs = divisible(channels, self.width)
            stride = 1 if self.stem == "cifar" and stage == _FIRST_STRIDED_STAGE else stride
            for number in range(1, math.ceil(self.depth * count) + 1):
                blocks.append(InvertedResidual(
                    f"stage{stage}_block{number}", inputs, expansion * inputs, outputs, kernel,
                    stride if number == 1 else 1,
                    max(1, inputs // 4), "silu", "silu", "sigmoid", **_NORM, **self.dtypes,
                ))  # fmt: skip
                inputs = outputs
        rates = [self.drop_path * index / len(blocks) for index in range(len(blocks))]
        return tuple(dataclasses.replace(block, drop_path=rate) for block, rate in zip(blocks, rates, strict=True))

    @property
    def conv_options(self) -> dict[str, Any]:
        """The options that the convolutions outside of blocks share."""
        # No biases: batch norm follows every convolution and would cancel them.
        return {"use_bias": False, "kernel_init": RESIDUAL_INIT, **self.dtypes}

    @property
    def norm_options(self) -> dict[str, Any]:
        """The options of every batch norm."""
        return {**_NORM, **self.dtypes}


class LinenEfficientNet(nn.Module):
    """Classifies images, f32[B, S, S, C] -> [B, num_classes] logits in `config.dtype`; `train`: while it learns."""

    config: EfficientNetConfig

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        config = self.config

        def norm(name: str, x: jax.Array) -> jax.Array:
            return nn.BatchNorm(use_running_average=not train, name=name, **config.norm_options)(x)

        x = nn.Conv(config.stem_channels, name="stem_conv", **config.stem_convolution, **config.conv_options)(x)
        x = jax.nn.silu(norm("stem_norm", x))
        for block in config.blocks:
            x = LinenInvertedResidual(block, name=block.name)(x, train=train)
        x = nn.Conv(config.last_channels, (1, 1), name="last_conv", **config.conv_options)(x)
        x = jnp.mean(jax.nn.silu(norm("last_norm", x)), axis=(1, 2))
        if config.dropout:
            x = nn.Dropout(config.dropout, deterministic=not train)(x)
        return nn.Dense(config.num_classes, kernel_init=LINEAR_INIT, name="logits", **config.dtypes)(x)


class NnxEfficientNet(nnx.Module):
    """Classifies images, f32[B, S, S, C] -> [B, num_classes] logits in `config.dtype`; `train`: while it learns."""

    def __init__(self, config: EfficientNetConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        blocks = config.blocks
        self.stem_conv: nnx.Conv = nnx.Conv(
            config.channels, config.stem_channels, rngs=rngs, **config.stem_convolution, **config.conv_options
        )
        self.stem_norm: nnx.BatchNorm = nnx.BatchNorm(config.stem_channels, rngs=rngs, **config.norm_options)
        for block in blocks:
            setattr(self, block.name, NnxInvertedResidual(block, rngs=rngs))
        self.last_conv: nnx.Conv = nnx.Conv(
            blocks[-1].outputs, config.last_channels, (1, 1), rngs=rngs, **config.conv_options
        )
        self.last_norm: nnx.BatchNorm = nnx.BatchNorm(config.last_channels, rngs=rngs, **config.norm_options)
        if config.dropout:
            self.dropout: nnx.Dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.logits: nnx.Linear = nnx.Linear(
            config.last_channels, config.num_classes, kernel_init=LINEAR_INIT, rngs=rngs, **config.dtypes
        )

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        x = jax.nn.silu(self.stem_norm(self.stem_conv(x), use_running_average=not train))
        for block in self.config.blocks:
            x = getattr(self, block.name)(x, train=train)
        x = jnp.mean(jax.nn.silu(self.last_norm(self.last_conv(x), use_running_average=not train)), axis=(1, 2))
        if self.config.dropout:
            x = self.dropout(x, deterministic=not train)
        return self.logits(x)
