"""Figures of the benchmark of real execution, from runs made up here; its policies, with workers that are threads."""

from __future__ import annotations

import pytest

from benchmarks._jigsaw_real import MODELS, POLICIES, _profile, starting_seconds
from splitjax.schedule import Cluster, Depth, Execution, Job, JobProfile, TaskRecord, ThreadEngine, execute
from splitjax.schedule.jobs import DEVICE, NETWORK
from tests.schedule.toys import Toy


def execution(tasks) -> Execution:
    return Execution(None, tuple(tasks), {}, {}, {})


def task(number: int, worker: int, depth: int, start: float, seconds: float, resource: int = DEVICE) -> TaskRecord:
    return TaskRecord("a", worker, worker, resource, number, depth, start, start + seconds)


def test_a_profile_is_what_full_and_half_depth_took() -> None:
    tasks = []
    for number in range(1, 9):
        slow = 10.0 if number <= 2 else 0.0  # the first two compile
        deep = (number + 1) % 2
        tasks += [task(number, deep, 0, 0.2 * number, 0.15 + slow), task(number, 1 - deep, 1, 0.2 * number, 0.1 + slow)]
        tasks.append(task(number, 0, 0, 0.2 * number + 0.15, 9.0, NETWORK))
    profile = _profile("a", execution(tasks))
    assert profile.task_seconds(0) == pytest.approx(0.15) and profile.task_seconds(1) == pytest.approx(0.1)
    assert profile.exposed_seconds == pytest.approx(0.05)


def test_starting_is_time_without_any_task() -> None:
    tasks = [task(1, 0, 0, 3.0, 1.0), task(1, 1, 0, 3.5, 2.0), task(2, 0, 0, 5.7, 0.3), task(3, 0, 0, 8.0, 1.0)]
    assert starting_seconds(execution(tasks)) == pytest.approx(3.0 + 2.0)  # 0.2 s between iterations are no start


def test_under_jigsaw_all_four_jobs_are_there_at_once_and_their_depths_are_those_of_partial_backpropagation_alone() -> None:
    profile = JobProfile("toy", 0.004, (Depth(1.0, 0.008), Depth(0.5, 0.004)), exposed_seconds=0.004)
    jobs = [Job(name, 0.0, 2, 6, profile) for name in MODELS]
    depths = {}
    for title, policy, partial in POLICIES:
        programs = {job.name: Toy(seconds=0.004) for job in jobs}
        found = execute(jobs, programs, Cluster(1, 2), policy, ThreadEngine())
        depths[title] = {name: {(number, given) for _, _, number, given in toy.log} for name, toy in programs.items()}
        assert not found.failed
        assert all(min(given) < 1 if partial else min(given) == 1 for log in depths[title].values() for _, given in log)
        first = [min(one.end_seconds for one in found.tasks if one.job == name) for name in MODELS]
        last = [max(one.end_seconds for one in found.tasks if one.job == name) for name in MODELS]
        assert (max(first) < min(last)) == (title in ("Muri", "JigSaw"))  # together, or one after the other
    assert depths["JigSaw"] == depths["partial backpropagation alone"]
