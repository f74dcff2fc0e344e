"""Says into how many parts XLA's GPU compiler splits a product along the dim that it sums over, to keep all cores busy.

The shapes of a product come in, a number of parts comes out, and for a schedule the bytes of the partial products that
are stored: f32[parts, m, n] in place of f32[m, n], which the loop that reads them adds up. Modules for an H200 show the
parts (`tests/cost/memory/test_products.py` has some of them); the compiler weighs them by a model of time (its
`SplitkRewriter`), which the rule here follows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from splitjax.cost.memory.program import Kind, Node, Program
from splitjax.cost.memory.schedule import Schedule

_TILE = 128  # elements of a tile of a result, along both dims
_CORES = 132  # of an H100 and of an H200
_LEAST = 4  # fewer parts are not worth it, unless more are wanted than there are cores for


def num_parts(rows: int, columns: int, summed: int) -> int:
    """Returns the parts into which a product of `rows` x `summed` and `summed` x `columns` elements is split."""
    tiles = -(-rows // _TILE) * -(-columns // _TILE)
    if not tiles:
        return 1
    wanted = 1 << max(int(math.log2(max(summed / (2 * tiles), 1)) / 2), 0)
    if wanted < _LEAST or tiles >= _CORES:
        return 1
    return max(min(wanted, 1 << round(math.log2(_CORES / tiles))), 1)


def store_parts(schedule: Schedule, sizes: dict[int, int], makers: Mapping[int, Node], program: Program) -> None:
    """Sets the `sizes` of products that are stored in parts: those that loops over elements alone read.

    **Arguments:** `schedule`: the steps, in which loops and branches hold schedules of their own. `sizes`: bytes by
    buffer. `makers`: by value the node that made it. `program`: has their shapes."""
    products = {
        step.writes[0]: count
        for step in schedule.steps
        if len(step.writes) == 1 and step.made is None and (count := _parts(makers.get(step.writes[0]), program)) > 1
    }
    kept = set(schedule.outputs)
    for step in schedule.steps:
        for inside in step.inside:
            store_parts(inside, sizes, makers, program)
        maker = makers.get(step.writes[0]) if step.writes else None
        if maker is None or maker.kind is not Kind.LOOP:
            kept.update(step.reads)
    for buffer, count in products.items():
        if buffer not in kept:
            sizes[buffer] *= count


def _parts(node: Node | None, program: Program) -> int:
    if node is None or node.name != "dot_general":
        return 1
    (contracted, _), (batch, _) = node.params["dimension_numbers"]
    if batch:
        return 1
    (left, _), (output,) = node.inputs, node.outputs
    local = [
        -(-size // program.num_parts(axes))
        for size, axes in zip(program.shapes[left], program.splits[left], strict=True)
    ]
    summed = _count(local, contracted)
    rows = _count(local, [dim for dim in range(len(local)) if dim not in contracted])
    return num_parts(rows, program.bytes_of(output) // program.itemsizes[output] // max(rows, 1), summed)


def _count(sizes: Sequence[int], dims: Sequence[int]) -> int:
    return math.prod(sizes[dim] for dim in dims)
