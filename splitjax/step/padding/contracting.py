"""Says what operations that add up, compare or choose along dims do with padded operands.

Each function takes an equation, its operands, the dims of its results that are to be padded and whether JAX takes its
derivative later, and returns the results; None where it needs the operands as the program has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from splitjax import _compat
from splitjax.step.padding.values import (
    Padded,
    Sizes,
    array_of,
    fill_of,
    fitted,
    is_finite_fill,
    masked,
    padded,
    sizes_of,
)

Results = list[Any] | None


def _is_bool(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.bool_)


def _lowest(dtype: Any) -> Any:
    return -np.inf if jnp.issubdtype(dtype, jnp.floating) else False if _is_bool(dtype) else jnp.iinfo(dtype).min


def _highest(dtype: Any) -> Any:
    return np.inf if jnp.issubdtype(dtype, jnp.floating) else True if _is_bool(dtype) else jnp.iinfo(dtype).max


# The number that changes nothing.
_NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "reduce_sum": lambda dtype: 0,
    "reduce_prod": lambda dtype: 1,
    "reduce_max": _lowest,
    "reduce_min": _highest,
    "argmax": _lowest,
    "argmin": _highest,
    "reduce_and": lambda dtype: True if _is_bool(dtype) else -1,
    "reduce_or": lambda dtype: 0,
    "reduce_xor": lambda dtype: 0,
}


def reduce(eqn: Any, values: Sequence[Any], _wanted: Sequence[Sizes], is_differentiated: bool) -> Results:
    """Reduces dims to one number."""
    value, axes = values[0], eqn.params["axes"]
    if not isinstance(value, Padded) or jnp.issubdtype(value.value.dtype, jnp.complexfloating):
        return None
    name, dims = eqn.primitive.name, [dim for dim in value.sizes if dim in axes]
    if dims:
        if is_differentiated:  # or the derivative would not be zero where nothing stands
            value = Padded(value.value, value.shape, value.sizes, None)
        value = masked(value, _NEUTRAL[name](value.value.dtype), dims)
    sizes = {dim - sum(axis < dim for axis in axes): size for dim, size in value.sizes.items() if dim not in axes}
    keeps = name in ("reduce_max", "reduce_min") or (name == "reduce_sum" and value.fill == 0)
    made = _compat.bind_equation(eqn, [value.value])
    return [padded(made[0], tuple(eqn.outvars[0].aval.shape), sizes, value.fill if keeps and not dims else None)]


def product(eqn: Any, values: Sequence[Any], _wanted: Sequence[Sizes], _is_differentiated: bool) -> Results:
    """Multiplies arrays and adds up along the dims that they share."""
    (contracted, batch), _ = eqn.params["dimension_numbers"], None
    sides = list(values[:2])
    shapes = [tuple(variable.aval.shape) for variable in eqn.invars[:2]]
    for kind in (contracted, batch):
        for left, right in zip(*kind, strict=True):
            size = sizes_of(sides[0]).get(left) or sizes_of(sides[1]).get(right)
            if size:
                both = ((0, left), (1, right))
                for side, dim in both:
                    sides[side] = fitted(sides[side], shapes[side], {**sizes_of(sides[side]), dim: size})
    for side, dims in enumerate(contracted):
        # Zero on one side is enough where there is a number on the other.
        shared = [dim for dim in dims if dim in sizes_of(sides[side])]
        other = sides[1 - side]
        if shared and not (fill_of(sides[side]) == 0 or (fill_of(other) == 0 and is_finite_fill(sides[side]))):
            sides[side] = masked(sides[side], 0, shared)
    sizes: dict[int, int] = {}
    free = [
        [dim for dim in range(len(shape)) if dim not in contracted[side] and dim not in batch[side]]
        for side, shape in enumerate(shapes)
    ]
    order = [(0, dim) for dim in batch[0]] + [(0, dim) for dim in free[0]] + [(1, dim) for dim in free[1]]
    for at, (side, dim) in enumerate(order):
        if dim in sizes_of(sides[side]):
            sizes[at] = sizes_of(sides[side])[dim]
    keeping = [side for side in (0, 1) if set(sizes_of(sides[side])) & {*free[side], *batch[side]}]
    fill = 0.0 if keeping and all(fill_of(sides[side]) == 0 for side in keeping) else None
    made = _compat.bind_equation(eqn, [*map(array_of, sides), *values[2:]])
    return [padded(made[0], tuple(eqn.outvars[0].aval.shape), sizes, fill)]


def convolution(eqn: Any, values: Sequence[Any], _wanted: Sequence[Sizes], _is_differentiated: bool) -> Results:
    """Convolves, with padded features."""
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        return None
    data, weight = values
    shapes = [tuple(variable.aval.shape) for variable in eqn.invars]
    if set(sizes_of(data)) - set(numbers.lhs_spec[:2]) or set(sizes_of(weight)) - set(numbers.rhs_spec[:2]):
        return None
    size = sizes_of(data).get(numbers.lhs_spec[1]) or sizes_of(weight).get(numbers.rhs_spec[1])
    if size:
        data = fitted(data, shapes[0], {**sizes_of(data), numbers.lhs_spec[1]: size})
        weight = fitted(weight, shapes[1], {**sizes_of(weight), numbers.rhs_spec[1]: size})
        data, weight = masked(data, 0, (numbers.lhs_spec[1],)), masked(weight, 0, (numbers.rhs_spec[1],))
    sizes = {}
    if numbers.lhs_spec[0] in sizes_of(data):
        sizes[numbers.out_spec[0]] = sizes_of(data)[numbers.lhs_spec[0]]
    if numbers.rhs_spec[0] in sizes_of(weight):
        sizes[numbers.out_spec[1]] = sizes_of(weight)[numbers.rhs_spec[0]]
    fill = 0.0 if numbers.rhs_spec[0] in sizes_of(weight) and len(sizes) == 1 and fill_of(weight) == 0 else None
    made = _compat.bind_equation(eqn, [array_of(data), array_of(weight)])
    return [padded(made[0], tuple(eqn.outvars[0].aval.shape), sizes, fill)]


CONTRACTING = {**dict.fromkeys(_NEUTRAL, reduce), "dot_general": product, "conv_general_dilated": convolution}
