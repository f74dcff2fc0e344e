"""What a device really loses when it goes from one job's task to another's, by kind of job, through the executor."""

from __future__ import annotations

import os
import pathlib
import statistics
from typing import Any

from benchmarks.jigsaw.jobs import MODELS
from benchmarks.jigsaw.processes import started
from benchmarks.jigsaw.real import ALL, POLICIES, iterations, profiles
from benchmarks.jigsaw.switching import TaskKind, of_kind
from splitjax.schedule import Job

ROUNDS = 5


def section(quick: bool, data_dir: pathlib.Path) -> Any:
    """Tasks after another job's and tasks after the same job's."""
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Section

    alone: dict[TaskKind, list[float]] = {}
    after: dict[TaskKind, list[float]] = {}
    with started() as run:
        known = profiles(run, 5 if quick else 20).partial
        for seed in range(1 if quick else ROUNDS):
            jobs = [Job(name, 0.0, 2, iterations(name, quick), known[name]) for name in MODELS]
            for policy, is_switched, kept in (("spb-fifo", False, alone), (POLICIES[ALL], True, after)):
                for kind, seconds in of_kind(run(policy, jobs, seed).execution.tasks, is_switched).items():
                    kept.setdefault(kind, []).extend(seconds)
    load = f"The load average was {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores when it ended."
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
            f" stay in the machine's memory. {load}"
        ),
        "",
        *table(["job", "depth", "after itself, ms", "after another, ms", "switch, ms", "of a task", "tasks"], rows),
    ]
    return Section("What a switch costs, really", lines, [])
