"""Options and results of real execution."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from splitjax.errors import ScheduleError
from splitjax.schedule.model.result import SimulationResult


@dataclasses.dataclass(frozen=True)
class ExecutionOptions:
    """How a real run goes.

    **Attributes:**

    - `checkpoint_every_seconds`: how much of a job's running time a process that dies may cost it. Checkpoints are also
      written before a job gives up its devices and when it is done.
    - `max_restarts`: how often a job begins again from its checkpoint because a process of it died; after that it has
      failed, and the others go on.
    - `stall_seconds`: a process that has not answered for so long counts as dead.
    """

    checkpoint_every_seconds: float = 600.0
    max_restarts: int = 3
    stall_seconds: float = 600.0

    def __post_init__(self) -> None:
        if not (self.checkpoint_every_seconds > 0 and self.max_restarts >= 0 and self.stall_seconds > 0):
            raise ScheduleError("times are above 0, and restarts are counted", value=self, place="options")


@dataclasses.dataclass(frozen=True)
class TaskRecord:
    """One task that ran: `job` by name; it had the token of `resource` of `device` from `start_seconds` to
    `end_seconds`; `number` of its iteration, `depth` number as in its job's profile."""

    job: str
    worker: int
    device: int
    resource: int
    number: int
    depth: int
    start_seconds: float
    end_seconds: float


@dataclasses.dataclass(frozen=True)
class Execution:
    """A real run.

    **Attributes:**

    - `result`: its figures, as a simulation's; times in seconds since the first arrival.
    - `tasks`: in the order in which they ended; of iterations that were lost with a process too.
    - `metrics`: by job, those of its last iteration. `restarts`: by job, how often it began again because a process
      died.
    - `failed`: jobs that were given up, and why.
    """

    result: SimulationResult
    tasks: tuple[TaskRecord, ...]
    metrics: Mapping[str, Mapping[str, float]]
    restarts: Mapping[str, int]
    failed: Mapping[str, str]
