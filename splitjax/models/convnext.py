"""Defines ConvNeXt in Flax Linen and in Flax NNX.

A `ConvNeXtConfig` goes in, a Flax model comes out: a convolutional network that normalises as Transformers do, by layer
norm, so that its examples do not meet in batch statistics.

Source: Liu et al. 2022, "A ConvNet for the 2020s" (arXiv 2201.03545), figure 4 (the block), table 9 and section 3 (the
stem and the downsampling layers); layer scale is Touvron et al. 2021 (arXiv 2103.17239), stochastic depth Huang et al.
2016 (arXiv 1603.09382). The 1x1 convolutions of a block are dense layers over the channels, as in the authors' code.
Both libraries name their layers alike (`stem_conv`, `stage1_block1.depthwise_conv`, `stage2_downsample.conv`,
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
    ModelError,
    SharedOptions,
    check_positive,
    check_rate,
    check_widths,
    image_inputs,
    scaled,
)
from splitjax.models._inverted_residual import around, check_stem

_INIT = jax.nn.initializers.truncated_normal(0.02)  # of all convolutions and dense layers, section A.1
_KERNEL = 7
_EXPANSION = 4


@dataclasses.dataclass(frozen=True)
class ConvNeXtConfig(SharedOptions):
    """Holds the options of a ConvNeXt.

    **Arguments:**

    - `stage_sizes`: blocks in each stage; `(3, 3, 9, 3)` is ConvNeXt-T.
    - `stage_channels`: channels of each stage; those of ConvNeXt-T are `(96, 192, 384, 768)`.
    - `num_classes`: width of the last layer.
    - `width`: multiplies the channels of every stage.
    - `stem`: `"cifar"`, for 32x32 images: patches of 2x2 pixels; `"imagenet"`, of 4x4 as in the paper.
    - `image_size`, `channels`: images are f32[B, image_size, image_size, channels].
    - `layer_scale`: first value of the weights of a block's channels before it is added.
    - `dropout`: rate before the last layer; the paper has none.
    - `drop_path`: stochastic depth, the probability that an example skips a block, rising from 0 at the first block to
      this at the last; the paper's is 0.1 for ConvNeXt-T, the default is none.
    - `dtype`, `param_dtype`: of the computation, of the parameters.
    """

    stage_sizes: tuple[int, ...] = (3, 3, 9, 3)
    stage_channels: tuple[int, ...] = (96, 192, 384, 768)
    num_classes: int = 10
    width: float = 1.0
    stem: str = "cifar"
    image_size: int = 32
    channels: int = 3
    layer_scale: float = 1e-6
    dropout: float = 0.0
    drop_path: float = 0.0
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        place = "ConvNeXtConfig"
        for name in ("stage_sizes", "stage_channels"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_stem(place, self.stem)
        check_positive(place, width=self.width, layer_scale=self.layer_scale)
        check_widths(
            place,
            stage_sizes=self.stage_sizes,
            stage_channels=self.stage_channels,
            num_classes=(self.num_classes,),
            image_size=(self.image_size,),
            channels=(self.channels,),
        )
        if len(self.stage_sizes) != len(self.stage_channels):
            raise ModelError(
                "stage_sizes and stage_channels must be of the same length",
                value=(self.stage_sizes, self.stage_channels),
                place=f"{place}, option 'stage_sizes'",
                remedy="name the channels of every stage",
            )
        check_rate(place, self.dropout)
        check_rate(place, self.drop_path, "drop_path")

    @property
    def inputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """An image, f32[image_size, image_size, channels]."""
        return image_inputs(self.image_size, self.channels)

    @property
    def has_dropout(self) -> bool:
        """True with dropout or stochastic depth."""
        return self.dropout > 0 or self.drop_path > 0

    @property
    def stages(self) -> tuple[tuple[int, tuple[tuple[str, float], ...]], ...]:
        """Channels of each stage, with (name, rate of stochastic depth) of each of its blocks."""
        total, index, stages = sum(self.stage_sizes), 0, []
        for stage, (size, channels) in enumerate(zip(self.stage_sizes, self.stage_channels, strict=True), start=1):
            rates = [self.drop_path * (index + number) / max(1, total - 1) for number in range(size)]
            blocks = tuple((f"stage{stage}_block{number}", rate) for number, rate in enumerate(rates, start=1))
            stages.append((scaled(channels, self.width), blocks))
            index += size
        return tuple(stages)

    @property
    def stem_convolution(self) -> dict[str, Any]:
        """Kernel size and stride of the first convolution, whose windows do not overlap."""
        return _patches(2 if self.stem == "cifar" else 4)

    @property
    def options(self) -> dict[str, Any]:
        """The options that all convolutions and dense layers share."""
        return {"kernel_init": _INIT, **self.dtypes}


def _patches(size: int) -> dict[str, Any]:
    return {"kernel_size": (size, size), "strides": (size, size), "padding": "VALID"}


def _depthwise(channels: int) -> dict[str, Any]:
    return {"kernel_size": (_KERNEL, _KERNEL), "padding": around(_KERNEL), "feature_group_count": channels}


class LinenConvNeXtBlock(nn.Module):
    """Adds a 7x7 depthwise convolution and two dense layers, scaled, to their input: [B, H, W, C] -> [B, H, W, C].

    `drop_path` is the probability that an example skips the block while it is trained (`train`).
    """

    config: ConvNeXtConfig
    drop_path: float

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        config, features = self.config, x.shape[-1]
        y = nn.Conv(features, name="depthwise_conv", **_depthwise(features), **config.options)(x)
        y = nn.LayerNorm(name="norm", **config.dtypes)(y)
        y = jax.nn.gelu(nn.Dense(_EXPANSION * features, name="up", **config.options)(y), approximate=False)
        y = nn.Dense(features, name="down", **config.options)(y)
        scale = self.param(
            "layer_scale", jax.nn.initializers.constant(config.layer_scale), (features,), config.param_dtype
        )
        y = y * scale.astype(config.dtype)
        if self.drop_path:
            y = nn.Dropout(self.drop_path, broadcast_dims=(1, 2, 3), deterministic=not train)(y)
        return x + y


class LinenDownsample(nn.Module):
    """Normalises, then convolves 2x2 windows that do not overlap: [B, H, W, C] -> [B, H / 2, W / 2, features]."""

    config: ConvNeXtConfig
    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.LayerNorm(name="norm", **self.config.dtypes)(x)
        return nn.Conv(self.features, name="conv", **_patches(2), **self.config.options)(x)


class LinenConvNeXt(nn.Module):
    """Classifies images, f32[B, S, S, C] -> [B, num_classes] logits in `config.dtype`; `train`: while it learns."""

    config: ConvNeXtConfig

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        config = self.config
        for stage, (features, blocks) in enumerate(config.stages, start=1):
            if stage == 1:
                x = nn.Conv(features, name="stem_conv", **config.stem_convolution, **config.options)(x)
                x = nn.LayerNorm(name="stem_norm", **config.dtypes)(x)
            else:
                x = LinenDownsample(config, features, name=f"stage{stage}_downsample")(x)
            for name, drop_path in blocks:
                x = LinenConvNeXtBlock(config, drop_path, name=name)(x, train=train)
        x = nn.LayerNorm(name="final_norm", **config.dtypes)(jnp.mean(x, axis=(1, 2)))
        if config.dropout:
            x = nn.Dropout(config.dropout, deterministic=not train)(x)
        return nn.Dense(config.num_classes, name="logits", **config.options)(x)


class NnxConvNeXtBlock(nnx.Module):
    """Adds a 7x7 depthwise convolution and two dense layers, scaled, to their input: [B, H, W, C] -> [B, H, W, C].

    `drop_path` is the probability that an example skips the block while it is trained (`train`).
    """

    def __init__(self, config: ConvNeXtConfig, features: int, drop_path: float, *, rngs: nnx.Rngs) -> None:
        options = {"rngs": rngs, **config.options}
        self.depthwise_conv: nnx.Conv = nnx.Conv(features, features, **_depthwise(features), **options)
        self.norm: nnx.LayerNorm = nnx.LayerNorm(features, rngs=rngs, **config.dtypes)
        self.up: nnx.Linear = nnx.Linear(features, _EXPANSION * features, **options)
        self.down: nnx.Linear = nnx.Linear(_EXPANSION * features, features, **options)
        self.layer_scale: nnx.Param[jax.Array] = nnx.Param(
            jnp.full((features,), config.layer_scale, config.param_dtype)
        )
        self.dtype: DTypeLike = config.dtype
        self.drops: bool = drop_path > 0
        if self.drops:
            self.drop_path: nnx.Dropout = nnx.Dropout(drop_path, broadcast_dims=(1, 2, 3), rngs=rngs)

    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        y = jax.nn.gelu(self.up(self.norm(self.depthwise_conv(x))), approximate=False)
        y = self.down(y) * self.layer_scale.astype(self.dtype)
        return x + (self.drop_path(y, deterministic=not train) if self.drops else y)


class NnxDownsample(nnx.Module):
    """Normalises, then convolves 2x2 windows that do not overlap: [B, H, W, C] -> [B, H / 2, W / 2, features]."""

    def __init__(self, config: ConvNeXtConfig, inputs: int, features: int, *, rngs: nnx.Rngs) -> None:
        self.norm: nnx.LayerNorm = nnx.LayerNorm(inputs, rngs=rngs, **config.dtypes)
        self.conv: nnx.Conv = nnx.Conv(inputs, features, rngs=rngs, **_patches(2), **config.options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.conv(self.norm(x))


class NnxConvNeXt(nnx.Module):
    """Classifies images, f32[B, S, S, C] -> [B, num_classes] logits in `config.dtype`; `train`: while it learns."""

    def __init__(self, config: ConvNeXtConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        inputs = config.stages[0][0]
        self.stem_conv: nnx.Conv = nnx.Conv(
            config.channels, inputs, rngs=rngs, **config.stem_convolution, **config.options
        )
        self.stem_norm: nnx.LayerNorm = nnx.LayerNorm(inputs, rngs=rngs, **config.dtypes)
        for stage, (features, blocks) in enumerate(config.stages, start=1):
            if stage > 1:
                setattr(self, f"stage{stage}_downsample", NnxDownsample(config, inputs, features, rngs=rngs))
            for name, drop_path in blocks:
                setattr(self, name, NnxConvNeXtBlock(config, features, drop_path, rngs=rngs))
            inputs = features
        self.final_norm: nnx.LayerNorm = nnx.LayerNorm(inputs, rngs=rngs, **config.dtypes)
        if config.dropout:
            self.dropout: nnx.Dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.logits: nnx.Linear = nnx.Linear(inputs, config.num_classes, rngs=rngs, **config.options)

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        x = self.stem_norm(self.stem_conv(x))
        for stage, (_, blocks) in enumerate(self.config.stages, start=1):
            if stage > 1:
                x = getattr(self, f"stage{stage}_downsample")(x)
            for name, _ in blocks:
                x = getattr(self, name)(x, train=train)
        x = self.final_norm(jnp.mean(x, axis=(1, 2)))
        if self.config.dropout:
            x = self.dropout(x, deterministic=not train)
        return self.logits(x)
