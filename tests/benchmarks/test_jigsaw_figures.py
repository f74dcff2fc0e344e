"""What the benchmark of the scheduler calculates: calibration, errors, goals, the page. On a tiny trace that its own
simulator "measured". The limits of whole runs, on jobs whose ends can be reckoned by hand."""

from __future__ import annotations

import csv
import dataclasses
import functools
import json

import numpy as np
import pytest

from benchmarks.jigsaw import accuracy, fidelity, interleaved
from benchmarks.jigsaw import main as jigsaw
from benchmarks.jigsaw.limits import LastJob, Limits, Needs, Packed, earliest_end, packed_ends, why_below
from splitjax.schedule import Cluster, Job, JobProfile, read_muri, simulate
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


# forward 0.4 s, backward 0.8 s: two workers compute 1.2 s and 0.8 s
PROFILE = JobProfile.uniform("even", 1.2, num_depths=8)


def needs(*jobs: tuple[float, float, float]) -> Needs:
    """Jobs as (ready, seconds, device-seconds)."""
    return Needs(*np.array(jobs, float).T)


def test_an_iteration_waits_for_its_deepest_worker_unless_all_have_one_depth():
    jobs = [Job("a", 5.0, 2, 100, PROFILE), Job("b", 0.0, 1, 10, PROFILE)]
    spatial, temporal = Needs.of(jobs), Needs.of(jobs, "temporal")
    assert spatial.ready_seconds.tolist() == [35, 30], "a start takes 30 s"
    assert spatial.seconds == pytest.approx([120, 12]) and temporal.seconds == pytest.approx([100, 12])
    assert (
        spatial.device_seconds == pytest.approx([200, 12]) and (temporal.device_seconds == spatial.device_seconds).all()
    )


def test_no_run_ends_before_its_work_fits_or_its_last_job_is_done():
    assert earliest_end(needs((0, 2, 4), (0, 2, 2), (1, 2, 2)), 2) == 4, "8 device-seconds on 2 devices"
    assert earliest_end(needs((0, 2, 4), (4, 3, 3)), 2) == 7, "the job that comes last"
    assert earliest_end(needs((0, 2, 4), (6, 3, 6), (6, 3, 6)), 2) == 12, "12 device-seconds from 6 s on"
    # At 9 s the first job has a second left at best, and the others 8: either bound alone says 9 + 4 or 10.
    assert earliest_end(needs((0, 10, 10), (9, 2, 4), (9, 2, 4)), 2) == 9 + (1 + 8) / 2


def test_perfect_packing_serves_the_least_time_left_first():
    long, short = (0, 10, 10), (0, 4, 4)
    assert packed_ends(needs(long, short), 1) == pytest.approx([14, 4])
    assert packed_ends(needs(long, short), 2) == pytest.approx([10, 4])
    # The short one keeps half a device for 2 s; the long one, which wants three quarters, gets the other half.
    assert packed_ends(needs((0, 8, 6), (0, 2, 1)), 1) == pytest.approx([2 + 8 - 2 * 0.5 / 0.75, 2])
    # Jobs with less time left come as fast as they are done: the long one begins when no more come.
    coming = [(4 * number, 4, 4) for number in range(5)]
    assert packed_ends(needs(long, *coming), 1) == pytest.approx([30, 4, 8, 12, 16, 20])
    assert packed_ends(needs((5, 1, 1), (90, 1, 1)), 1) == pytest.approx([6, 91]), "nobody is there in between"


def test_jobs_that_would_be_alone_in_the_end_can_come_first():
    # Of 2 devices the long job wants one, for 10 s; the others together take (10 + 4 + 4 + 4) / 2 = 11 s with it, and
    # 9 s where it is 10 s and they are 4 and 4: it then begins at once, and they share the other device.
    jobs = needs((0, 10, 10), (0, 4, 4), (0, 4, 4))
    assert packed_ends(jobs, 2) == pytest.approx([14, 4, 4])
    assert packed_ends(jobs, 2, last_first=True) == pytest.approx([10, 4, 8])
    crowded = needs((0, 10, 10), (0, 4, 4), (0, 4, 4), (0, 4, 4))
    assert packed_ends(crowded, 2, last_first=True)[1] == 4, "not alone in the end: shortest first"


def test_no_policy_passes_its_limit_and_the_last_job_says_what_it_lost():
    jobs = [Job(f"short {number}", 60.0 * number, 8, 100, PROFILE) for number in range(8)]
    jobs.append(Job("long", 60.0, 2, 2000, PROFILE))
    cluster = Cluster(1, 8)
    base = simulate(jobs, cluster, "gang-srtf")
    limits = Limits.of(jobs, cluster, base)
    assert limits.at_most == pytest.approx(base.makespan / (60 + 30 + 2400)), "the long job, from its arrival on"
    assert limits.temporal > limits.at_most >= limits.last_first.rate >= limits.shortest.rate
    for policy, limit in (("jigsaw", limits.at_most), ("temporal-spb", limits.temporal)):
        result = simulate(jobs, cluster, policy)
        assert base.makespan / result.makespan <= limit
        last = LastJob.of(result, limits, 1.2)
        assert last.num_workers == 2 and last.alone_seconds == pytest.approx(2400)
        assert result.makespan == pytest.approx(60 + 2400 + last.waits_seconds + last.slowed_seconds)
        assert last.allowed_seconds == pytest.approx(base.makespan / 1.2 - 2460)


def test_a_missed_goal_is_explained_by_what_limits_it():
    packed = Packed(1.16, 0.7)
    limits = Limits(
        at_most=1.25,
        temporal=1.41,
        shortest=packed,
        last_first=packed,
        full_last_first=packed,
        seconds=3600 * 3844.0,
        first_seconds=0.0,
    )
    last = LastJob(8, 3600 * 1242.0, 3600 * 240.0, 3600 * 10.0, 3600 * 130.0)
    text = why_below("muri 1", 1.2, limits, last, 1.314)
    assert "one job of 8 workers ends the run" in text and "takes 1,242 h alone, of the 3,844 h" in text
    assert "may lose 130 h in all" in text and "waits 240 h for devices" in text and "loses 10 h to starts" in text
    assert "the deepest worker" in text and "has 1.160; whatever the order, 1.250 is the most" in text
    assert "`temporal-spb` shortens such a job too: 1.314, at most 1.410." in text
    low = why_below("x", 1.3, limits, dataclasses.replace(last, num_workers=1, allowed_seconds=-5.0), 1.1)
    assert "one job of 1 worker ends" in low and "its only worker" in low and "cannot shorten such a job either" in low
    assert "may lose" not in low and "more than 1.250: the goal is out of reach" in low
