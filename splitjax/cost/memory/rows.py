"""Lays tables out in rows for a TPU, and what is gathered or summed in pieces within its tiles.

An argument lies as compactly as can be; a lookup wants whole rows along the lanes, so that a table of few columns is
copied into an array that is filled up. An all-gather of pieces that do not begin where tiles do is laid out anew, and a
reduce-scatter of such pieces is an all-reduce of the whole, of which each device takes its part. All of this shows in
modules that libtpu compiled for the cells of `python -m benchmarks planner` that are not held out.

The split program comes in, with what compilers move in it (`moves`), and is changed.
"""

from __future__ import annotations

from splitjax.cost.memory.program import Kind, Node, Program, Region
from splitjax.cost.memory.tiles import Lie, is_cut_at_tiles, tiled_bytes

_ROWS = frozenset("gather scatter scatter-add scatter-mul scatter-min scatter-max".split())


def lay_out_rows(program: Program) -> set[int]:
    """Adds what lays out arrays of a `program`, and returns the values that lie in rows."""
    rows: set[int] = set()
    _lay_out(program, program.body, rows)
    return rows


def _lay_out(program: Program, region: Region, rows: set[int]) -> None:
    nodes: list[Node] = []
    laid_out: dict[int, int] = {}  # by table, the same in rows
    seen_through: dict[int, int] = {}  # by view, the value that it looks at
    for node in region.nodes:
        for inner in node.regions:
            _lay_out(program, inner, rows)
        _look_through(program, node, seen_through)
        if _picks_elements(node):
            node.kind = Kind.LOOP
        elif node.name == "gather":
            node.kind = Kind.KERNEL
        if node.kind in (Kind.LOOP, Kind.PART):
            node.inputs[:] = [laid_out.get(seen_through.get(value, value), value) for value in node.inputs]
        if _reads_rows(program, node):
            table = node.inputs[0]
            copies = _in_rows(program, node)
            laid_out |= {seen_through.get(table, table): copy.outputs[0] for copy in copies}
            rows |= {node.inputs[0], *node.outputs}
            nodes += copies
        elif node.kind in (Kind.LOOP, Kind.COLLECTIVE, Kind.VIEW) and _stays_in_rows(program, node, rows):
            rows |= {*node.outputs}
        nodes.append(node)
        if node.kind is Kind.COLLECTIVE:
            after = _within_tiles(program, node)
            if after and node.inputs[0] in rows:
                rows |= {*node.outputs, *after[0].outputs}
            nodes += after
    region.nodes[:] = nodes


def _look_through(program: Program, node: Node, seen_through: dict[int, int]) -> None:
    if node.kind is Kind.VIEW and len(node.inputs) == 1:
        (value,), (view,) = node.inputs, node.outputs
        if program.shapes[value] == program.shapes[view]:
            seen_through[view] = seen_through.get(value, value)


def _picks_elements(node: Node) -> bool:
    """Whether a node adds one element to each row of an array, as the gradient of a cross-entropy does: a loop that
    compares the numbers of elements with those that it is given."""
    if node.name != "scatter-add":
        return False
    numbers = node.params["dimension_numbers"]
    return not numbers.update_window_dims and len(numbers.operand_batching_dims) > 0


def _reads_rows(program: Program, node: Node) -> bool:
    """Whether a node looks up whole rows of a table, or adds to whole rows."""
    if node.name not in _ROWS or len(program.shapes[node.inputs[0]]) < 2:
        return False
    numbers = node.params["dimension_numbers"]
    return len(numbers.offset_dims if node.name == "gather" else numbers.update_window_dims) > 0


def _stays_in_rows(program: Program, node: Node, rows: set[int]) -> bool:
    """Whether a node reads an array in rows of as many dims as it makes, those of one element apart."""
    rank = lambda value: sum(size > 1 for size in program.part_of(value))
    return any(value in rows and rank(value) == rank(node.outputs[0]) for value in node.inputs)


def _in_rows(program: Program, node: Node) -> list[Node]:
    """Returns what lays a table out in rows for a node that looks rows up or adds to them."""
    table = node.inputs[0]
    part, itemsize = program.part_of(table), program.itemsizes[table]
    if table in program.zeros or tiled_bytes(part, itemsize) == tiled_bytes(part, itemsize, Lie.ROWS):
        return []
    copy = program.new(program.shapes[table], itemsize, program.splits[table])
    node.inputs[0] = copy
    return [Node("rows", Kind.KERNEL, [table], [copy])]


def _within_tiles(program: Program, node: Node) -> list[Node]:
    """Returns what lays out anew the result of an all-gather whose pieces do not begin where tiles do, or cuts that of
    a reduce-scatter whose pieces do not: that one is summed whole."""
    source, target = node.inputs[0], node.outputs[0]
    before, after = program.part_of(source), program.part_of(target)
    if len(before) != len(after):
        return []
    for dim, (here, there) in enumerate(zip(before, after, strict=True)):
        if here < there and not is_cut_at_tiles(before, dim):
            pieces = program.new(program.shapes[target], program.itemsizes[target], program.splits[target])
            node.outputs[0] = pieces
            return [Node("copy", Kind.KERNEL, [pieces], [target])]
        if here > there and node.name == "reduce_scatter" and not is_cut_at_tiles(after, dim):
            whole = program.new(program.shapes[source], program.itemsizes[source], program.splits[source])
            node.outputs[0] = whole
            return [Node("part", Kind.PART, [whole], [target])]
    return []
