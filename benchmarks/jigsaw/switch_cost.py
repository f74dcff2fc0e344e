"""What a device really loses when it goes from one job's task to another's, by kind of job, through the executor."""

from __future__ import annotations

import os
import pathlib
import statistics
from typing import Any

from benchmarks.jigsaw.jobs import MODELS, SMALL_MODELS
from benchmarks.jigsaw.processes import started
from benchmarks.jigsaw.profiling import ALL_AT_ONCE, PROFILE_ROUNDS, profiles
from benchmarks.jigsaw.switching import TaskKind, of_kind
from splitjax.schedule import Job

ROUNDS = 5


def section(quick: bool, data_dir: pathlib.Path) -> Any:
    """Tasks after another job's and tasks after the same job's."""
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Section

    alone: dict[TaskKind, list[float]] = {}
    after: dict[TaskKind, list[float]] = {}
    models = SMALL_MODELS if quick else MODELS
    with started(models) as run:
        known = profiles(run, models, 5 if quick else 20, 1 if quick else PROFILE_ROUNDS).partial
        for seed in range(1 if quick else ROUNDS):
            jobs = [Job(name, 0.0, 2, model.num_iterations, known[name]) for name, model in models.items()]
            for policy, is_switched, kept in (("spb-fifo", False, alone), (ALL_AT_ONCE, True, after)):
                for kind, seconds in of_kind(run(policy, jobs, seed).execution.tasks, is_switched).items():
                    kept.setdefault(kind, []).extend(seconds)
    load = f"The load average was {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores when it ended."
    rows = []
    for name in models:
        for depth in (0, 1):
            rows.append(
                [
                    name,
                    "full" if depth == 0 else "half",
                    *lost(alone.get((name, depth), []), after.get((name, depth), [])),
                ]
            )
    lines = [
        (
            "The jobs of the part on real execution, two workers each on two devices of one core, through Ray. A task's"
            " time is that for which it has the device's token. *After itself*: jobs one after the other, each with the"
            " devices to itself; *after another*: all four jobs at once, tasks that came right after another job's"
            f" on the device. Medians over {1 if quick else ROUNDS} rounds. A switch here is between processes on one"
            " core: caches are filled anew, and the one process sleeps and the other wakes; no weights move, as all"
            " stay in the machine's memory. *none*: no task of the kind came so, as of a job whose workers the policy"
            f" folds onto one device, which follow each other there. {load}"
        ),
        "",
        *table(["job", "depth", "after itself, ms", "after another, ms", "switch, ms", "of a task", "tasks"], rows),
    ]
    return Section("What a switch costs, really", lines, [])


def lost(same: list[float], other: list[float]) -> list[str]:
    """Gives the cells of a kind of task: medians of the seconds after the job's own tasks and after another job's,
    their difference, its share, and how many tasks there were of each."""
    medians = [statistics.median(seconds) if seconds else None for seconds in (same, other)]
    shown = ["none" if median is None else f"{1000 * median:.1f}" for median in medians]
    if medians[0] is None or medians[1] is None:
        return [*shown, "", "", f"{len(same)}, {len(other)}"]
    lost = medians[1] - medians[0]
    return [*shown, f"{1000 * lost:+.1f}", f"{lost / medians[0]:+.1%}", f"{len(same)}, {len(other)}"]
