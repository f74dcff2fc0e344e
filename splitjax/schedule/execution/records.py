"""Holds options and results of real execution.

`ExecutionOptions` go into `execute`; an `Execution` with figures, as a simulation has them, and a record of each task
comes out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from splitjax.errors import ScheduleError
from splitjax.schedule.model.result import SimulationResult


@dataclasses.dataclass(frozen=True)
class ExecutionOptions:
    """Says how a real run goes.

    **Attributes:**

    - `checkpoint_every_seconds`: how much of a job's running time a process that dies may cost it. Checkpoints are also
      written before a job gives up its devices and when it is done.
    - `max_restarts`: how often a job begins again from its checkpoint because a process of it died; after that it has
      failed, and the others go on.
    - `stall_seconds`: a process that has not answered for so long counts as dead.

    Raises `ScheduleError` for a time that is not above 0, or fewer restarts than none.
    """

    checkpoint_every_seconds: float = 600.0
    max_restarts: int = 3
    stall_seconds: float = 600.0

    def __post_init__(self) -> None:
        if not (self.checkpoint_every_seconds > 0 and self.max_restarts >= 0 and self.stall_seconds > 0):
            raise ScheduleError(
                "times are above 0, and restarts are counted",
                value=self,
                place="options",
                remedy="give seconds above 0, and restarts of 0 or more",
            )


@dataclasses.dataclass(frozen=True)
class TaskRecord:
    """Records one task that ran.

    **Attributes:**

    - `job`: by name. `worker`: number of its worker.
    - `device`, `resource`: it had the token of this resource of this device.
    - `number`: of its iteration. `depth`: number as in its job's profile.
    - `start_seconds`, `end_seconds`: from when and until when.
    """

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
    """Holds what came of a real run.

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
