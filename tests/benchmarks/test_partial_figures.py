"""What the benchmark of partial backpropagation calculates: steps to a loss, times to it, bytes by the formula; its
section, picture and page."""

from __future__ import annotations

import json
import types

import pytest

from benchmarks.partial import device, full, memory, pays, quality
from benchmarks.partial import main as partial
from splitjax.partial.contributors import sent_bytes

LOSSES = {
    pays.RIVAL: [[(10, 2.0), (20, 1.0)], [(10, 2.0), (20, 1.2)]],
    quality.SMALLER: [[(10, 1.5), (20, 0.8)], [(10, 1.6), (20, 0.4)]],
}


def facts(partial_seconds=0.3):
    one = lambda seconds: {"seconds": seconds, "low": seconds, "high": seconds, "sent": None}
    steps = {
        f"{link}, {name}, {how}": one(partial_seconds if name == pays.RIVAL and link == "100mbit" else 1.0)
        for link in ("100mbit", "unlimited")
        for name in (pays.RIVAL, quality.SMALLER)
        for how in (pays.ALONE, pays.SHARED)
    }
    sent = {
        "full": {"sent": 154.0, "planned": 150, "segments": [], "whole": 100},
        "branch": {"sent": 150.0, "planned": 120, "segments": [[2, 40], [4, 60]], "whole": 100},
    }
    return {"steps": steps, "smaller": 56, "share": 0.4, "others": 0.0, "bytes": sent}


def kept(measured):
    measured = {"facts": measured, "seconds": 1.0, "load": "load average 0.0", "header": "h\n"}
    return {
        "quality": {
            "facts": {f"{pays.TASK}, sgd": LOSSES},
            "title": "Q",
            "lines": ["kept"],
            "goals": [],
            "seconds": 1,
            "load": "-",
            "header": "h",
        },
        "pays": measured,
    }


def test_a_loss_is_reached_between_two_points_of_a_curve():
    curve = [(20, 2.0), (40, 1.0), (60, 1.5), (80, 0.5)]
    assert (
        pays.steps_to(curve, 1.5) == 30
        and pays.steps_to(curve, 2.5) == 20
        and pays.steps_to(curve, 0.75) == 75
        and pays.steps_to(curve, 0.1) is None
    )
    loss, mine, rival = pays.steps_by_seed(LOSSES)
    assert (loss, mine) == (1.2, [18.0, 20.0]) and rival == pytest.approx([10 + 10 * 0.3 / 0.7, 10 + 10 * 0.4 / 1.2])


def test_bytes_by_the_formula_are_those_of_the_plan():
    assert pays.by_formula([[2, 40], [0, 7], [4, 60]], 0, 4) == pytest.approx(
        sum(sent_bytes(40, 2, 4)) + sum(sent_bytes(60, 4, 4))
    )
    assert pays.by_formula([], 100, 4) == 150


def test_the_section_says_where_it_is_sooner_and_draws_it():
    section, pictures = pays.render(facts(), kept(facts()))
    text = "\n".join(section.lines)
    ratio = 19 / (10 + (10 * 0.3 / 0.7 + 10 * 0.4 / 1.2) / 2)
    assert f"**{0.3 * ratio:.3f}**" in text and f"| {ratio:.3f} |" in text
    assert "sgd, alone: 100mbit; sgd, two jobs: 100mbit" in text and pays.PICTURE in text and "0.40 of a core" in text
    assert [goal.ok for goal in section.goals] == [True, False]
    (picture,) = pictures.values()
    assert picture.startswith("<?xml") and "100 Mb/s" in picture and "sooner" in picture
    assert pays.render(facts(), kept(facts()))[1] == pictures, "the same figures give the same file"
    empty, drawn = pays.render(facts(2.0), kept(facts()))
    assert "sgd, alone: nowhere" in "\n".join(empty.lines) and list(drawn) == list(pictures), (
        "an empty region is drawn, too"
    )
    without, drawn = pays.render({**facts(), "share": None}, {})
    assert drawn == {} and "not held to a share" in "\n".join(without.lines)


