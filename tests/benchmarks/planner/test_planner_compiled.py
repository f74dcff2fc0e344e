"""The page on what the compiler says of a layout before it is taken."""

from __future__ import annotations

import json

import pytest

from benchmarks.planner import main as planner
from benchmarks.planner.compiled import lines_of

ROW = {
    "mesh": "data=8 x model=8", "rules": "fsdp", "predicted_ms": 2.0, "bound_bytes": 2**20, "needed_bytes": 2**19,
    "fits": True, "sent_bytes": 3 * 2**20, "planned_bytes": 2**21, "more_ms": 0.25, "seconds": 12.0, "is_taken": True,
}  # fmt: skip


def test_the_page_says_what_was_compiled_and_whether_it_changed_anything():
    refused = ROW | {"needed_bytes": 2**34, "sent_bytes": None, "fits": False, "is_taken": False}
    model = {"model": "VGG-16", "candidates": 9, "compiled": [refused, ROW], "is_changed": True}
    page = "\n".join(lines_of({"header": "", "models": [model]}))
    assert "2 of 9 candidates compiled; another layout is taken than without the compiler's word." in page
    assert "| data=8 x model=8 | fsdp | 2 | 1.0 | 0.5 | yes | 2.0 | 3.0 | 0.25 | 12.0 | yes |" in page
    assert "| 16,384.0 | no | 2.0 | refused |" in page
    assert "the same layout" in "\n".join(lines_of({"header": "", "models": [model | {"is_changed": False}]}))


@pytest.mark.tpu_aot
@pytest.mark.slow
def test_a_quick_run(tmp_path):
    assert planner.main(["--only", "compiled", "--quick", "--output", str(tmp_path)]) == 0
    (found,) = json.loads((tmp_path / "planner_compiled.json").read_text())["models"]
    assert 1 <= len(found["compiled"]) <= 3 and sum(row["is_taken"] for row in found["compiled"]) == 1
    assert all(row["seconds"] > 0 and row["planned_bytes"] > 0 for row in found["compiled"])
