"""Defines MobileNet, versions 2 and 3, in Flax Linen and in Flax NNX.

A `MobileNetConfig` goes in, a Flax model comes out: small models of depthwise convolutions, whose kernels have a group
a channel.

Sources: Sandler et al. 2018, "MobileNetV2: inverted residuals and linear bottlenecks" (arXiv 1801.04381), table 2;
Howard et al. 2019, "Searching for MobileNetV3" (arXiv 1905.02244), tables 1 (large) and 2 (small). Both libraries name
their layers alike (`stem_conv`, `stage2_block1.depthwise_conv`, `last_conv`, `logits`).
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
    RELU_INIT,
    RESIDUAL_INIT,
    ModelError,
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
    to_depth,
)


@dataclasses.dataclass(frozen=True)
class _Row:
    """Holds a row of the papers' tables: a block by its kernel size, the factor by which it expands the channels that
    reach it, its output channels, whether it has squeeze-and-excitation, its activation and its stride."""

    kernel: int
    expansion: float
    channels: int
    squeezes: bool
    activation: str
    stride: int = 1


def _rows(
    kernel: int, expansions: tuple[float, ...], channels: int, squeezes: bool, activation: str, stride: int
) -> tuple[_Row, ...]:
    """Returns the rows of a stage: as many blocks as `expansions`; the first has the `stride`, the others 1."""
    return tuple(
        _Row(kernel, expansion, channels, squeezes, activation, stride if index == 0 else 1)
        for index, expansion in enumerate(expansions)
    )


@dataclasses.dataclass(frozen=True)
class _Version:
    """Holds what the papers' tables say of a version.

    `last` is the number of channels of the last convolution, as a multiple of the channels of the last block; None:
    `head_features`, and no dense layer between pooling and logits. `activation` is that of the stem and the head.
    """

    stages: tuple[tuple[_Row, ...], ...]
    stem_channels: int
    last: float | None
    head_features: int
    activation: str
    squeeze_activation: str = "relu"
    gate: str = "hard_sigmoid"
    momentum: float = 0.9
    epsilon: float = 1e-5


VERSIONS: dict[str, _Version] = {
    "v2": _Version(
        (
            _rows(3, (1,), 16, False, "relu6", 1),
            _rows(3, (6,) * 2, 24, False, "relu6", 2),
            _rows(3, (6,) * 3, 32, False, "relu6", 2),
            _rows(3, (6,) * 4, 64, False, "relu6", 2),
            _rows(3, (6,) * 3, 96, False, "relu6", 1),
            _rows(3, (6,) * 3, 160, False, "relu6", 2),
            _rows(3, (6,), 320, False, "relu6", 1),
        ),
        32, None, 1280, "relu6",
    ),
    "v3_large": _Version(
        (
            _rows(3, (1,), 16, False, "relu", 1),
            _rows(3, (4, 3), 24, False, "relu", 2),
            _rows(5, (3, 3, 3), 40, True, "relu", 2),
            _rows(3, (6, 2.5, 2.3, 2.3), 80, False, "hard_swish", 2),
            _rows(3, (6, 6), 112, True, "hard_swish", 1),
            _rows(5, (6, 6, 6), 160, True, "hard_swish", 2),
        ),
        16, 6, 1280, "hard_swish", epsilon=1e-3, momentum=0.99,
    ),
    "v3_small": _Version(
        (
            _rows(3, (1,), 16, True, "relu", 2),
            _rows(3, (4.5, 11 / 3), 24, False, "relu", 2),
            _rows(5, (4, 6, 6), 40, True, "hard_swish", 2),
            _rows(5, (3, 3), 48, True, "hard_swish", 1),
            _rows(5, (6, 6, 6), 96, True, "hard_swish", 2),
        ),
        16, 6, 1024, "hard_swish", epsilon=1e-3, momentum=0.99,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class MobileNetConfig(SharedOptions):
    """Holds the options of a MobileNet.

    **Arguments:**

    - `version`: `"v2"`, `"v3_large"` or `"v3_small"`; the third has squeeze-and-excitation and hard-swish.
    - `num_classes`: width of the last layer.
    - `width`: multiplies the channels of every block (not the head), rounded to multiples of 8.
    - `depth`: multiplies the number of blocks of each stage, rounded up; the papers' is 1.
    - `head_features`: channels before the last layer; None for the papers', 1280 (`v3_small`: 1024).
    - `stem`: `"cifar"`, for 32x32 images: the first two strides of 2 are 1; `"imagenet"`, as in the papers.
    - `image_size`, `channels`: images are f32[B, image_size, image_size, channels].
    - `dropout`: rate before the last layer; the papers' is 0.2, the default is none.
    - `dtype`, `param_dtype`: of the computation, of the parameters.
    """

    version: str = "v2"
    num_classes: int = 10
    width: float = 1.0
    depth: float = 1.0
    head_features: int | None = None
    stem: str = "cifar"
    image_size: int = 32
    channels: int = 3
    dropout: float = 0.0
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        place = "MobileNetConfig"
        if self.version not in VERSIONS:
            raise ModelError(
                "no such version of MobileNet",
                value=self.version,
                place=f"{place}, option 'version'",
                remedy=f"choose one of {', '.join(map(repr, VERSIONS))}",
            )
        if self.head_features is None:
            object.__setattr__(self, "head_features", self.head_width)
        check_stem(place, self.stem)
        check_positive(place, width=self.width, depth=self.depth)
        check_widths(
            place,
            num_classes=(self.num_classes,),
            head_features=(self.head_width,),
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
    def table(self) -> _Version:
        """The version's rows in the papers' tables."""
        return VERSIONS[self.version]

    @property
    def head_width(self) -> int:
        """Channels before the last layer: `head_features`, or the papers'."""
        return self.table.head_features if self.head_features is None else self.head_features

    @property
    def stem_channels(self) -> int:
        """Output channels of the first convolution."""
        return divisible(self.table.stem_channels, self.width)

    @property
    def stem_convolution(self) -> dict[str, Any]:
        """Kernel size, stride and padding of the first convolution."""
        stride = 1 if self.stem == "cifar" else 2
        return {"kernel_size": (3, 3), "strides": (stride, stride), "padding": around(3)}

    @property
    def blocks(self) -> tuple[InvertedResidual, ...]:
        """All blocks in order."""
        table, blocks, inputs, strides = self.table, [], self.stem_channels, 0
        for stage, rows in enumerate(table.stages, start=1):
            for number, row in enumerate(to_depth(rows, self.depth), start=1):
                strides += row.stride > 1
                stride = 1 if self.stem == "cifar" and strides == 1 else row.stride
                expanded = inputs if row.expansion == 1 else divisible(inputs * row.expansion)
                block = InvertedResidual(
                    f"stage{stage}_block{number}", inputs, expanded, divisible(row.channels, self.width), row.kernel,
                    stride, divisible(expanded / 4) if row.squeezes else 0, row.activation, table.squeeze_activation,
                    table.gate,
                    table.momentum, table.epsilon, dtype=self.dtype, param_dtype=self.param_dtype,
                )  # fmt: skip
                blocks.append(block)
                inputs = block.outputs
        return tuple(blocks)

    @property
    def last_channels(self) -> int:
        """Output channels of the last convolution, which is 1x1."""
        return self.head_width if self.table.last is None else divisible(self.blocks[-1].outputs * self.table.last)

    @property
    def conv_options(self) -> dict[str, Any]:
        """The options that the convolutions outside of blocks share."""
        # No biases: batch norm follows every convolution and would cancel them.
        return {"use_bias": False, "kernel_init": RESIDUAL_INIT, **self.dtypes}

    @property
    def norm_options(self) -> dict[str, Any]:
        """The options of the batch norms outside of blocks."""
        return {"momentum": self.table.momentum, "epsilon": self.table.epsilon, **self.dtypes}


