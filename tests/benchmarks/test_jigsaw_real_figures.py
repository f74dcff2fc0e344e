"""Figures of the benchmark of real execution, from runs made up here; its policies, with workers that are threads."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import types

import numpy as np
import pytest

from benchmarks.jigsaw import profiling, real_runs
from benchmarks.jigsaw.jobs import MODELS, SMALL_MODELS, BegunOnce, ByAssignment
from benchmarks.jigsaw.lasting import Beginning, Lasting, LastingEngine, LastingTask
from benchmarks.jigsaw.processes import Run
from benchmarks.jigsaw.profiling import _full_profile, _profile
from benchmarks.jigsaw.real_runs import ALL, ALONE, FULL, GANG, JIGSAW, PARTIAL, POLICIES
from benchmarks.jigsaw.switch_cost import lost
from splitjax.schedule import Cluster, Depth, Execution, Job, JobProfile, Place, TaskRecord, ThreadEngine, execute
from splitjax.schedule.model.jobs import DEVICE, NETWORK, STORAGE
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
    profile = _profile("a", [execution(tasks)])
    assert profile.task_seconds(0) == pytest.approx(0.15) and profile.task_seconds(1) == pytest.approx(0.1)
    assert profile.exposed_seconds == pytest.approx(0.05)


class Slowing:
    """Runs jobs on a machine that takes a tenth of a second longer for every task of a run than for those of the last
    run. Tasks after another job's take 0.01 s more."""

    def __init__(self):
        self.begun = []

    def __call__(self, policy, jobs, seed):
        took, at, tasks = 0.1 * len(self.begun), 0.0, []
        self.begun.append((policy, [job.profile for job in jobs]))
        together = policy is POLICIES[ALL]
        numbers = range(1, max(job.num_iterations for job in jobs) + 1)
        turns = [(n, job) for n in numbers for job in jobs] if together else [(n, job) for job in jobs for n in numbers]
        for number, job in turns:
            is_partial = policy == "spb-fifo" or together
            lost = 0.01 if together else 0.0
            for worker in (0, 1):
                depth = (number + worker) % 2 if is_partial else 0
                end = at + (1.0 + took) * (0.75 if depth else 1.0) + lost
                tasks.append(TaskRecord(job.name, worker, worker, DEVICE, number, depth, at, end))
            at += 1.0 + took + lost
        result = types.SimpleNamespace(makespan=at)
        return Run(Execution(result, tuple(tasks), {}, {}, {}), 0.0, 0.0)


