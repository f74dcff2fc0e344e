"""Verification in a run of two processes with two devices each: both come to the same result."""

from __future__ import annotations

import json
import pathlib

import pytest

from tests.processes import run_processes


@pytest.mark.slow
def test_processes_verify_together_and_agree():
    outputs = run_processes(pathlib.Path(__file__).with_name("processes_worker.py"), num=2, devices=2)
    first, second = ([json.loads(line) for line in output.splitlines() if line.startswith("{")] for output in outputs)
    assert first == second
    right, wrong = first
    assert right == {"ok": True, "found": []}
    assert not wrong["ok"] and wrong["found"][0].startswith("the value of lying")
