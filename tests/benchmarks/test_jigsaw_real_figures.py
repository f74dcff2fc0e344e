"""Figures of the benchmark of real execution, from runs made up here; its policies, with workers that are threads."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import types
from typing import ClassVar

import pytest

from benchmarks.jigsaw.jobs import Lasting, LastingEngine
from benchmarks.jigsaw.real import ALL, ALONE, FULL, JIGSAW, MODELS, PARTIAL, POLICIES, _full_profile, _profile
from splitjax.schedule import Cluster, Depth, Execution, Job, JobProfile, TaskRecord, ThreadEngine, execute
from splitjax.schedule.model.jobs import DEVICE, NETWORK
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


def test_jobs_are_packed_where_they_should_be_and_at_the_depths_of_partial_backpropagation_alone() -> None:
    profile = JobProfile("toy", 0.004, (Depth(1.0, 0.008), Depth(0.5, 0.004)), exposed_seconds=0.004)
    jobs = [Job(name, 0.0, 2, 6, profile) for name in MODELS]
    depths = {}
    for title, policy in POLICIES.items():
        programs = {job.name: Toy(seconds=0.004) for job in jobs}
        found = execute(jobs, programs, Cluster(1, 2), policy, ThreadEngine())
        depths[title] = {name: {(number, given) for _, _, number, given in toy.log} for name, toy in programs.items()}
        assert not found.failed
        assert all(
            min(given) < 1 if title in PARTIAL else min(given) == 1
            for log in depths[title].values()
            for _, given in log
        )
        first = sorted(min(one.end_seconds for one in found.tasks if one.job == name) for name in MODELS)
        last = sorted(max(one.end_seconds for one in found.tasks if one.job == name) for name in MODELS)
        assert (first[1] < last[0]) == (title in ("Muri", FULL, JIGSAW, ALL))  # together, or one after the other
        assert first[3] < last[0] or title != ALL
    assert depths[JIGSAW] == depths[ALL] == depths[ALONE]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Adds up what its seed and the numbers of its iterations give; checkpoints are files."""

    folder: pathlib.Path

    def meet(self, place):
        return None, None

    def begin(self, place):
        return DrawnTask(self.folder)


class DrawnTask:
    def __init__(self, folder):
        self.file, self.total = folder / "checkpoint", 0
        self.training = types.SimpleNamespace(batch=types.SimpleNamespace(seed=0))

    def restore(self):
        done, self.total = map(int, self.file.read_text().split()) if self.file.exists() else (0, 0)
        return done

    def stage(self, number, resource):
        pass

    def step(self, order, computed):
        self.total += order.number + 100 * self.training.batch.seed
        return {"loss": self.total}

    def save(self, number):
        self.file.write_text(f"{number} {self.total}")


def test_every_run_begins_anew_in_the_processes_of_the_first(tmp_path) -> None:
    profile = JobProfile("toy", 0.001, (Depth(1.0, 0.002),))
    jobs = [Job(name, 0.0, 1, 4, profile) for name in "ab"]
    folders = {job.name: tmp_path / job.name for job in jobs}
    for folder in folders.values():
        folder.mkdir()
    programs = {name: Lasting(Drawn(folder)) for name, folder in folders.items()}
    engine = LastingEngine(ThreadEngine(), jobs, programs, folders, [0])
    for seed, order in ((0, jobs), (0, jobs[::-1]), (3, jobs)):
        engine.rewind(order, seed)
        found = execute(order, programs, Cluster(1, 1), "gang-fifo", engine)
        assert {name: metrics["loss"] for name, metrics in found.metrics.items()} == {
            "a": 10 + 400 * seed,
            "b": 10 + 400 * seed,
        }
        assert min(found.tasks, key=lambda one: one.start_seconds).job == order[0].name and not any(
            found.restarts.values()
        )
    engine.end()


class Placed(DrawnTask):
    """Notes on which cores each of its iterations ran."""

    cores: ClassVar[list[set[int]]] = []

    def step(self, order, computed):
        self.cores.append(os.sched_getaffinity(0))
        return super().step(order, computed)


class PlacedProgram(Drawn):
    def begin(self, place):
        return Placed(self.folder)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processor cores")
def test_workers_that_are_folded_onto_one_device_go_to_its_core(tmp_path) -> None:
    """JigSaw gives two jobs a device each where switches between them cost more than they gain."""
    allowed = os.sched_getaffinity(0)
    cores = sorted(allowed)[:2]
    profile = JobProfile("toy", 0.001, (Depth(1.0, 0.002), Depth(0.5, 0.001)), switch_seconds=1.0)
    jobs = [Job(name, 0.0, 2, 4, profile) for name in "ab"]
    folders = {job.name: tmp_path / job.name for job in jobs}
    for folder in folders.values():
        folder.mkdir()
    programs = {name: Lasting(PlacedProgram(folder)) for name, folder in folders.items()}
    engine = LastingEngine(ThreadEngine(), jobs, programs, folders, cores)
    try:
        engine.rewind(jobs, 0)
        found = execute(jobs, programs, Cluster(1, 2), "jigsaw-fifo", engine)
    finally:
        engine.end()
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), allowed)
    devices = {(one.job, one.device) for one in found.tasks if one.resource == DEVICE}
    assert len(devices) == 2, "each job is on one device"
    assert {frozenset(each) for each in Placed.cores} <= {frozenset({core}) for core in cores}
    assert len(Placed.cores) == 16


def test_a_task_is_switched_where_another_job_had_the_device_before():
    from benchmarks.jigsaw.switching import of_kind, switch_seconds, switched
    from splitjax.schedule.execution.records import TaskRecord

    def task(job, device, number, start, seconds, depth=0):
        return TaskRecord(job, 0, device, DEVICE, number, depth, start, start + seconds)

    tasks = [
        task("a", 0, 2, 0.0, 9.0),
        task("a", 0, 3, 9.0, 1.0),
        task("b", 0, 3, 10.0, 2.0, 1),
        task("b", 1, 3, 10.0, 5.0),  # the first on its device
        task("a", 0, 4, 12.0, 1.5),
        task("b", 1, 4, 15.0, 2.5),
    ]
    assert switched(tasks) == {
        ("a", 0, False): [1.0],
        ("b", 1, True): [2.0],
        ("a", 0, True): [1.5],
        ("b", 0, False): [2.5],
    }
    alone, after = of_kind(tasks, False), of_kind(tasks, True)
    assert switch_seconds("a", alone, after) == pytest.approx(0.5), "the depth that both have"
    assert switch_seconds("b", alone, after) == 0.0, "no depth that both have"
    assert switch_seconds("a", after, alone) == 0.0, "no switch gains time"


def test_a_profile_of_full_depth_is_from_runs_at_full_depth():
    """The other worker's full depth makes both slower by a fifth; forward and backward keep their shares."""
    partial = JobProfile("a", 0.05, (Depth(1.0, 0.10), Depth(0.5, 0.05)), 0.05, switch_seconds=0.007)
    tasks = [
        task(number, worker, 0, 0.3 * number, 0.18 + (10.0 if number <= 2 else 0.0))
        for number in range(1, 9)
        for worker in (0, 1)
    ]
    full = _full_profile("a", execution(tasks), partial)
    assert full.task_seconds(0) == pytest.approx(0.18) and full.forward_seconds == pytest.approx(0.06)
    assert full.depths[1].backward_seconds == pytest.approx(0.06) and full.switch_seconds == 0.007
    assert full.exposed_seconds == pytest.approx(0.12)
