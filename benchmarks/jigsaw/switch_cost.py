"""What a device really loses when it goes from one job's task to another's, by kind of job, through the executor."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.jigsaw.jobs import MODELS
from benchmarks.jigsaw.real import ALL, POLICIES, profiles, started
from splitjax.schedule import Job
from splitjax.schedule.execution.records import TaskRecord
from splitjax.schedule.model.jobs import DEVICE

ROUNDS = 5


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


def section(quick: bool, data_dir: pathlib.Path) -> Any:
    """Tasks after another job's and tasks after the same job's."""
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Section

    alone: dict[tuple[str, int], list[float]] = {}
    after: dict[tuple[str, int], list[float]] = {}
    with started() as run:
        known = profiles(run, 8 if quick else 20)
        for seed in range(1 if quick else ROUNDS):
            jobs = [
                Job(name, 0.0, 2, MODELS[name].num_iterations // (4 if quick else 1), known[name]) for name in MODELS
            ]
            for policy, is_switched, kept in (("spb-fifo", False, alone), (POLICIES[ALL], True, after)):
                times = switched(run(policy, jobs, seed).execution.tasks)
                for (name, depth, has_switched), seconds in times.items():
                    if has_switched == is_switched:
                        kept.setdefault((name, depth), []).extend(seconds)
    rows = []
    for name in MODELS:
        for depth in (0, 1):
            if not alone.get((name, depth)) or not after.get((name, depth)):
                continue
            same, other = (statistics.median(times[name, depth]) for times in (alone, after))
            rows.append(
                [
                    name, "full" if depth == 0 else "half", f"{1000 * same:.1f}", f"{1000 * other:.1f}",
                    f"{1000 * (other - same):+.1f}", f"{(other - same) / same:+.1%}",
                    f"{len(alone[name, depth])}, {len(after[name, depth])}",
                ]
            )  # fmt: skip
    lines = [
        (
            "The jobs of the part on real execution, two workers each on two devices of one core, through Ray. A task's"
            " time is that for which it has the device's token. *After itself*: jobs one after the other, each with the"
            " devices to itself; *after another*: all four jobs at once, tasks that came right after another job's"
            f" on the device. Medians over {1 if quick else ROUNDS} rounds. A switch here is between processes on one"
            " core: caches are filled anew, and the one process sleeps and the other wakes; no weights move, as all"
            " stay in the machine's memory."
        ),
        "",
        *table(["job", "depth", "after itself, ms", "after another, ms", "switch, ms", "of a task", "tasks"], rows),
    ]
    return Section("What a switch costs, really", lines, [])
