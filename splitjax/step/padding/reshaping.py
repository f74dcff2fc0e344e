"""Says what operations that move, repeat and cut entries do with padded operands.

Each function takes an equation, its operands and the dims of its results that are to be padded, and returns the
results; None where it needs the operands as the program has them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax import lax

from splitjax import _compat
from splitjax.step.padding.values import (
    Padded,
    Sizes,
    array_of,
    fill_of,
    fitted,
    grown,
    masked,
    padded,
    sizes_of,
)

Results = list[Any] | None


def broadcast(eqn: Any, values: Sequence[Any], wanted: Sequence[Sizes]) -> Results:
    """Repeats an operand along new dims, which may be padded."""
    (value, *dynamic), dims, shape = values, eqn.params["broadcast_dimensions"], eqn.params["shape"]
    if dynamic:
        return None
    small = tuple(eqn.invars[0].aval.shape)
    sizes = dict(wanted[0]) | {dims[dim]: size for dim, size in sizes_of(value).items()}
    inner = {dim: sizes[at] for dim, at in enumerate(dims) if at in sizes and small[dim] == shape[at]}
    operand = fitted(value, small, inner)
    made = _compat.bind_equation(_compat.with_params(eqn, shape=grown(shape, sizes)), [array_of(operand)])
    is_known = small == () or len(inner) == len(sizes)
    return [padded(made[0], shape, sizes, fill_of(operand) if is_known else None)]


def iota(eqn: Any, _values: Sequence[Any], wanted: Sequence[Sizes]) -> Results:
    """Counts on."""
    shape = eqn.params["shape"]
    made = _compat.bind_equation(_compat.with_params(eqn, shape=grown(shape, wanted[0])), [])
    return [padded(made[0], shape, wanted[0], None)]


def reshape(eqn: Any, values: Sequence[Any], wanted: Sequence[Sizes]) -> Results:
    """Keeps padded dims that are dims of the result, and takes apart and joins those that lead what is reshaped: of
    columns that hold heads side by side, whole heads are padded. Where several weights' columns lie side by side the
    padding is that of the heads of each, not further weights."""
    value, old, new = values[0], tuple(eqn.invars[0].aval.shape), tuple(eqn.params["new_sizes"])
    if eqn.params.get("dimensions") is not None or not isinstance(value, Padded):
        return None
    sizes: dict[int, int] = {}
    for before, after in _runs(old, new):
        own = [dim for dim in before if dim in value.sizes]
        if not own:
            continue
        leading = next((dim for dim in after if new[dim] != 1), None)
        if leading is None or own != [dim for dim in before if old[dim] != 1][:1]:
            return None
        if any(dim in wanted[0] for dim in after if dim != leading):
            return None
        total = math.prod(value.sizes.get(dim, old[dim]) for dim in before)
        sizes[leading], rest = divmod(total, math.prod(new[dim] for dim in after) // new[leading])
        if rest:  # what is padded ends within an entry
            return None
    made = _compat.bind_equation(_compat.with_params(eqn, new_sizes=grown(new, sizes)), [value.value])
    return [padded(made[0], new, sizes, value.fill)]


def _runs(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the shortest runs of dims of two shapes that hold the same entries. Dims of size 1 stand where they
    come; nothing is told of shapes without entries."""
    i = j = 0
    while 0 not in old and (i < len(old) or j < len(new)):
        before: list[int] = []
        after: list[int] = []
        left = right = 1
        while not (before or after) or left != right:
            if left <= right and i < len(old):
                before.append(i)
                left, i = left * old[i], i + 1
            else:
                after.append(j)
                right, j = right * new[j], j + 1
        yield before, after


def transpose(eqn: Any, values: Sequence[Any], _wanted: Sequence[Sizes]) -> Results:
    """Moves padded dims."""
    value, order = values[0], eqn.params["permutation"]
    sizes = {order.index(dim): size for dim, size in sizes_of(value).items()}
    return [padded(_bound(eqn, value), _shape(eqn), sizes, fill_of(value))]


def squeeze(eqn: Any, values: Sequence[Any], _wanted: Sequence[Sizes]) -> Results:
    """Takes out dims of size 1."""
    value, gone = values[0], eqn.params["dimensions"]
    sizes = {dim - sum(g < dim for g in gone): size for dim, size in sizes_of(value).items()}
    return [padded(_bound(eqn, value), _shape(eqn), sizes, fill_of(value))]


def reverse(eqn: Any, values: Sequence[Any], _wanted: Sequence[Sizes]) -> Results:
    """Turns other dims round."""
    if set(eqn.params["dimensions"]) & set(sizes_of(values[0])):
        return None
    return [padded(_bound(eqn, values[0]), _shape(eqn), sizes_of(values[0]), fill_of(values[0]))]


def cut(eqn: Any, values: Sequence[Any], _wanted: Sequence[Sizes]) -> Results:
    """Cuts out a part; a padded dim of which all is taken stays one."""
    value, params = values[0], eqn.params
    if not isinstance(value, Padded):
        return None
    limits, sizes = list(params["limit_indices"]), {}
    strides = params["strides"] or (1,) * len(limits)
    for dim, size in value.sizes.items():
        if (params["start_indices"][dim], limits[dim], strides[dim]) == (0, value.shape[dim], 1):
            limits[dim] = sizes[dim] = size
    made = _compat.bind_equation(_compat.with_params(eqn, limit_indices=tuple(limits)), [value.value])
    return [padded(made[0], _shape(eqn), sizes, value.fill)]


