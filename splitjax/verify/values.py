"""Draws the values that a verified step runs on: the caller's where they fit, else by the path of the leaf.

The caller's arguments and the wanted shapes go in, numpy arrays come out, alike in every process.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from splitjax.plan import LeafPlan
from splitjax.primitives.operation import Trait
from splitjax.verify.dim_classes import Analysis


def draw_values(
    given: Sequence[Any],
    types: Sequence[jax.ShapeDtypeStruct],
    leaves: Sequence[LeafPlan],
    bound: int,
    own_values: bool,
    seed: int = 0,
) -> list[np.ndarray]:
    """Returns a value for each flat argument.

    **Arguments:**

    - `given`: the caller's leaves, arrays or `ShapeDtypeStruct`s.
    - `types`: what is wanted in their place.
    - `leaves`: what the plan says of them.
    - `bound`: drawn whole numbers are below it, so that they are rows of every table and classes of every loss.
    - `own_values`: keep the caller's values of floating-point leaves that keep their shape, too.
    - `seed`: decides what is drawn, with the path of each leaf.
    """
    return [
        _value(value, like, leaf, bound, own_values, seed)
        for value, like, leaf in zip(given, types, leaves, strict=True)
    ]


def nudged(leaves: Sequence[Any]) -> list[Any]:
    """Returns the values of `leaves`, float64 numbers changed by some 1e-13 of themselves."""
    rng = np.random.default_rng(0)
    return [
        leaf * (1 + 1e-13 * rng.standard_normal(leaf.shape))
        if isinstance(leaf, np.ndarray) and leaf.dtype == np.float64
        else leaf
        for leaf in leaves
    ]


def _value(given: Any, like: jax.ShapeDtypeStruct, leaf: LeafPlan, bound: int, own_values: bool, seed: int) -> Any:
    shape, dtype = tuple(like.shape), like.dtype
    rng = np.random.default_rng([seed, zlib.crc32(leaf.path.encode())])
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return _keys(given, shape, dtype)
    known = None if isinstance(given, jax.ShapeDtypeStruct) or not _is_addressable(given) else given
    keeps = known is not None and tuple(np.shape(known)) == shape
    if jnp.issubdtype(dtype, jnp.inexact):
        if keeps and own_values:
            return np.asarray(known).astype(dtype)
        return _floats(rng, known, shape, leaf.role).astype(dtype)
    if dtype == np.bool_:
        return np.asarray(known) if keeps else rng.random(shape) < 0.75
    if keeps and (own_values or leaf.role not in ("batch", "input") or dtype == np.uint32 or not shape):
        return np.asarray(known).astype(dtype)  # ids that numpy made have 64 bits
    if dtype == np.uint32:  # the words of a raw random key
        return rng.integers(0, 2**32, shape, dtype=np.uint32)
    return rng.integers(0, max(2, min(bound, 127)), shape).astype(dtype)


def _floats(rng: np.random.Generator, known: Any, shape: tuple[int, ...], role: str) -> np.ndarray:
    """Draws numbers of the size of the caller's, if there are any that differ; else such that a deep network neither
    dies nor blows up.

    What only updates read, and running statistics, may be variances: they are positive."""
    drawn = rng.standard_normal(shape)
    sample = None if known is None else _sample(known)
    if sample is not None and sample.size > 1 and np.all(np.isfinite(sample)) and np.ptp(sample) > 0:
        picked = rng.choice(sample, size=shape)
        # Every number once more or less: a row that is all zero would hide what is done to it.
        picked = picked + 0.1 * np.std(sample) * np.abs(drawn)
        return picked
    if role in ("optimizer", "statistic"):
        return 0.1 + np.abs(drawn)
    if role == "param":
        if len(shape) < 2:
            return 0.5 + 0.2 * drawn
        return drawn * math.sqrt(1.5 / max(1, math.prod(shape[:-1])))
    return drawn


def _sample(known: Any) -> np.ndarray:
    """Returns up to some thousand of an array's numbers, from one device."""
    part = known.addressable_shards[0].data if isinstance(known, jax.Array) else np.asarray(known)
    flat = np.asarray(part).reshape(-1)
    return flat[:: max(1, flat.size // 4096)].astype(np.float64)


def _is_addressable(given: Any) -> bool:
    return not isinstance(given, jax.Array) or (given.is_fully_addressable and not given.is_deleted())


def _keys(given: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    if isinstance(given, jax.Array) and tuple(given.shape) == shape:
        return given
    key = jax.random.key(0, impl=dtype._impl.name)
    return jax.random.split(key, math.prod(shape)).reshape(shape) if shape else key


def whole_number_bound(analysis: Analysis, sizes: Mapping[int, int]) -> int:
    """Returns a bound for drawn whole numbers: the smallest dim that a lookup picks from or a comparison counts along.

    `analysis` is that of the step, `sizes` maps classes of dims to their new sizes.
    """
    dims: list[int] = []
    for op in analysis.flat.ops:
        if Trait.TAKES in op.facts.traits and op.inputs:
            value = op.inputs[0]
            dims += [n for n in analysis.shape(value, sizes) if n > 1]
        elif op.primitive == "iota":
            dims += [n for n in analysis.shape(op.outputs[0], sizes) if n > 1]
    return min(dims, default=2)
