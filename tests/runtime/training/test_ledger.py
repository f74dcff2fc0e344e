"""Goodput, with a clock of its own."""

from __future__ import annotations

import json

import pytest

from splitjax.runtime.training.ledger import Ledger, RecordedAttempt, summarise


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def attempt(begin, end, first, last, **seconds):
    return RecordedAttempt(begin, end, first, last, seconds)


def test_what_no_part_took_went_into_steps():
    clock = Clock()
    ledger = Ledger(None, begin_unix_seconds=990.0, clock=clock)
    ledger.started(1)
    with ledger.during("compile"):
        clock.now += 20
    for step in range(1, 11):
        with ledger.during("input"):
            clock.now += 1
        clock.now += 6
        ledger.step_done(step)
    found = ledger.summary()
    assert (
        found.parts["start"] == 10
        and found.parts["compile"] == 20
        and found.parts["input"] == 10
        and found.parts["step"] == 60
    )
    assert found.goodput == pytest.approx(0.6) and found.total_seconds == 100
    assert "goodput 60.0% of 100 s" in str(found) and "compile 20.0%" in str(found)


def test_steps_that_are_done_again_and_the_time_between_attempts_are_no_goodput():
    # 100 steps in 100 s, of which a checkpoint kept 80; 30 s later the rest again.
    found = summarise([attempt(0, 110, 1, 100, start=10.0), attempt(140, 170, 81, 100, start=10.0)])
    assert found.repeated_steps == 20
    assert found.parts["repeated"] == pytest.approx(20) and found.parts["restart"] == 30
    assert found.parts["step"] == pytest.approx(80 + 20) and found.total_seconds == pytest.approx(170)
    assert "in 2 attempts, 20 steps done again" in str(found)


def test_an_attempt_that_did_no_step_only_started():
    found = summarise([attempt(0, 50, 0, -1, start=0.0), attempt(60, 110, 1, 10, start=10.0)])
    assert found.parts["start"] == 60 and found.parts["step"] == 40 and found.repeated_steps == 0


def test_the_file_holds_all_attempts_and_survives_damage(tmp_path):
    file, clock = tmp_path / "goodput.json", Clock()
    for first in (1, 3):
        ledger = Ledger(file, clock=clock)
        ledger.started(first)
        for step in (first, first + 1):
            clock.now += 11
            ledger.step_done(step)
        ledger.flush()
    attempts = json.loads(file.read_text())["attempts"]
    assert [(one["first_step"], one["last_step"]) for one in attempts] == [(1, 2), (3, 4)]
    assert ledger.summary().num_attempts == 2
    file.write_text("{ half a")
    assert Ledger(file, clock=clock).summary().num_attempts == 1


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path):
    ledger = Ledger(tmp_path / "missing" / "goodput.json")
    ledger.started(1)
    ledger.flush()
    assert ledger.summary().num_attempts == 1
