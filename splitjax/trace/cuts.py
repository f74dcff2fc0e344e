"""Finds where a step takes a part of the batch's examples: slices of it, and single examples of a loop.

A flat step comes in, `BatchCut`s come out. It exists because devices share a dim of examples, and no part of one: what
is computed of a slice, every device computes, and the plan says where it was cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from splitjax.trace.classes import Classes
from splitjax.trace.flatten import BACKWARD, FlatStep, Op
from splitjax.trace.stepping import around_gradients, reads_a_turn


@dataclasses.dataclass(frozen=True)
class BatchCut:
    """Describes an operation that takes a part of the examples of a batch.

    - `source`: the user's file:line; "" where it is not known, as of what a scan reads.
    - `part`, `whole`: the number of examples in the part, and in the batch.
    - `looped`: whether a loop around the gradient takes it, another one in every turn.
    """

    source: str
    part: int
    whole: int
    looped: bool


def find_cuts(
    flat: FlatStep, classes: Classes, feeds: Sequence[frozenset[str]], examples: frozenset[int]
) -> Iterator[BatchCut]:
    """Yields the cuts of `flat`, in program order.

    **Arguments:** `classes`: the dim classes. `feeds`: per value the batch leaves that it is made of. `examples`: the
    atoms of the example dim, of which loops around the gradient count none."""
    loops = around_gradients(flat)
    for op in flat.ops:
        if op.phase == BACKWARD or not op.inputs or not feeds[op.inputs[0]]:
            continue
        looped = not loops.isdisjoint(op.loops)
        part = _part(op, flat, looped)
        if part is None:
            continue
        dim, number = part
        shape = flat.shapes[op.inputs[0]]
        atoms = classes.dims(op.inputs[0], len(shape))[dim]
        if atoms and atoms[0] in examples:
            yield BatchCut(op.source, number, shape[dim], looped)


def _part(op: Op, flat: FlatStep, looped: bool) -> tuple[int, int] | None:
    """Returns the first dim of its first operand of which an operation takes a part, with the size of the part; None
    for none. What is read turn by turn is a part where a loop around the gradient reads it (`looped`)."""
    if looped and reads_a_turn(op, flat):
        return 0, 1
    if op.primitive not in ("slice", "dynamic_slice", "split"):
        return None
    sizes = zip(flat.shapes[op.inputs[0]], flat.shapes[op.outputs[0]], strict=True)
    return next(((dim, part) for dim, (whole, part) in enumerate(sizes) if part < whole), None)
