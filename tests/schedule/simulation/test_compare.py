"""Policies side by side: a row for each in both tables, and what the columns mean."""

from __future__ import annotations

import pytest

from splitjax import display, schedule
from splitjax.schedule import Cluster, Job, JobProfile
from splitjax.schedule.simulation.comparison_document import _durations

PROFILE = JobProfile.uniform("m", 1.0, num_depths=4)


@pytest.fixture(scope="module")
def comparison():
    jobs = [Job(f"j{i}", 10.0 * i, 2, 600 + 300 * i, PROFILE) for i in range(4)]
    return schedule.compare(jobs, Cluster(1, 4), ["gang-fifo", "spb"])


@pytest.mark.parametrize("width", [50, 60, 80, 160])
def test_it_fits(comparison, width):
    assert max(map(len, display.show(comparison, width).splitlines())) <= width


def test_a_row_for_each_policy(comparison):
    times, efficiencies, legend = display.show(comparison, 80).split("\n\n")
    assert times.splitlines()[0] == "times of jobs" and efficiencies.splitlines()[0] == "efficiencies of devices"
    for block in (times, efficiencies):
        assert [line.split()[0] for line in block.splitlines()[3:]] == ["gang-fifo", "spb"]
    titles = {line.split("  ")[0] for line in legend.splitlines() if not line.startswith(" ")}
    rows = [line.split() for line in times.splitlines()[3:]]
    assert all(above[2:9:2] == below[2:9:2] for above, below in zip(rows, rows[1:], strict=False))  # one unit a column
    assert titles == {"JCT", "queue", "unfair", "busy", "iterations"}


@pytest.mark.parametrize(
    ("seconds", "texts"),
    [
        ((7200, 360), ["2.00 h", "0.10 h"]),
        ((7100, 61), ["118 min", "1 min"]),
        ((1800, 0), ["30.0 min", "0.0 min"]),
        ((0.5, 0), ["0.50 s", "0.00 s"]),
    ],
)
def test_times_of_a_column_compare(seconds, texts):
    assert _durations(seconds) == texts


def test_figures_are_those_of_the_results(comparison):
    words = " ".join(str(comparison).split())
    for result in comparison.results:
        assert f"{100 * result.busy:.1f} %" in words and f"{result.avg_jct / 60:.1f} min" in words
    source = comparison._repr_html_()
    assert source.count("<td>gang-fifo</td>") >= 2 and '<th scope="col" class="number">p99 JCT</th>' in source


def test_what_a_prompt_shows_is_short(comparison):
    assert repr(comparison).startswith("<Comparison of ") and len(repr(comparison)) < 200
