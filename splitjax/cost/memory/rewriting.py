"""Rewrites a split program as a TPU's compiler does before anything is stored. Modules of libtpu show two things:

- What loops convert of stacked arrays to narrower types is converted once, in front of the loop, and loops that read
  the same stack share it (`convert` of `bf16[32,4096,224]` in front of both loops of LLaMA 8B).
- Pieces of whole tiles into which an array is split are computed where they are read: gradients of concatenated images
  are stored whole, and their halves read from there (`slice_add_fusion` of `unet/zero/256`).

`tests/cost/memory` has small ones (`test_on_tpus.py`, `test_what_products_read.py`).
"""

from __future__ import annotations

from typing import Any

from splitjax.cost.memory.program import Kind, Node, Program, Region, views_of
from splitjax.cost.memory.tiles import LANES


def hoist_converts(program: Program) -> list[tuple[int, int]]:
    """Moves conversions of slices in front of the loops of a split `program`, which it changes. Returns (stack,
    converted stack) of each."""
    return _hoist(program, program.body)


def _hoist(program: Program, region: Region) -> list[tuple[int, int]]:
    made: list[tuple[int, int]] = []
    nodes: list[Node] = []
    narrow: dict[tuple[int, Any], int] = {}  # by stack and type, the converted stack
    for node in region.nodes:
        for inner in node.regions:
            made += _hoist(program, inner)
        if node.name == "scan":
            nodes += _hoisted(program, node, narrow)
        nodes.append(node)
    region.nodes[:] = nodes
    return made + [(stack, converted) for (stack, _), converted in narrow.items()]


def _hoisted(program: Program, loop: Node, narrow: dict[tuple[int, Any], int]) -> list[Node]:
    """Returns the conversions of stacks that a `loop` needs, and makes it read their results."""
    made: list[Node] = []
    (body,) = loop.regions
    readers: dict[int, list[Node]] = {}
    for node in body.nodes:
        for value in node.inputs:
            readers.setdefault(value, []).append(node)
    inside = {value for node in body.nodes for value in node.outputs}
    kept = set(body.outputs)
    for node in body.nodes:
        if node.name != "slice_of_scan" or node.inputs[0] in inside:
            continue
        (stack,), (part,) = node.inputs, node.outputs
        views, using = _through_views(part, readers)
        types = {user.params["new_dtype"] for user in using if user.name == "convert_element_type"}
        if len(types) != 1 or any(user.name != "convert_element_type" for user in using) or kept & set(views):
            continue
        itemsize = program.itemsizes[using[0].outputs[0]]
        if itemsize >= program.itemsizes[stack]:
            continue
        key = stack, *types
        if key not in narrow:
            narrow[key] = program.new(program.shapes[stack], itemsize, program.splits[stack])
            made.append(Node("convert", Kind.KERNEL, [stack], [narrow[key]]))
        node.inputs[0] = narrow[key]
        if len(readers[stack]) == 1:  # the loop needs the wide stack no more
            loop.inputs[:] = [narrow[key] if value == stack else value for value in loop.inputs]
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


def slice_splits(program: Program, region: Region) -> None:
    """Replaces each split in a `region` of a `program`, and in the loops and branches in it, by slices, where every
    piece fills the lanes of its tiles."""
    nodes: list[Node] = []
    for node in region.nodes:
        for inner in node.regions:
            slice_splits(program, inner)
        if node.name == "split" and all(program.part_of(each)[-1] % LANES == 0 for each in node.outputs):
            nodes += [
                Node("slice_of_split", node.kind, list(node.inputs), [each], origin=node.origin)
                for each in node.outputs
            ]
        else:
            nodes.append(node)
    region.nodes[:] = nodes
