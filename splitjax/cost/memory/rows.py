"""Lays tables out in rows for a TPU, and what is gathered or summed in pieces within its tiles.

An argument lies as compactly as can be; a lookup wants whole rows along the lanes, so that a table of few columns is
copied into an array that is filled up. An all-gather of pieces that do not begin where tiles do is laid out anew, and a
reduce-scatter of such pieces is an all-reduce of the whole, of which each device takes its part. All of this shows in
modules that libtpu compiled for the cells of `python -m benchmarks planner` that are not held out.

The split program comes in, with what compilers move in it (`moves`), and is changed.
"""

from __future__ import annotations

import math

from splitjax.cost.memory.layouts import decided_layouts
from splitjax.cost.memory.program import Kind, Node, Program, Region, look_through
from splitjax.cost.memory.tiles import Along, Tiling, is_cut_at_tiles, tiled_bytes

_SCATTERS = frozenset("scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max".split())


def lay_out(program: Program) -> dict[int, Tiling | Along]:
    """Adds what lays out arrays of a `program`, and returns by value how it lies, where that is not as products want
    it."""
    rows: set[int] = set()
    _lay_out(program, program.body, rows)
    # Of a value that is several, the last one counts: arguments lie as they come.
    return {
        **decided_layouts(program),
        **dict.fromkeys(rows, Tiling.ROWS),
        **dict.fromkeys(program.body.inputs, Tiling.COMPACT),
    }


def _lay_out(program: Program, region: Region, rows: set[int]) -> None:
    nodes: list[Node] = []
    laid_out: dict[int, int] = {}  # by table, the same in rows
    seen_through: dict[int, int] = {}  # by view, the value that it looks at
    for node in region.nodes:
        for inner in node.regions:
            _lay_out(program, inner, rows)
        look_through(program, node, seen_through)
        if _picks_elements(program, node):
            node.kind = Kind.LOOP
        elif node.name == "gather":
            node.kind = Kind.KERNEL
        if node.kind in (Kind.LOOP, Kind.PART):
            node.inputs[:] = [laid_out.get(seen_through.get(value, value), value) for value in node.inputs]
        if _looks_up_rows(program, node):
            nodes += _in_rows(program, node, laid_out, seen_through)
            rows |= {node.inputs[0], *node.outputs}
        elif _adds_rows(program, node, seen_through):
            rows |= {node.inputs[0], seen_through.get(node.inputs[0], node.inputs[0]), *node.outputs}
        elif node.kind in (Kind.LOOP, Kind.COLLECTIVE, Kind.VIEW) and _stays_in_rows(program, node, rows):
            rows |= {*node.outputs}
        nodes.append(node)
        if node.kind is Kind.COLLECTIVE:
            after = _within_tiles(program, node)
            if after and node.inputs[0] in rows:
                rows |= {*node.outputs, *after[0].outputs}
            nodes += after
    region.nodes[:] = nodes


def _picks_elements(program: Program, node: Node) -> bool:
    """Whether a node adds one element to each row of an array, as the gradient of a cross-entropy does: a loop that
    compares the numbers of elements with those that it is given."""
    if node.name != "scatter-add":
        return False
    numbers, (table, _, added) = node.params["dimension_numbers"], node.inputs
    num_rows = math.prod(program.shapes[table][dim] for dim in numbers.operand_batching_dims)
    is_batched = len(numbers.operand_batching_dims) > 0
    return is_batched and not numbers.update_window_dims and math.prod(program.shapes[added]) == num_rows


def _looks_up_rows(program: Program, node: Node) -> bool:
    """Whether a node looks up whole rows of a table, or columns."""
    if node.name != "gather" or len(program.shapes[node.inputs[0]]) < 2:
        return False
    return len(node.params["dimension_numbers"].offset_dims) > 0


def _adds_rows(program: Program, node: Node, seen_through: dict[int, int]) -> bool:
    """Whether a node adds whole rows into zeros, as the gradient of a lookup does. What else is added into lies as it
    lay before."""
    if node.name not in _SCATTERS or seen_through.get(node.inputs[0], node.inputs[0]) not in program.zeros:
        return False
    return len(program.shapes[node.inputs[0]]) > 1 and len(node.params["dimension_numbers"].update_window_dims) > 0


def _stays_in_rows(program: Program, node: Node, rows: set[int]) -> bool:
    """Whether a node reads an array in rows of as many dims as it makes, those of one element apart."""
    rank = lambda value: sum(size > 1 for size in program.part_of(value))
    return any(value in rows and rank(value) == rank(node.outputs[0]) for value in node.inputs)


def _in_rows(program: Program, node: Node, laid_out: dict[int, int], seen_through: dict[int, int]) -> list[Node]:
    """Returns what lays a table out in rows for a node that looks them up, and makes it read that. A table whose
    columns are looked up is transposed. `laid_out`: by table, what lies in rows already; it gets the table."""
    table = node.inputs[0]
    part, itemsize, split = program.part_of(table), program.itemsizes[table], program.splits[table]
    numbers = node.params["dimension_numbers"]
    found = sorted({*numbers.start_index_map, *numbers.operand_batching_dims})
    order = [*found, *(dim for dim in range(len(part)) if dim not in found)]
    is_in_place = order == list(range(len(part)))
    if is_in_place and tiled_bytes(part, itemsize) == tiled_bytes(part, itemsize, Tiling.ROWS):
        return []
    source = seen_through.get(table, table)
    if is_in_place and source in laid_out and program.splits[laid_out[source]] == split:
        node.inputs[0] = laid_out[source]
        return []
    copy = program.new([program.shapes[table][dim] for dim in order], itemsize, tuple(split[dim] for dim in order))
    node.inputs[0] = copy
    if is_in_place:
        laid_out[source] = copy
    return [Node("rows", Kind.KERNEL, [table], [copy])]


def _within_tiles(program: Program, node: Node) -> list[Node]:
    """Returns what lays out anew the result of an all-gather whose pieces do not begin where tiles do, or cuts that of
    a reduce-scatter whose pieces do not: that one is summed whole."""
    source, target = node.inputs[0], node.outputs[0]
    before, after = program.part_of(source), program.part_of(target)
    if len(before) != len(after):
        return []
    for dim, (here, there) in enumerate(zip(before, after, strict=True)):
        if here < there and node.name.startswith("all_gather") and not is_cut_at_tiles(before, dim):
            pieces = program.new(program.shapes[target], program.itemsizes[target], program.splits[target])
            node.outputs[0] = pieces
            return [Node("copy", Kind.KERNEL, [pieces], [target])]
        if here > there and node.name == "reduce_scatter" and not is_cut_at_tiles(after, dim):
            whole = program.new(program.shapes[source], program.itemsizes[source], program.splits[source])
            node.outputs[0] = whole
            return [Node("part", Kind.PART, [whole], [target])]
    return []
