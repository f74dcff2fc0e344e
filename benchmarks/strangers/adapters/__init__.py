"""Other people's training steps: one module of adapters a framework."""

from __future__ import annotations

from benchmarks.strangers.adapters import equinox, flax_linen, flax_nnx, haiku, optax, plain_jax
from benchmarks.strangers.adapters.base import Loaded, Stranger

ALL: tuple[Stranger, ...] = tuple(
    stranger for module in (flax_linen, flax_nnx, haiku, equinox, optax, plain_jax) for stranger in module.STRANGERS
)

__all__ = ["ALL", "Loaded", "Stranger"]
