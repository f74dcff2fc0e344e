"""Adds to a split `Program` what compilers move: an operand that is split otherwise than its operation, the sum of a
product over a split dim, operands and results of products whose dims lie in another order than these want them.

The program is changed; `buffers` then decides what of it is stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from splitjax.cost.memory.compilers import Compiler
from splitjax.cost.memory.program import Axes, Kind, Node, Program, Region
from splitjax.cost.memory.spreading import label_dims


def add_moves(program: Program, compiler: Compiler) -> None:
    """Adds what the partitioner moves and sums, and what the `compiler` transposes, to all regions of a program."""
    _rewrite(program, compiler, program.body)


def _rewrite(program: Program, compiler: Compiler, region: Region) -> None:
    nodes: list[Node] = []
    for node in region.nodes:
        for inner in node.regions:
            _rewrite(program, compiler, inner)
        if (
            node.kind is Kind.VIEW
            and node.name != "transpose"
            and node.dims is not None
            and len(node.inputs) == 1 == len(node.outputs)
        ):
            nodes += _moved(program, node)
            continue
        before, after = ([], []) if node.dims is None or node.kind is Kind.REGIONS else _partition(program, node)
        inner = _arranged(program, node) if compiler.transposes_operands else ([], [])
        nodes += [*before, *inner[0], node, *inner[1], *after]
    region.nodes[:] = nodes


def _moved(program: Program, node: Node) -> list[Node]:
    """Returns a view in a list; where its result is split otherwise than what it looks at, what moves that."""
    (source,), (target,) = node.inputs, node.outputs
    if program.bytes_of(source) != program.bytes_of(target) or (
        program.shapes[source] == program.shapes[target] and program.splits[source] != program.splits[target]
    ):
        grows = program.bytes_of(target) > program.bytes_of(source)
        smaller = program.bytes_of(target) < program.bytes_of(source)
        kind = Kind.PART if smaller else Kind.COLLECTIVE
        return [dataclasses.replace(node, kind=kind, name="all_gather" if grows else "move")]
    return [node]


def _partition(program: Program, node: Node) -> tuple[list[Node], list[Node]]:
    """Returns what moves operands that are split otherwise than `node` has their dims, and what sums its results over
    the axes of dims that these lack."""
    before: list[Node] = []
    summed: list[str] = []
    chosen: dict[Hashable, Axes] = {}
    assert node.dims is not None, "a node whose dims are not known is left as it is"
    for label, places in label_dims(node).items():
        results = [(value, dim) for position, value, dim in places if position < 0]
        axes: Axes = ()
        for value, dim in results or [(value, dim) for _, value, dim in places]:
            here = program.splits[value][dim]
            axes = here if len(here) > len(axes) else axes
        chosen[label] = axes
        if not results and axes and _sums(node):
            summed += [axis for axis in axes if axis not in summed]
    used = {axis for output in node.outputs[:1] for axes in program.splits[output] for axis in axes}
    summed = [axis for axis in summed if axis not in used]
    for position, value in enumerate(node.inputs):
        if value in program.constants or not program.shapes[value]:
            continue
        labels = node.dims.inputs[position] if position < len(node.dims.inputs) else ()
        wanted: list[Axes] = []
        for dim, factors in enumerate(labels):
            here = program.splits[value][dim]
            axes = chosen.get(factors[0], ()) if factors else ()
            ok = program.shapes[value][dim] > 1 and program.shapes[value][dim] % max(program.num_parts(axes), 1) == 0
            other = {axis for taken in wanted for axis in taken}
            wanted.append(axes if ok and not other & set(axes) else here if here and not axes and not ok else ())
        if len(labels) == len(program.shapes[value]) and tuple(wanted) != program.splits[value]:
            moved = program.new(program.shapes[value], program.itemsizes[value], tuple(wanted))
            smaller = program.bytes_of(moved) < program.bytes_of(value)
            kind = Kind.PART if smaller else Kind.COLLECTIVE
            if program.bytes_of(moved) != program.bytes_of(value) or smaller:
                before.append(Node("part" if smaller else "all_gather", kind, [value], [moved]))
                node.inputs[position] = moved
    after: list[Node] = []
    if summed:
        for position, output in enumerate(node.outputs):
            partial = program.new(program.shapes[output], program.itemsizes[output], program.splits[output])
            node.outputs[position] = partial
            after.append(Node("all_reduce", Kind.COLLECTIVE, [partial], [output], None, tuple(summed)))
    return before, after


def _arranged(program: Program, node: Node) -> tuple[list[Node], list[Node]]:
    """Returns what transposes operands and results of a product, a convolution, or a collective along a dim that is not
    the first."""
    before: list[Node] = []
    after: list[Node] = []
    if node.name == "conv_general_dilated":
        numbers = node.params["dimension_numbers"]
        for position, spec in enumerate((numbers.lhs_spec, numbers.rhs_spec)):
            rank = len(spec)
            last = (0, rank - 1, *range(1, rank - 1)) if position == 0 else (rank - 1, rank - 2, *range(rank - 2))
            if tuple(spec) != last:
                before.append(_transposed(program, node, position))
        rank = len(numbers.out_spec)
        if tuple(numbers.out_spec) != (0, rank - 1, *range(1, rank - 1)):
            after.append(_untransposed(program, node))
    elif node.name == "dot_general":
        before += _arranged_product(program, node)
    elif node.kind is Kind.COLLECTIVE and node.params and node.name.startswith("all_gather"):
        if node.params.get("all_gather_dimension", 0):
            before.append(_transposed(program, node, 0))
            after.append(_untransposed(program, node))
    elif node.kind is Kind.COLLECTIVE and node.name == "reduce_scatter":
        if node.params["scatter_dimension"]:
            before.append(_transposed(program, node, 0))
            after.append(_untransposed(program, node))
    return before, after


def _transposed(program: Program, node: Node, position: int) -> Node:
    value = node.inputs[position]
    arranged = program.new(program.shapes[value], program.itemsizes[value], program.splits[value])
    node.inputs[position] = arranged
    return Node("transpose_operand", Kind.LOOP, [value], [arranged])


def _untransposed(program: Program, node: Node) -> Node:
    value = node.outputs[0]
    raw = program.new(program.shapes[value], program.itemsizes[value], program.splits[value])
    node.outputs[0] = raw
    return Node("transpose_result", Kind.LOOP, [raw], [value])


def _arranged_product(program: Program, node: Node) -> list[Node]:
    (contracted, batch), before = node.params["dimension_numbers"], []
    for position, value in enumerate(node.inputs[:2]):
        shape = program.shapes[value]
        real = [d for d in range(len(shape)) if shape[d] > 1]
        group = [0 if d in batch[position] else 2 if d in contracted[position] else 1 for d in real]
        fine = (
            len(shape) == 2
            or group == sorted(group)
            or (position == 1 and group == sorted(group, key=lambda g: (0, 2, 1)[g] if g else 0))
        )
        if not fine:
            before.append(_transposed(program, node, position))
    return before


def _sums(node: Node) -> bool:
    """Whether an operation adds up over dims that its result lacks."""
    return node.name in ("dot_general", "conv_general_dilated", "gather", "scatter-add") or node.name.startswith(
        "reduce_"
    )
