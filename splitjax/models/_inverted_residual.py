"""Defines the inverted residual block that MobileNet and EfficientNet are made of, in Flax Linen and in Flax NNX.

An `InvertedResidual` goes in, which says how wide and of which stride; a Flax module comes out of it, with the same
names of layers in both libraries.

A 1x1 convolution widens, a depthwise one mixes pixels (each channel for itself: a convolution of as many groups as
channels), squeeze-and-excitation may weigh the channels, and a 1x1 convolution narrows again, after which there is no
activation.

Sources: Sandler et al. 2018, "MobileNetV2: inverted residuals and linear bottlenecks" (arXiv 1801.04381), section 3.3;
Howard et al. 2019, "Searching for MobileNetV3" (arXiv 1905.02244), section 5.3; Tan and Le 2019, "EfficientNet" (arXiv
1905.11946), section 4; Hu et al. 2017, "Squeeze-and-excitation networks" (arXiv 1709.01507), figure 2; Huang et al.
2016, "Deep networks with stochastic depth" (arXiv 1603.09382), section 3.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.typing import DTypeLike

from splitjax.models._common import RELU_INIT, RESIDUAL_INIT, ModelError

STEMS: tuple[str, ...] = ("cifar", "imagenet")
_Item = TypeVar("_Item")


@dataclasses.dataclass(frozen=True)
class InvertedResidual:
    """Describes a block: [B, H, W, inputs] -> [B, H / stride, W / stride, outputs].

    **Arguments:**

    - `name`: such as `"stage2_block1"`.
    - `inputs`, `expanded`, `outputs`: channels before, inside and behind; where `expanded == inputs` nothing is
      widened.
    - `kernel`, `stride`: of the depthwise convolution.
    - `squeezed`: channels between the two layers of squeeze-and-excitation; 0 for none.
    - `activation`, `squeeze_activation`, `gate`: functions of `jax.nn`; the last two are those of
      squeeze-and-excitation.
    - `momentum`, `epsilon`: of batch norm; running statistics keep `momentum` of the old value a step.
    - `drop_path`: probability that an example skips the block in training, where it has a shortcut.
    - `dtype`, `param_dtype`: of the computation, of the parameters.
    """

    name: str
    inputs: int
    expanded: int
    outputs: int
    kernel: int
    stride: int
    squeezed: int = 0
    activation: str = "relu6"
    squeeze_activation: str = "relu"
    gate: str = "sigmoid"
    momentum: float = 0.9
    epsilon: float = 1e-5
    drop_path: float = 0.0
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    @property
    def expands(self) -> bool:
        """True where a 1x1 convolution widens the channels first."""
        return self.expanded != self.inputs

    @property
    def has_shortcut(self) -> bool:
        """True where the input has the shape of the output, and is added to it."""
        return self.stride == 1 and self.inputs == self.outputs

    @property
    def drops(self) -> bool:
        """True where training lets examples skip the block (stochastic depth)."""
        return self.has_shortcut and self.drop_path > 0

    @property
    def depthwise(self) -> dict[str, Any]:
        """The options of the depthwise convolution. One channel feeds one: its fan-in is the kernel's area alone."""
        options = {
            "kernel_size": (self.kernel, self.kernel),
            "strides": (self.stride, self.stride),
            "kernel_init": RELU_INIT,
        }
        return {**self.conv, **options, "padding": around(self.kernel), "feature_group_count": self.expanded}

    @property
    def conv(self) -> dict[str, Any]:
        """The options that all convolutions of the block share, but those of squeeze-and-excitation."""
        # No biases: batch norm follows every convolution and would cancel them.
        return {"use_bias": False, "kernel_init": RESIDUAL_INIT, **self.dtypes}

    @property
    def norm(self) -> dict[str, Any]:
        """The options of every batch norm."""
        return {"momentum": self.momentum, "epsilon": self.epsilon, **self.dtypes}

    @property
    def dtypes(self) -> dict[str, Any]:
        """Both types as Flax's layers take them."""
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}


