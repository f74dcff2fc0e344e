"""Draws jobs: arrivals of a Poisson process, sizes from a trace, at a wanted load. The same seed gives the same jobs.

Jobs of a trace, a cluster and a load come in; jobs with new names and arrival times come out, to compare policies at
loads that the trace does not have.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from splitjax.errors import ScheduleError
from splitjax.schedule.model.cluster import Cluster
from splitjax.schedule.model.jobs import Job


def offered_load(jobs: Sequence[Job], cluster: Cluster) -> float:
    """Divides the full-backpropagation device time of `jobs` by the time of the devices of `cluster` between the first
    and the last arrival; infinite where all arrive at once."""
    seconds = max(job.arrival_seconds for job in jobs) - min(job.arrival_seconds for job in jobs)
    return sum(job.device_seconds for job in jobs) / (seconds * cluster.num_devices) if seconds else math.inf


def generate(
    sizes: Sequence[Job], cluster: Cluster, *, load: float, seed: int, num_jobs: int | None = None
) -> tuple[Job, ...]:
    """Draws jobs with the sizes of a trace's, which arrive at `cluster` by a Poisson process.

    **Arguments:**

    - `sizes`: the trace's jobs; workers, iterations and profile are taken, arrivals are not. Those wider than the
      cluster are left out.
    - `cluster`: where they are to run.
    - `load`: device time that the jobs ask for, with full backpropagation, over that of the devices in the time in
      which they arrive; met exactly.
    - `seed`: of numpy's random generator.
    - `num_jobs`: by default every job of the trace once, in random order; else so many, drawn with replacement.

    Raises `ScheduleError` for a load that is not above 0 and finite, or where no job fits the cluster.
    """
    fitting = [job for job in sizes if job.num_workers <= cluster.num_devices]
    if not fitting or not 0 < load < math.inf or (num_jobs is not None and num_jobs < 1):
        raise ScheduleError(
            "a load above 0 takes jobs that fit the cluster", value=(load, num_jobs, len(fitting)), place="generate",
            remedy="give a load above 0, a trace with jobs no wider than the cluster, and one job at least",
        )  # fmt: skip
    random = np.random.default_rng(seed)
    count = len(fitting) if num_jobs is None else num_jobs
    chosen = random.permutation(count) if num_jobs is None else random.integers(len(fitting), size=count)
    drawn = [fitting[index] for index in chosen.tolist()]
    seconds = sum(job.device_seconds for job in drawn) / (load * cluster.num_devices)
    # A Poisson process of which the number of arrivals is known: gaps are exponential, and together as long as they
    # have to be.
    gaps = random.exponential(size=count)
    arrivals = (np.cumsum(gaps) - gaps[0]) / max(gaps[1:].sum(), 1e-12) * seconds
    return tuple(
        dataclasses.replace(job, name=str(number), arrival_seconds=time)
        for number, (job, time) in enumerate(zip(drawn, arrivals.tolist()))
    )


def rescale(jobs: Sequence[Job], cluster: Cluster, *, load: float) -> tuple[Job, ...]:
    """Stretches all gaps between the arrivals of `jobs` alike, so that they ask for the given `load` of `cluster`
    (`offered_load`). Raises `ScheduleError` for a load that is not above 0 and finite, or jobs that all arrive at
    once."""
    present = offered_load(jobs, cluster) if jobs else math.inf
    if not 0 < load < math.inf or present == math.inf:
        raise ScheduleError(
            "a load above 0 takes jobs that arrive at different times",
            value=load,
            place="rescale",
            remedy="give a load above 0, and jobs that arrive at different times",
        )
    return tuple(dataclasses.replace(job, arrival_seconds=job.arrival_seconds * present / load) for job in jobs)
