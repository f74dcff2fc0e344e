"""Pictures of iterations: what disciplines place on devices, and what a profile says."""

from __future__ import annotations

import pytest

from splitjax.schedule import Cluster, Job, JobProfile, Options, compare
from splitjax.schedule.simulation.plot import draw_efficiency, draw_results
from splitjax.schedule.simulation.task_plot import draw_job_profile, draw_tasks, placed_tasks

pytestmark = pytest.mark.one_version
PROFILE = JobProfile.uniform("four layers", 3.0, num_depths=4)  # 1 s forward, 2 s backward
JOBS = [Job("A", 0.0, 4, 100, PROFILE), Job("B", 0.0, 4, 100, PROFILE)]


def test_full_backpropagation_leaves_no_hole_and_partial_no_time_to_gain():
    full, partial = placed_tasks("gang", JOBS[:1], 4, 15.0), placed_tasks("spb", JOBS[:1], 4, 15.0)
    assert full.num_iterations == partial.num_iterations == (5,)
    seconds = [sum(task.seconds for _, task in placed.tasks) for placed in (full, partial)]
    assert seconds[0] == pytest.approx(4 * 15) and seconds[1] == pytest.approx(0.75 * 4 * 15)


def test_tasks_are_drawn_until_the_horizon():
    pytest.importorskip("matplotlib")
    figure = draw_tasks({"alone": ("gang", JOBS[:1]), "two": ("jigsaw", JOBS)}, 4, 15.0)
    alone, two = figure.axes
    assert alone.get_title(loc="left") == "alone: busy 100%, iterations 5" and len(alone.patches) == 20
    assert "100%" in [text.get_text() for text in alone.texts] and alone.get_xlim() == (0, 15)
    assert two.get_title(loc="left").startswith("two: busy 100%") and len({p.get_facecolor() for p in two.patches}) == 2


def test_a_profile_is_drawn_by_depth():
    pytest.importorskip("matplotlib")
    time, memory = draw_job_profile(PROFILE).axes
    widths = [patch.get_width() for patch in time.patches]
    assert widths[:4] == [1000.0] * 4 and widths[4:8] == pytest.approx([2000.0, 1500.0, 1000.0, 500.0])
    assert len(memory.patches) == 8


def test_results_share_one_axis_of_time_and_gang_policies_have_no_bar():
    pytest.importorskip("matplotlib")
    jobs = [Job(str(number), 2.0 * number, 4, 20, PROFILE) for number in range(6)]
    compared = compare(jobs, Cluster(1, 4), ["gang-srtf", "spb", "jigsaw"], Options(spans=True))
    curves, *charts = draw_results(compared.results, charts=("gang-srtf", "jigsaw")).axes
    assert [chart.get_title().split(",")[0] for chart in charts] == ["gang-srtf", "jigsaw"]
    assert charts[0].get_xlim() == charts[1].get_xlim()
    assert [text.get_text() for text in curves.get_legend().get_texts()] == ["gang-srtf", "spb", "jigsaw"]
    axes = draw_efficiency(compared).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["spb", "jigsaw"] and len(axes.patches) == 4
