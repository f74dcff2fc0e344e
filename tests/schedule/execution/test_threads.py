"""Jobs as threads: what is reported, once, when all workers are there."""

from __future__ import annotations

import threading

from splitjax.schedule.execution.engine import Kind, Place, StepOrder
from splitjax.schedule.execution.threads import ThreadEngine

SECONDS = 20.0


class Task:
    """A worker of which number 1 does nothing before `gate` is open."""

    def __init__(self, worker, gate):
        self.worker, self.gate = worker, gate

    def wait(self):
        assert self.worker == 0 or self.gate.wait(SECONDS)

    def restore(self):
        self.wait()
        return 3

    def stage(self, number, resource):
        pass

    def step(self, order, computed):
        if order.number == 9:
            raise ValueError("a batch is missing")
        computed()
        return {"loss": 0.5 + self.worker}

    def save(self, number):
        self.wait()


class Program:
    def __init__(self):
        self.gate = threading.Event()

    def meet(self, place):
        return "here", None

    def begin(self, place):
        assert place.meeting == "here"
        return Task(place.worker, self.gate)


def started(program):
    engine = ThreadEngine()
    engine.start(7, program, tuple(Place("job", worker, 2, worker, worker) for worker in range(2)))
    return engine


def test_a_job_has_started_and_saved_when_its_last_worker_has():
    program = Program()
    engine = started(program)
    assert engine.next(0.3) is None, "worker 1 has not restored yet"
    program.gate.set()
    report = engine.next(SECONDS)
    assert (report.kind, report.job, report.number) == (Kind.STARTED, 7, 3)
    program.gate.clear()
    engine.save(7, 4)
    assert engine.next(0.3) is None, "worker 1 has not saved yet"
    program.gate.set()
    report = engine.next(SECONDS)
    assert (report.kind, report.number) == (Kind.SAVED, 4)
    assert engine.next(0.1) is None, "once for all workers"
    engine.close()


def test_every_worker_reports_its_iteration_and_its_end():
    program = Program()
    program.gate.set()
    engine = started(program)
    assert engine.next(SECONDS).kind is Kind.STARTED
    engine.step(7, 1, StepOrder(4, (1.0, 1.0)))
    reports = [engine.next(SECONDS) for _ in range(2)]
    assert [report.kind for report in reports] == [Kind.COMPUTED, Kind.FINISHED]
    assert (reports[1].worker, reports[1].number, reports[1].values) == (1, 4, {"loss": 1.5})
    engine.step(7, 0, StepOrder(9, (1.0, 1.0)))
    report = engine.next(SECONDS)
    assert (report.kind, report.worker, report.reason) == (Kind.DIED, 0, "ValueError: a batch is missing")
    engine.close()
    assert engine.next(0.1) is None
