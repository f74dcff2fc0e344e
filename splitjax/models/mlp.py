"""A multi-layer perceptron, in Flax Linen and in Flax NNX: the smallest model that has every part of a plan."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from splitjax.models._common import LINEAR_INIT, RELU_INIT, as_widths, check_rate, check_widths


@dataclasses.dataclass(frozen=True)
class MLPConfig:
    """The options of a multi-layer perceptron.

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
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    def __post_init__(self):
        place = "MLPConfig"
        object.__setattr__(self, "features", as_widths(self.features, 2))
        object.__setattr__(self, "input_shape", as_widths(self.input_shape, 1))
        check_widths(place, features=self.features, num_classes=(self.num_classes,), input_shape=self.input_shape)
        check_rate(place, self.dropout)

    @property
    def dtypes(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}


class LinenMLP(nn.Module):
    """f32[B, *input_shape] -> [B, num_classes] logits in `config.dtype`."""

    config: MLPConfig

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        config = self.config
        x = x.reshape((x.shape[0], -1))
        for index, features in enumerate(config.features, start=1):
            x = nn.relu(nn.Dense(features, kernel_init=RELU_INIT, name=f"dense{index}", **config.dtypes)(x))
            if config.dropout:
                x = nn.Dropout(config.dropout, deterministic=not train)(x)
        return nn.Dense(config.num_classes, kernel_init=LINEAR_INIT, name="logits", **config.dtypes)(x)


class NnxMLP(nnx.Module):
    """f32[B, *input_shape] -> [B, num_classes] logits in `config.dtype`."""

    def __init__(self, config: MLPConfig, *, rngs: nnx.Rngs):
        self.config = config
        inputs = math.prod(config.input_shape)
        for index, features in enumerate(config.features, start=1):
            dense = nnx.Linear(inputs, features, kernel_init=RELU_INIT, rngs=rngs, **config.dtypes)
            setattr(self, f"dense{index}", dense)
            if config.dropout:
                setattr(self, f"dropout{index}", nnx.Dropout(config.dropout, rngs=rngs))
            inputs = features
        self.logits = nnx.Linear(inputs, config.num_classes, kernel_init=LINEAR_INIT, rngs=rngs, **config.dtypes)

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        x = x.reshape((x.shape[0], -1))
        for index in range(1, len(self.config.features) + 1):
            x = nnx.relu(getattr(self, f"dense{index}")(x))
            if self.config.dropout:
                x = getattr(self, f"dropout{index}")(x, deterministic=not train)
        return self.logits(x)
