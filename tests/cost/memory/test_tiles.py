"""How many bytes arrays take on a TPU, against layouts in modules that libtpu compiled."""

from __future__ import annotations

import pytest

from splitjax.cost.memory.tiles import Tiling, is_cut_at_tiles, tiled_bytes


# Shapes of arguments in modules for TPUs v5p and v5e, bytes of an element, and the elements of their layouts.
@pytest.mark.parametrize(
    ("shape", "itemsize", "elements"),
    [
        ((), 4, 128),  # {:T(128)}
        ((10,), 4, 128),  # {0:T(128)}
        ((256,), 4, 256),  # {0:T(256)}
        ((4096,), 4, 4096),  # {0:T(1024)}
        ((346525,), 4, 339 * 1024),  # {0:T(1024)}
        ((13, 1), 4, 128),  # {0,1:T(1,128)}
        ((13, 64), 4, 16 * 128),  # {1,0:T(8,128)}
        ((2772200, 64), 4, 2772224 * 64),  # {0,1:T(8,128)}
        ((4096, 2004), 4, 4096 * 2008),  # {0,1:T(8,128)}
        ((2, 4096), 4, 2 * 4096),  # {1,0:T(2,128)}
        ((32, 128, 4), 4, 32 * 128 * 4),  # {1,2,0:T(4,128)}
        ((3, 3, 3, 64), 4, 3 * 3 * 4 * 128),  # {3,2,1,0:T(4,128)}
        ((128, 32, 32, 3), 4, 128 * 32 * 32 * 3),  # {0,2,3,1:T(8,128)}
        ((1024, 4096), 2, 1024 * 4096),  # {1,0:T(8,128)(2,1)}
        ((), 2, 256),  # {:T(256)}
        ((10,), 2, 256),  # {0:T(256)(128)(2,1)}
        ((1, 100), 2, 2 * 128),  # {1,0:T(2,128)(2,1)}
        ((10,), 1, 512),  # {0:T(512)(128)(4,1)}
        ((2, 100), 1, 4 * 128),  # {1,0:T(4,128)(4,1)}
    ],
)  # fmt: skip
def test_arguments_lie_so_that_least_is_filled_up(shape, itemsize, elements):
    assert tiled_bytes(shape, itemsize) == itemsize * elements


def test_a_table_that_is_looked_up_lies_in_rows():
    assert tiled_bytes((2772200, 64), 4, Tiling.ROWS) == 4 * 2772200 * 128
    assert tiled_bytes((2772200, 1), 4, Tiling.ROWS) == 4 * 2708 * 1024, "a single column is an array of one dim"
    assert tiled_bytes((100, 128), 4, Tiling.ROWS) == 4 * 104 * 128


def test_what_convolutions_write_lies_along_examples_and_features():
    """`f32[32,224,224,64]{3,0,2,1:T(8,128)}` and `f32[128,32,32,64]{0,3,2,1:T(8,128)}`, never along the width."""
    assert tiled_bytes((32, 224, 224, 64), 4, Tiling.OPERAND) == 4 * 32 * 224 * 224 * 128
    assert tiled_bytes((128, 32, 32, 64), 4, Tiling.OPERAND) == 4 * 128 * 32 * 32 * 64
    assert tiled_bytes((32, 224, 224, 64), 4) == 4 * 32 * 224 * 256 * 64


def test_pieces_that_begin_where_tiles_do():
    assert is_cut_at_tiles((346528, 64), 0) and not is_cut_at_tiles((346525, 64), 0)
    assert is_cut_at_tiles((8, 4096, 56), 2) and not is_cut_at_tiles((4096, 2004), 1)
    assert is_cut_at_tiles((3, 3, 100, 100), 0) and is_cut_at_tiles((7,), 0)


@pytest.mark.parametrize("shape", [(0,), (0, 30), (0, 0), (0, 64, 64, 3)])
def test_empty_arrays_take_nothing(shape):
    assert [tiled_bytes(shape, 4, tiling) for tiling in Tiling] == [0] * len(Tiling)
