"""What the model families share: the typed error, checks of their options, initialisers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from splitjax.errors import SplitjaxError


class ModelError(SplitjaxError, ValueError):
    """A model that does not exist, or an option or input that it cannot take."""


# Networks without batch norm only train from scratch when every ReLU layer keeps the variance of its input
# (He et al. 2015, arXiv 1502.01852, section 2.2); Flax's default, LeCun's, halves it in each layer of a VGG.
RELU_INIT = jax.nn.initializers.he_normal()
# He et al. 2015 offer the backward form as the equal alternative; it is the customary one for residual networks.
RESIDUAL_INIT = jax.nn.initializers.variance_scaling(2.0, "fan_out", "truncated_normal")
LINEAR_INIT = jax.nn.initializers.lecun_normal()


def recurrent_init(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """Flax's initialisation of recurrent kernels, orthogonal, in any dtype: JAX has no decomposition in half
    precision."""
    wide = jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype
    return jax.nn.initializers.orthogonal()(key, shape, wide).astype(dtype)


def at_least_float32(x: jax.Array) -> jax.Array:
    """`x`, widened to float32 if it is narrower: sums over a row need more digits than bfloat16 has."""
    # Not by promote_types, which strict dtype promotion forbids between bfloat16 and float32.
    return x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x


def scaled(channels: int, width: float) -> int:
    """`channels` times the width multiplier, rounded, at least 1."""
    return max(1, round(channels * width))


def as_widths(value: int | Sequence[int], repeat: int) -> tuple[int, ...]:
    """A tuple of layer widths; one number stands for `repeat` layers of that width."""
    return (value,) * repeat if isinstance(value, int) else tuple(value)


def check_positive(place: str, **options: float) -> None:
    """Raise `ModelError` for the first of `options` that is not a number above zero."""
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ModelError(
                f"{name} must be a number above 0",
                value=value,
                place=f"{place}, option {name!r}",
                remedy=f"pass {name}= a positive number",
            )


def check_widths(place: str, **options: Sequence[int]) -> None:
    """Raise `ModelError` for the first layer width of `options` that is not a whole number above zero."""
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
    """Raise `ModelError` unless the option `name` is a probability below 1."""
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate < 1:
        raise ModelError(
            f"{name} is the fraction of values set to zero: it lies in [0, 1)",
            value=rate,
            place=f"{place}, option {name!r}",
            remedy=f"pass {name}=0.0 for none, {'0.5 as in VGG' if name == 'dropout' else '0.1 as in ConvNeXt-T'}",
        )


def halved(x: jax.Array) -> jax.Array:
    """Max pooling of 2x2 windows that do not overlap: f32[B, H, W, C] -> f32[B, H // 2, W // 2, C].

    Written as a maximum over dims of size 2, not as a window that slides: XLA's CPU compiler differentiates the latter
    through whole arrays of indices, several times as large as the images."""
    batch, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2]
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels).max((2, 4))
