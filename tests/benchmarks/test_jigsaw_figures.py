"""What the benchmark of the scheduler calculates: calibration, errors, goals, the page. On a tiny trace that its own
simulator "measured"."""

from __future__ import annotations

import csv
import functools
import json

import pytest

from benchmarks.jigsaw import accuracy, fidelity, interleaved
from benchmarks.jigsaw import main as jigsaw
from splitjax.schedule import read_muri
from splitjax.schedule.policies.muri_testbed import Overhead

TRACE = (
    "job_id,num_gpu,submit_time,iterations,model_name,iteration_time,resource_time_0,resource_time_1,resource_time_2\n"
    + "".join(
        f"{number},{(1, 4, 8, 32)[number % 4]},{number * 400_000},{500 + 900 * (number % 7)},m{number % 3},{200 + 100 * (number % 3)},{150 - 60 * (number % 3)},{20 + 110 * (number % 3)},20\n"  # noqa: E501
        for number in range(24)
    )
)
TRUTH = fidelity.Calibration(1.05, 20.0)
LONGER = Overhead(job_seconds=0.1)


def _interleaving(name, overhead=LONGER):
    return functools.partial(fidelity.AS_RUN[name], overhead=overhead)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of a testbed whose iterations take 5 % longer than the trace says, a start 20 s, and a cycle of several
    jobs 0.1 s more for each."""
    muri = tmp_path_factory.mktemp("data") / "muri"
    muri.mkdir()
    (muri / "testbed_trace.csv").write_text(TRACE)
    whole, staged = (read_muri(muri / "testbed_trace.csv", stages=stages).jobs for stages in (False, True))
    runs = [(fidelity.FILES[name], whole, decide) for name, decide in fidelity.POLICIES.items()]
    runs += [(file, staged, _interleaving(name)) for name, file in fidelity.INTERLEAVED_FILES.items()]
    for file_name, jobs, decide in runs:
        with open(muri / file_name, "w", newline="") as file:
            out = csv.writer(file)
            out.writerow(["job_id", "JCT", "real_executed_time", "end_time", "job_counter"])
            for record in fidelity.replay(jobs, decide, TRUTH).records:
                out.writerow(
                    [
                        record.name,
                        record.completion_seconds,
                        record.running_seconds,
                        record.finish_seconds,
                        record.num_starts,
                    ]
                )
    return muri.parent


def test_the_calibration_finds_what_the_testbed_is_like(folder):
    jobs = read_muri(folder / "muri" / "testbed_trace.csv", stages=False).jobs
    found = fidelity.calibrate(jobs, fidelity.read_measured(folder / "muri" / fidelity.FILES["SRTF"], jobs))
    assert found.slowdown == pytest.approx(1.05, abs=0.01) and found.restart_seconds == pytest.approx(20, abs=2)
    for name, decide in fidelity.POLICIES.items():
        measured = fidelity.read_measured(folder / "muri" / fidelity.FILES[name], jobs)
        assert fidelity.errors(fidelity.replay(jobs, decide, TRUTH), measured) == pytest.approx((0, 0), abs=1e-9)
        assert fidelity.errors(fidelity.replay(jobs, decide, fidelity.Calibration(1.5, 20.0)), measured)[0] > 0.1


def test_one_constant_is_fitted_under_one_policy_and_predicts_the_other(folder):
    jobs = read_muri(folder / "muri" / "testbed_trace.csv").jobs
    measured = {
        name: fidelity.read_measured(folder / "muri" / file, jobs) for name, file in fidelity.INTERLEAVED_FILES.items()
    }
    replayed = lambda overhead: fidelity.replay(jobs, _interleaving("Muri-S", overhead), TRUTH)
    found = interleaved.fit("a time for each job of a cycle", jobs, measured["Muri-S"].running_seconds, replayed)
    assert found.constant == pytest.approx(LONGER.job_seconds, abs=0.002) and found.off < 0.01
    predicted = fidelity.replay(jobs, _interleaving("Muri-L", found.overhead), TRUTH)
    assert fidelity.errors(predicted, measured["Muri-L"]) == pytest.approx((0, 0), abs=0.02)
    without = fidelity.replay(jobs, _interleaving("Muri-L", Overhead(job_seconds=0.001)), TRUTH)
    assert fidelity.errors(without, measured["Muri-L"])[0] < -0.02


def test_the_page_keeps_parts_and_says_which_goals_are_met(folder, tmp_path, capsys):
    assert "fidelity" in jigsaw.parts() and jigsaw.parts()[0] == "fidelity"
    (tmp_path / "jigsaw.json").write_text(
        json.dumps(
            {
                "zz": {
                    "title": "Kept",
                    "header": "h\n",
                    "seconds": 1,
                    "load": "-",
                    "lines": ["kept line"],
                    "goals": [{"what": "g", "value": 2, "limit": 1, "at_most": True, "form": "d"}],
                }
            }
        )
    )
    status = jigsaw.main(["--data-dir", str(folder), "--only", "fidelity", "--output", str(tmp_path)])
    page = (tmp_path / "jigsaw.md").read_text()
    assert status == 0 and page.index("Fidelity") < page.index("Kept") and "**MISS g: 2 (goal: at most 1)**" in page
    assert "12 of 12 goals met" in capsys.readouterr().out and "**12 of 13 goals met.**" in page
    assert set(json.loads((tmp_path / "jigsaw.json").read_text())) == {"zz", "fidelity"}


def test_iterations_to_an_accuracy_lengthen_jobs_by_the_median_of_pairs():
    inf = float("inf")
    trained = {
        "full": accuracy.Trained(0.1, (100.0, 200.0, 300.0)),
        "spatial": accuracy.Trained(0.1, (150.0, 200.0, inf)),
        "temporal": accuracy.Trained(0.1, (inf, inf, 300.0)),
    }
    assert [accuracy.lengthening(trained, way) for way in trained] == [1.0, 1.5, inf]


def test_a_page_says_first_whether_skipped_work_pays():
    faster = {"gangs": (1.0, 1.0), "packed alone": (0.9, 0.9), "temporal": (0.8, 0.8), "JigSaw": (0.7, 0.7)}
    slower = faster | {"JigSaw": (1.1, 1.1)}
    (line,) = accuracy._verdict({("t", 1.0, "x"): faster, ("t", 1.5, "x"): slower, ("t", 1.5, "as many"): slower})
    assert "packed alone with full backpropagation in 1 of 2 cells, later than in gangs in 1" in line
