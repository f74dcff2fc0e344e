"""Keeps the books of an executor on each job: its processes, and how far it is.

A job and its program come in; the executor asks what can go on, what is due, and what is lost when a process dies.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from splitjax.schedule.execution.engine import Program
from splitjax.schedule.execution.tokens import Grant
from splitjax.schedule.model.jobs import Job

_BUSY = 0  # of a vector of work, what stays spent when the work is lost


class Status(enum.Enum):
    """Says where the processes of a job stand.

    **Attributes:**

    - `WAITING`: it has none. `STARTING`: they were started and have not restored yet.
    - `RUNNING`: all are up. `SAVING`: they write a checkpoint. `DONE`: the job is finished or given up.
    """

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    SAVING = "saving"
    DONE = "done"


class JobRun:
    """Keeps a job's processes, and how far it is.

    **Attributes:**

    - `number`, `job`, `program`: the job's number, what it wants, and what it trains. `status`: where its processes
      stand.
    - `wanted`: where its policy wants it; None to wait. `devices`: where its processes are.
    - `attempt`: tells reports of different starts apart. `asked`: since when an answer is due.
    - `restarts`: how often it began again because a process died. `failed`: why it was given up.
    - `num_done`, `num_saved`: iterations, and those of them in the newest checkpoint, of `saved_at`; `unsaved`: the
      work of the rest.
    - `grants`: under way; only the first one's tasks can run. `ready_at`: when the last one was over. `device_seconds`:
      computed.
    - `metrics`: of its last iteration.
    """

    def __init__(self, number: int, job: Job, program: Program):
        self.number: int = number
        self.job: Job = job
        self.program: Program = program
        self.status: Status = Status.WAITING
        self.wanted: tuple[int, ...] | None = None
        self.devices: tuple[int, ...] = ()
        self.attempt: int = -1
        self.restarts: int = 0
        self.failed: str = ""
        self.num_done: int = 0
        self.num_saved: int = 0
        self.saved_at: float = 0.0
        self.asked: float = 0.0
        self.ready_at: float = 0.0
        self.device_seconds: float = 0.0
        self.grants: list[Grant] = []
        self.metrics: Mapping[str, float] = {}
        self.unsaved: list[NDArray[np.float64]] = []

    def can_go_on(self, devices: tuple[int, ...]) -> bool:
        """Tells whether an iteration on these `devices` can be granted."""
        is_up = self.status is Status.RUNNING and self.devices == devices == self.wanted
        return is_up and self.num_done + len(self.grants) < self.job.num_iterations

    def checkpoint_due(self, every_seconds: float) -> float:
        """Gives the time at which a checkpoint is due that is written every `every_seconds`; infinite where all is
        saved."""
        return self.saved_at + every_seconds if self.num_done > self.num_saved else math.inf

    def blocks(self, devices: tuple[int, ...]) -> bool:
        """Tells whether it is about to leave one of these `devices`: its memory is not free before that."""
        return (
            self.status in (Status.STARTING, Status.RUNNING, Status.SAVING)
            and self.wanted != self.devices
            and not set(devices).isdisjoint(self.devices)
        )

    def saved(self, number: int, now: float) -> None:
        """Notes that the checkpoint after iteration `number` is safe at time `now`."""
        self.num_saved, self.saved_at, self.status = number, now, Status.RUNNING
        self.unsaved.clear()

    def roll_back(self, num_done: int) -> NDArray[np.float64]:
        """Goes back to the checkpoint after `num_done` iterations. **Returns** the work to add for what is lost:
        computing time stays spent."""
        lost = self.unsaved[max(0, num_done - self.num_saved) :] if num_done < self.num_done else []
        work = -sum(lost, np.zeros(7))
        work[_BUSY] = 0.0
        self.num_done = num_done
        self.unsaved.clear()
        return work
