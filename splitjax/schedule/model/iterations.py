"""Runs groups iteration by iteration: for the exact mode of the simulator, and to measure steady rates.

A group, its jobs and a discipline's `next_iteration` come in; the group's state after each iteration, or the `Rates` at
which its members go on for ever, come out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from splitjax.errors import ScheduleError
from splitjax.schedule.model.jobs import DEVICE, RESOURCES, Job
from splitjax.schedule.model.policy import Group
from splitjax.schedule.model.tasks import GroupState, Iteration, NextIteration, Rates

_STARVED_AFTER = 64  # iterations of others for one of its own: a member that gets less counts as never served
# iterations of the slowest member, before and in the first window over which rates are measured
_WARM_UP, _WINDOW = 4, 16
_MOST_MARKS = 7  # after 4, 20, 36, 68, 132, 260 and 516 of them
_AGREE = 0.02  # by how much rates of two windows may differ


def start_state(
    group: Group, jobs: Sequence[Job], now_seconds: float = 0.0, remaining: Sequence[float] | None = None
) -> GroupState:
    """Makes the state of a group whose devices and `jobs` (of the members, in order) are all free at `now_seconds`.
    `remaining` counts the iterations that each member has left; by default all of its job's."""
    count = len(jobs)
    return GroupState(
        now_seconds,
        (0,) * count,
        tuple(remaining or (float(job.num_iterations) for job in jobs)),
        (now_seconds,) * count,
        (0.0,) * count,
        ((now_seconds, now_seconds, now_seconds, now_seconds),) * len(group.devices),
        (-1,) * len(group.devices),
    )


def charge_switches(group: Group, jobs: Sequence[Job], state: GroupState, iteration: Iteration) -> Iteration:
    """Gives `iteration` of `group` with what its devices lose by going over to it from other members (of `jobs`, in the
    members' order): the first task on such a device takes `JobProfile.switch_seconds` longer, and what follows it there
    begins later. Disciplines do not reckon with it in their times, so that none can leave it out."""
    seconds = jobs[iteration.member].profile.switch_seconds
    if not seconds:
        return iteration
    holder = dict(zip(group.devices, state.holders))
    switched = {task.device for task in iteration.tasks if holder[task.device] not in (-1, iteration.member)}
    if not switched:
        return iteration
    begun: set[int] = set()
    tasks = []
    for task in sorted(iteration.tasks, key=lambda task: (task.start_seconds, task.resource)):
        if task.device in begun:
            task = dataclasses.replace(task, start_seconds=task.start_seconds + seconds)
        elif task.device in switched and task.resource == DEVICE:
            begun.add(task.device)
            task = dataclasses.replace(task, seconds=task.seconds + seconds)
        tasks.append(task)
    after = iteration.ready_seconds - max(task.end_seconds for task in iteration.tasks)
    return Iteration(iteration.member, tuple(tasks), max(task.end_seconds for task in tasks) + after)


def advance(group: Group, state: GroupState, iteration: Iteration) -> GroupState:
    """Gives the state of `group` after `iteration` was granted in `state`. Raises `ScheduleError` if one of its tasks
    starts before its device is free."""
    place = {device: index for index, device in enumerate(group.devices)}
    free, holders = [list(times) for times in state.free_seconds], list(state.holders)
    used = 0.0
    for task in iteration.tasks:
        times = free[place[task.device]]
        if task.start_seconds < times[task.resource] - 1e-9 * max(1.0, abs(times[task.resource])):
            raise ScheduleError(
                "a task starts before its device is free",
                value=task,
                place=f"discipline {group.discipline!r}",
                remedy="let the discipline start a task when its device has ended the one before",
            )
        times[task.resource] = task.end_seconds
        used += task.seconds if task.resource == DEVICE else 0.0
        if task.resource == DEVICE:
            holders[place[task.device]] = iteration.member
    member = iteration.member

    def put(values: tuple, value: float) -> tuple:
        return (*values[:member], value, *values[member + 1 :])

    return dataclasses.replace(
        state, iterations=put(state.iterations, state.iterations[member] + 1),
        remaining_iterations=put(state.remaining_iterations, state.remaining_iterations[member] - 1),
        ready_seconds=put(state.ready_seconds, iteration.ready_seconds),
        attained_device_seconds=put(state.attained_device_seconds, state.attained_device_seconds[member] + used),
        free_seconds=tuple(map(tuple, free)), holders=tuple(holders),
    )  # fmt: skip


def iteration_credit(job: Job, iteration: Iteration) -> float:
    """Gives what `iteration` of `job` is worth if backward work that it skipped does not count: 1 for full
    backpropagation."""
    profile = job.profile
    skipped = sum(
        profile.task_seconds(0) - profile.task_seconds(task.depth)
        for task in iteration.tasks
        if task.resource == DEVICE
    )
    return 1 - skipped / (profile.iteration_seconds * job.num_workers)


