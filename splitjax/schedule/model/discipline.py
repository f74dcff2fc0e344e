"""Registers disciplines: pure functions that say how the jobs of one group share its devices, asked for one iteration
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
from splitjax.schedule.model.iterations import measure_rates
from splitjax.schedule.model.jobs import DEVICE, Job
from splitjax.schedule.model.policy import Group
from splitjax.schedule.model.tasks import GroupState, Iteration, NextIteration, Rates, Task

SteadyState = Callable[[Group, Sequence[Job], Cluster], Rates]


@dataclasses.dataclass(frozen=True)
class Discipline:
    """Holds a registered discipline.

    **Attributes:**

    - `name`: what groups name it by (`Group.discipline`).
    - `next_iteration`: chooses the next iteration of a group.
    - `rates`: gives the group's steady state; measured from `next_iteration` where no closed form was registered.
    """

    name: str
    next_iteration: NextIteration
    rates: SteadyState


_DISCIPLINES: dict[str, Discipline] = {}


def discipline(name: str, rates: SteadyState | None = None) -> Callable[[NextIteration], NextIteration]:
    """Decorates a function `next_iteration(group, jobs, state) -> Iteration` (`jobs`: those of the members, in order),
    and so makes it the discipline called `name`. `rates(group, jobs, cluster)` gives its steady state, if there is a
    closed form. Raises `ScheduleError` if the name is taken."""

    def add(next_iteration: NextIteration) -> NextIteration:
        if name in _DISCIPLINES and _DISCIPLINES[name].next_iteration is not next_iteration:
            raise ScheduleError("there is a discipline of this name", value=name, remedy="choose another name")

        def measured(group: Group, jobs: Sequence[Job], cluster: Cluster) -> Rates:
            return measure_rates(next_iteration, group, jobs)

        _DISCIPLINES[name] = Discipline(name, next_iteration, rates or measured)
        return next_iteration

    return add


def get_discipline(name: str) -> Discipline:
    """Gives the discipline called `name`. Raises `ScheduleError`, which lists the names there are."""
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
    """Gives the next iteration of the only member of `group`, which has whole devices and full backpropagation. `jobs`
    holds its job, and `state` says from when its devices are free."""
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