def test_a_run_is_simulated_by_the_profiles_right_before_and_right_after_it(monkeypatch) -> None:
    machine = Slowing()
    monkeypatch.setattr(real_runs, "started", lambda models: contextlib.nullcontext(machine))
    taken = real_runs.take(SMALL_MODELS, 2)
    ran = [None if profiles[0] is profiling.GUESS else policy for policy, profiles in machine.begun]
    runs = [number for number, policy in enumerate(ran) if policy is not None]
    order = [*POLICIES, *[*POLICIES][1:], [*POLICIES][0]]  # the second round begins with another policy
    assert [ran[number] for number in runs] == [POLICIES[title] for title in order]
    seconds = lambda policy, numbers: next(
        1.0 + 0.1 * number for number in numbers if machine.begun[number][0] == policy and ran[number] is None
    )
    for place, (number, title) in enumerate(zip(runs, order, strict=True)):
        known = taken.around[place // len(POLICIES)][title]
        for policy, found in (("gang-fifo", known.full), ("spb-fifo", known.partial)):
            before = seconds(policy, range(number - 1, -1, -1))
            after = seconds(policy, range(number + 1, len(ran)))
            for name in SMALL_MODELS:
                assert found[name].task_seconds(0) == pytest.approx((before + after) / 2)
        assert {job.name: job.profile for job in taken.jobs(place // len(POLICIES), title)} == (
            known.partial if title in PARTIAL else known.full
        )
    assert [job.name for job in taken.jobs(1, GANG)] == [*SMALL_MODELS][1:] + [*SMALL_MODELS][:1]


def test_a_switch_costs_what_tasks_after_another_job_take_longer() -> None:
    steady = lambda *call: Slowing()(*call)
    alone, mixed = profiling.run_alone(steady, SMALL_MODELS), profiling.run_mixed(steady, SMALL_MODELS)
    assert profiling.read_switches([alone], [mixed]) == {name: pytest.approx(0.01) for name in SMALL_MODELS}


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


@dataclasses.dataclass(frozen=True)
class DrawnTraining:
    warm_up: tuple[tuple[float, ...], ...] = ((1.0,),)
    batch: types.SimpleNamespace = dataclasses.field(default_factory=lambda: types.SimpleNamespace(seed=0))
    at_depths: types.SimpleNamespace = dataclasses.field(
        default_factory=lambda: types.SimpleNamespace(is_temporal=False)
    )


class DrawnTask:
    def __init__(self, folder):
        self.file, self.total = folder / "checkpoint", 0
        self.training = DrawnTraining()

    @property
    def state(self):
        return self.total, self.training.at_depths.is_temporal

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
    engine = LastingEngine(ThreadEngine(), jobs, programs, folders)
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


def test_a_run_goes_on_where_the_last_one_ended_and_is_judged_between(tmp_path) -> None:
    """Jobs that are not in a run stay as they are; a run that goes on keeps no checkpoints."""
    profile = JobProfile("toy", 0.001, (Depth(1.0, 0.002),))
    of = lambda **numbers: [Job(name, 0.0, 1, number, profile) for name, number in numbers.items()]
    folders = {name: tmp_path / name for name in "ab"}
    for folder in folders.values():
        folder.mkdir()
    judge = lambda: lambda state: {"total": state[0], "temporal": state[1]}
    programs = {name: Lasting(Drawn(folder), judge) for name, folder in folders.items()}
    engine = LastingEngine(ThreadEngine(), of(a=1, b=1), programs, folders)

    def go_on(jobs):
        engine.go_on(jobs)
        execute(jobs, programs, Cluster(1, 1), "gang-fifo", engine)
        return {name: found["total"] for name, found in engine.held_out(jobs).items()}

    engine.rewind(of(b=1, a=1), 1, is_temporal=True)
    assert go_on(of(b=2, a=2)) == {"a": 203, "b": 203}
    assert go_on(of(b=4)) == {"b": 410}
    assert go_on(of(a=3, b=5)) == {"a": 306, "b": 515}
    assert not any(any(folder.iterdir()) for folder in folders.values())
    assert all(found["temporal"] for found in engine.held_out(of(a=1, b=1)).values())
    engine.rewind(of(a=1, b=1), 0)
    assert engine.held_out(of(a=1)) == {"a": {"total": 0, "temporal": False}}
    engine.end()


def test_processes_follow_their_job_to_other_devices(tmp_path) -> None:
    """A policy may fold two workers onto one device; the next run may have each on its own again."""
    pinned = []
    job = Job("a", 0.0, 2, 1, JobProfile("toy", 0.001, (Depth(1.0, 0.002),)))
    programs = {"a": Lasting(Drawn(tmp_path), pin=pinned.append)}
    places = lambda *devices: tuple(Place("a", worker, 2, device, device) for worker, device in enumerate(devices))
    engine = LastingEngine(ThreadEngine(), [job], programs, {"a": tmp_path}, cores=(5, 7))
    for devices, then in (((0, 1), []), ((0, 0), [5]), ((0, 0), [5]), ((0, 1), [5, 7])):
        engine.rewind([job], 0)
        engine.start(0, programs["a"], places(*devices))
        assert pinned == then
    engine.end()
    engine = LastingEngine(ThreadEngine(), [job], programs, {"a": tmp_path})
    engine.rewind([job], 0)
    with pytest.raises(RuntimeError, match="on other devices"):
        engine.start(0, programs["a"], places(0, 0))
    engine.end()


def test_programs_are_warmed_up_once_for_each_assignment(tmp_path) -> None:
    warmed = []

    class Recorded(DrawnTask):
        def restore(self):
            warmed.append((self.training.at_depths.is_temporal, bool(self.training.warm_up)))
            return super().restore()

    task = LastingTask(Recorded(tmp_path), None)
    task.restore()
    for beginning in (Beginning(1), Beginning(0, True), Beginning(1, True), Beginning(2)):
        task.stage(beginning.number, STORAGE)
    assert warmed == [(False, True), (False, False), (True, True), (True, False), (False, False)]


def test_how_a_run_begins_is_told_by_a_number_below_0() -> None:
    every = [Beginning(seed, is_temporal) for seed in range(5) for is_temporal in (False, True)]
    assert [Beginning.of(one.number) for one in every] == every
    assert len({one.number for one in every}) == len(every) and max(one.number for one in every) < 0


def test_a_state_to_begin_with_is_made_once_and_never_overwritten() -> None:
    made = []

    class Step:
        mesh = "a mesh"

        def init(self, init_fn, key, *, example):
            made.append(key)
            return {"w": init_fn(key)}

        def __call__(self, state, batch):
            state["w"] += batch
            return state

    step = BegunOnce(Step())
    first = step(step.init(np.ones, 3, example=()), 1)
    assert first["w"].tolist() == [2, 2, 2] and step.mesh == "a mesh"
    assert step.init(np.ones, 3, example=())["w"].tolist() == [1, 1, 1] and made == [3]


def test_full_depth_is_another_program_where_the_assignment_is_temporal() -> None:
    chosen = ByAssignment(lambda depths: ("spatial", depths), lambda depths: ("temporal", depths))
    assert chosen((1.0, 1.0)) == ("spatial", (1.0, 1.0))
    chosen.is_temporal = True
    assert chosen((1.0, 1.0)) == ("temporal", (1.0, 1.0))


def test_a_task_is_switched_where_another_job_had_the_device_before():
    from benchmarks.jigsaw.switching import of_kind, of_kinds, switch_seconds, switched
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
    runs = of_kinds([execution(tasks), execution(tasks[:3])], True)
    assert runs == {("b", 1): [2.0, 2.0], ("a", 0): [1.5]}, "each run by itself: no task is the next of another run's"


def test_a_profile_of_full_depth_is_from_runs_at_full_depth():
    """The other worker's full depth makes both slower by a fifth; forward and backward keep their shares."""
    partial = JobProfile("a", 0.05, (Depth(1.0, 0.10), Depth(0.5, 0.05)), 0.05, switch_seconds=0.007)
    tasks = [
        task(number, worker, 0, 0.3 * number, 0.18 + (10.0 if number <= 2 else 0.0))
        for number in range(1, 9)
        for worker in (0, 1)
    ]
    full = _full_profile("a", [execution(tasks), execution(tasks[:-4])], partial)
    assert full.task_seconds(0) == pytest.approx(0.18) and full.forward_seconds == pytest.approx(0.06)
    assert full.depths[1].backward_seconds == pytest.approx(0.06) and full.switch_seconds == 0.007
    assert full.exposed_seconds == pytest.approx(0.12)


@pytest.mark.parametrize(
    ("same", "other", "cells"),
    [
        ([0.1, 0.2, 0.3], [0.25], ["200.0", "250.0", "+50.0", "+25.0%", "3, 1"]),
        ([0.1], [], ["100.0", "none", "", "", "1, 0"]),
        ([], [0.1], ["none", "100.0", "", "", "0, 1"]),
    ],
)
def test_a_kind_without_tasks_after_others_says_so(same, other, cells):
    """A folded job's workers follow each other on their device: the table has its row all the same."""
    assert lost(same, other) == cells
