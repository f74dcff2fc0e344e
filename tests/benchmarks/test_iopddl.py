"""The contest's command: what it writes, how it judges, and what it does with files that are no problems."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.iopddl import run
from benchmarks.iopddl.contest import Invalid, judge, limit_of, problems, read_standings
from benchmarks.iopddl.main import main
from benchmarks.iopddl.run import Settings, solve_file

# The best is strategies 1, 1: 2 + 1 + 0, with 6 bytes alive; 0, 0 costs 1, with 9 bytes.
PROBLEM = {
    "nodes": {"intervals": [[0, 2], [1, 3]], "costs": [[1, 2], [0, 1]], "usages": [[5, 3], [4, 3]]},
    "edges": {"nodes": [[0, 1]], "costs": [[0, 10**18, 9, 0]]},
    "usage_limit": 6,
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "asplos-2025-iopddl-B.json").write_text(json.dumps({"problem": PROBLEM}))
    (tmp_path / "final_results.csv").write_text(
        "TEAM #,A,B\nteam01,5,6\nteam02,4,1000000000000000003\nteam03,,3\nXLA,8,12\n"
    )
    return tmp_path


def test_every_problem_has_an_entry_whatever_its_file_holds(folder, capsys):
    (folder / "damaged.json").write_text("{")
    answers = folder / "out" / "answers.json"
    assert (
        main([str(folder), "--json", str(answers), "--processes", "1", "--clock", "processor", "--at-once", "2"]) == 1
    )
    written = json.loads(answers.read_text())
    assert set(written) == {"B", "damaged"}
    best = written["B"]
    assert (best["cost"], best["bound"], best["feasible"], best["solution"]) == (3, 3, True, [1, 1])
    assert 0 < best["seconds"]
    assert written["damaged"]["error"]["type"] == "SearchError"
    assert "cannot be read" in written["damaged"]["error"]["message"]
    assert written["damaged"]["solution"] is None and not written["damaged"]["feasible"]
    text = capsys.readouterr().out
    assert "| **splitjax** | 1.000 |" in text
    assert "| B | 3 | 1.0000 |" in text


@pytest.mark.parametrize(
    "solution, cost, peak, feasible",
    [([1, 1], 3, 6, True), ([0, 0], 1, 9, False), ([1, 0], 11, 7, False), ([0, 1], 2 + 10**18, 8, False)],
)
def test_the_judge_adds_up_by_itself(folder, solution, cost, peak, feasible):
    verdict = judge(folder / "asplos-2025-iopddl-B.json", solution)
    assert (verdict.cost, verdict.peak_bytes, verdict.feasible) == (cost, peak, feasible)


def test_what_is_forbidden_is_not_feasible_whatever_the_memory(folder):
    path = folder / "roomy.json"
    path.write_text(json.dumps({"problem": PROBLEM | {"usage_limit": 100}}))
    assert judge(path, [0, 0]).feasible
    assert not judge(path, [0, 1]).feasible


@pytest.mark.parametrize("solution", [[1], [1, 2], [1, -1], [1, 0.0], [1, True], [1, 1, 1]])
def test_the_judge_refuses_what_names_no_strategies(folder, solution):
    with pytest.raises(Invalid):
        judge(folder / "asplos-2025-iopddl-B.json", solution)


def fake_worker(monkeypatch, tmp_path, body):
    """Makes a script stand for the process that solves; it gets the same arguments."""
    script = tmp_path / "worker.sh"
    script.write_text(f'#!/bin/sh\nanswer="$4"\n{body}\n')
    script.chmod(0o755)
    monkeypatch.setattr(run.sys, "executable", str(script))


def test_a_process_that_is_ended_or_dies_leaves_its_last_answer(folder, monkeypatch):
    path = folder / "asplos-2025-iopddl-B.json"
    fake_worker(monkeypatch, folder, 'echo \'{"solution": [1, 1], "bound": 2.5}\' > "$answer"\nexec sleep 60')
    entry = solve_file(path, 1.0, Settings())
    assert (entry["cost"], entry["bound"], entry["feasible"]) == (3, 2.5, True)
    assert entry["seconds"] < 10
    fake_worker(monkeypatch, folder, "kill -9 $$")
    entry = solve_file(path, 30.0, Settings())
    assert not entry["feasible"]
    assert entry["error"]["type"] == "NoAnswer" and "status -9" in entry["error"]["message"]


def test_a_wrong_answer_or_bound_is_told(folder, monkeypatch):
    path = folder / "asplos-2025-iopddl-B.json"
    fake_worker(monkeypatch, folder, 'echo \'{"solution": [1, 7], "bound": 1.0}\' > "$answer"')
    entry = solve_file(path, 30.0, Settings(processes=1))
    assert entry["solution"] is None and "no strategy 7" in entry["problems"][0]
    fake_worker(monkeypatch, folder, 'echo \'{"solution": [1, 1], "bound": 4.0}\' > "$answer"')
    assert "above a cost" in solve_file(path, 30.0, Settings(processes=1))["problems"][0]


def test_limits_names_and_standings_are_the_contests(folder):
    assert [limit_of(name) for name in ("A", "E", "F", "K", "P", "Y", "mine")] == [60, 60, 120, 180, 240, 300, 60]
    assert list(problems(folder)) == ["B"]
    standings = read_standings(folder / "final_results.csv")
    assert standings.best("A") == 4 and standings.best("B") == 3 and math.isnan(standings.best("Z"))
    assert standings.ratio("team01", ["A", "B"]) == pytest.approx(math.sqrt(5 / 4 * 2))
    assert standings.ratio("team02", ["A", "B"]) == math.inf  # the limit was broken
    assert standings.ratio("XLA", ["A", "B"]) == pytest.approx(math.sqrt(2 * 4))


@pytest.mark.parametrize(
    "arguments, words",
    [(["missing"], "No such file"), (["."], "holds no problem"), ([".", "--only", "Q"], "no problem")],
)
def test_bad_requests_end_with_a_reason(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_two_files_of_one_name_are_refused(folder, capsys):
    (folder / "B.json").write_text("{}")
    assert main([str(folder)]) == 2
    assert "both problem B" in capsys.readouterr().err
