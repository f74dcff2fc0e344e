"""What a compiled program keeps in a TPU's vector memory, counted by hand."""

from __future__ import annotations

import pytest

from splitjax.report.memory.vector import padded_bytes, vector_memory_bytes
from splitjax.report.wire import Module, Shape, shape_of
from tests.report.memory.test_timelines import instruction, module_of

F32, BF16 = 11, 16


def near(*dims, **more):
    return Shape(F32, dims, memory_space=1, **more)


def far(*dims):
    return Shape(F32, dims)


def both(*members):
    return Shape(13, (), members)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (Shape(F32, (3, 5)), 60),
        (Shape(F32, (3, 5), minor_to_major=(1, 0), tile=(8, 128)), 8 * 128 * 4),
        (Shape(BF16, (16, 130), minor_to_major=(0, 1), tile=(8, 128)), 128 * 136 * 2),
        (Shape(F32, (4, 9, 100), minor_to_major=(2, 1, 0), tile=(8, 128)), 4 * 16 * 128 * 4),
        (Shape(F32, (100,), minor_to_major=(0,), tile=(8, 128)), 512),
        (Shape(F32, ()), 4),
    ],
)
def test_arrays_are_filled_up_to_tiles(shape, expected):
    assert padded_bytes(shape) == expected


def test_a_layout_is_read_from_its_bytes():
    # ShapeProto: element type 2, dims 3, layout 5; LayoutProto: order 1, tiles 6, memory space 8.
    layout = {1: [b"\x01\x00"], 6: [b"\x0a\x03\x08\x80\x01"], 8: [1]}
    encoded = b"".join(
        bytes([number << 3 | 2, len(value)]) + value if isinstance(value, bytes) else bytes([number << 3, value])
        for number, values in layout.items() for value in values
    )  # fmt: skip
    shape = shape_of({2: [11], 3: [b"\x03\x05"], 5: [encoded]})
    assert shape == Shape(11, (3, 5), (), (1, 0), (8, 128), 1)


def test_what_is_alive_together_is_summed_and_main_memory_is_not():
    module = module_of(
        [
            instruction(1, "parameter", shape=near(1000)),  # no array of the program's own
            instruction(2, "exp", [1], shape=near(10)),
            instruction(3, "log", [2], shape=near(20)),  # reads the one before it
            instruction(4, "sine", [3], shape=far(1000)),
            instruction(5, "negate", [4], shape=near(25)),
        ]
    )
    assert vector_memory_bytes(module) == 120
    assert vector_memory_bytes(module_of([instruction(2, "exp", [], shape=far(5))])) == 0


def test_a_copy_into_vector_memory_counts_once_from_its_start_on():
    start = both(near(10), far(10), Shape(8, ()))
    module = module_of(
        [
            instruction(1, "parameter", shape=far(10)),
            instruction(2, "copy-start", [1], shape=start),
            instruction(3, "exp", [1], shape=near(4)),
            instruction(4, "copy-done", [2], shape=near(10)),
            instruction(5, "add", [4, 3], shape=far(10)),
        ]
    )
    assert vector_memory_bytes(module) == 56
    # What was begun with an operand in vector memory does not count that twice.
    begun = both(both(near(7)), both(far(7)), Shape(8, ()))
    module = module_of(
        [
            instruction(1, "parameter", shape=far(7)),
            instruction(2, "exp", [1], shape=near(7)),
            instruction(3, "async-start", [2], shape=begun),
            instruction(4, "async-done", [3], shape=far(7)),
        ]
    )
    assert vector_memory_bytes(module) == 28


def test_what_a_loop_carries_is_one_array_and_its_body_comes_on_top():
    carried = both(near(10), far(10))
    body = [
        instruction(20, "parameter", shape=carried),
        instruction(21, "get-tuple-element", [20], shape=near(10)),
        instruction(22, "exp", [21], shape=near(3)),
        instruction(23, "add", [22, 21], shape=far(10)),
        instruction(24, "tuple", [21, 23], shape=carried),
    ]
    condition = [instruction(30, "parameter", shape=carried), instruction(31, "compare", [30], shape=far(1))]
    module = module_of(
        [
            instruction(1, "parameter", shape=far(10)),
            instruction(2, "exp", [1], shape=near(10)),
            instruction(3, "tuple", [2, 1], shape=carried),
            instruction(4, "while", [3], called=(1, 2), shape=carried),
            instruction(5, "get-tuple-element", [4], shape=near(10)),
            instruction(6, "negate", [5], shape=near(1)),
        ],
        body,
        condition,
    )
    assert vector_memory_bytes(module) == 52


def test_without_an_order_nothing_is_known():
    module = module_of([instruction(2, "exp", [], shape=near(5))])
    assert vector_memory_bytes(Module(module.entry, module.computations, ())) is None
