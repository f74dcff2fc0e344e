"""The page on the time that choices take: its goals, and a quick run of what it measures."""

from __future__ import annotations

import json

from benchmarks.planner import main as planner
from benchmarks.planner.search import is_met, lines_of

FOUND = {
    "model": "VGG-16", "goal_seconds": 1.0, "goal_gap": 0.0, "search_seconds": 0.5, "whole_seconds": 2.0, "meshes": 22,
    "searched": 7, "candidates": 40, "variables": 16, "gap": 0.0, "clock_struck": False, "mesh": "data=8 x model=8",
    "rules": "auto", "program_ms": 2.0, "sum_ms": 3.0, "lowered": 8,
}  # fmt: skip


def test_goals():
    assert is_met(FOUND)
    assert not is_met(FOUND | {"search_seconds": 1.1}) and not is_met(FOUND | {"gap": 0.001})
    page = "\n".join(lines_of({"header": "", "models": [FOUND | {"search_seconds": 1.5}]}))
    assert "| VGG-16 | 1.50 s of 1 s (missed) | 2.00 s |" in page and "| 0.00% of 0% |" in page


def test_a_quick_run(tmp_path):
    assert planner.main(["--only", "search", "--quick", "--output", str(tmp_path)]) in (0, 1)
    (found,) = json.loads((tmp_path / "planner_search.json").read_text())["models"]
    assert found["searched"] >= 7 and found["lowered"] > 3 and found["gap"] <= found["goal_gap"]
    assert 0 < found["search_seconds"] and found["program_ms"] > 0
    assert found["model"] in (tmp_path / "planner_search.md").read_text()
