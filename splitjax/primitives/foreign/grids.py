"""Reads a traced `pallas_call`: along which dims its grid runs the kernel on parts that have nothing to do with each
other.

The grid of the call goes in, a `DimMap` comes out. A dim has the label of a grid dim if a block has one entry of it,
numbered by the grid's index, nothing else depends on that index, and no step hands on anything in memory to the next
along it (`carried`): then a call with a smaller grid does the same for a part. All other dims have nothing to do with
each other, as far as anybody can see: a block hides what the kernel does in it. Where a plan splits one of them the
call is refused (`planning.sites.grids`).
"""

from __future__ import annotations

from splitjax import _compat
from splitjax.primitives.dims import DimMap, Label, Labels, Params, Shapes
from splitjax.primitives.foreign.carried import carried_dims
from splitjax.primitives.operation import Trait
from splitjax.primitives.table import OPERATIONS, dim_rule

PALLAS: str = "pallas_call"


def grid_label(dim: int) -> Label:
    """Returns the label of dims that follow the grid dim `dim`."""
    return ("grid", dim)


def split_dims(params: Params) -> tuple[int, ...]:
    """Returns the grid dims along which the Pallas call with these parameters may run on parts."""
    grid = _compat.pallas_grid(params)
    blocks = [block for block in (*grid.operands, *grid.results) if block is not None]
    found = []
    for dim, size in enumerate(grid.sizes):
        if size is None or dim in grid.counted or any(dim in block.reads for block in blocks):
            continue
        places = [_places(block, dim) for block in blocks]
        whole = all(
            block.sizes[d] == 1 and block.shape[d] == size for block, at in zip(blocks, places, strict=True) for d in at
        )
        in_results = all(block is not None and dim in block.follows for block in grid.results)
        in_operands = any(block is not None and dim in block.follows for block in grid.operands)
        if whole and in_results and in_operands and all(len(at) <= 1 for at in places):
            found.append(dim)
    bound = bound_dims(params) if found else frozenset()
    return tuple(dim for dim in found if dim not in bound)


def bound_dims(params: Params) -> frozenset[int]:
    """Returns the grid dims along which steps of the Pallas call with these parameters may depend on each other: the
    kernel reads their index, or carries values in memory from one step to the next, or an operand is the same memory as
    a result without having the same part of it in each step."""
    grid = _compat.pallas_grid(params)
    shared = {
        dim
        for operand, result in grid.aliases
        for dim in range(len(grid.sizes))
        if _places(grid.operands[operand], dim) != _places(grid.results[result], dim)
    }
    return grid.counted | carried_dims(params) | shared


def followed(params: Params) -> tuple[tuple[tuple[int | None, ...], ...], tuple[tuple[int | None, ...], ...]]:
    """Returns for every dim of the operands, and of the results, of the Pallas call with these parameters the grid dim
    whose index is its block's; None for none. Operands without blocks have no dims here."""
    grid = _compat.pallas_grid(params)
    operands, results = (
        tuple(() if block is None else block.follows for block in side) for side in (grid.operands, grid.results)
    )
    return operands, results


@dim_rule(PALLAS)
def pallas_call(inputs: Shapes, outputs: Shapes, params: Params) -> DimMap:
    """Labels the dims of `inputs` and `outputs` by the grid dims that they follow, where these may be split."""
    grid, split = _compat.pallas_grid(params), split_dims(params)

    def labels(name: str, shapes: Shapes, blocks: tuple[_compat.PallasBlock | None, ...]) -> tuple[Labels, ...]:
        return tuple(
            tuple(
                (grid_label(follows),) if (follows := _follows(block, d)) in split else ((name, k, d),)
                for d in range(len(shape))
            )
            for k, (shape, block) in enumerate(zip(shapes, blocks, strict=True))
        )

    return DimMap(labels("operand", inputs, grid.operands), labels("result", outputs, grid.results), mixing=True)


def _places(block: _compat.PallasBlock | None, dim: int) -> list[int]:
    """Returns the dims of a block that follow the grid dim `dim`."""
    return [] if block is None else [d for d, follows in enumerate(block.follows) if follows == dim]


def _follows(block: _compat.PallasBlock | None, dim: int) -> int:
    """Returns the grid dim that a dim of a block follows; -1 for none."""
    follows = None if block is None else block.follows[dim]
    return -1 if follows is None else follows


OPERATIONS.state(PALLAS, Trait.FOREIGN)
