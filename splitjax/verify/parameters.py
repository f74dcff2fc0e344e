"""Rewrites equation parameters that hold sizes or dtypes, for operands of different sizes and dtypes.

The parameters of a traced equation and the old and new shapes go in; the parameters to change come out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from splitjax.primitives.calls import CallKind, names
from splitjax.primitives.operation import Trait
from splitjax.primitives.table import OPERATIONS

Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = Sequence[Shape]
Change: TypeAlias = Callable[[Mapping[str, Any], Shapes, Shapes, Shapes, Shapes], dict[str, Any]]

# An equation of one of these runs in the dtypes that it was traced with, because it looks at the bits of a number.
BITWISE: frozenset[str] = OPERATIONS.with_trait(Trait.BITS)
# At the sizes, too, because its parameters hold programs or buffers of these.
AS_TRACED: frozenset[str] = names(CallKind.FIXED, CallKind.MANUAL) | OPERATIONS.with_trait(Trait.SIZED)


def wide(dtype: Any) -> Any:
    """Returns the 64-bit dtype of a floating or complex `dtype`; any other dtype itself."""
    if jnp.issubdtype(dtype, jax.dtypes.extended) or dtype == jax.dtypes.float0:
        return dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype


def widened(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of `params` that name a floating dtype, changed for float64 throughout.

    Precisions that name an algorithm are those of narrower dtypes: they become None.
    """
    changed = {}
    for name in ("new_dtype", "dtype", "preferred_element_type"):
        value = params.get(name)
        if value is not None and wide(value) != value:
            changed[name] = wide(value)
    if isinstance(params.get("precision"), (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset)):
        changed["precision"] = None
    return changed


def resized(
    name: str, params: Mapping[str, Any], old: tuple[Shapes, Shapes], new: tuple[Shapes, Shapes]
) -> dict[str, Any]:
    """Returns those of `params`, of the primitive `name`, that hold sizes, changed for other shapes.

    `old`, `new`: (shapes of all operands, shapes of all results), as traced and as wanted.
    """
    change = _CHANGES.get(name)
    return (
        {}
        if change is None or (list(old[0]) == list(new[0]) and list(old[1]) == list(new[1]))
        else change(params, *old, *new)
    )


def _result_shape(parameter: str) -> Change:
    return lambda params, ins, outs, new_ins, new_outs: {parameter: tuple(new_outs[-1])}


def _slice(params: Mapping[str, Any], ins: Shapes, outs: Shapes, new_ins: Shapes, new_outs: Shapes) -> dict[str, Any]:
    starts, limits = list(params["start_indices"]), list(params["limit_indices"])
    for d, (size, taken, new, new_taken) in enumerate(zip(ins[0], outs[0], new_ins[0], new_outs[0], strict=True)):
        if (size, taken) == (new, new_taken):
            continue
        if starts[d] == 0 and limits[d] == size:
            limits[d] = new
        elif size - taken == new - new_taken:  # all but some at the ends: see `sizes.offsets`
            limits[d] -= size - new
        elif starts[d] % taken == 0:  # one of equal parts: see `sizes.part_links`
            starts[d] = starts[d] // taken * new_taken
            limits[d] = starts[d] + new_taken
    return {"start_indices": tuple(starts), "limit_indices": tuple(limits)}


def _gather(params: Mapping[str, Any], ins: Shapes, outs: Shapes, new_ins: Shapes, new_outs: Shapes) -> dict[str, Any]:
    numbers, sizes = params["dimension_numbers"], list(params["slice_sizes"])
    gone = {*numbers.collapsed_slice_dims, *getattr(numbers, "operand_batching_dims", ())}
    window = [d for d in range(len(sizes)) if d not in gone]
    for d, position in zip(window, numbers.offset_dims, strict=True):
        sizes[d] = new_outs[0][position]
    return {"slice_sizes": tuple(sizes)}


def _convolution(
    params: Mapping[str, Any], ins: Shapes, outs: Shapes, new_ins: Shapes, new_outs: Shapes
) -> dict[str, Any]:
    numbers = params["dimension_numbers"]
    changed = {}
    if params["feature_group_count"] > 1:
        changed["feature_group_count"] = new_ins[0][numbers.lhs_spec[1]] // new_ins[1][numbers.rhs_spec[1]]
    if params["batch_group_count"] > 1:
        changed["batch_group_count"] = new_ins[0][numbers.lhs_spec[0]] // new_outs[0][numbers.out_spec[0]]
    return changed


def _fourier_transform(
    params: Mapping[str, Any], ins: Shapes, outs: Shapes, new_ins: Shapes, new_outs: Shapes
) -> dict[str, Any]:
    # The lengths are those of the side that has all elements: a transform from or to real numbers halves the other.
    count = len(params["fft_lengths"])
    sides = zip(new_ins[0][-count:], new_outs[0][-count:], strict=True)
    return {"fft_lengths": tuple(max(sizes) for sizes in sides)} if count else {}


def _behind_keys(
    params: Mapping[str, Any], ins: Shapes, outs: Shapes, new_ins: Shapes, new_outs: Shapes
) -> dict[str, Any]:
    return {"shape": tuple(new_outs[0][len(ins[0]) :])}


_CHANGES: dict[str, Change] = {
    "broadcast_in_dim": _result_shape("shape"), "iota": _result_shape("shape"), "empty": _result_shape("shape"),
    "rng_uniform": _result_shape("shape"), "rng_bit_generator": _result_shape("shape"),
    "reshape": _result_shape("new_sizes"), "dynamic_slice": _result_shape("slice_sizes"), "slice": _slice,
    "gather": _gather, "conv_general_dilated": _convolution,
    "fft": _fourier_transform,
    "random_bits": _behind_keys, "random_split": _behind_keys,
    "split": lambda params, ins, outs, new_ins, new_outs: {"sizes": tuple(shape[params["axis"]] for shape in new_outs)},
    "top_k": lambda params, ins, outs, new_ins, new_outs: {"k": new_outs[0][params.get("axis", -1)]},
    "tile": lambda params, ins, outs, new_ins, new_outs: {
        "reps": tuple(o // i for i, o in zip(new_ins[0], new_outs[0], strict=True))
    },
}  # fmt: skip
