"""Finds the dims of an operation that must not be split while XLA partitions it.

A description of an operation goes in; dims by operand come out, none for an operation that the function is not about.
Each function is what a row of the table asks (`defects.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from splitjax.primitives.operation import Trait
from splitjax.primitives.table import OPERATIONS

Shape = tuple[int, ...]
Touched = Mapping[int, tuple[int, ...]]  # operand position (-1 for the first result) -> dims


@dataclasses.dataclass(frozen=True)
class Operation:
    """Describes an operation of a traced step, as far as rows ask for it.

    - `primitive`, `params`: the name of its primitive, and the equation's parameters.
    - `operands`, `results`: their shapes.
    - `literals`: the operands that are numbers in the program, by position.
    - `dtypes`: of the operands; empty where they are not known.
    """

    primitive: str
    params: Mapping[str, Any]
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    literals: Mapping[int, Any]
    dtypes: tuple[str, ...] = ()


def no_operation(operation: Operation) -> Touched:
    """Is for rows that are seen to where layouts are decided, whatever the operation."""
    return {}


def _all_dims(operation: Operation) -> Touched:
    """Returns all dims of operands and first result."""
    shapes = {**dict(enumerate(operation.operands)), -1: operation.results[0]}
    return {position: tuple(range(len(shape))) for position, shape in shapes.items()}


def grouped(operation: Operation) -> Touched:
    """Returns all dims of a convolution with groups."""
    if operation.primitive != "conv_general_dilated":
        return {}
    groups = max(operation.params["feature_group_count"], operation.params["batch_group_count"])
    return _all_dims(operation) if groups > 1 else {}


def convolution(operation: Operation) -> Touched:
    """Returns all dims of a convolution."""
    return _all_dims(operation) if operation.primitive == "conv_general_dilated" else {}


def transformed(operation: Operation) -> Touched:
    """Returns all dims of a Fourier transform."""
    return _all_dims(operation) if operation.primitive == "fft" else {}


# Primitive -> the position of the operand whose shape is the window's (None: `slice_sizes`), and of the first start
# index.
WINDOWS: Mapping[str, tuple[int | None, int]] = {"dynamic_slice": (None, 1), "dynamic_update_slice": (1, 2)}
SCATTERS: frozenset[str] = OPERATIONS.with_trait(Trait.WRITES) - {"dynamic_update_slice"}
BITWISE: frozenset[str] = OPERATIONS.with_trait(Trait.BITWISE)


def unbounded_starts(operation: Operation) -> Touched:
    """Returns the dims of which a dynamic slice takes or writes a part that starts at an index that the program
    computes."""
    if operation.primitive not in WINDOWS:
        return {}
    window, first = WINDOWS[operation.primitive]
    sizes = operation.params["slice_sizes"] if window is None else operation.operands[window]

    def is_safe(dim: int) -> bool:
        largest, start = operation.operands[0][dim] - sizes[dim], operation.literals.get(first + dim)
        return largest == 0 or (start is not None and 0 <= int(start) <= largest)

    dims = tuple(dim for dim in range(len(sizes)) if not is_safe(dim))
    return {0: dims, -1: dims} if dims else {}


def dilated_and_cut(operation: Operation) -> Touched:
    """Returns the dims that a pad dilates and cuts at their beginning, but not between two elements of the operand."""
    if operation.primitive != "pad":
        return {}
    config = operation.params["padding_config"]
    dims = tuple(dim for dim, (low, _, interior) in enumerate(config) if low < 0 and -low % (interior + 1))
    return {0: dims, -1: dims} if dims else {}


def strided_to_one(operation: Operation) -> Touched:
    """Returns the dims of which a strided slice takes one element."""
    if operation.primitive != "slice" or not operation.params["strides"]:
        return {}
    dims = tuple(
        dim
        for dim, (stride, taken, size) in enumerate(
            zip(operation.params["strides"], operation.results[0], operation.operands[0], strict=True)
        )
        if stride > 2 and taken == 1 < size
    )
    return {0: dims} if dims else {}


def upper_half(operation: Operation) -> Touched:
    """Returns all dims of an upper half of a product."""
    return _all_dims(operation) if operation.primitive == "mulhi" else {}


def indexed(operation: Operation) -> Touched:
    """Returns the dims that a lookup (whose gradient is a scatter) or a scatter has from its indices."""
    if operation.primitive == "gather":
        rows = len(operation.results[0])
        offsets = operation.params["dimension_numbers"].offset_dims
        return _without_none(
            {1: range(len(operation.operands[1]) - 1), -1: [dim for dim in range(rows) if dim not in offsets]}
        )
    if operation.primitive in SCATTERS:
        rows = len(operation.operands[2])
        windows = operation.params["dimension_numbers"].update_window_dims
        return _without_none(
            {1: range(len(operation.operands[1]) - 1), 2: [dim for dim in range(rows) if dim not in windows]}
        )
    return {}


def batched_indices(operation: Operation) -> Touched:
    """Returns the dims that a lookup or a scatter with dims of its own indices for each entry of a batch has from these
    indices, unless they are of 32 bits with a sign; and the sorted dim of a sort of floats, whose gradient is such a
    scatter."""
    if operation.primitive == "sort":
        if not any("float" in dtype for dtype in operation.dtypes):
            return {}  # it has no gradient
        dims = (operation.params["dimension"],)
        count = len(operation.operands)
        return dict.fromkeys((*range(count), *range(-count, 0)), dims)
    touched = indexed(operation)
    if not touched or operation.dtypes[1:2] in ((), ("int32",)):
        return {}
    numbers, is_gather = operation.params["dimension_numbers"], operation.primitive == "gather"
    batching = numbers.start_indices_batching_dims if is_gather else numbers.scatter_indices_batching_dims
    if not batching:
        return {}
    # Along the dims that are from the indices, in order, the parts of the array lie as the indices do.
    return _without_none(
        {
            position: [dim for number, dim in enumerate(dims) if number not in batching]
            for position, dims in touched.items()
        }
    )


def _without_none(touched: Mapping[int, Iterable[int]]) -> Touched:
    """Leaves out the positions without dims."""
    return {position: tuple(dims) for position, dims in touched.items() if tuple(dims)}


def reduced(operation: Operation) -> Touched:
    """Returns the dims that a reduction without a collective of its own sums up: bitwise ones, and those with a
    computation of the user's."""
    if operation.primitive in BITWISE:
        return {0: tuple(operation.params["axes"])}
    if operation.primitive == "reduce":
        return {
            position: tuple(operation.params["dimensions"])
            for position, shape in enumerate(operation.operands)
            if shape
        }
    return {}
