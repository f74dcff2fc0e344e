"""What a TPU's compiler says where a program does not fit, read as bytes."""

from __future__ import annotations

import pytest

from splitjax.report.target.refusal import OutOfMemory, read_refusal

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (143.05G)"
            " exceeds available HBM (15.75G).",
            OutOfMemory(round(143.05 * GIB), round(15.75 * GIB)),
        ),
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: XLA:TPU compile permanent error. Ran out of memory in memory"
            " space hbm. Used 727.16M of 725.00M hbm. Exceeded hbm capacity by 2.16M.\n\nTotal hbm usage >= 977.16M:",
            OutOfMemory(round(727.16 * MIB), 725 * MIB),
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (512B) exceeds"
            " available HBM (1.5K).",
            OutOfMemory(512, 1536),
        ),
    ],
)
def test_what_a_program_needs_is_read(message, expected):
    assert read_refusal(message) == expected


@pytest.mark.parametrize(
    "message",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space smem. Used 1.00M of 1.00M smem.",
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 140.00M of 128.00M vmem.",
        "Ran out of memory in memory space hbm. Used much of 15.75G hbm.",
        "INVALID_ARGUMENT: No such compile option: 'xla_tpu_no_such'",
        "",
    ],
)
def test_what_is_about_something_else_says_nothing(message):
    assert read_refusal(message) is None
