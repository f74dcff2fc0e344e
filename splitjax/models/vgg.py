"""Defines VGG: stages of 3x3 convolutions and a large dense head, in Flax Linen and in Flax NNX.

A `VGGConfig` goes in, a Flax model comes out. Its head holds most of the parameters, as in AlexNet, which makes it the
classic case for sharding some layers and not others.

Source: Simonyan and Zisserman 2014, "Very deep convolutional networks for large-scale image recognition"
(arXiv 1409.1556), table 1, columns A (VGG-11) and D (VGG-16). Both versions name their layers alike (`conv1_1` to
`conv5_3`, `dense1`, `dense2`, `logits`), so that a parameter has the same path and shape in both.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.typing import DTypeLike

from splitjax.models._common import (
    LINEAR_INIT,
    RELU_INIT,
    ModelError,
    SharedOptions,
    as_widths,
    check_positive,
    check_rate,
    check_widths,
    halved,
    image_inputs,
    scaled,
)

# Number of convolutions in each of the five stages, by the paper's configuration letter.
CONFIGURATIONS: dict[str, tuple[int, ...]] = {"A": (1, 1, 2, 2, 2), "D": (2, 2, 3, 3, 3)}
STAGE_CHANNELS: tuple[int, ...] = (64, 128, 256, 512, 512)


@dataclasses.dataclass(frozen=True)
class VGGConfig(SharedOptions):
    """Holds the options of a VGG.

    **Arguments:**

    - `letter`: configuration letter of the paper's table 1: `"A"` (11 weight layers) or `"D"` (16).
    - `num_classes`: width of the last layer.
    - `width`: multiplies the channels of every convolution (not the head).
    - `head_features`: widths of the dense layers before the last; one number means two layers of it.
    - `image_size`, `channels`: images are f32[B, image_size, image_size, channels]. Five poolings halve the image:
      32 gives the head 512 inputs (CIFAR-10), 224 gives it 25,088 (ImageNet), at `width=1`.
    - `batch_norm`: normalise after each convolution (which then has no bias).
    - `dropout`: rate after each hidden dense layer; the paper's is 0.5, the default is none.
    - `dtype`, `param_dtype`: of the computation, of the parameters.
    """

    letter: str = "D"
    num_classes: int = 10
    width: float = 1.0
    head_features: int | tuple[int, ...] = (4096, 4096)
    image_size: int = 32
    channels: int = 3
    batch_norm: bool = False
    dropout: float = 0.0
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        place = "VGGConfig"
        if self.letter not in CONFIGURATIONS:
            raise ModelError(
                "no such VGG configuration",
                value=self.letter,
                place=f"{place}, option 'letter'",
                remedy=f"choose one of {', '.join(map(repr, CONFIGURATIONS))}",
            )
        object.__setattr__(self, "head_features", self.head_widths)
        check_positive(place, width=self.width)
        check_widths(place, head_features=self.head_widths, num_classes=(self.num_classes,), channels=(self.channels,))
        check_rate(place, self.dropout)
        if self.image_size < 32:
            raise ModelError(
                "five poolings leave nothing of an image smaller than 32",
                value=self.image_size,
                place=f"{place}, option 'image_size'",
                remedy="enlarge the images to 32 (splitjax.data.load_digits does) or use the model 'mlp'",
            )

    @property
    def inputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """An image, f32[image_size, image_size, channels]."""
        return image_inputs(self.image_size, self.channels)

    @property
    def has_batch_stats(self) -> bool:
        """True with `batch_norm`."""
        return self.batch_norm

    @property
    def head_widths(self) -> tuple[int, ...]:
        """Widths of the dense layers before the last: `head_features` as a tuple."""
        return as_widths(self.head_features, 2)

    @property
    def convolutions(self) -> tuple[tuple[tuple[str, int], ...], ...]:
        """For each stage, for each convolution: its suffix (`"1_1"`) and its number of output channels."""
        counts = CONFIGURATIONS[self.letter]
        return tuple(
            tuple((f"{stage}_{layer}", scaled(channels, self.width)) for layer in range(1, count + 1))
            for stage, (count, channels) in enumerate(zip(counts, STAGE_CHANNELS, strict=True), start=1)
        )

    @property
    def head_inputs(self) -> int:
        """Values per example that reach the first dense layer."""
        return (self.image_size // 2 ** len(STAGE_CHANNELS)) ** 2 * self.convolutions[-1][-1][1]


class LinenVGG(nn.Module):
    """Classifies images, f32[B, S, S, C] -> [B, num_classes] logits in `config.dtype`; `train`: while it learns."""

    config: VGGConfig

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        config = self.config
        for stage in config.convolutions:
            for suffix, channels in stage:
                # A bias before batch norm is cancelled by it: its true gradient is zero, and adaptive optimizers would
                # amplify the rounding noise left in its place.
                x = nn.Conv(
                    channels,
                    (3, 3),
                    use_bias=not config.batch_norm,
                    kernel_init=RELU_INIT,
                    name=f"conv{suffix}",
                    **config.dtypes,
                )(x)
                if config.batch_norm:
                    norm = nn.BatchNorm(
                        use_running_average=not train, momentum=0.9, name=f"norm{suffix}", **config.dtypes
                    )
                    x = norm(x)
                x = nn.relu(x)
            x = halved(x)
        x = x.reshape((x.shape[0], -1))
        for index, features in enumerate(config.head_widths, start=1):
            x = nn.relu(nn.Dense(features, kernel_init=RELU_INIT, name=f"dense{index}", **config.dtypes)(x))
            if config.dropout:
                x = nn.Dropout(config.dropout, deterministic=not train)(x)
        return nn.Dense(config.num_classes, kernel_init=LINEAR_INIT, name="logits", **config.dtypes)(x)


class NnxVGG(nnx.Module):
    """Classifies images, f32[B, S, S, C] -> [B, num_classes] logits in `config.dtype`; `train`: while it learns."""

    def __init__(self, config: VGGConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        inputs = config.channels
        for stage in config.convolutions:
            for suffix, channels in stage:
                conv = nnx.Conv(
                    inputs,
                    channels,
                    (3, 3),
                    use_bias=not config.batch_norm,  # see LinenVGG
                    kernel_init=RELU_INIT,
                    rngs=rngs,
                    **config.dtypes,
                )
                setattr(self, f"conv{suffix}", conv)
                if config.batch_norm:
                    setattr(self, f"norm{suffix}", nnx.BatchNorm(channels, momentum=0.9, rngs=rngs, **config.dtypes))
                inputs = channels
        inputs = config.head_inputs
        for index, features in enumerate(config.head_widths, start=1):
            dense = nnx.Linear(inputs, features, kernel_init=RELU_INIT, rngs=rngs, **config.dtypes)
            setattr(self, f"dense{index}", dense)
            if config.dropout:
                setattr(self, f"dropout{index}", nnx.Dropout(config.dropout, rngs=rngs))
            inputs = features
        self.logits: nnx.Linear = nnx.Linear(
            inputs, config.num_classes, kernel_init=LINEAR_INIT, rngs=rngs, **config.dtypes
        )

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        config = self.config
        for stage in config.convolutions:
            for suffix, _ in stage:
                x = getattr(self, f"conv{suffix}")(x)
                if config.batch_norm:
                    x = getattr(self, f"norm{suffix}")(x, use_running_average=not train)
                x = nnx.relu(x)
            x = halved(x)
        x = x.reshape((x.shape[0], -1))
        for index in range(1, len(config.head_widths) + 1):
            x = nnx.relu(getattr(self, f"dense{index}")(x))
            if config.dropout:
                x = getattr(self, f"dropout{index}")(x, deterministic=not train)
        return self.logits(x)