def test_the_page_is_made_again_without_measuring(tmp_path, monkeypatch, capsys):
    (tmp_path / "partial.json").write_text(json.dumps(kept(facts())))
    arguments = ["--data-dir", str(tmp_path), "--output", str(tmp_path)]
    assert partial.main([*arguments, "--page"]) == 0
    page = (tmp_path / "partial.md").read_text()
    assert (
        page.index("## Q") < page.index("## Where it pays")
        and "**1 of 2 goals met.**" in page
        and (tmp_path / pays.PICTURE).is_file()
    )
    monkeypatch.setattr(
        partial,
        "run_child",
        lambda name, part, options: {"facts": facts(2.0), "seconds": 2.0, "load": "-", "header": "new"},
    )
    assert partial.main([*arguments, "--only", "pays"]) == 1, "a goal is missed"
    assert "nowhere" in (tmp_path / "partial.md").read_text() and json.loads((tmp_path / "partial.json").read_text())[
        "quality"
    ]["lines"] == ["kept"]
    monkeypatch.setattr(partial, "run_child", lambda name, part, options: None)
    assert partial.main([*arguments, "--only", "pays"]) == 1 and "failed: pays" in capsys.readouterr().out


def test_devices_share_the_cores_and_leave_some_to_the_network(monkeypatch):
    monkeypatch.setattr(device.os, "cpu_count", lambda: 2)
    assert device.core_share(4) == pytest.approx(0.4) and device.core_share(1) == 1.0


def test_partial_backpropagation_stands_beside_full():
    mine = [[(10, 2.0), (20, 1.0), (30, 0.5), (40, 0.4)], [(10, 1.8), (20, 1.2), (30, 0.9), (40, 0.2)]]
    whole = [[(10, 1.0), (20, 0.5), (30, 0.4), (40, 0.3)], [(10, 1.2), (20, 0.6), (30, 0.4), (40, 0.2)]]
    # The first pair's common loss is 0.4: 40 steps and 30. The second's is 0.2, which both reach at their end.
    assert full.steps_to_equal_loss(mine, whole) == pytest.approx([40 / 30, 1.0])
    runs = {"quality": {"facts": {"digits, adam": {"full": whole, "spatial, count": mine, "temporal": whole}}}}
    costs = {"digits": {"full": 1.0, "spatial, count": 0.9, "temporal": 0.8}}
    section, pictures = full.render({"costs": costs}, runs)
    assert section.lines[0].startswith("**") and "in 1 of 2 cells" in section.lines[0] and not pictures
    assert "above that of full backpropagation in 0 of 2 cells" in section.lines[0], "two seeds say little"
    (row,) = (line.split(" | ") for line in section.lines if "spatial, count" in line)
    assert row[3] == "0.900" and row[4].startswith("+0.800") and row[-1].startswith("**1.05**")
    with_nothing, _ = full.render({"costs": costs}, {})
    assert "0 of 0" in with_nothing.lines[0]


def test_memory_counts_what_is_held_beside_a_worker_program():
    program = lambda argument, temp, output, alias=0: types.SimpleNamespace(
        argument_size_in_bytes=argument,
        temp_size_in_bytes=temp,
        output_size_in_bytes=output,
        alias_size_in_bytes=alias,
    )
    read = {
        "before": program(60, 0, 10),
        "worker 0": program(50, 5, 20),
        "worker 1": program(50, 45, 40),
        "after": program(140, 30, 100, 100),
    }
    found = memory.held(read, 250, 100, 8, 2)
    # The state, the batch and what was handed on are there all the time: 118.
    assert found.own == (118 + 25, 118 + 85) and found.update == 8 + 170
    assert found.by_slot == (178, 203) and found.mean == 190.5 and found.gradients == 40
    section, facts = memory.report({"ResNet-18": found})
    assert [(goal.value, goal.ok) for goal in section.goals] == [(pytest.approx(0.238), True)]
    assert facts["ResNet-18"]["ordinary"] == 250 and section.lines[-1].endswith("| **23.8%** |")


def test_a_quick_run_has_points_of_its_curves(tmp_path):
    """The parts that read the curves of the part on quality need one point at least."""
    assert all(task.num_steps >= quality.CURVE_STEPS for task in quality.tasks(True, tmp_path))
