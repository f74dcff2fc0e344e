"""Small instances: the list schedule of JigSaw against the exact optimum of one round of iterations, and the groups'
steady rates against their bound."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from splitjax.schedule import Cluster, Group, Job, JobProfile, Member
from splitjax.schedule.model.discipline import get_discipline
from splitjax.schedule.simulation.optimal import compare_round

LIMIT = 0.10  # of the mean gap
_SECONDS = (0.2, 0.35, 0.5, 0.7, 0.9)


def section(quick: bool, data_dir: pathlib.Path) -> Any:
    """The section of the page; `data_dir` is not used."""
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Goal, Section

    random, rows, means = np.random.default_rng(0), [], {}
    for what, choices in (("in step", _SECONDS[2:3]), ("of five iteration times", _SECONDS)):
        for num_jobs in (2, 4) if quick else (1, 2, 3, 4, 6):
            gaps, floors, steady = [], [], []
            for _ in range(3 if quick else 10):
                jobs = [
                    Job(
                        str(number),
                        0.0,
                        int(random.integers(1, 5)),
                        1,
                        JobProfile.uniform("model", float(random.choice(choices)), num_depths=8),
                    )
                    for number in range(num_jobs)
                ]
                num_devices = int(random.integers(2, 5))
                found = compare_round(jobs, num_devices)
                gaps.append(found.gap)
                floors.append(found.optimal_seconds / found.floor_seconds - 1)
                steady.append(_steady(jobs, num_devices))
            # Rounded first, plus 0: what an integer program or a rate is short of exact would be printed as -0.0%.
            rows.append(
                [
                    what,
                    num_jobs,
                    len(gaps),
                    *(
                        f"{round(value, 3) + 0.0:.1%}"
                        for value in (np.mean(gaps), np.median(gaps), max(gaps), np.mean(floors), np.mean(steady))
                    ),
                ]
            )
            means[what, num_jobs] = gaps
    every = [gap for gaps in means.values() for gap in gaps]
    goals = [
        Goal(f"optimum, {len(every)} small instances: mean gap of one round", float(np.mean(every)), LIMIT, True, ".1%")
    ]
    lines = [
        (
            "Jobs of 1 to 4 workers with 8 depths, on 2 to 4 devices, drawn with one seed. A round: every job does one"
            " iteration, its tasks on any device; done when the last task is (P||Cmax, an integer program solved to"
            " proof). JigSaw places one job after the other, as jobs become ready, so it cannot put the longest task of"
            " all first. In a running group that matters less, since the next round fills the first one's ragged end:"
            " *steady* is what its rate lacks to the lesser of all devices computing all the time and all jobs at their"
            " speed alone."
        ),
        "",
        *table(
            [
                "jobs",
                "number",
                "instances",
                "gap, mean",
                "median",
                "largest",
                "optimum over its floor, mean",
                "steady, mean lack",
            ],
            rows,
        ),
    ]
    return Section("Optimum: small instances", lines, goals)


def _steady(jobs: list[Job], num_devices: int) -> float:
    devices = tuple(range(num_devices))
    members = tuple(
        Member(number, tuple(devices[worker % num_devices] for worker in range(job.num_workers)), devices)
        for number, job in enumerate(jobs)
    )
    rates = get_discipline("jigsaw").rates(Group(members, "jigsaw"), jobs, Cluster(1, num_devices))
    alone = [
        job.profile.partial_seconds(job.num_workers) * job.num_workers / job.profile.iteration_seconds for job in jobs
    ]
    have = sum(rate * busy for rate, busy in zip(rates.iterations_per_second, rates.device_seconds))
    return 1 - have / min(num_devices, sum(alone))
