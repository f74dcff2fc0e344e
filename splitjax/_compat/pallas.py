"""Reads and changes the grids of Pallas calls, whose parameters are not public."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.core import ShapedArray

from splitjax._compat.jaxprs import Literal


@dataclasses.dataclass(frozen=True)
class PallasBlock:
    """Describes how the blocks of an operand or a result follow the grid of a Pallas call.

    - `shape`: of the array. `sizes`: of a block along each dim; None where a block is no run of entries that the index
      map numbers.
    - `follows`: for each dim the grid dim whose index is the block's, unchanged; None for any other index.
    - `reads`: the grid dims of which the index map makes anything else.
    """

    shape: tuple[int, ...]
    sizes: tuple[int | None, ...]
    follows: tuple[int | None, ...]
    reads: frozenset[int]


@dataclasses.dataclass(frozen=True)
class PallasGrid:
    """Describes the grid of a Pallas call.

    - `sizes`: of its dims; None for one that only the run tells.
    - `operands`, `results`: their blocks; None for an operand that has none, as those that index maps read.
    - `counted`: grid dims whose index or size the kernel reads.
    - `own`: the grid dims that the kernel knows of, as it numbers them: those that `vmap` added are not among them.
    - `aliases`: operands and results, by position, that are the same memory.
    """

    sizes: tuple[int | None, ...]
    operands: tuple[PallasBlock | None, ...]
    results: tuple[PallasBlock | None, ...]
    counted: frozenset[int]
    own: tuple[int, ...] = ()
    aliases: tuple[tuple[int, int], ...] = ()


def pallas_grid(params: Mapping[str, Any]) -> PallasGrid:
    """Returns the grid of the Pallas call with the parameters `params`."""
    mapping = params["grid_mapping"]
    sizes = tuple(size if isinstance(size, int) else None for size in mapping.grid)
    dynamic = sum(size is None for size in sizes)
    blocks = [_block(each, len(sizes)) for each in mapping.block_mappings]
    before = dynamic + mapping.num_index_operands
    operands = (*([None] * before), *blocks[: mapping.num_inputs])
    own = [dim for dim in range(len(sizes)) if dim not in mapping.vmapped_dims]
    counted = {own[axis] for axis in _program_ids(params["jaxpr"]) if axis < len(own)}
    if params.get("mesh") is not None:
        counted = set(range(len(sizes)))
    # sizes that only the run tells come first among the operands, and have no number here
    aliases = tuple((operand + dynamic, result) for operand, result in params["input_output_aliases"])
    results = tuple(blocks[mapping.num_inputs :])
    return PallasGrid(sizes, operands, results, frozenset(counted), tuple(own), aliases)


def only_reads(eqn: Any, variable: Any) -> bool:
    """Returns whether the equation `eqn` of a kernel's body says of the memory `variable` that it reads it, and nothing
    else."""
    kinds = {type(effect).__name__ for effect in eqn.effects if getattr(effect, "input", None) is variable}
    return kinds == {"ReadEffect"}


def smaller_pallas_call(eqn: Any, factors: Mapping[int, int]) -> Any:
    """Returns the Pallas call `eqn` with grid dims that are smaller by `factors` (grid dim -> divisor), and with them
    the dims of arrays that follow them."""
    mapping, grid = eqn.params["grid_mapping"], pallas_grid(eqn.params)
    blocks = [block for block in (*grid.operands, *grid.results) if block is not None]
    smaller = []
    for each, block in zip(mapping.block_mappings, blocks, strict=True):
        shape = tuple(
            size // factors.get(follows, 1) if follows is not None else size
            for size, follows in zip(block.shape, block.follows, strict=True)
        )
        smaller.append(dataclasses.replace(each, array_aval=each.array_aval.update(shape=shape)))
    results = smaller[mapping.num_inputs :]
    sizes = tuple(size // factors.get(dim, 1) if dim in factors else size for dim, size in enumerate(mapping.grid))
    changed = dataclasses.replace(mapping, grid=sizes, block_mappings=tuple(smaller))
    types = tuple(
        ShapedArray(each.array_aval.shape, before.dtype)
        for each, before in zip(results, eqn.params["out_avals"], strict=True)
    )
    return eqn.replace(params={**eqn.params, "grid_mapping": changed, "out_avals": types})


def _block(each: Any, rank: int) -> PallasBlock:
    inner = getattr(each.index_map_jaxpr, "jaxpr", each.index_map_jaxpr)
    shape = tuple(each.array_aval.shape)
    indices = {var: dim for dim, var in enumerate(inner.invars[:rank])}
    follows = [indices.get(v) if not isinstance(v, Literal) else None for v in inner.outvars[: len(shape)]]
    read = {indices[v] for eqn in inner.eqns for v in eqn.invars if not isinstance(v, Literal) and v in indices}
    sizes = [_block_size(entry) for entry in each.block_shape]
    follows += [None] * (len(shape) - len(follows))
    return PallasBlock(shape, tuple(sizes), tuple(follows), frozenset(read))


def _block_size(entry: Any) -> int | None:
    if isinstance(entry, int):
        return entry
    kind = type(entry).__name__
    return 1 if kind == "Squeezed" else entry.block_size if kind == "Blocked" else None


def _program_ids(jaxpr: Any) -> set[int]:
    """Returns the grid dims whose index or size a kernel's body reads."""
    found: set[int] = set()
    todo: list[Any] = [jaxpr]
    while todo:
        inner = todo.pop()
        for eqn in getattr(inner, "jaxpr", inner).eqns:
            if eqn.primitive.name in ("program_id", "num_programs"):
                found.add(eqn.params["axis"])
            todo += _held(eqn.params.values())
    return found


def _held(values: Any) -> Sequence[Any]:
    nested = [value for value in values if hasattr(value, "eqns") or hasattr(value, "jaxpr")]
    return nested + [
        item
        for value in values
        if isinstance(value, (tuple, list))
        for item in value
        if hasattr(item, "eqns") or hasattr(item, "jaxpr")
    ]
