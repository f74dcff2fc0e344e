"""What the benchmark of training calculates: speedups, quiet rounds, Welch's test, which saves count, the page of parts
measured apart."""

from __future__ import annotations

import json

import pytest

from benchmarks.training import accuracy, checkpoints, common, scaling
from benchmarks.training import main as training

SETTINGS = {"width": 1.0, "head": 4096, "examples": 128, "steps": 2}


def link(seconds, others=(0.0, 0.0)):
    return scaling.Link(
        seconds,
        dict.fromkeys(seconds, 1.0),
        {way: 110.0 for way in scaling.WAYS},
        {way: 100 for way in scaling.WAYS},
        list(others),
        1_000_000,
    )


def seconds(split):
    return {
        scaling.SINGLE: [2.0, 4.0],
        scaling.APART: [2.0, 4.0],
        scaling.DATA: [4.0, 8.0],
        **{way: split for way in scaling.SPLITS},
    }


def test_the_speedup_is_by_round_and_counts_both_workers_examples():
    one = link(seconds([2.5, 4.0]))
    assert scaling.speedups(one, scaling.SPLITS[0]) == [1.6, 2.0]
    assert scaling.speedups(one, scaling.APART) == [2.0, 2.0]


def test_the_goal_of_the_unlimited_link_is_missed_below_it_and_bytes_are_compared():
    unlimited, slow = scaling.LINKS.keys() - {"1 Gb/s"}, link(seconds([3.0, 6.0]))
    assert "unlimited (loopback)" in unlimited
    met = scaling._report({"unlimited (loopback)": link(seconds([2.1, 4.2])), "1 Gb/s": slow}, [], SETTINGS)
    missed = scaling._report({"unlimited (loopback)": slow}, ["1 Gb/s: needs root"], SETTINGS)
    assert met.goals[0].ok and met.goals[0].value == pytest.approx(2 / 1.05)
    assert not missed.goals[0].ok and missed.goals[0].value == pytest.approx(4 / 3)
    assert any("(+10.0%)" in line for line in met.lines), "110 bytes sent, 100 planned"
    assert "1 Gb/s: needs root\n" in missed.lines


def test_disturbed_rounds_are_left_out_unless_all_are():
    used, note = common.quiet_rounds([0.0, 1.5, 0.2])
    assert used == [0, 2] and note.startswith("1 of 3 rounds")
    used, note = common.quiet_rounds([1.5, 0.9])
    assert used == [0, 1] and "Every round was disturbed: others kept 0.9 to 1.5 cores" in note


def test_a_disturbed_round_does_not_enter_the_speedup():
    found = scaling._report({"unlimited (loopback)": link(seconds([2.0, 100.0]), others=(0.0, 2.0))}, [], SETTINGS)
    assert found.goals[0].value == 2.0


def test_the_meter_counts_what_others_did_by_the_second(monkeypatch):
    busy, own, now = iter([100.0, 107.0, 107.5]), iter([10.0, 13.0, 13.5]), iter([0.0, 4.0, 5.0])
    monkeypatch.setattr(common, "busy_seconds", lambda: next(busy))
    monkeypatch.setattr(common, "cpu_seconds", lambda pid: next(own))
    monkeypatch.setattr(common.time, "perf_counter", lambda: next(now))
    meter = common.Meter(1)
    assert meter.others() == 1.0, "7 s of CPU time in 4 s, 3 s of them our own"
    assert meter.others() == 0.0


def test_cpu_time_is_read_for_all_threads_and_all_cores():
    before, all_before = common.cpu_seconds(common.os.getpid()), common.busy_seconds()
    end = common.time.process_time() + 0.2
    while common.time.process_time() < end:
        pass
    assert 0.15 <= common.cpu_seconds(common.os.getpid()) - before < 5
    assert common.busy_seconds() - all_before >= 0.15


def test_welch_tells_equal_from_different_means():
    same = accuracy.compare([0.48, 0.50, 0.49], [0.49, 0.50, 0.48])
    apart = accuracy.compare([0.48, 0.50, 0.49], [0.38, 0.40, 0.39])
    assert same.p > 0.9 and apart.p < 0.01
    assert apart.difference == pytest.approx(0.1) and apart.standard_error == pytest.approx(0.01 * (2 / 3) ** 0.5)
    assert accuracy.compare([0.5, 0.5], [0.4, 0.4]).p == 0.0, "no spread at all, and different"


def test_losses_are_compared_over_the_first_steps():
    split, one = [accuracy.Run(0.5, [1.0, 2.0, 9.0], 1.0)], [accuracy.Run(0.5, [1.0, 2.5, 3.0], 1.0)]
    assert accuracy.largest_difference(split, one, 1) == 0.0
    assert accuracy.largest_difference(split, one, 2) == pytest.approx(0.2)


def test_only_the_save_in_the_middle_of_a_round_is_one():
    told = []

    class Saves:
        def save(self, step, state, extra, metrics, *, wait=False):
            told.append((step, wait))
            return True

    saves = checkpoints.InTheMiddle(Saves(), 100)
    assert [saves.save(step, None, {}, {}, wait=step == 150) for step in (99, 100, 150)] == [False, True, False]
    assert told == [(100, False)] and len(saves.blocked) == 1 and saves.last_step == 100


def test_the_page_keeps_parts_that_were_measured_before(tmp_path, monkeypatch):
    part = {
        "title": "Input",
        "lines": ["said"],
        "goals": [{"what": "ratio", "value": 1.1, "limit": 1.03, "at_most": True, "form": ".3f"}],
        "seconds": 1.0,
        "load": "load average 0.0 on 2 cores",
        "header": "- then",
    }
    (tmp_path / "training.json").write_text(json.dumps({"input": part}))
    better = {**part, "title": "Weak scaling", "goals": [{**part["goals"][0], "value": 1.0}], "header": "- now"}
    monkeypatch.setattr(training, "_run", lambda name, options: better)
    assert training.main(["--data-dir", str(tmp_path), "--only", "scaling", "--output", str(tmp_path)]) == 0
    page = (tmp_path / "training.md").read_text()
    assert "**1 of 2 goals met.**" in page and page.index("## Input") < page.index("## Weak scaling")
    assert "- then" in page and "- now" in page and "**MISS ratio: 1.100" in page


def test_a_part_that_fails_keeps_its_earlier_figures_and_the_exit_status_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training, "_run", lambda name, options: None)
    assert training.main(["--data-dir", str(tmp_path), "--only", "input", "--output", str(tmp_path)]) == 1
    assert "failed: input" in capsys.readouterr().out and not (tmp_path / "training.md").exists()