class LinenMobileNet(nn.Module):
    """Classifies images, f32[B, S, S, C] -> [B, num_classes] logits in `config.dtype`; `train`: while it learns."""

    config: MobileNetConfig

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        config = self.config
        activation = getattr(jax.nn, config.table.activation)

        def norm(name: str, x: jax.Array) -> jax.Array:
            return nn.BatchNorm(use_running_average=not train, name=name, **config.norm_options)(x)

        x = nn.Conv(config.stem_channels, name="stem_conv", **config.stem_convolution, **config.conv_options)(x)
        x = activation(norm("stem_norm", x))
        for block in config.blocks:
            x = LinenInvertedResidual(block, name=block.name)(x, train=train)
        x = nn.Conv(config.last_channels, (1, 1), name="last_conv", **config.conv_options)(x)
        x = jnp.mean(activation(norm("last_norm", x)), axis=(1, 2))
        if config.table.last is not None:
            x = activation(nn.Dense(config.head_width, kernel_init=RELU_INIT, name="dense", **config.dtypes)(x))
        if config.dropout:
            x = nn.Dropout(config.dropout, deterministic=not train)(x)
        return nn.Dense(config.num_classes, kernel_init=LINEAR_INIT, name="logits", **config.dtypes)(x)


class NnxMobileNet(nnx.Module):
    """Classifies images, f32[B, S, S, C] -> [B, num_classes] logits in `config.dtype`; `train`: while it learns."""

    def __init__(self, config: MobileNetConfig, *, rngs: nnx.Rngs) -> None:
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
        if config.table.last is not None:
            self.dense: nnx.Linear = nnx.Linear(
                config.last_channels, config.head_width, kernel_init=RELU_INIT, rngs=rngs, **config.dtypes
            )
        if config.dropout:
            self.dropout: nnx.Dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.logits: nnx.Linear = nnx.Linear(
            config.head_width, config.num_classes, kernel_init=LINEAR_INIT, rngs=rngs, **config.dtypes
        )

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        config, activation = self.config, getattr(jax.nn, self.config.table.activation)
        x = activation(self.stem_norm(self.stem_conv(x), use_running_average=not train))
        for block in config.blocks:
            x = getattr(self, block.name)(x, train=train)
        x = jnp.mean(activation(self.last_norm(self.last_conv(x), use_running_average=not train)), axis=(1, 2))
        if config.table.last is not None:
            x = activation(self.dense(x))
        if config.dropout:
            x = self.dropout(x, deterministic=not train)
        return self.logits(x)
