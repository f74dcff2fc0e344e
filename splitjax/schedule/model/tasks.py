"""Defines what a discipline is asked and what it answers: tasks on devices, iterations, where a group stands, its
steady rates.

These are values only. `discipline` holds the functions that answer, `iterations` runs groups by them; both import
these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from splitjax.schedule.model.jobs import DEVICE, Job
from splitjax.schedule.model.policy import Group


@dataclasses.dataclass(frozen=True)
class Task:
    """Describes what one worker does in one iteration on one resource of one device (an iteration of stages has a task
    for each resource).

    **Attributes:**

    - `worker`: number of the worker in its job. `device`: number of the device in the cluster.
    - `depth`: a number in `JobProfile.depths`.
    - `start_seconds`: when it begins. `seconds`: how long it takes.
    - `resource`: a number in `RESOURCES`.
    """

    worker: int
    device: int
    depth: int
    start_seconds: float
    seconds: float
    resource: int = DEVICE

    @property
    def end_seconds(self) -> float:
        """Gives the time at which the device, or the resource, is free again."""
        return self.start_seconds + self.seconds


@dataclasses.dataclass(frozen=True)
class Iteration:
    """Describes one iteration of one member of a group.

    **Attributes:**

    - `member`: number of the member in `Group.members`.
    - `tasks`: its workers' tasks.
    - `ready_seconds`: when the job's next iteration may begin (its last task's end, and what of the all-reduce others'
      computing cannot hide from the job itself).
    """

    member: int
    tasks: tuple[Task, ...]
    ready_seconds: float


@dataclasses.dataclass(frozen=True)
class GroupState:
    """Tells a discipline where a group stands; one entry per member, in their order, or per device, in the order of
    `Group.devices`.

    **Attributes:**

    - `now_seconds`: nothing starts earlier.
    - `iterations`: finished or granted ones of each member in this group. `remaining_iterations`: those that are left;
      a member with none is not to be chosen.
    - `ready_seconds`: from when each member's next iteration can start.
    - `attained_device_seconds`: device time that each member has had in this group (a group whose members change is
      another one).
    - `free_seconds`: [device][resource], from when each is free.
    - `holders`: per device, the member that computed on it last; -1 where none of this group did.
    """

    now_seconds: float
    iterations: tuple[int, ...]
    remaining_iterations: tuple[float, ...]
    ready_seconds: tuple[float, ...]
    attained_device_seconds: tuple[float, ...]
    free_seconds: tuple[tuple[float, float, float, float], ...]
    holders: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Rates:
    """Gives the steady state of a group; one entry per member.

    **Attributes:**

    - `iterations_per_second`: how fast each member goes.
    - `device_seconds`: for how long one iteration keeps devices busy, all workers together, with what they lose by
      going over to it from other jobs.
    - `credit`: what one iteration is worth if only work really done counts: 1 with full backpropagation, else
      device-seconds without the skipped backward work over those with it.
    """

    iterations_per_second: tuple[float, ...]
    device_seconds: tuple[float, ...]
    credit: tuple[float, ...]


NextIteration = Callable[[Group, Sequence[Job], GroupState], Iteration]
