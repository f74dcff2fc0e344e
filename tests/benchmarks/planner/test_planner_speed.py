"""The figures of the page on step times, by hand."""

from __future__ import annotations

import pytest

from benchmarks.planner.speed import lines_of, rank_correlation, summary
from benchmarks.planner.speed_cells import PLACES, every_cell


def test_ranks():
    assert rank_correlation([(1, 10), (2, 20), (3, 30)]) == 1
    assert rank_correlation([(1, 30), (2, 20), (3, 10)]) == -1
    assert rank_correlation([(1, 10), (2, 30), (3, 20), (4, 40)]) == pytest.approx(0.8)


def cell(name, predicted, measured, held_out=True, **more):
    return {"cell": name, "held_out": held_out, "predicted": predicted, "measured": measured,
            "halves": [1.0, 1.1], "load": 0.5, "sending": 0.0, **more}  # fmt: skip


def page_of(cells, part="one process"):
    return {"parts": {part: {"header": "", "note": "", "cells": cells}}}


def test_errors_are_of_what_was_measured():
    found = summary([cell("a/b/1/x", 0.9, 1.0, oracle=0.8), cell("c/b/1/x", 2.4, 2.0, oracle=2.0)])
    assert found["error"] == pytest.approx(0.15) and found["worst"] == pytest.approx(0.2)
    assert found["rank"] == 1 and found["oracle"] == pytest.approx(0.9)


def test_only_held_out_cells_are_quoted_apart():
    cells = [cell("a/b/1/one process", 1.0, 1.0), cell("c/b/1/one process", 3.0, 1.0, held_out=False)]
    page = "\n".join(lines_of(page_of(cells)))
    held_out, looked_at = page.split("## Cells that were ")[1:]
    assert held_out.startswith("held out") and "| one process | 1 | 0.0% | 0.0% | 1.000 |" in held_out
    assert looked_at.startswith("looked at") and "| one process | 1 | 200.0% | 200.0% | 1.000 |" in looked_at
    assert "Missed: no goal." in page


def test_what_is_missed_is_said():
    cells = [cell(f"{name}/b/1/one process", *each) for name, each in zip("abc", [(1, 1), (3, 2), (2, 3)], strict=True)]
    page = "\n".join(lines_of(page_of(cells)))
    assert "Missed: the error, one process; the rank correlation, one process." in page


def test_cells_have_names_of_their_own():
    cells = [each for where in ("one process", *PLACES) for each in every_cell(where)]
    assert len({each.name for each in cells}) == len(cells) == 36 * 5
    assert 0.2 < sum(each.is_held_out for each in cells) / len(cells) < 0.45


def test_four_processes_have_a_goal_of_their_own():
    where = "four processes, 1 Gb/s"
    cells = [cell(f"{name}/b/1/{where}", 1.08 * k, k) for k, name in enumerate("abc", 1)]
    assert "Missed: no goal." in "\n".join(lines_of(page_of(cells, where)))
    cells = [cell(f"{name}/b/1/1 Gb/s", 1.08 * k, k) for k, name in enumerate("abc", 1)]
    assert "Missed: the error, 1 Gb/s." in "\n".join(lines_of(page_of(cells, "1 Gb/s")))
