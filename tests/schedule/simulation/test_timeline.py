"""The document of a result: its figures, and a lane for each device with what computed on it."""

from __future__ import annotations

import dataclasses
import re

import pytest

from splitjax import schedule
from splitjax.schedule import Cluster, Job, JobProfile, Options
from splitjax.schedule.model.result import Span
from splitjax.schedule.simulation.timeline import timeline

PROFILE = JobProfile.uniform("m", 1.0, num_depths=4)


@pytest.fixture(scope="module")
def result():
    jobs = [Job(f"j{i}", 10.0 * i, 2, 600 + 300 * i, PROFILE) for i in range(3)]
    return schedule.simulate(jobs, Cluster(1, 4), "gang-fifo", Options(spans=True))


def test_lanes_hold_what_the_spans_say(result):
    made = timeline(result)
    assert [title for title, _ in made.lanes] == [f"device {i}" for i in range(4)] and made.unit == "minutes"
    computed = sum(stretch.end - stretch.start for _, lane in made.lanes for stretch in lane) * 60
    assert computed == pytest.approx(
        sum(len(span.devices) * (span.end_seconds - span.start_seconds) for span in result.spans)
    )
    for _, lane in made.lanes:
        assert all(before.end <= after.start + 1e-9 for before, after in zip(lane, lane[1:], strict=False))
    assert set(made.keys) == {"j0", "j1", "j2"}


@pytest.mark.parametrize("names", [("7", "8", "9"), ("a", "a", "b"), ("a", "", "b")])
def test_jobs_whose_names_say_nothing_are_numbered(result, names):
    records = tuple(dataclasses.replace(r, name=n) for r, n in zip(result.records, names, strict=True))
    assert set(timeline(dataclasses.replace(result, records=records)).keys) == {"job 0", "job 1", "job 2"}


def test_spans_of_the_same_jobs_are_joined_and_slivers_left_out(result):
    spans = (
        Span((0,), (0,), 0.0, 100.0),
        Span((0,), (0,), 100.0, 400.0),
        Span((1, 2), (0, 1), 500.0, 1600.0),
        Span((1,), (2,), 0.0, 0.5),
    )
    made = timeline(dataclasses.replace(result, spans=spans))
    lanes = [[(round(s.start * 60), round(s.end * 60), s.keys) for s in lane] for _, lane in made.lanes]
    assert lanes == [[(0, 400, ("j0",)), (500, 1600, ("j1", "j2"))], [(500, 1600, ("j1", "j2"))], [], []]
    assert made.lanes[0][1][1].note == "j1, j2: 8.33 to 26.7 minutes"


def test_a_result_prints_its_figures_and_its_timeline(result):
    text = str(result)
    assert text.startswith("gang-fifo: 3 jobs on 1x4 devices\n") and "makespan" in text and "who computed when" in text
    lanes = re.findall(r"^device \d  ([A-C.#]+)$", text, flags=re.MULTILINE)
    assert len(lanes) == 4 and all(len(lane) == 110 for lane in lanes)
    assert {"A", "B", "C"} <= set("".join(lanes)) and ". idle, A j0, B j" in text
    source = result._repr_html_()
    assert source.count('<div class="lane">') == 4 and "minutes" in source
    assert "who computed" not in str(dataclasses.replace(result, spans=()))
    assert "60 more devices" not in text and "SimulationResult" in repr(result)
