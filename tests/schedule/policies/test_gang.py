"""Gang policies: who runs when, in cases that can be worked out by hand."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from splitjax.errors import ScheduleError
from splitjax.schedule import Cluster, JobProfile, Options, Policy, gang, get, names, register, simulate
from splitjax.schedule.model.policy import unregister
from splitjax.schedule.policies.gang import admit, place
from splitjax.schedule.policies.gavel import equal_devices
from splitjax.schedule.policies.las import las
from splitjax.schedule.policies.memory import carry
from splitjax.schedule.policies.themis import fair_shares
from tests.schedule.helpers import ONE, finishes, job

FREE = Options(restart_seconds=0.0)


def run(jobs, policy, cluster="1x2", options=FREE):
    return simulate(jobs, Cluster.parse(cluster), policy, options)


def test_fifo_keeps_what_runs_and_lets_small_jobs_pass():
    jobs = [job("a", 0, 1, 10), job("wide", 1, 2, 5), job("b", 2, 1, 3)]
    assert finishes(run(jobs, "gang-fifo")) == {"a": 10, "b": 5, "wide": 15}


def test_srtf_preempts_for_the_shorter():
    jobs = [job("long", 0, 2, 10), job("short", 4, 2, 3)]
    result = run(jobs, "gang-srtf")
    assert finishes(result) == {"long": 13, "short": 7}
    assert [record.num_starts for record in result.records] == [2, 1]
    assert result.records[0].queueing_seconds == pytest.approx(3)


def test_srsf_counts_devices_and_srtf_does_not():
    jobs = [job("wide", 0, 2, 5), job("narrow", 0, 1, 6)]
    assert finishes(run(jobs, "gang-srtf")) == {"wide": 5, "narrow": 11}
    assert finishes(run(jobs, "gang-srsf")) == {"wide": 11, "narrow": 6}


def test_las_serves_the_newcomer_until_it_has_had_its_share():
    policy = Policy("las", lambda view: las(view, thresholds=(4.0,)), "", "", "las", "gang-las")
    result = run([job("old", 0, 2, 10), job("new", 5, 2, 4)], policy)
    # `old` falls at 2 s; `new` has the devices from 5 to 7 s, falls, and waits behind `old`, which was in that queue
    # before it.
    assert finishes(result) == {"old": 12, "new": 14}


def test_las_within_a_queue_does_not_preempt():
    policy = Policy("las", lambda view: las(view, thresholds=(2.0,)), "", "", "las", "gang-las")
    result = run([job("a", 0, 2, 20), job("b", 3, 2, 20), job("c", 6, 2, 20)], policy)
    assert sum(record.num_starts for record in result.records) <= 7
    assert sorted(finishes(result).values())[-1] == 60


def test_themis_and_gavel_share_between_equals():
    jobs = [job(name, 0, 2, 2000) for name in "ab"]
    for name, least in (("gang-gavel", 3), ("gang-themis", 1)):
        result = run(jobs, name)
        assert (
            result.makespan == pytest.approx(4000) and min(record.num_starts for record in result.records) >= least - 1
        )
        assert result.busy == pytest.approx(1.0)
    first, second = sorted(finishes(run(jobs, "gang-gavel")).values())
    assert second - first <= 360


def test_fair_shares_equalise_the_ratio_and_fill_the_cluster():
    waited, remaining = np.array([10.0, 0.0, 500.0]), np.array([100.0, 50.0, 20.0])
    isolated, workers = np.array([300.0, 100.0, 60.0]), np.array([4, 2, 1])
    shares = fair_shares(waited, remaining, isolated, workers, 4)
    assert shares @ workers == pytest.approx(4, rel=1e-6) and shares[2] == 1.0  # the last cannot be helped by more
    ratio = ((waited + remaining / shares) / isolated)[:2]
    assert ratio[0] == pytest.approx(ratio[1], rel=1e-6)
    assert fair_shares(waited, remaining, isolated, workers, 7).tolist() == [1, 1, 1]


def test_equal_devices_leave_what_small_jobs_do_not_want():
    workers = np.array([8, 1, 4])
    shares = equal_devices(workers, 9)
    assert shares * workers == pytest.approx([4, 1, 4]) and (shares * workers).sum() == 9
    assert equal_devices(workers, 13).tolist() == [1, 1, 1]
    assert (equal_devices(np.array([8, 8]), 8) * 8).tolist() == [4, 4]


def test_admission_takes_what_fits_in_order():
    workers = np.array([3, 4, 2, 1, 2, 1])
    assert admit(workers, 7).tolist() == [0, 1]
    assert admit(workers, 6).tolist() == [0, 2, 3]
    assert admit(workers, 6, backfill=False).tolist() == [0]
    assert admit(workers, 0).tolist() == [] and admit(workers, 99).tolist() == [0, 1, 2, 3, 4, 5]
    random = np.random.default_rng(0)
    for _ in range(50):  # against one at a time
        workers, left, expected = random.integers(1, 9, 30), int(random.integers(1, 60)), []
        devices = left
        for index, count in enumerate(workers):
            if count <= left:
                expected.append(index)
                left -= count
        assert admit(workers, devices).tolist() == expected


def test_placement_prefers_few_nodes():
    cluster, free = Cluster(3, 4), np.ones(12, bool)
    free[:2] = free[4] = False  # 2, 3 and 4 are free
    assert place(free, 2, cluster) == (2, 3) and place(free, 3, cluster) == (5, 6, 7)
    assert {cluster.node_of(device) for device in place(free, 6, cluster)} == {2, 0}
    with pytest.raises(ScheduleError, match="are free"):
        place(free, int(free.sum()) + 1, cluster)


def test_consolidated_jobs_stay_within_a_node():
    narrow = [job(name, 0, 3, 10) for name in "abc"] + [job("wide", 0, 6, 4)]
    strict = dataclasses.replace(
        get("gang-fifo"), decide=lambda view: gang(view, view.arrival_seconds, consolidate=True)
    )
    result = run(narrow, strict, "2x4", Options(restart_seconds=0.0, spans=True))
    assert finishes(result) == {"a": 10, "b": 10, "c": 20, "wide": 24}  # c and wide fit the free devices, but no node
    for span in result.spans:
        if span.jobs != (3,):
            assert len({device // 4 for device in span.devices}) == 1


def test_a_new_policy_is_one_function():
    name = "test-longest-first"

    @register(name, paper="none", order="srtf")
    def longest(view):
        """Longest first."""
        return gang(view, -view.remaining_iterations)

    try:
        assert name in names() and get(name).baseline == "gang-srtf" and get(name).summary == "Longest first."
        assert finishes(run([job("a", 0, 2, 3), job("b", 0, 2, 9)], name))["b"] >= 9
        with pytest.raises(ScheduleError, match="there is a policy of this name"):
            register(name, paper="none")(lambda view: longest(view))
    finally:
        unregister(name)
    with pytest.raises(ScheduleError, match="did you mean 'gang-srtf'"):
        get("gang-srft")


def test_policies_are_pure_functions_of_a_read_only_view():
    jobs = [job(str(number), number % 5, 1 + number % 3, 5 + number) for number in range(12)]
    for name in [name for name in names() if name.startswith("gang-")]:
        policy, calls = get(name), []

        def twice(view, policy=policy, calls=calls):
            with pytest.raises(ValueError, match="read-only"):
                view.remaining_iterations[:] = 0
            with pytest.raises(TypeError):
                view.groups[0] = None
            first, second = policy.decide(view), policy.decide(view)
            assert (first.stop, first.start, first.wake_seconds) == (second.stop, second.start, second.wake_seconds)
            calls.append(view.now_seconds)
            return first

        result = run(jobs, dataclasses.replace(policy, decide=twice), "1x4")
        assert calls == sorted(calls) and finishes(result) == finishes(run(jobs, name, "1x4"))


def test_memory_follows_the_jobs():
    views = []
    policy = Policy("spy", lambda view: views.append(view) or gang(view, view.arrival_seconds), "", "", "", "")
    run([job("a", 0, 1, 5), job("b", 1, 1, 9), job("c", 7, 1, 1, JobProfile.uniform("x", 2.0))], policy)
    before = {"jobs": views[1].active, "seen": np.array([1.5, 2.5])}
    assert carry(views[3], before, seen=0.0)["seen"].tolist() == [2.5, 0.0]  # a is done, c has come
    assert carry(views[0], None, seen=math.inf)["seen"].tolist() == [math.inf]
    assert ONE.iteration_seconds == 1.0
