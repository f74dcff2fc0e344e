"""Pages of one part: each is made of what its JSON holds, and a figure that is stored stands on it."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks import _calls, kept_memory, numbers, overhead, planning_time, state, verify, walk
from benchmarks._common import RESULTS, write_stored
from benchmarks.modern import large

HEADER = "- 2026-11-20, commit 1234567, Linux\n- command: `python -m benchmarks widgets`"
PLANNED = planning_time.Planned(
    "vgg16", "splitbrain", 33_638_218, 0.217, dict.fromkeys(planning_time.PARTS, 0.0034), 0.00041, 0.00187, 1234, 0.5
)
CELLS = [
    numbers.Cell("mlp", "linen", "fsdp", check, 3e-13, 7e-12, "kernel", 4, 1.5, draw=2) for check in numbers.CHECKS
]
STATE = state.Measured(
    "cifar", 4, 14_714_688, 18_923_530, 155_564_568.0, 155_564_640, (("step", 4.0),),
    {"cpu": state.Compiled(155_564_640, 0, True), "tpu": state.Compiled(155_600_000, 35_360, False)},
)  # fmt: skip
COMPARED = overhead.Compared("vgg", "fsdp", "batch and state alone", True, False, 77, True, 1.017, (0.98, 1.05), 0.123)
DISPATCH = overhead.Dispatch(8, 64, 432, 172e-6, 119e-6, 31.4e-6, 30.4e-6)
CALLS = _calls.Against(8, "added", (31.5e-6, 32.5e-6, 33.5e-6), (32.75e-6, 33.75e-6, 34.75e-6))
VERIFIED = verify.Verified("vgg16", "megatron", 33_638_218, 0.4, 21.6, 33.1, 4321, 57, 3.1e-13, True, "")
SENT = {"all_reduce over tensor": 41_000_000_000, "all_gather over data": 499_000}
LARGE = large.Measured(
    "LLaMA 8B, v5p", "1234567", "2026-11-20", 8_030_261_248,
    large.Program(SENT, 1_500_000_000, 16_900_000_000, 1_000, 11_400_000_000), 43_700_000_000, 16_800_000_000, 1.234,
    large.Program({"all_reduce over tensor": 40_000_000_000}, 6_000_000_000, 14_000_000_000, 0, 12_000_000_000),
    18_400_001_000, large.Program(SENT, 1_500_000_000, 14_700_000_000, 1_000, 11_400_000_000),
    large.Program({"all_reduce over tensor": 50_000_000_000}, 6_000_000_000, 9_000_000_000, 0, 12_000_000_000),
)  # fmt: skip
STEP = {"seconds": 0.1234, "pages": 4321, "most_bytes": 567 * 2**20}
KEPT = {way: {**STEP, "seconds": seconds} for way, seconds in ((kept_memory.GIVES, 0.5), (kept_memory.KEEPS, 0.31))}
COUNTS = {"plain: plan": {"files": 26, "switches": 1153}, "plain: lower": {"files": 35, "switches": 3150}}


def as_json(*values):
    return [dataclasses.asdict(value) for value in values]


MEASURED = {
    "calls": (
        _calls,
        {"before_commit": "7654321", "num_calls": 1234, "calls": as_json(CALLS)},
        ("7654321", "1,234 calls", "3 times", "| 32.5 | 33.8 | **+1.25** |"),
    ),
    large.PAGE: (
        large,
        {"cases": {LARGE.name: dataclasses.asdict(LARGE)}},
        (
            "at most 1.02 of",
            "within 5 s",
            "| 1.025 (missed) |",
            "| 0.920 |",
            "or 1.080 (missed) where memory is limited",
            "| 18.400 | 16.200 | 15.000 | 1.080 (missed) | 1.000 | 1.250 |",
            "41.000",
            "43.700",
            "8,030,261,248",
            "16.800",
            "1.23",
            "data 4 x fsdp 4 x tensor 4",
            "yet: LLaMA 8B, v5e",
        ),
    ),
    "kept_memory": (kept_memory, {"models": {"lstm": [KEPT]}}, ("500.0", "310.0", "**0.62**", "4321", "567")),
    "numbers": (numbers, {"cells": [{**vars(cell), "check": cell.check.name} for cell in CELLS]}, ("3e-13, 7e-12",)),
    "overhead": (
        overhead,
        {
            "num_steps": 345,
            "compared": as_json(COMPARED),
            "dispatch": as_json(DISPATCH),
            "planned": as_json(PLANNED),
        },
        ("345 steps", "77 lines differ", "1.017 (0.98 to 1.05)", "432 calls", "**31.4**", "217 ms"),
    ),
    "planning_time": (planning_time, {"planned": as_json(PLANNED)}, ("217 ms", "1,234 drawn", "1.87 ms")),
    "state": (state, {"states": as_json(STATE)}, ("18,923,530", "(unexplained)", "35,360 bytes", "`step` +4")),
    "verify": (verify, {"verified": as_json(VERIFIED)}, ("21.6", "33.1", "4,321", "3.1e-13")),
    "walk": (
        walk,
        {"after": COUNTS, "before": COUNTS, "before_commit": "7654321"},
        ("7654321", "1,153", "| 35 |", "1.00"),
    ),
}


@pytest.mark.parametrize("name", MEASURED)
def test_a_page_is_made_of_what_is_stored_beside_it(name, tmp_path):
    module, measured, figures = MEASURED[name]
    page = write_stored(name, {"header": HEADER, **measured}, module.page_lines, tmp_path).read_text(encoding="utf-8")
    assert "commit 1234567" in page
    missing = [figure for figure in figures if figure not in page]
    assert not missing, f"{missing} not on\n{page}"
    stored = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    write_stored(name, stored, module.page_lines, tmp_path / "again")
    assert (tmp_path / "again" / f"{name}.md").read_text(encoding="utf-8") == page


@pytest.mark.parametrize("name", [name for name in MEASURED if (RESULTS / f"{name}.json").is_file()])
def test_a_page_of_the_results_is_what_its_stored_data_say(name, tmp_path):
    stored = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    page = write_stored(name, stored, MEASURED[name][0].page_lines, tmp_path)
    assert page.read_text(encoding="utf-8") == (RESULTS / f"{name}.md").read_text(encoding="utf-8")
