"""Groups run iteration by iteration: the exact mode of the simulator, and steady rates measured with it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from splitjax.errors import ScheduleError
from splitjax.schedule.discipline import GroupState, Iteration, NextIteration, Rates
from splitjax.schedule.jobs import DEVICE, Job
from splitjax.schedule.policy import Group

_WARM_UP, _MEASURED = 8, 64  # iterations per member, before and while rates are measured


def start_state(group: Group, jobs: Sequence[Job], now_seconds: float = 0.0, remaining: Sequence[float] | None = None) -> GroupState:
    """A group whose devices and jobs are all free at `now_seconds`."""
    count = len(jobs)
    return GroupState(
        now_seconds, (0,) * count, tuple(remaining or (float(job.num_iterations) for job in jobs)), (now_seconds,) * count, (0.0,) * count,
        ((now_seconds,) * 4,) * len(group.devices),
    )  # fmt: skip


def advance(group: Group, state: GroupState, iteration: Iteration) -> GroupState:
    """The state after an iteration was granted. Raises `ScheduleError` if one of its tasks starts before its device is free."""
    place = {device: index for index, device in enumerate(group.devices)}
    free = [list(times) for times in state.free_seconds]
    used = 0.0
    for task in iteration.tasks:
        times = free[place[task.device]]
        if task.start_seconds < times[task.resource] - 1e-9 * max(1.0, abs(times[task.resource])):
            raise ScheduleError("a task starts before its device is free", value=task, place=f"discipline {group.discipline!r}")
        times[task.resource] = task.end_seconds
        used += task.seconds if task.resource == DEVICE else 0.0
    member = iteration.member

    def put(values: tuple, value: float) -> tuple:
        return (*values[:member], value, *values[member + 1 :])

    return dataclasses.replace(
        state, iterations=put(state.iterations, state.iterations[member] + 1),
        remaining_iterations=put(state.remaining_iterations, state.remaining_iterations[member] - 1),
        ready_seconds=put(state.ready_seconds, iteration.ready_seconds),
        attained_device_seconds=put(state.attained_device_seconds, state.attained_device_seconds[member] + used),
        free_seconds=tuple(map(tuple, free)),
    )  # fmt: skip


def iteration_credit(job: Job, iteration: Iteration) -> float:
    """What the iteration is worth if backward work that it skipped does not count: 1 for full backpropagation."""
    profile = job.profile
    skipped = sum(profile.task_seconds(0) - profile.task_seconds(task.depth) for task in iteration.tasks if task.resource == DEVICE)
    return 1 - skipped / (profile.iteration_seconds * job.num_workers)


def measure_rates(next_iteration: NextIteration, group: Group, jobs: Sequence[Job]) -> Rates:
    """Steady rates: the group is run with endless jobs past a warm-up, then over `_MEASURED` iterations of its slowest member."""
    count = len(jobs)
    state = start_state(group, jobs, remaining=[math.inf] * count)
    begun: GroupState | None = None
    seconds, worth, done = [0.0] * count, [0.0] * count, [0] * count
    ends = [0.0] * count
    limit = (_WARM_UP + _MEASURED) * 64 * count
    for _ in range(limit):
        iteration = next_iteration(group, jobs, state)
        state = advance(group, state, iteration)
        member = iteration.member
        ends[member] = iteration.ready_seconds
        if begun is None:
            if min(state.iterations) >= _WARM_UP:
                begun, started = state, list(ends)
            continue
        done[member] += 1
        seconds[member] += sum(task.seconds for task in iteration.tasks if task.resource == DEVICE)
        worth[member] += iteration_credit(jobs[member], iteration)
        if min(done) >= _MEASURED:
            break
    if begun is None or not all(done):
        raise ScheduleError(
            "a member of the group is never served", value=list(state.iterations), place=f"discipline {group.discipline!r}",
            remedy="serve every member, such as by attained service",
        )  # fmt: skip
    return Rates(
        tuple(count / (end - start) for count, end, start in zip(done, ends, started)),
        tuple(total / count for total, count in zip(seconds, done)), tuple(total / count for total, count in zip(worth, done)),
    )  # fmt: skip
