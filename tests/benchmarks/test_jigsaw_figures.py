"""What the benchmark of the scheduler calculates: calibration, errors, goals, the page. On a tiny trace that its own simulator "measured"."""

from __future__ import annotations

import csv
import json

import pytest

from benchmarks import _jigsaw_fidelity as fidelity
from benchmarks import jigsaw
from splitjax.schedule import read_muri

TRACE = "job_id,num_gpu,submit_time,iterations,model_name,iteration_time,resource_time_0,resource_time_1,resource_time_2\n" + "".join(
    f"{number},{(1, 4, 8, 32)[number % 4]},{number * 400_000},{500 + 900 * (number % 7)},m{number % 3},{200 + 100 * (number % 3)},1,2,3\n" for number in range(24)
)
TRUTH = fidelity.Calibration(1.05, 20.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of a testbed whose iterations take 5 % longer than the trace says, and a start 20 s."""
    muri = tmp_path_factory.mktemp("data") / "muri"
    muri.mkdir()
    (muri / "testbed_trace.csv").write_text(TRACE)
    jobs = read_muri(muri / "testbed_trace.csv", stages=False).jobs
    for name, decide in fidelity.POLICIES.items():
        with open(muri / fidelity.FILES[name], "w", newline="") as file:
            out = csv.writer(file)
            out.writerow(["job_id", "JCT", "real_executed_time", "end_time", "job_counter"])
            for record in fidelity.replay(jobs, decide, TRUTH).records:
                out.writerow([record.name, record.completion_seconds, record.running_seconds, record.finish_seconds, record.num_starts])
    return muri.parent


def test_the_calibration_finds_what_the_testbed_is_like(folder):
    jobs = read_muri(folder / "muri" / "testbed_trace.csv", stages=False).jobs
    found = fidelity.calibrate(jobs, fidelity.read_measured(folder / "muri" / fidelity.FILES["SRTF"], jobs))
    assert found.slowdown == pytest.approx(1.05, abs=0.01) and found.restart_seconds == pytest.approx(20, abs=2)
    for name, decide in fidelity.POLICIES.items():
        measured = fidelity.read_measured(folder / "muri" / fidelity.FILES[name], jobs)
        assert fidelity.errors(fidelity.replay(jobs, decide, TRUTH), measured) == pytest.approx((0, 0), abs=1e-9)
        assert fidelity.errors(fidelity.replay(jobs, decide, fidelity.Calibration(1.5, 20.0)), measured)[0] > 0.1


def test_the_page_keeps_parts_and_says_which_goals_are_met(folder, tmp_path, capsys):
    assert "fidelity" in jigsaw.parts() and jigsaw.parts()[0] == "fidelity"
    (tmp_path / "jigsaw.json").write_text(json.dumps({"zz": {"title": "Kept", "header": "h\n", "seconds": 1, "load": "-", "lines": ["kept line"],
                                                             "goals": [{"what": "g", "value": 2, "limit": 1, "at_most": True, "form": "d"}]}}))  # fmt: skip
    status = jigsaw.main(["--data-dir", str(folder), "--only", "fidelity", "--output", str(tmp_path)])
    page = (tmp_path / "jigsaw.md").read_text()
    assert status == 0 and page.index("Fidelity") < page.index("Kept") and "**MISS g: 2 (goal: at most 1)**" in page
    assert "8 of 8 goals met" in capsys.readouterr().out and "**8 of 9 goals met.**" in page
    assert set(json.loads((tmp_path / "jigsaw.json").read_text())) == {"zz", "fidelity"}
