"""Tasks and an engine whose processes are started once for all runs (`jigsaw.processes`): a run begins its jobs anew
or goes on where they are, in processes that are there."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.jigsaw.jobs import Judge
from splitjax.schedule import Job, Place, RayEngine
from splitjax.schedule.execution.engine import Kind, Program, StepOrder, WorkerReport
from splitjax.schedule.model.jobs import DEVICE, STORAGE


@dataclasses.dataclass(frozen=True)
class Beginning:
    """How a job begins a run: with batches drawn by `seed`, trained by a temporal assignment of depths or not."""

    seed: int
    is_temporal: bool = False

    @property
    def number(self) -> int:
        """What stands for it in place of an iteration's number: a number below 0."""
        return -1 - 2 * self.seed - self.is_temporal

    @staticmethod
    def of(number: int) -> Beginning:
        return Beginning((-1 - number) // 2, (-1 - number) % 2 == 1)


def pin_to_core(core: int) -> None:
    """Puts all threads of this process onto a core."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})


@dataclasses.dataclass(frozen=True)
class Lasting:
    """A `DecoratedJob` whose tasks go back to the beginning, or to their checkpoint, when they are asked for `STORAGE`
    of the number of a `Beginning`, which go to core C when they are asked for `DEVICE` of -1 - C, and which judge their
    state when they are asked for the step of a number below 0. `judge`: makes, in the process that is asked first, what
    judges. `pin`: puts the process onto a core."""

    job: Any
    judge: Callable[[], Judge] | None = None
    pin: Callable[[int], None] = pin_to_core

    def meet(self, place: Place) -> tuple[Any, Any]:
        return self.job.meet(place)

    def begin(self, place: Place) -> LastingTask:
        return LastingTask(self.job.begin(place), self.judge, self.pin)


class LastingTask:
    def __init__(self, task: Any, make_judge: Callable[[], Judge] | None, pin: Callable[[int], None] = pin_to_core):
        self._task, self._make_judge, self._pin = task, make_judge, pin
        self._judge: Judge | None = None
        self._warm: set[bool] = set()  # the assignments whose programs are compiled

    def restore(self) -> int:
        """Warms up what the task has not been warmed up for yet: each time it would make a state to throw away."""
        training = self._task.training
        is_temporal = training.at_depths.is_temporal
        if is_temporal in self._warm:
            self._task.training = dataclasses.replace(training, warm_up=())
        done = self._task.restore()
        self._warm.add(is_temporal)
        self._task.training = training
        return done

    def stage(self, number: int, resource: int) -> None:
        if number < 0 and resource == DEVICE:
            self._pin(-1 - number)
        elif number < 0:
            beginning, training = Beginning.of(number), self._task.training
            training.batch.seed, training.at_depths.is_temporal = beginning.seed, beginning.is_temporal
            self.restore()
        else:
            self._task.stage(number, resource)

    def step(self, order: StepOrder, computed: Any) -> Mapping[str, float]:
        if order.number >= 0:
            return self._task.step(order, computed)
        if self._judge is None:
            assert self._make_judge is not None, "a job without a judge is asked for a judgement"
            self._judge = self._make_judge()
        return self._judge(self._task.state)

    def save(self, number: int) -> None:
        self._task.save(number)


class LastingEngine:
    """An `Engine` whose processes are started, and their programs compiled, before the first run, and stay from run to
    run: a run's time has no starts in it. A job that is stopped and started again within a run does go back to its
    checkpoint. It is for one set of jobs, whose processes start on the devices 0 to N-1.

    `cores`: of each device. A job that a policy wants on other devices (it may fold its workers onto one) has its
    processes put onto their cores. None: no job can be on other devices."""

    def __init__(
        self,
        inner: RayEngine,
        jobs: Sequence[Job],
        programs: Mapping[str, Program],
        folders: Mapping[str, pathlib.Path],
        cores: Sequence[int] | None = None,
    ):
        self._inner, self._numbers, self._folders = (
            inner,
            {job.name: number for number, job in enumerate(jobs)},
            folders,
        )
        self._workers = {number: job.num_workers for number, job in enumerate(jobs)}
        self._cores, self._devices = cores, {number: [*range(count)] for number, count in self._workers.items()}
        self._reports: collections.deque[WorkerReport] = collections.deque()
        self._beginning = Beginning(0)
        self._judgements = itertools.count(1)
        # of the run's numbers, the numbers of the processes; they differ where a run has another order
        self._job_of: dict[int, int] = {}
        self._attempt: dict[int, int] = {}
        # by number of the processes, the iteration that a job goes on from
        self._saved = dict.fromkeys(self._workers, 0)
        self._keeps_checkpoints = True
        for number, job in enumerate(jobs):
            inner.start(
                number,
                programs[job.name],
                tuple(Place(job.name, worker, job.num_workers, worker, worker) for worker in range(job.num_workers)),
            )
        self._await(Kind.STARTED, len(jobs))

    def rewind(self, jobs: Sequence[Job], seed: int, is_temporal: bool = False) -> None:
        """Before a run from the beginning: `jobs`, in their order. `is_temporal`: whether their depths are those of a
        temporal assignment."""
        self._enter(jobs, keeps_checkpoints=True)
        self._beginning = Beginning(seed, is_temporal)
        self._saved = dict.fromkeys(self._workers, 0)
        for folder in self._folders.values():
            for checkpoint in folder.glob("*"):
                shutil.rmtree(checkpoint) if checkpoint.is_dir() else checkpoint.unlink()
        for inner in self._job_of.values():
            self._restore(inner)
        self._await(Kind.STAGED, sum(self._workers[inner] for inner in self._job_of.values()))

    def go_on(self, jobs: Sequence[Job]) -> None:
        """Before a run that goes on where the last one of each of `jobs` ended. It keeps no checkpoints, so no job may
        be started again within it."""
        self._enter(jobs, keeps_checkpoints=False)

    def held_out(self, jobs: Sequence[Job]) -> dict[str, Mapping[str, float]]:
        """After a run: what the judge of each of `jobs` gives for its state."""
        number, found = -next(self._judgements), {}
        names = {self._numbers[job.name]: job.name for job in jobs}
        for inner in names:
            self._inner.step(inner, inner % self._workers[inner], StepOrder(number, ()))  # all devices have work
        while len(found) < len(names):
            report = self._next_of_processes()
            if report.kind is Kind.FINISHED and report.number == number:
                found[names[report.job]] = report.values
        return found

    def _enter(self, jobs: Sequence[Job], keeps_checkpoints: bool) -> None:
        self._reports.clear()
        self._job_of = {number: self._numbers[job.name] for number, job in enumerate(jobs)}
        self._attempt, self._keeps_checkpoints = {}, keeps_checkpoints

    def _restore(self, inner: int) -> None:
        for worker in range(self._workers[inner]):
            self._inner.stage(inner, worker, self._beginning.number, STORAGE)

    def _await(self, kind: Kind, count: int) -> None:
        """Answers of processes that begin or go back; what others report meanwhile is kept."""
        while count:
            report = self._next_of_processes()
            if report.kind is kind and report.number <= 0:
                count -= 1
            elif (of_run := self._of_run(report)) is not None:
                self._reports.append(of_run)

    def _next_of_processes(self) -> WorkerReport:
        report = self._inner.next(600.0)
        if report is None or report.kind is Kind.DIED:
            raise RuntimeError(f"a process does not answer: {report}")
        return report

    def _of_run(self, report: WorkerReport) -> WorkerReport | None:
        """The report with the run's number of its job; None for what a job still says that is not in this run, or has
        not been started in it."""
        job = next((job for job, inner in self._job_of.items() if inner == report.job), None)
        if job is None or job not in self._attempt:
            return None
        return dataclasses.replace(report, job=job, attempt=self._attempt[job])

    def start(self, job: int, program: Program, places: tuple[Place, ...]) -> None:
        inner = self._job_of[job]
        self._move(inner, places)
        if job in self._attempt:
            self._restore(inner)
            self._await(Kind.STAGED, self._workers[inner])
        self._attempt[job] = places[0].attempt
        self._reports.append(WorkerReport(Kind.STARTED, job, places[0].attempt, number=self._saved[inner]))

    def _move(self, inner: int, places: tuple[Place, ...]) -> None:
        """Puts the processes of a job onto the cores of its devices, where they are on others."""
        before, self._devices[inner] = self._devices[inner], [place.device for place in places]
        moved = [place for place, device in zip(places, before, strict=True) if place.device != device]
        if moved and self._cores is None:
            raise RuntimeError(f"{places[0].job} is to be on other devices than its processes: {places}")
        for place in moved:
            self._inner.stage(inner, place.worker, -1 - self._cores[place.device], DEVICE)
        self._await(Kind.STAGED, len(moved))

    def stage(self, job: int, worker: int, number: int, resource: int) -> None:
        self._inner.stage(self._job_of[job], worker, number, resource)

    def step(self, job: int, worker: int, order: StepOrder) -> None:
        self._inner.step(self._job_of[job], worker, order)

    def save(self, job: int, number: int) -> None:
        inner = self._job_of[job]
        self._saved[inner] = number
        if self._keeps_checkpoints:
            self._inner.save(inner, number)
        else:
            self._reports.append(WorkerReport(Kind.SAVED, job, self._attempt[job], number=number))

    def stop(self, job: int) -> None:
        pass  # its processes stay, idle

    def next(self, timeout_seconds: float) -> WorkerReport | None:
        if self._reports:
            return self._reports.popleft()
        report = self._inner.next(timeout_seconds)
        return None if report is None else self._of_run(report)

    def close(self) -> None:
        pass  # `execute` closes it after every run

    def end(self) -> None:
        self._inner.close()