def split(eqn: Any, values: Sequence[Any], _wanted: Sequence[Sizes]) -> Results:
    """Cuts another dim apart."""
    value = values[0]
    if eqn.params["axis"] in sizes_of(value):
        return None
    made = _compat.bind_equation(eqn, [array_of(value)])
    return [
        padded(part, variable.aval.shape, sizes_of(value), fill_of(value))
        for part, variable in zip(made, eqn.outvars, strict=True)
    ]


def concatenate(eqn: Any, values: Sequence[Any], wanted: Sequence[Sizes]) -> Results:
    """Joins arrays along another dim."""
    sizes = dict(wanted[0])
    for value in values:
        sizes |= sizes_of(value)
    if eqn.params["dimension"] in sizes:
        return None
    operands = [fitted(v, tuple(x.aval.shape), sizes) for v, x in zip(values, eqn.invars, strict=True)]
    fills = {fill_of(operand) for operand in operands}
    made = _compat.bind_equation(eqn, [array_of(operand) for operand in operands])
    return [padded(made[0], _shape(eqn), sizes, fills.pop() if len(fills) == 1 else None)]


def pad(eqn: Any, values: Sequence[Any], _wanted: Sequence[Sizes]) -> Results:
    """Pads other dims, as the program says."""
    value, config = values[0], eqn.params["padding_config"]
    if any(tuple(config[dim]) != (0, 0, 0) for dim in sizes_of(value)):
        return None
    made = _compat.bind_equation(eqn, [array_of(value), values[1]])
    fill = fill_of(value) if fill_of(value) == fill_of(values[1]) else None
    return [padded(made[0], _shape(eqn), sizes_of(value), fill)]


def dynamic_slice(eqn: Any, values: Sequence[Any], _wanted: Sequence[Sizes]) -> Results:
    """Cuts out a part from where it is told to; a part that would reach behind the end begins earlier, as without
    padding."""
    value, taken = values[0], list(eqn.params["slice_sizes"])
    if not isinstance(value, Padded) or len(values) != 1 + len(taken):
        return None
    starts, sizes = list(values[1:]), {}
    for dim, size in value.sizes.items():
        if taken[dim] == value.shape[dim]:
            taken[dim] = sizes[dim] = size
        else:
            starts[dim] = _at_most(starts[dim], value.shape[dim] - taken[dim])
    made = _compat.bind_equation(_compat.with_params(eqn, slice_sizes=tuple(taken)), [value.value, *starts])
    return [padded(made[0], _shape(eqn), sizes, value.fill)]


def dynamic_update(eqn: Any, values: Sequence[Any], wanted: Sequence[Sizes]) -> Results:
    """Puts a part where it is told to, as `dynamic_slice` takes it."""
    (value, part), starts = values[:2], list(values[2:])
    shape, small = tuple(eqn.invars[0].aval.shape), tuple(eqn.invars[1].aval.shape)
    sizes = dict(wanted[0]) | dict(sizes_of(value))
    if len(starts) != len(shape):
        return None
    inner = {dim: size for dim, size in sizes.items() if small[dim] == shape[dim]}
    for dim in set(sizes) - set(inner):
        starts[dim] = _at_most(starts[dim], shape[dim] - small[dim])
    value, part = fitted(value, shape, sizes), fitted(part, small, inner)
    made = _compat.bind_equation(eqn, [array_of(value), array_of(part), *starts])
    return [padded(made[0], shape, sizes, fill_of(value) if fill_of(value) == fill_of(part) or not inner else None)]


def cumulative(eqn: Any, values: Sequence[Any], _wanted: Sequence[Sizes]) -> Results:
    """Adds up, or compares, from one end: what comes behind the end changes nothing unless it comes first."""
    value, axis = values[0], eqn.params["axis"]
    if axis in sizes_of(value) and eqn.params["reverse"]:
        if eqn.primitive.name != "cumsum":
            return None
        value = masked(value, 0, (axis,))
    is_zero = fill_of(value) == 0 and axis not in sizes_of(value) and eqn.primitive.name in ("cumsum", "cumprod")
    return [padded(_bound(eqn, value), _shape(eqn), sizes_of(value), 0.0 if is_zero else None)]


def sort(eqn: Any, values: Sequence[Any], wanted: Sequence[Sizes]) -> Results:
    """Sorts along another dim."""
    sizes: dict[int, int] = {}
    for each in (*wanted, *map(sizes_of, values)):
        sizes |= each
    if eqn.params["dimension"] in sizes:
        return None
    made = _compat.bind_equation(eqn, [array_of(fitted(value, _shape(eqn), sizes)) for value in values])
    return [padded(result, _shape(eqn), sizes, None) for result in made]


def _at_most(start: Any, limit: int) -> Any:
    """Returns where a part begins, no later than at `limit`."""
    number = np.asarray(limit, dtype=getattr(start, "dtype", np.int32))
    return lax.min(lax.convert_element_type(start, number.dtype), number)


def _bound(eqn: Any, value: Any) -> Any:
    return _compat.bind_equation(eqn, [array_of(value)])[0]


def _shape(eqn: Any) -> tuple[int, ...]:
    return tuple(eqn.outvars[0].aval.shape)


RESHAPING = {
    "broadcast_in_dim": broadcast,
    "iota": iota,
    "reshape": reshape,
    "transpose": transpose,
    "squeeze": squeeze,
    "rev": reverse,
    "slice": cut,
    "split": split,
    "concatenate": concatenate,
    "pad": pad,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update,
    "sort": sort,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), cumulative),
}
