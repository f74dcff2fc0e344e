"""The walk counts files that run, and calls from one of them to another."""

from __future__ import annotations

import runpy

from benchmarks.walk import Trail


def test_calls_between_files_are_switches(tmp_path):
    (tmp_path / "low.py").write_text("def leaf():\n    return 1\ndef twice():\n    return leaf() + leaf()\n")
    low = runpy.run_path(str(tmp_path / "low.py"))
    (tmp_path / "high.py").write_text("def work(low):\n    return sorted([2, 1], key=lambda _: low['twice']())\n")
    high = runpy.run_path(str(tmp_path / "high.py"))
    trail = Trail(str(tmp_path))
    # The lambda is called by Python itself, and calls `twice` in the other file two times; `leaf` stays within it.
    assert trail.of(lambda: high["work"](low)) == {"files": 2, "switches": 2}
    assert trail.of(lambda: None) == {"files": 0, "switches": 0}
