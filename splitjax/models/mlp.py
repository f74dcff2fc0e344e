"""Defines a multi-layer perceptron, in Flax Linen and in Flax NNX: the smallest model that has every part of a plan.

An `MLPConfig` goes in, a Flax model comes out, whose dense layers have the same names in both libraries (`dense1`,
`logits`).
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.typing import DTypeLike

from splitjax.models._common import LINEAR_INIT, RELU_INIT, SharedOptions, as_widths, check_rate, check_widths


@dataclasses.dataclass(frozen=True)
class MLPConfig(SharedOptions):
    """Holds the options of a multi-layer perceptron.

    **Arguments:**

    - `num_classes`: width of the last layer.
    - `features`: widths of the hidden layers; one number means two layers of it.
    - `input_shape`: shape of one example, flattened by the model.
    - `dropout`: rate after each hidden layer.
    - `dtype`, `param_dtype`: of the computation, of the parameters.
    """

    num_classes: int = 10
    features: int | tuple[int, ...] = (512, 512)
    input_shape: tuple[int, ...] = (32, 32, 3)
    dropout: float = 0.0
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        place = "MLPConfig"
        object.__setattr__(self, "features", self.widths)
        object.__setattr__(self, "input_shape", as_widths(self.input_shape, 1))
        check_widths(place, features=self.widths, num_classes=(self.num_classes,), input_shape=self.input_shape)
        check_rate(place, self.dropout)

    @property
    def inputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """An example, f32[*input_shape], called an image."""
        return {"image": jax.ShapeDtypeStruct(self.input_shape, jnp.float32)}

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of the hidden layers: `features` as a tuple."""
        return as_widths(self.features, 2)


class LinenMLP(nn.Module):
    """Classifies arrays: f32[B, *input_shape] -> [B, num_classes] logits in `config.dtype`; `train`: as it learns."""

    config: MLPConfig

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        config = self.config
        x = x.reshape((x.shape[0], -1))
        for index, features in enumerate(config.widths, start=1):
            x = nn.relu(nn.Dense(features, kernel_init=RELU_INIT, name=f"dense{index}", **config.dtypes)(x))
            if config.dropout:
                x = nn.Dropout(config.dropout, deterministic=not train)(x)
        return nn.Dense(config.num_classes, kernel_init=LINEAR_INIT, name="logits", **config.dtypes)(x)


class NnxMLP(nnx.Module):
    """Classifies arrays: f32[B, *input_shape] -> [B, num_classes] logits in `config.dtype`; `train`: as it learns."""

    def __init__(self, config: MLPConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        inputs = math.prod(config.input_shape)
        for index, features in enumerate(config.widths, start=1):
            dense = nnx.Linear(inputs, features, kernel_init=RELU_INIT, rngs=rngs, **config.dtypes)
            setattr(self, f"dense{index}", dense)
            if config.dropout:
                setattr(self, f"dropout{index}", nnx.Dropout(config.dropout, rngs=rngs))
            inputs = features
        self.logits: nnx.Linear = nnx.Linear(
            inputs, config.num_classes, kernel_init=LINEAR_INIT, rngs=rngs, **config.dtypes
        )

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        x = x.reshape((x.shape[0], -1))
        for index in range(1, len(self.config.widths) + 1):
            x = nnx.relu(getattr(self, f"dense{index}")(x))
            if self.config.dropout:
                x = getattr(self, f"dropout{index}")(x, deterministic=not train)
        return self.logits(x)
