"""Takes out of loops what they convert of stacked arrays to narrower types: a TPU's compiler converts the stack once,
in front of the loop, and loops that read the same stack share it (`WhileLoopInvariantCodeMotion` in XLA)."""

from __future__ import annotations

from splitjax.cost.memory.program import Kind, Node, Program, Region, views_of


def hoist_converts(program: Program) -> None:
    """Moves conversions of slices in front of the loops of a split `program`, which it changes."""
    _hoist(program, program.body)


def _hoist(program: Program, region: Region) -> None:
    nodes: list[Node] = []
    narrow: dict[tuple[int, int], int] = {}  # by stack and bytes of an element, the converted stack
    for node in region.nodes:
        for inner in node.regions:
            _hoist(program, inner)
        if node.kind is Kind.REGIONS and node.num_carry:
            nodes += _hoisted(program, node.regions[0], narrow)
        nodes.append(node)
    region.nodes[:] = nodes


def _hoisted(program: Program, body: Region, narrow: dict[tuple[int, int], int]) -> list[Node]:
    """Returns the conversions of stacks that a loop's `body` needs, and makes it read their results."""
    made: list[Node] = []
    inside = {value for node in body.nodes for value in node.outputs}
    readers: dict[int, list[Node]] = {}
    for node in body.nodes:
        for value in node.inputs:
            readers.setdefault(value, []).append(node)
    for node in body.nodes:
        if node.name != "slice_of_scan" or node.inputs[0] in inside:
            continue
        (stack,), (part,) = node.inputs, node.outputs
        views, using = _through_views(part, readers)
        sizes = {program.itemsizes[user.outputs[0]] for user in using}
        if not using or any(user.name != "convert_element_type" for user in using) or len(sizes) > 1:
            continue
        (itemsize,) = sizes
        if itemsize >= program.itemsizes[stack]:
            continue
        key = stack, itemsize
        if key not in narrow:
            narrow[key] = program.new(program.shapes[stack], itemsize, program.splits[stack])
            made.append(Node("convert", Kind.KERNEL, [stack], [narrow[key]]))
        node.inputs[0] = narrow[key]
        for view in views:
            program.itemsizes[view] = itemsize
    return made


def _through_views(value: int, readers: dict[int, list[Node]]) -> tuple[list[int], list[Node]]:
    """Returns a value with the views of it, and what reads any of them."""
    views, using = [value], []
    for view in views:
        for node in readers.get(view, []):
            if node.kind is Kind.VIEW:
                views += views_of(node, view)
            else:
                using.append(node)
    return views, using
