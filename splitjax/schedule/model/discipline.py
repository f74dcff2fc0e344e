"""How the jobs of one group share its devices, iteration by iteration: a pure function that is asked for one iteration
after the other.

`next_iteration` gets the group, its jobs and a `GroupState`, and returns one iteration of one member: which device
computes which worker's task, at which depth, from when. Simulators take its times as they are; executors grant its
devices (all tasks of an iteration at once, in the order in which iterations are returned, so that jobs cannot wait for
each other in a circle) and report the times that it really took.

`rates` is the steady state of the same, for skipping ahead: in closed form where a discipline gives one, else measured
over iterations.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Sequence

from splitjax.errors import ScheduleError
from splitjax.schedule.model.cluster import Cluster
from splitjax.schedule.model.jobs import DEVICE, Job
from splitjax.schedule.model.policy import Group


@dataclasses.dataclass(frozen=True)
class Task:
    """What one worker does in one iteration on one device: `depth` is a number in `JobProfile.depths`, `resource` one
    in `RESOURCES` (an iteration of stages has a task for each of them)."""

    worker: int
    device: int
    depth: int
    start_seconds: float
    seconds: float
    resource: int = DEVICE

    @property
    def end_seconds(self) -> float:
        """When the device, or the resource, is free again."""
        return self.start_seconds + self.seconds


@dataclasses.dataclass(frozen=True)
class Iteration:
    """One iteration of member number `member` of the group; the job's next one may begin at `ready_seconds` (its last
    task's end, and what of the all-reduce others' computing cannot hide from the job itself)."""

    member: int
    tasks: tuple[Task, ...]
    ready_seconds: float


@dataclasses.dataclass(frozen=True)
class GroupState:
    """Where a group stands; one entry per member, in their order, or per device, in the order of `Group.devices`.

    **Attributes:**

    - `now_seconds`: nothing starts earlier.
    - `iterations`: finished or granted ones of each member in this group. `remaining_iterations`: those that are left;
      a member with none is not to be chosen.
    - `ready_seconds`: from when each member's next iteration can start.
    - `attained_device_seconds`: device time that each member has had in this group (a group whose members change is
      another one).
    - `free_seconds`: [device][resource], from when each is free.
    """

    now_seconds: float
    iterations: tuple[int, ...]
    remaining_iterations: tuple[float, ...]
    ready_seconds: tuple[float, ...]
    attained_device_seconds: tuple[float, ...]
    free_seconds: tuple[tuple[float, float, float, float], ...]


@dataclasses.dataclass(frozen=True)
class Rates:
    """The steady state of a group; one entry per member.

    **Attributes:**

    - `iterations_per_second`.
    - `device_seconds`: computing time on devices of one iteration, all workers together.
    - `credit`: what one iteration is worth if only work really done counts: 1 with full backpropagation, else
      device-seconds without the skipped backward work over those with it.
    """

    iterations_per_second: tuple[float, ...]
    device_seconds: tuple[float, ...]
    credit: tuple[float, ...]


NextIteration = Callable[[Group, Sequence[Job], GroupState], Iteration]
SteadyState = Callable[[Group, Sequence[Job], Cluster], Rates]


@dataclasses.dataclass(frozen=True)
class Discipline:
    """A registered discipline; `rates` is measured from `next_iteration` where no closed form was registered."""

    name: str
    next_iteration: NextIteration
    rates: SteadyState


_DISCIPLINES: dict[str, Discipline] = {}


def discipline(name: str, rates: SteadyState | None = None) -> Callable[[NextIteration], NextIteration]:
    """Decorator: makes `next_iteration(group, jobs, state) -> Iteration` (`jobs`: those of the members, in order) the
    discipline of this name. `rates(group, jobs, cluster)`: its steady state, if there is a closed form. Raises
    `ScheduleError` if the name is taken."""

    def add(next_iteration: NextIteration) -> NextIteration:
        if name in _DISCIPLINES and _DISCIPLINES[name].next_iteration is not next_iteration:
            raise ScheduleError("there is a discipline of this name", value=name, remedy="choose another name")

        def measured(group: Group, jobs: Sequence[Job], cluster: Cluster) -> Rates:
            from splitjax.schedule.model.iterations import measure_rates

            return measure_rates(next_iteration, group, jobs)

        _DISCIPLINES[name] = Discipline(name, next_iteration, rates or measured)
        return next_iteration

    return add


def get_discipline(name: str) -> Discipline:
    """The discipline of this name. Raises `ScheduleError`, which lists the names there are."""
    if name not in _DISCIPLINES:
        close = difflib.get_close_matches(name, _DISCIPLINES, n=1)
        raise ScheduleError(
            "there is no discipline of this name" + (f"; did you mean {close[0]!r}?" if close else ""), value=name,
            remedy="name one of " + ", ".join(sorted(_DISCIPLINES)),
        )  # fmt: skip
    return _DISCIPLINES[name]


def _gang_rates(group: Group, jobs: Sequence[Job], cluster: Cluster) -> Rates:
    (job,) = jobs
    compute = job.profile.task_seconds(0)
    return Rates((1 / job.profile.iteration_seconds,), (compute * job.num_workers,), (1.0,))


@discipline("gang", _gang_rates)
def gang_iteration(group: Group, jobs: Sequence[Job], state: GroupState) -> Iteration:
    """One job with whole devices and full backpropagation."""
    ((member,), (job,)) = group.members, jobs
    place = {device: index for index, device in enumerate(group.devices)}
    start = max(
        [
            state.now_seconds,
            state.ready_seconds[0],
            *(state.free_seconds[place[device]][DEVICE] for device in member.devices),
        ]
    )
    seconds = job.profile.task_seconds(0)
    tasks = tuple(Task(worker, device, 0, start, seconds) for worker, device in enumerate(member.devices))
    return Iteration(0, tasks, start + seconds + job.profile.exposed_seconds)
