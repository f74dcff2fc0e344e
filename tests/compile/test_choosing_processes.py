"""The choice of mesh and rules in a run of several processes."""

from __future__ import annotations

import pathlib

from tests.processes import run_processes


def test_processes_choose_alike_or_are_told():
    for output in run_processes(pathlib.Path(__file__).parent / "choice_worker.py", num=2, devices=4):
        assert output.strip().endswith("all well"), output