@dataclasses.dataclass(frozen=True)
class Mark:
    """Notes where the members of a group that runs stand at one moment.

    **Attributes:**

    - `done`: iterations that each member has done.
    - `ends_seconds`: when the last of them ended.
    """

    done: tuple[int, ...]
    ends_seconds: tuple[float, ...]

    def rates_until(self, later: Mark) -> tuple[float, ...]:
        """Gives the iterations per second of each member between this mark and `later`."""
        return tuple(
            (now - before) / (end - start)
            for before, now, start, end in zip(self.done, later.done, self.ends_seconds, later.ends_seconds)
        )


def iterations_to_next(num_marks: int) -> int:
    """Says how many iterations every member has to do after the first `num_marks` marks until the next one: a warm-up,
    then windows of 16, 16, 32, 64, ..."""
    return _WARM_UP if num_marks == 0 else _WINDOW << max(0, num_marks - 2)


def settled(marks: Sequence[Mark]) -> tuple[Mark, Mark] | None:
    """Gives the two of `marks` between which rates are steady: those around the last two windows, once they agree.
    None: go on.

    A group can hold one pattern for long and then another one: jobs that were ahead wait until the others have caught
    up, and from then on all take turns. In the few that still change after `_MOST_MARKS`, the last window, as long as
    all before it, decides.
    """
    if len(marks) < 3:
        return None
    before, last = marks[-3].rates_until(marks[-2]), marks[-2].rates_until(marks[-1])
    if all(abs(new - old) <= _AGREE * old for old, new in zip(before, last)):
        return marks[-3], marks[-1]
    return (marks[-2], marks[-1]) if len(marks) == _MOST_MARKS else None


def within_capacity(
    speeds: Sequence[float], busy_seconds: Sequence[Sequence[float]], num_devices: int
) -> tuple[float, ...]:
    """Lowers `speeds` (iterations per second of each member), all by one factor, if together they take more than
    `num_devices` of a resource; else gives them as they are.

    `busy_seconds`: [member][resource], of one iteration on all devices. Members end their iterations at different
    moments, so each one's window is another, and an iteration's worth of work can be counted in windows into which it
    does not fit.
    """
    taken = max(sum(speed * seconds for speed, seconds in zip(speeds, each)) for each in zip(*busy_seconds))
    return tuple(speed * num_devices / taken for speed in speeds) if taken > num_devices else tuple(speeds)


def measure_rates(next_iteration: NextIteration, group: Group, jobs: Sequence[Job]) -> Rates:
    """Measures the steady rates of `group`: it is run by `next_iteration` with endless `jobs` (of the members, in
    order) until they have `settled`, and kept `within_capacity`. Raises `ScheduleError` if a member is never served."""
    count = len(jobs)
    state = start_state(group, jobs, remaining=[math.inf] * count)
    busy_seconds = np.zeros((count, len(RESOURCES)))
    worth, ends = np.zeros(count), [0.0] * count
    marks: list[Mark] = []
    totals: list[tuple[NDArray, NDArray]] = []
    while (steady := settled(marks)) is None:
        begun = state.iterations
        window = iterations_to_next(len(marks))
        # Short windows wait as long as middling ones: a member that was ahead can stand still for long without
        # starving.
        for _ in range(max(window, 64) * _STARVED_AFTER * count):
            iteration = charge_switches(group, jobs, state, next_iteration(group, jobs, state))
            state = advance(group, state, iteration)
            member = iteration.member
            ends[member] = iteration.ready_seconds
            for task in iteration.tasks:
                busy_seconds[member, task.resource] += task.seconds
            worth[member] += iteration_credit(jobs[member], iteration)
            if min(now - before for now, before in zip(state.iterations, begun)) >= window:
                break
        else:
            raise ScheduleError(
                "a member of the group is never served",
                value=list(state.iterations),
                place=f"discipline {group.discipline!r}",
                remedy="serve every member, such as by attained service",
            )
        marks.append(Mark(state.iterations, tuple(ends)))
        totals.append((busy_seconds.copy(), worth.copy()))
    first, last = steady
    (busy_before, worth_before), (busy_seconds, worth) = totals[marks.index(first)], totals[marks.index(last)]
    done = np.subtract(last.done, first.done)
    each = ((busy_seconds - busy_before) / done[:, None]).tolist()
    speeds = within_capacity(first.rates_until(last), each, len(group.devices))
    return Rates(speeds, tuple(seconds[DEVICE] for seconds in each), tuple(((worth - worth_before) / done).tolist()))
