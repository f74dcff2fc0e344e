"""Says how much of a core's vector memory (VMEM) a compiled program fills, beside the main memory (HBM) of the chip.

A TPU's compiler puts arrays into vector memory where there is room, because it is near. It says so in the layout of
each array, and its own figure for the peak counts both memories. How an array lies, tiles and padding included, follows
XLA's text on tiled layouts (https://openxla.org/xla/tiled_layout).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from splitjax.report.hlo import DTYPES
from splitjax.report.memory.moments import LOOKS, Moments
from splitjax.report.wire import Instruction, Module, Shape

_VECTOR = 1  # the memory space of an array's layout; 0 is the main memory
# What they give lies where one of their operands lies, or where what began it put it.
_GOES_ON = frozenset("while conditional call dynamic-update-slice async-update".split())
# Of what begins an asynchronous operation, the part of its tuple that is new; the others are its operands.
_NEW_PART = {
    "copy-start": 0, "async-start": 1, "async-update": 1, "all-gather-start": 1, "collective-permute-start": 1,
}  # fmt: skip


def vector_memory_bytes(module: Module) -> int | None:
    """Returns how many bytes at most lie in vector memory at any moment of a program, 0 where nothing lies there; None
    where XLA does not say in which order its operations run.

    It is an upper bound: what an operation writes over its operands counts beside them at that moment. What kernels
    keep there while they run is not counted. `module`: the program, with its schedule."""
    moments = Moments(module)
    if not moments.operations:
        return None
    changes = [0] * (len(moments.operations) + 1)
    for instruction in moments.instructions.values():
        if instruction.opcode == "parameter" or instruction.opcode in LOOKS:
            continue
        for index, shape in _new_arrays(instruction):
            span = moments.span((instruction.id, index)) if shape.memory_space == _VECTOR else None
            if span is None:
                continue
            start, end = span
            if instruction.opcode in _GOES_ON or instruction.opcode.endswith("-done"):
                # Up to here its bytes are counted with the array that they were.
                start = moments.last_of(instruction.id)
            if start < end:
                changes[start] += padded_bytes(shape)
                changes[end] -= padded_bytes(shape)
    return max(itertools.accumulate(changes))


def padded_bytes(shape: Shape) -> int:
    """Returns the bytes of an array as it lies: its dims in the order of its layout, the innermost of them filled up to
    whole tiles."""
    order = shape.minor_to_major or tuple(reversed(range(len(shape.dims))))
    sizes = [shape.dims[dim] for dim in order if dim < len(shape.dims)]
    for place, tile in enumerate(reversed(shape.tile)):
        if place < len(sizes) and tile > 0:  # a tile may join a dim with the next one instead
            sizes[place] = -(-sizes[place] // tile) * tile
    return math.prod(sizes) * DTYPES.get(shape.element_type, ("unknown", 8))[1] // 8


def _new_arrays(instruction: Instruction) -> Iterator[tuple[tuple[int, ...], Shape]]:
    """Yields the arrays in the result of an instruction, by their place in its tuple; what begins an asynchronous
    operation gives its operands, too, which are left out."""
    part = _NEW_PART.get(instruction.opcode)
    if part is None or part >= len(instruction.shape.members):
        yield from _arrays(instruction.shape, ())
    else:
        yield from _arrays(instruction.shape.members[part], (part,))


def _arrays(shape: Shape, index: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Shape]]:
    if not shape.members:
        yield index, shape
    for place, member in enumerate(shape.members):
        yield from _arrays(member, (*index, place))
