"""Holds arrays that are longer than the program knows them, while a step is traced again (`step.padding.rewriting`).

The first entries of a padded dim are those that the program has; what stands behind them is of no meaning, but where it
is known to be one number. Nothing that the program sees may depend on it: an operation that adds up, compares or
selects along such a dim gets it with a number in its place that changes nothing (`masked`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from splitjax import _compat

# Dim of an array -> its size with the padding.
Sizes = Mapping[int, int]


@dataclasses.dataclass(frozen=True)
class Padded:
    """An array with padded dims.

    - `value`: the array. `shape`: as the program has it. `sizes`: of its padded dims, with the padding.
    - `fill`: the number that stands in all of the padding, where that is known; else None.
    """

    value: Any
    shape: tuple[int, ...]
    sizes: Sizes
    fill: float | None = None

    @property
    def logical(self) -> Any:
        """What the program has in its place."""
        return lax.slice(self.value, (0,) * len(self.shape), self.shape)


def sizes_of(value: Any) -> Sizes:
    """Returns the padded dims of `value`, which may be any operand of an equation."""
    return value.sizes if isinstance(value, Padded) else {}


def array_of(value: Any) -> Any:
    """Returns the array behind `value`, with its padding."""
    return value.value if isinstance(value, Padded) else value


def logical(value: Any) -> Any:
    """Returns `value` as the program knows it."""
    return value.logical if isinstance(value, Padded) else value


def fill_of(value: Any) -> float | None:
    """Returns the number that stands in the padding of `value`; of a number in the program, the number itself."""
    if isinstance(value, Padded):
        return value.fill
    if isinstance(value, (bool, int, float)):
        return float(value)
    if _compat.is_abstract(value) or getattr(value, "shape", None) != ():
        return None
    try:
        return float(value)
    except (TypeError, ValueError):  # a key, a complex number
        return None


def grown(shape: tuple[int, ...], sizes: Sizes) -> tuple[int, ...]:
    """Returns `shape` with the padded `sizes`."""
    return tuple(sizes.get(dim, size) for dim, size in enumerate(shape))


def padded(value: Any, shape: tuple[int, ...], sizes: Sizes, fill: float | None) -> Any:
    """Returns the array `value` as a padded one; as it is where nothing is padded. The arguments are the attributes of
    `Padded`."""
    kept = {dim: size for dim, size in sizes.items() if size != shape[dim]}
    return Padded(value, tuple(shape), kept, fill) if kept else value


def fitted(value: Any, shape: tuple[int, ...], sizes: Sizes) -> Any:
    """Returns `value`, an operand of the logical `shape`, with exactly the dims of `sizes` padded, the further ones by
    zeros."""
    own = sizes_of(value)
    if dict(own) == dict(sizes):
        return value
    array, fill = array_of(value), value.fill if isinstance(value, Padded) else 0.0
    kept = {dim: size for dim, size in own.items() if sizes.get(dim) == size}
    if len(kept) < len(own):
        array = lax.slice(array, (0,) * len(shape), grown(shape, kept))
        fill = fill if kept else 0.0
    missing = [(0, sizes[dim] - size if dim in sizes and dim not in kept else 0, 0) for dim, size in enumerate(shape)]
    if any(high for _, high, _ in missing):
        array = lax.pad(array, np.zeros((), array.dtype), missing)
        fill = 0.0 if fill == 0.0 else None
    return padded(array, shape, sizes, fill)


def masked(value: Any, number: Any, dims: Any = None) -> Any:
    """Returns `value` with `number` in its padding: along `dims`, or all padded ones. What has it already is returned
    as it is."""
    if not isinstance(value, Padded):
        return value
    dims = [dim for dim in value.sizes if dims is None or dim in dims]
    if not dims or (value.fill is not None and value.fill == number):
        return value
    full = jnp.shape(value.value)
    inside = [lax.lt(lax.iota("int32", full[dim]), np.int32(value.shape[dim])) for dim in dims]
    wide = [lax.broadcast_in_dim(each, full, (dim,)) for each, dim in zip(inside, dims, strict=True)]
    keep = functools.reduce(lax.bitwise_and, wide)
    chosen = lax.select(keep, value.value, jnp.full(full, number, value.value.dtype))
    is_all = len(dims) == len(value.sizes)
    fill = float(number) if is_all and isinstance(number, (bool, int, float)) else None
    return Padded(chosen, value.shape, value.sizes, fill)


def is_finite_fill(value: Any) -> bool:
    """Tells whether what stands in the padding is known, and a finite number."""
    return isinstance(value, Padded) and value.fill is not None and math.isfinite(value.fill)


def typed(value: Any) -> jax.ShapeDtypeStruct:
    """Describes an array, a number or a tracer."""
    aval = jax.typeof(value)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))
