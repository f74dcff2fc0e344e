"""What executed tasks say of switches between jobs, for the parts on real execution and on the cost of a switch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

from splitjax.schedule.execution.records import Execution, TaskRecord
from splitjax.schedule.model.jobs import DEVICE

TaskKind = tuple[str, int]  # job, depth


def switched(tasks: Iterable[TaskRecord]) -> dict[tuple[str, int, bool], list[float]]:
    """Gives the seconds of the tasks on devices by job, depth and whether another job had the device before; the first
    two iterations of each job are left out, and what came first on a device."""
    found: dict[tuple[str, int, bool], list[float]] = {}
    last: dict[int, str] = {}
    for task in sorted(tasks, key=lambda task: task.start_seconds):
        if task.resource != DEVICE:
            continue
        before = last.get(task.device)
        last[task.device] = task.job
        if before is not None and task.number > 2:
            key = task.job, task.depth, before != task.job
            found.setdefault(key, []).append(task.end_seconds - task.start_seconds)
    return found


def of_kind(tasks: Iterable[TaskRecord], is_switched: bool) -> dict[TaskKind, list[float]]:
    """Gives the seconds of the tasks that came after another job's (`is_switched`), or after the same job's."""
    return {(job, depth): times for (job, depth, after), times in switched(tasks).items() if after == is_switched}


def of_kinds(executions: Iterable[Execution], is_switched: bool) -> dict[TaskKind, list[float]]:
    """Gives what `of_kind` gives, of several runs together."""
    found: dict[TaskKind, list[float]] = {}
    for execution in executions:
        for kind, seconds in of_kind(execution.tasks, is_switched).items():
            found.setdefault(kind, []).extend(seconds)
    return found


def switch_seconds(job: str, alone: Mapping[TaskKind, list[float]], after: Mapping[TaskKind, list[float]]) -> float:
    """Gives what a device loses when it goes from another job's task to one of `job`: the mean over depths of the
    difference of the medians, none where tasks after another job's were no longer.

    **Arguments:** `alone`: seconds of tasks after the job's own. `after`: of those after another's."""
    lost = [
        statistics.median(after[kind]) - statistics.median(alone[kind])
        for kind in alone
        if kind[0] == job and kind in after
    ]
    return max(0.0, statistics.mean(lost)) if lost else 0.0
