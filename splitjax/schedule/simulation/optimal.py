"""Finds the best that any schedule could do, for small cases: what the list schedule of `jigsaw` is measured against.

Jobs and a number of devices come in; the optimal time of one round, beside the discipline's, comes out.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import milp

from splitjax.errors import ScheduleError
from splitjax.schedule.model.discipline import get_discipline
from splitjax.schedule.model.iterations import advance, charge_switches, start_state
from splitjax.schedule.model.jobs import Job
from splitjax.schedule.model.policy import Group, Member

MAX_TASKS = 64


@dataclasses.dataclass(frozen=True)
class Round:
    """Compares times of one iteration of each job on common devices, all ready at once.

    **Attributes:**

    - `optimal_seconds`: the shortest time in which the devices can be done, whatever the order and placement of tasks.
    - `list_seconds`: the time that the discipline takes.
    - `floor_seconds`: no schedule is shorter: the longest task, or all computing spread evenly.
    """

    optimal_seconds: float
    list_seconds: float
    floor_seconds: float

    @property
    def gap(self) -> float:
        """Gives the share of the optimum by which the discipline takes longer."""
        return self.list_seconds / self.optimal_seconds - 1


def compare_round(
    jobs: Sequence[Job], num_devices: int, *, partial: bool = True, time_limit_seconds: float = 60.0
) -> Round:
    """Compares the discipline `jigsaw` (`interleave` without `partial`) with the exact optimum of one round of `jobs`
    on `num_devices` devices.

    A round: every job does one iteration, its N tasks forward and backward down to its workers' depths, any task on any
    device, no task interrupted, one at a time on a device; done when the last task is. All-reduce is left out: it keeps
    no device. This is the scheduling of independent tasks on equal machines (P||Cmax; Graham 1969: longest first is
    within 4/3 - 1/(3 devices) of the optimum, for one list of all tasks).

    Raises `ScheduleError` for more than 64 tasks, or where the optimum was not proven within `time_limit_seconds`.
    """
    lengths = sorted((seconds for job in jobs for seconds in _tasks(job, partial)), reverse=True)
    if not lengths or len(lengths) > MAX_TASKS or num_devices < 1:
        raise ScheduleError(
            "an exact optimum is for few tasks, and a device at least",
            value=(len(lengths), num_devices),
            remedy=f"give 1 to {MAX_TASKS} tasks",
        )
    floor = max(lengths[0], sum(lengths) / num_devices)
    listed = list_round(jobs, num_devices, partial=partial)
    best = floor if listed <= floor * (1 + 1e-9) else _optimum(lengths, num_devices, floor, listed, time_limit_seconds)
    return Round(best, listed, floor)


def list_round(jobs: Sequence[Job], num_devices: int, *, partial: bool = True) -> float:
    """Gives the seconds until `num_devices` devices are done with one iteration of each of `jobs`, by the discipline
    `jigsaw` (`interleave` without `partial`)."""
    name = "jigsaw" if partial else "interleave"
    devices = tuple(range(num_devices))
    members = tuple(
        Member(number, tuple(devices[worker % num_devices] for worker in range(job.num_workers)), devices)
        for number, job in enumerate(jobs)
    )
    group = Group(members, name)
    state, end = start_state(group, jobs, remaining=[1.0] * len(jobs)), 0.0
    while max(state.remaining_iterations) > 0:
        asked = get_discipline(name).next_iteration(group, jobs, state)
        iteration = charge_switches(group, jobs, state, asked)
        state = advance(group, state, iteration)
        end = max(end, *(task.end_seconds for task in iteration.tasks))
    return end


def _tasks(job: Job, partial: bool) -> list[float]:
    depths = job.profile.partial_depths(job.num_workers) if partial else (0,) * job.num_workers
    return [job.profile.task_seconds(depth) for depth in depths]


def _optimum(lengths: Sequence[float], num_devices: int, floor: float, ceiling: float, limit: float) -> float:
    """Solves an integer program: how many tasks of each length go to each device. Variables: counts [length, device],
    then the time."""
    kinds = sorted(collections.Counter(round(length / ceiling, 9) for length in lengths).items(), reverse=True)
    count = len(kinds) * num_devices
    rows, low, high = [], [], []
    for kind, (_, number) in enumerate(kinds):  # every task is somewhere
        row = np.zeros(count + 1)
        row[kind * num_devices : (kind + 1) * num_devices] = 1
        rows, low, high = [*rows, row], [*low, number], [*high, number]
    loads = []
    for device in range(num_devices):
        load = np.zeros(count + 1)
        load[device:count:num_devices] = [length for length, _ in kinds]
        loads.append(load)
        row = load.copy()
        row[-1] = -1
        rows, low, high = [*rows, row], [*low, -math.inf], [*high, 0.0]
    for first, second in zip(loads, loads[1:]):  # devices are alike: fullest first
        rows, low, high = [*rows, first - second], [*low, 0.0], [*high, math.inf]
    upper = np.array([number for _, number in kinds for _ in range(num_devices)] + [1.0])
    objective = np.append(np.zeros(count), 1.0)
    lower = np.append(np.zeros(count), floor / ceiling * (1 - 1e-9))
    solved = milp(
        objective,
        constraints=(np.array(rows), low, high),
        bounds=(lower, upper),
        integrality=np.append(np.ones(count), 0),
        options={"time_limit": limit, "mip_rel_gap": 1e-5},
    )
    if solved.status != 0:
        raise ScheduleError(
            "the optimum was not proven in time",
            value=solved.message,
            place=f"{len(lengths)} tasks, {num_devices} devices",
            remedy="allow more time",
        )
    return float(solved.fun) * ceiling
