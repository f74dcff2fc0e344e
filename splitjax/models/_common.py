"""Holds what the model families share, so that they do not repeat it: the typed error, what every config tells, checks
of options, initialisers.

Options go into the checks, and `ModelError` comes out of them, with the option's name; `ModelConfig` is what the
registry reads of a config, whatever its family, and `SharedOptions` is how a config comes by most of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from splitjax.errors import SplitjaxError


class ModelError(SplitjaxError, ValueError):
    """Reports a model that does not exist, or an option or input that it cannot take."""


class ModelConfig(Protocol):
    """Tells what a model needs to know of a batch and of a training step: every family's config does."""

    @property
    def inputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The batch entries that the model reads, in its arguments' order: the shape of one example, without the
        example dim."""
        ...

    @property
    def num_classes(self) -> int:
        """The number of classes that the model tells apart: the width of its logits, or 2 for one logit of a click."""
        ...

    @property
    def num_negatives(self) -> int:
        """The number of words that a training batch brings drawn for each example; 0 where nothing is sampled."""
        ...

    @property
    def has_batch_stats(self) -> bool:
        """True where training updates running statistics (batch norm)."""
        ...

    @property
    def has_dropout(self) -> bool:
        """True where training draws random bits: for dropout, or for stochastic depth."""
        ...


class SharedOptions:
    """Gives a config what follows from the fields that all have; a base without fields of its own.

    **Attributes** that the frozen dataclass below it declares:

    - `dropout`: rate in [0, 1).
    - `dtype`, `param_dtype`: of the computation, of the parameters.
    """

    dropout: float
    dtype: DTypeLike
    param_dtype: DTypeLike

    @property
    def dtypes(self) -> dict[str, Any]:
        """Both types as Flax's layers take them: `{"dtype": ..., "param_dtype": ...}`."""
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}

    @property
    def num_negatives(self) -> int:
        """0: nothing is sampled (`ModelConfig.num_negatives`)."""
        return 0

    @property
    def has_batch_stats(self) -> bool:
        """False: there is no batch norm (`ModelConfig.has_batch_stats`)."""
        return False

    @property
    def has_dropout(self) -> bool:
        """True where the dropout rate is not 0."""
        return self.dropout > 0


def image_inputs(image_size: int, channels: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the `ModelConfig.inputs` of a model of square images: f32[image_size, image_size, channels]."""
    return {"image": jax.ShapeDtypeStruct((image_size, image_size, channels), jnp.float32)}


def token_inputs(max_len: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the `ModelConfig.inputs` of a model of text: i32[max_len]."""
    return {"tokens": jax.ShapeDtypeStruct((max_len,), jnp.int32)}


# Networks without batch norm only train from scratch when every ReLU layer keeps the variance of its input
# (He et al. 2015, arXiv 1502.01852, section 2.2); Flax's default, LeCun's, halves it in each layer of a VGG.
RELU_INIT: jax.nn.initializers.Initializer = jax.nn.initializers.he_normal()
# He et al. 2015 offer the backward form as the equal alternative; it is the customary one for residual networks.
RESIDUAL_INIT: jax.nn.initializers.Initializer = jax.nn.initializers.variance_scaling(
    2.0, "fan_out", "truncated_normal"
)
LINEAR_INIT: jax.nn.initializers.Initializer = jax.nn.initializers.lecun_normal()


def recurrent_init(key: jax.Array, shape: Sequence[int], dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Draws a recurrent kernel as Flax does, orthogonal, but in any dtype: JAX has no decomposition in half precision.

    From the PRNG key `key` an array of `shape` and floating-point `dtype`; types narrower than float32 are drawn in
    float32 and rounded.
    """
    wide = jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype
    return jax.nn.initializers.orthogonal()(key, shape, wide).astype(dtype)


def at_least_float32(x: jax.Array) -> jax.Array:
    """Returns `x`, widened to float32 if it is narrower: sums over a row need more digits than bfloat16 has."""
    # Not by promote_types, which strict dtype promotion forbids between bfloat16 and float32.
    return x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x


def scaled(channels: int, width: float) -> int:
    """Multiplies `channels` by the width multiplier `width` and rounds, to at least 1."""
    return max(1, round(channels * width))


def as_widths(value: int | Sequence[int], repeat: int) -> tuple[int, ...]:
    """Returns `value` as a tuple of layer widths; a single number stands for `repeat` layers of that width."""
    return (value,) * repeat if isinstance(value, int) else tuple(value)


def check_positive(place: str, **options: float) -> None:
    """Raises `ModelError` for the first of `options` that is not a number above zero; `place` names the config."""
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ModelError(
                f"{name} must be a number above 0",
                value=value,
                place=f"{place}, option {name!r}",
                remedy=f"pass {name}= a positive number",
            )


def check_widths(place: str, **options: Sequence[int]) -> None:
    """Raises `ModelError` for the first layer width of `options` that is not a whole number above zero.

    `place` names the config.
    """
    for name, widths in options.items():
        for value in widths:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ModelError(
                    f"{name} must hold whole numbers above 0",
                    value=tuple(widths),
                    place=f"{place}, option {name!r}",
                    remedy=f"pass one layer width, or a sequence of them, such as {name}=(4096, 4096)",
                )


def check_rate(place: str, rate: float, name: str = "dropout") -> None:
    """Raises `ModelError` unless `rate`, the option `name` of the config called `place`, is a probability below 1."""
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate < 1:
        raise ModelError(
            f"{name} is the fraction of values set to zero: it lies in [0, 1)",
            value=rate,
            place=f"{place}, option {name!r}",
            remedy=f"pass {name}=0.0 for none, {'0.5 as in VGG' if name == 'dropout' else '0.1 as in ConvNeXt-T'}",
        )


def halved(x: jax.Array) -> jax.Array:
    """Pools `x` by the maximum of 2x2 windows that do not overlap: f32[B, H, W, C] -> f32[B, H // 2, W // 2, C].

    Written as a maximum over dims of size 2, not as a window that slides: XLA's CPU compiler differentiates the latter
    through whole arrays of indices, several times as large as the images."""
    batch, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2]
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels).max((2, 4))
