"""Says how values lie in the main memory of a TPU where others decide it: operands and results of products with batch
dims, and what becomes a result of the step by loops over elements, views and collectives alone, such as a gradient.

Modules that libtpu compiled for the cells of `python -m benchmarks planner` that are not held out show both: heads of
ViT-L (`bf16[32,196,16,64]{1,3,2,0}`, positions along the lanes), and gradients of stacked weights of a mixture of
experts (`f32[32,8,4096,56]{2,3,1,0}`, as the weights).
"""

from __future__ import annotations

from splitjax.cost.memory.program import Kind, Node, Program, Region, look_through
from splitjax.cost.memory.tiles import Along, Tiling

# What hands a layout on to a result of the step.
_HANDS_ON = (Kind.LOOP, Kind.VIEW, Kind.COLLECTIVE)


def decided_layouts(program: Program) -> dict[int, Tiling | Along]:
    """Returns by value of a `program` how it lies, where products or arguments decide it."""
    found: dict[int, Tiling | Along] = {}
    _beside_products(program, program.body, found, {})
    found |= dict.fromkeys(_as_results(program), Tiling.COMPACT)
    return found


def _beside_products(
    program: Program, region: Region, found: dict[int, Tiling | Along], source: dict[int, int]
) -> None:
    """Adds to `found` what lies around products. `source`: by view of the same shape, the value that it looks at."""
    for node in region.nodes:
        for inner in node.regions:
            _beside_products(program, inner, found, source)
        look_through(program, node, source)
        if node.name == "dot_general":
            _around_product(program, node, source, found)
        elif node.name == "transpose":
            along, order = found.get(node.inputs[0]), tuple(node.params["permutation"])
            if isinstance(along, Along):
                found.setdefault(node.outputs[0], Along(tuple(order.index(dim) for dim in along.dims)))


def _around_product(program: Program, node: Node, source: dict[int, int], found: dict[int, Tiling | Along]) -> None:
    """Adds how operands and result of a product with batch dims lie. Who makes a value decides before who reads it."""
    _, batches = node.params["dimension_numbers"]
    if not batches[0]:
        return
    for value, batch in zip([*node.inputs, *node.outputs], [*batches, range(len(batches[0]))], strict=True):
        dims = tuple(dim for dim, size in enumerate(program.part_of(value)) if dim not in batch and size > 1)
        if len(dims) > 1:
            found.setdefault(source.get(value, value), Along(dims))


def _as_results(program: Program) -> set[int]:
    """Returns the results of a step, and the values of the same shape that they are made of, through loops over
    elements, views and collectives."""
    found = set(program.body.outputs)
    for node in reversed(program.body.nodes):
        if node.kind in _HANDS_ON and found & set(node.outputs):
            shapes = {program.part_of(value) for value in node.outputs}
            found |= {value for value in node.inputs if program.part_of(value) in shapes}
    return found
