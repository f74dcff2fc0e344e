"""The limits of whole runs, on jobs whose ends can be reckoned by hand; and what the page says of a missed goal."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from benchmarks.jigsaw.limits import LastJob, Limits, Needs, Packed, earliest_end, packed_ends, why_below
from splitjax.schedule import Cluster, Job, JobProfile, simulate

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
