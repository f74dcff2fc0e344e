"""Says what look-ups and their counterparts do with padded operands.

An index behind the end of the array that the program knows means what its mode says: it is cut to the last entry, or
nothing is read or written there. It must not find the padding. Where the program promises that there is no such index,
XLA reads the last entry and writes nothing; here the last entry is read, too, and has what is differentiated of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from splitjax import _compat
from splitjax.step.padding.values import Sizes, array_of, fill_of, fitted, logical, padded, sizes_of

Results = list[Any] | None
SCATTERS = ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max", "scatter_add")


def gather(eqn: Any, values: Sequence[Any], _wanted: Sequence[Sizes]) -> Results:
    """Looks parts of an array up."""
    numbers, taken = eqn.params["dimension_numbers"], list(eqn.params["slice_sizes"])
    value, indices = values[0], logical(values[1])
    shape, out = tuple(eqn.invars[0].aval.shape), tuple(eqn.outvars[0].aval.shape)
    batching = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    index_shape = tuple(eqn.invars[1].aval.shape)
    windows = [dim for dim in range(len(shape)) if dim not in numbers.collapsed_slice_dims and dim not in batching]
    where = dict(zip(windows, numbers.offset_dims, strict=True))
    of_batch = [at for at in range(len(out)) if at not in numbers.offset_dims]
    sizes, of_indices = {}, {}
    for dim, size in sizes_of(value).items():
        if dim in batching:
            of_indices[batching[dim]] = size
            sizes[of_batch[batching[dim]]] = size
        elif taken[dim] == shape[dim] and dim in numbers.start_index_map:
            return None
        elif taken[dim] == shape[dim]:
            taken[dim] = sizes[where[dim]] = size
        elif dim in numbers.start_index_map:
            component = numbers.start_index_map.index(dim)
            cuts = eqn.params["mode"] in (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)
            indices = _bounded(indices, component, shape[dim] - taken[dim], size, cuts)
    indices = fitted(indices, index_shape, of_indices)
    changed = _compat.with_params(eqn, slice_sizes=tuple(taken))
    made = _compat.bind_equation(changed, [array_of(value), array_of(indices)])
    return [padded(made[0], out, sizes, fill_of(value) if sizes and not of_indices else None)]


def scatter(eqn: Any, values: Sequence[Any], wanted: Sequence[Sizes]) -> Results:
    """Writes parts of an array, or adds to them."""
    numbers = eqn.params["dimension_numbers"]
    value, indices, updates = values
    shape, parts = tuple(eqn.invars[0].aval.shape), tuple(eqn.invars[2].aval.shape)
    batching = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    windows = [dim for dim in range(len(shape)) if dim not in numbers.inserted_window_dims and dim not in batching]
    where = dict(zip(windows, numbers.update_window_dims, strict=True))
    of_batch = [at for at in range(len(parts)) if at not in numbers.update_window_dims]
    sizes = dict(wanted[0]) | dict(sizes_of(value))
    for dim, at in where.items():  # what is written in whole
        if at in sizes_of(updates) and parts[at] == shape[dim]:
            sizes.setdefault(dim, sizes_of(updates)[at])
    of_updates, of_indices = {}, {}
    indices = logical(indices)
    for dim, size in sizes.items():
        if dim in batching:
            of_indices[batching[dim]] = size
            of_updates[of_batch[batching[dim]]] = size
            continue
        width = parts[where[dim]] if dim in where else 1
        if width == shape[dim] and dim in where:
            if dim in numbers.scatter_dims_to_operand_dims:
                return None
            of_updates[where[dim]] = size
        elif dim in numbers.scatter_dims_to_operand_dims:
            component = numbers.scatter_dims_to_operand_dims.index(dim)
            cuts = eqn.params["mode"] == lax.GatherScatterMode.CLIP
            indices = _bounded(indices, component, shape[dim] - width, size, cuts)
    value, updates = fitted(value, shape, sizes), fitted(updates, parts, of_updates)
    indices = fitted(indices, tuple(eqn.invars[1].aval.shape), of_indices)
    made = _compat.bind_equation(eqn, [array_of(value), array_of(indices), array_of(updates)])
    is_zero = fill_of(value) == 0 and not of_indices and (not of_updates or fill_of(updates) == 0)
    return [padded(made[0], shape, sizes, 0.0 if is_zero else None)]


def _bounded(indices: Any, component: int, last: int, behind: int, cuts: bool) -> Any:
    """Returns indices of which a component does not find the padding: it is at most `last` where the program `cuts`
    what is further, or else `behind` all of it."""
    number = lambda n: np.asarray(n, indices.dtype)
    is_last = indices.ndim == 0 or indices.shape[-1] == 1
    if jnp.iinfo(indices.dtype).max < behind:
        behind = jnp.iinfo(indices.dtype).max
    own = indices if is_last else lax.slice_in_dim(indices, component, component + 1, axis=-1)
    if cuts:
        own = lax.min(own, jnp.full(own.shape, number(last)))
    else:
        own = lax.select(lax.gt(own, jnp.full(own.shape, number(last))), jnp.full(own.shape, number(behind)), own)
    if is_last:
        return own
    before = lax.slice_in_dim(indices, 0, component, axis=-1)
    after = lax.slice_in_dim(indices, component + 1, indices.shape[-1], axis=-1)
    return lax.concatenate([before, own, after], indices.ndim - 1)


INDEXING = {"gather": gather, **dict.fromkeys(SCATTERS, scatter)}
