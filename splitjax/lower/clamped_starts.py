"""Start indices of dynamic slices, brought into their range before XLA sees them.

XLA's semantics are the same either way: a start index is clamped so that the window lies inside. Its partitioner compares the
index as it comes with what each device holds, though, and no device writes an update that starts behind the end (row
`start-index-out-of-range` of `splitjax.partitioner.DEFECTS`). The gradient of a dynamic slice inherits its indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax


def clamp_starts(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """The operands of a `dynamic_slice` (array, start per dim) or `dynamic_update_slice` (array, update, start per dim) with every
    start index between 0 and the size of its dim less that of the window. Other equations' operands come back as they are."""
    first = {"dynamic_slice": 1, "dynamic_update_slice": 2}.get(eqn.primitive.name)
    if first is None:
        return list(operands)
    window = eqn.params["slice_sizes"] if first == 1 else operands[1].shape
    starts = [
        _clamped(start, size - width) for start, size, width in zip(operands[first:], operands[0].shape, window, strict=True)
    ]
    return [*operands[:first], *starts]


def _clamped(start: Any, largest: int) -> Any:
    dtype = jnp.asarray(start).dtype
    bound = min(largest, int(jnp.iinfo(dtype).max))  # of an index type that cannot name the end
    return lax.clamp(jnp.zeros((), dtype), start, jnp.asarray(bound, dtype))
