"""Holds jobs as threads of this process: an engine for programs that need no process of their own, and to try out
policies and programs.

Commands come in as calls of `ThreadEngine`'s methods, as of every `Engine`; reports come out of `next`.
"""

from __future__ import annotations

import dataclasses
import functools
import queue
import threading
from collections.abc import Callable
from typing import Any

from splitjax.schedule.execution.engine import Kind, Place, Program, StepOrder, WorkerReport, WorkerTask


class ThreadEngine:
    """Implements `Engine` with threads. A thread cannot be killed: one that is stopped within a call is forgotten, and
    ends with that call."""

    def __init__(self) -> None:
        self._reports: queue.SimpleQueue[WorkerReport] = queue.SimpleQueue()
        self._jobs: dict[int, _Job] = {}

    def start(self, job: int, program: Program, places: tuple[Place, ...]) -> None:
        """Starts a thread for `job` at each of `places`, which meet and then begin `program` (`Engine.start`)."""
        self._jobs[job] = _Job(job, program, places, self._reports)

    def stage(self, job: int, worker: int, number: int, resource: int) -> None:
        """Lets `worker` of `job` do `resource` of iteration `number` (`Engine.stage`)."""
        self._jobs[job].workers[worker].do(
            lambda task: task.stage(number, resource),
            lambda _: WorkerReport(Kind.STAGED, job, self._jobs[job].attempt, worker, number, resource),
        )

    def step(self, job: int, worker: int, order: StepOrder) -> None:
        """Lets `worker` of `job` do the iteration that `order` names (`Engine.step`)."""
        held = self._jobs[job]
        report = functools.partial(WorkerReport, job=job, attempt=held.attempt, worker=worker, number=order.number)
        computed = lambda: held.reports.put(report(Kind.COMPUTED))
        held.workers[worker].do(
            lambda task: task.step(order, computed), lambda metrics: report(Kind.FINISHED, values=dict(metrics))
        )

    def save(self, job: int, number: int) -> None:
        """Lets all workers of `job` save the state after iteration `number` (`Engine.save`)."""
        held = self._jobs[job]
        done = _Last(len(held.workers))
        for worker in held.workers:
            worker.do(
                lambda task: task.save(number),
                lambda _: WorkerReport(Kind.SAVED, job, held.attempt, number=number) if done() else None,
            )

    def stop(self, job: int) -> None:
        """Forgets the threads of `job` (`Engine.stop`)."""
        held = self._jobs.pop(job, None)
        if held is not None:
            for worker in held.workers:
                worker.leave()

    def next(self, timeout_seconds: float) -> WorkerReport | None:
        """Waits for the next report, at most `timeout_seconds`; None if there is none (`Engine.next`)."""
        try:
            return self._reports.get(timeout=max(0.0, timeout_seconds))
        except queue.Empty:
            return None

    def close(self) -> None:
        """Forgets the threads of all jobs."""
        for job in list(self._jobs):
            self.stop(job)


class _Last:
    """Counts calls, one per worker; true for the last of them."""

    def __init__(self, count: int):
        self._left, self._lock = count, threading.Lock()

    def __call__(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left == 0


class _Job:
    """Holds the threads of a job, worker 0 first, and the queue of their reports."""

    def __init__(self, job: int, program: Program, places: tuple[Place, ...], reports: queue.SimpleQueue[WorkerReport]):
        self.attempt, self.reports = places[0].attempt, reports
        started = _Last(len(places))
        self.workers = tuple(
            _Worker(
                job,
                program,
                place,
                reports,
                lambda number: WorkerReport(Kind.STARTED, job, self.attempt, number=number) if started() else None,
            )
            for place in places
        )
        # As in processes: worker 0 first says where it is to be found.
        self.workers[0].meet(lambda meeting: [worker.begin(meeting) for worker in self.workers])


class _Worker:
    """Holds a thread that does what it is given, one after the other."""

    def __init__(
        self,
        job: int,
        program: Program,
        place: Place,
        reports: queue.SimpleQueue[WorkerReport],
        started: Callable[[int], WorkerReport | None],
    ):
        self._job, self._program, self._place, self._reports, self._started = job, program, place, reports, started
        self._commands: queue.SimpleQueue[Callable[[], WorkerReport | None] | None] = queue.SimpleQueue()
        self._task: WorkerTask | None = None
        self._kept: Any = None
        self._left = False
        threading.Thread(target=self._run, name=f"{place.job}-{place.worker}", daemon=True).start()

    def meet(self, then: Callable[[Any], Any]) -> None:
        def meet() -> None:
            meeting, self._kept = self._program.meet(self._place)
            then(meeting)

        self._commands.put(meet)

    def begin(self, meeting: Any) -> None:
        def begin() -> WorkerReport | None:
            self._task = self._program.begin(dataclasses.replace(self._place, meeting=meeting))
            return self._started(self._task.restore())

        self._commands.put(begin)

    def do(self, what: Callable[[WorkerTask], Any], report: Callable[[Any], WorkerReport | None]) -> None:
        def do() -> WorkerReport | None:
            assert self._task is not None, "a worker is given nothing to do before it has begun"
            return report(what(self._task))

        self._commands.put(do)

    def leave(self) -> None:
        self._left = True
        self._commands.put(None)

    def _run(self) -> None:
        while (command := self._commands.get()) is not None and not self._left:
            try:
                report = command()
            except BaseException as error:  # whatever it is, it is this worker's end, and told
                report = WorkerReport(
                    Kind.DIED,
                    self._job,
                    self._place.attempt,
                    self._place.worker,
                    reason=f"{type(error).__name__}: {error}",
                )
            if report is not None and not self._left:
                self._reports.put(report)
            if report is not None and report.kind is Kind.DIED:
                return