def around(kernel: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the padding by which a convolution of `kernel` x `kernel` pixels keeps the size at stride 1.

    As much on both sides: "SAME" pads strided convolutions on one side only.
    """
    padding = (kernel // 2, kernel // 2)
    return padding, padding


def divisible(channels: float, width: float = 1.0) -> int:
    """Multiplies `channels` by the multiplier `width` and rounds to a multiple of 8.

    The result is at least 8, and not below nine tenths of the product.

    Source: the authors' code of MobileNetV2 and of EfficientNet (`_make_divisible`, `round_filters`)."""
    wanted = channels * width
    rounded = max(8, int(wanted + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * wanted else rounded


def to_depth(items: Sequence[_Item], depth: float) -> tuple[_Item, ...]:
    """Returns `depth` times as many blocks as `items`, rounded up: the first ones, beyond them the last again."""
    count = math.ceil(depth * len(items))
    return tuple(items[min(index, len(items) - 1)] for index in range(count))


def check_stem(place: str, stem: str) -> None:
    """Raises `ModelError` for a `stem` that does not exist; `place` names the config."""
    if stem not in STEMS:
        raise ModelError(
            "no such stem",
            value=stem,
            place=f"{place}, option 'stem'",
            remedy=f"choose one of {', '.join(map(repr, STEMS))}",
        )


class LinenInvertedResidual(nn.Module):
    """Applies `block`: [B, H, W, inputs] -> [B, H / stride, W / stride, outputs].

    In training (`train`) batch norm takes the statistics of the batch, and stochastic depth draws.
    """

    block: InvertedResidual

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        block = self.block
        activation = getattr(jax.nn, block.activation)

        def norm(name: str, y: jax.Array) -> jax.Array:
            return nn.BatchNorm(use_running_average=not train, name=name, **block.norm)(y)

        y = x
        if block.expands:
            y = activation(norm("expand_norm", nn.Conv(block.expanded, (1, 1), name="expand_conv", **block.conv)(y)))
        y = activation(norm("depthwise_norm", nn.Conv(block.expanded, name="depthwise_conv", **block.depthwise)(y)))
        if block.squeezed:
            # Convolutions on one pixel, as in the authors' code of both families.
            weights = jnp.mean(y, axis=(1, 2), keepdims=True)
            weights = nn.Conv(block.squeezed, (1, 1), kernel_init=RELU_INIT, name="squeeze_conv", **block.dtypes)(
                weights
            )
            weights = getattr(jax.nn, block.squeeze_activation)(weights)
            weights = nn.Conv(block.expanded, (1, 1), kernel_init=RESIDUAL_INIT, name="excite_conv", **block.dtypes)(
                weights
            )
            y = y * getattr(jax.nn, block.gate)(weights)
        y = norm("project_norm", nn.Conv(block.outputs, (1, 1), name="project_conv", **block.conv)(y))
        if block.drops:
            y = nn.Dropout(block.drop_path, broadcast_dims=(1, 2, 3), deterministic=not train)(y)
        return x + y if block.has_shortcut else y


class NnxInvertedResidual(nnx.Module):
    """Applies `block`: [B, H, W, inputs] -> [B, H / stride, W / stride, outputs].

    In training (`train`) batch norm takes the statistics of the batch, and stochastic depth draws.
    """

    def __init__(self, block: InvertedResidual, *, rngs: nnx.Rngs) -> None:
        self.block = block
        if block.expands:
            self.expand_conv: nnx.Conv = nnx.Conv(block.inputs, block.expanded, (1, 1), rngs=rngs, **block.conv)
            self.expand_norm: nnx.BatchNorm = nnx.BatchNorm(block.expanded, rngs=rngs, **block.norm)
        self.depthwise_conv: nnx.Conv = nnx.Conv(block.expanded, block.expanded, rngs=rngs, **block.depthwise)
        self.depthwise_norm: nnx.BatchNorm = nnx.BatchNorm(block.expanded, rngs=rngs, **block.norm)
        if block.squeezed:
            options = {"rngs": rngs, **block.dtypes}
            self.squeeze_conv: nnx.Conv = nnx.Conv(
                block.expanded, block.squeezed, (1, 1), kernel_init=RELU_INIT, **options
            )
            self.excite_conv: nnx.Conv = nnx.Conv(
                block.squeezed, block.expanded, (1, 1), kernel_init=RESIDUAL_INIT, **options
            )
        self.project_conv: nnx.Conv = nnx.Conv(block.expanded, block.outputs, (1, 1), rngs=rngs, **block.conv)
        self.project_norm: nnx.BatchNorm = nnx.BatchNorm(block.outputs, rngs=rngs, **block.norm)
        if block.drops:
            self.drop_path: nnx.Dropout = nnx.Dropout(block.drop_path, broadcast_dims=(1, 2, 3), rngs=rngs)

    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        block = self.block
        activation, averaged = getattr(jax.nn, block.activation), not train
        y = x
        if block.expands:
            y = activation(self.expand_norm(self.expand_conv(y), use_running_average=averaged))
        y = activation(self.depthwise_norm(self.depthwise_conv(y), use_running_average=averaged))
        if block.squeezed:
            weights = self.squeeze_conv(jnp.mean(y, axis=(1, 2), keepdims=True))
            weights = self.excite_conv(getattr(jax.nn, block.squeeze_activation)(weights))
            y = y * getattr(jax.nn, block.gate)(weights)
        y = self.project_norm(self.project_conv(y), use_running_average=averaged)
        if block.drops:
            y = self.drop_path(y, deterministic=not train)
        return x + y if block.has_shortcut else y
