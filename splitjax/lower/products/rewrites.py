"""Evaluates operations as others which mean the same, and which XLA's partitioner splits rightly.

An equation and its operands come in; its results come out. It exists for the rows of `splitjax.partitioner.DEFECTS`
whose action is `REWRITE`; nothing is sent for any of them:

- a dynamic slice's start indices are brought into their range. XLA's semantics clamp them anyway, but its partitioner
  compares the index as it comes with what each device holds, and no device writes an update that starts behind the end.
  The gradient of a dynamic slice inherits its indices;
- a slice that takes one element of a dim takes it with stride 1;
- a pad that dilates a dim and cuts into its beginning does so in two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from splitjax import _compat


def rewritten(eqn: Any, operands: Sequence[Any]) -> list[Any] | None:
    """Evaluates the equation `eqn` on `operands` as another operation of the same meaning, and returns its results.

    None for a primitive that is evaluated as it is.
    """
    rewrite = _REWRITES.get(eqn.primitive.name)
    return None if rewrite is None else rewrite(eqn, operands)


def _dynamic(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Evaluates `dynamic_slice` (array, start per dim) or `dynamic_update_slice` (array, update, start per dim) with
    every start index between 0 and the size of its dim less that of the window."""
    first = 1 if eqn.primitive.name == "dynamic_slice" else 2
    window = eqn.params["slice_sizes"] if first == 1 else operands[1].shape
    starts = [
        _clamped(start, size - width)
        for start, size, width in zip(operands[first:], operands[0].shape, window, strict=True)
    ]
    return _compat.bind_equation(eqn, [*operands[:first], *starts])


def _clamped(start: ArrayLike, largest: int) -> jax.Array:
    """Brings a start index between 0 and `largest`."""
    dtype = jnp.asarray(start).dtype
    bound = min(largest, int(jnp.iinfo(dtype).max))  # of an index type that cannot name the end
    return lax.clamp(jnp.zeros((), dtype), start, jnp.asarray(bound, dtype))


def _slice(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Evaluates `slice` with stride 1 along dims of which a single element is taken."""
    params, shape = eqn.params, eqn.outvars[0].aval.shape
    starts, limits = params["start_indices"], list(params["limit_indices"])
    strides = list(params["strides"] or (1,) * len(shape))
    for dim, size in enumerate(shape):
        if size == 1:
            limits[dim], strides[dim] = starts[dim] + 1, 1
    return [lax.slice(operands[0], starts, limits, strides)]


def _pad(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Evaluates `pad` in two steps: first it dilates and adds, then it cuts off what lies before the beginning."""
    value, filling = operands
    config = eqn.params["padding_config"]
    dilated = lax.pad(value, filling, [(max(low, 0), high, interior) for low, high, interior in config])
    return [lax.pad(dilated, filling, [(min(low, 0), 0, 0) for low, _, _ in config])]


_REWRITES: Mapping[str, Callable[[Any, Sequence[Any]], list[Any]]] = {
    "dynamic_slice": _dynamic, "dynamic_update_slice": _dynamic, "slice": _slice, "pad": _pad,
}  # fmt: skip
