"""Says how many bytes an array takes in the main memory of a TPU, whose compiler fills arrays up to whole tiles.

Two dims of an array lie along the tiles: 128 elements of the one, the lanes, and 8 of the other, the sublanes; where
that one has fewer elements, the tile has the next power of two of them. An array of one dim lies along tiles of up to
1024 elements. Which two dims these are, the compiler chooses so that little is filled up; arrays whose rows are looked
up by their numbers lie as rows. The layouts in modules that libtpu compiled (`f32[2772200,64]{0,1:T(8,128)}`) show it;
`tests/cost/memory/test_tiles.py` compares arguments.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Iterable, Sequence

LANES, _SUBLANES = 128, 8
_FLAT = 1024  # elements of the largest tile of an array of one dim


class Tiling(enum.Enum):
    """Says which two dims of an array may lie along lanes and sublanes.

    - `COMPACT`: any, as those of arguments and results.
    - `ROWS`: the last along the lanes, the one before along the sublanes.
    - `OPERAND`: the last along the one, the first or the one before along the other: what products and convolutions
      read and write, with their batch as the first dim and their features as the last.
    """

    COMPACT = "compact"
    ROWS = "rows"
    OPERAND = "operand"

    def pairs(self, rank: int) -> Iterable[tuple[int, int]]:
        """Returns the pairs of dims, (along the lanes, along the sublanes), of an array of `rank` dims, at least 2."""
        last, before = rank - 1, rank - 2
        if self is Tiling.ROWS:
            return [(last, before)]
        if self is Tiling.COMPACT:
            return itertools.permutations(range(rank), 2)
        pairs = [(last, before), (last, 0), (0, last)]
        return pairs if rank > 3 else [*pairs, (before, last)]


@dataclasses.dataclass(frozen=True)
class Along:
    """Says that two of these `dims` lie along lanes and sublanes, in either order. A product with batch dims reads and
    writes arrays so: its batch dims lie along neither."""

    dims: tuple[int, ...]

    def pairs(self, rank: int) -> Iterable[tuple[int, int]]:
        """Returns the pairs of dims, (along the lanes, along the sublanes), as `Tiling.pairs` does."""
        return itertools.permutations(self.dims, 2)


def tiled_bytes(shape: Sequence[int], itemsize: int, tiling: Tiling | Along = Tiling.COMPACT) -> int:
    """Returns the bytes of an array of a `shape` with elements of `itemsize` bytes, of which the compiler chooses how
    it lies as its `tiling` lets it, so that least is filled up."""
    if tiling is not Tiling.COMPACT and not isinstance(tiling, Along):
        shape = [size for size in shape if size != 1]
    packed = max(1, 4 // max(itemsize, 1))
    if len(shape) < 2:
        size = math.prod(shape)
        return itemsize * _filled(size, min(_FLAT, max(packed * LANES, _power(size))))
    return itemsize * min(_elements(shape, lanes, rows, packed) for lanes, rows in tiling.pairs(len(shape)))


def is_cut_at_tiles(shape: Sequence[int], dim: int) -> bool:
    """Returns whether pieces of a `shape` that lie behind each other along `dim` begin where tiles do: an array is put
    together of them, or cut into them, without moving elements within tiles. The dim may lie along the sublanes."""
    return len(shape) < 2 or dim < len(shape) - 2 or shape[dim] % _SUBLANES == 0


def _elements(shape: Sequence[int], lanes: int, rows: int, packed: int) -> int:
    """Returns the elements of an array with these dims along lanes and sublanes, filled up; four bytes hold `packed` of
    them."""
    rest = math.prod(size for dim, size in enumerate(shape) if dim not in (lanes, rows))
    return rest * _filled(shape[lanes], LANES) * _filled(shape[rows], max(packed, min(_SUBLANES, _power(shape[rows]))))


def _filled(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def _power(size: int) -> int:
    """Returns the least power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()
