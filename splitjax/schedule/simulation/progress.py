"""Keeps the books of a run: arrays of each job's progress, brought up to date only when they are looked at, and
integrals over time.

The simulator and real execution write what happens into it; views for policies, records of jobs and `Work` come out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitjax.schedule.model.cluster import Cluster
from splitjax.schedule.model.jobs import Job, JobColumns
from splitjax.schedule.model.policy import Group, View
from splitjax.schedule.model.result import JobRecord, Work

_BUSY, _FINISHED, _CREDITED, _FLOOR = 0, 1, 2, 3  # positions in a vector of work; the floors are its last four
_LENGTH = 7


class Progress:
    """Keeps the progress of each job: iterations done until `progress_from`, at `rate` a second from then on, and
    service likewise. Every array has one entry per job of the trace.

    **Arguments:**

    - `jobs`: all of the trace. `columns`: their constants.
    """

    def __init__(self, jobs: Sequence[Job], columns: JobColumns):
        count = len(jobs)
        self.jobs: Sequence[Job] = jobs
        self.columns: JobColumns = columns
        self.remaining: NDArray[np.float64] = columns.num_iterations.astype(np.float64)
        self.rate: NDArray[np.float64] = np.zeros(count)
        self.progress_from: NDArray[np.float64] = np.zeros(count)
        self.seconds: NDArray[np.float64] = np.zeros(count)
        self.device_seconds: NDArray[np.float64] = np.zeros(count)
        self.held: NDArray[np.float64] = np.zeros(count)
        self.held_from: NDArray[np.float64] = np.zeros(count)
        self.group_of: NDArray[np.int64] = np.full(count, -1, np.int64)
        self.fair_at_arrival: NDArray[np.float64] = np.zeros(count)
        self.started: NDArray[np.float64] = np.full(count, np.nan)
        self.finished: NDArray[np.float64] = np.full(count, np.nan)
        self.fair_at_finish: NDArray[np.float64] = np.zeros(count)
        self.starts: NDArray[np.int64] = np.zeros(count, np.int64)

    def settle(self, job: int, now: float) -> None:
        """Brings `job` up to date at `now`."""
        if self.held[job] > 0:
            elapsed = now - self.held_from[job]
            self.seconds[job] += elapsed
            self.device_seconds[job] += self.held[job] * elapsed
            self.held_from[job] = now
        if self.rate[job] > 0 and now > self.progress_from[job]:
            self.remaining[job] = max(0.0, self.remaining[job] - self.rate[job] * (now - self.progress_from[job]))
            self.progress_from[job] = now

    def hold(self, job: int, now: float, group: int, share: float, rate: float, progress_from: float) -> None:
        """Gives `job`, which is up to date at `now`, `share` devices in the group of id `group`, where it progresses at
        `rate` iterations a second from `progress_from` on."""
        self.group_of[job], self.held[job], self.held_from[job] = group, share, now
        self.rate[job], self.progress_from[job] = rate, progress_from

    def release(self, job: int, now: float) -> None:
        """Brings `job` up to date at `now`; it waits from then on."""
        self.settle(job, now)
        self.group_of[job], self.held[job], self.rate[job] = -1, 0.0, 0.0

    def view(
        self,
        now: float,
        cluster: Cluster,
        active: NDArray[np.int64],
        fair: float,
        groups: Mapping[int, Group],
        free: NDArray[np.bool_],
        memory: Any,
    ) -> View:
        """Makes the view of what a policy may know, up to date.

        **Arguments:**

        - `now`: the time, in seconds. `cluster`: the devices there are.
        - `active`: i64, jobs that have arrived and are not done. `fair`: `Integrals.fair`.
        - `groups`, `free`, `memory`: as in `View`.
        """
        elapsed = (now - self.held_from[active]) * (self.held[active] > 0)
        ran = self.rate[active] * np.maximum(0.0, now - self.progress_from[active])
        arrays = (
            active.view(),
            np.maximum(0.0, self.remaining[active] - ran),
            self.seconds[active] + elapsed,
            self.device_seconds[active] + self.held[active] * elapsed,
            fair - self.fair_at_arrival[active],
            self.group_of[active],
        )
        free = free.view()
        for array in (*arrays, free):
            array.setflags(write=False)
        return View(now, cluster, self.jobs, self.columns, *arrays, groups, free, memory)

    def records(self) -> tuple[JobRecord, ...]:
        """Records all jobs, in the order of the trace."""
        return tuple(
            JobRecord(
                job.name,
                job.tag,
                job.num_workers,
                job.arrival_seconds,
                float(self.started[number]),
                float(self.finished[number]),
                job.exclusive_seconds,
                float(self.seconds[number]),
                float(self.device_seconds[number]),
                float(self.fair_at_finish[number] - self.fair_at_arrival[number]),
                int(self.starts[number]),
            )
            for number, job in enumerate(self.jobs)
        )


class Integrals:
    """Sums over time what is under way, for the whole run and for its busy part, in which jobs ask for at least
    `num_devices` devices."""

    def __init__(self, num_devices: int):
        self.num_devices = num_devices
        self.speed: NDArray[np.float64] = np.zeros(_LENGTH)
        self.num_held: int = 0
        self.demand: int = 0
        self.fair: float = 0.0
        self._work = np.zeros((2, _LENGTH))
        self._times = np.zeros((2, 2))  # [whole run, busy part] x [seconds, held device-seconds]

    @property
    def _parts(self) -> slice:
        return slice(0, 2 if self.demand >= self.num_devices else 1)

    def advance(self, seconds: float) -> None:
        """Lets so many `seconds` pass."""
        if seconds > 0:
            self._work[self._parts] += self.speed * seconds
            self._times[self._parts] += (seconds, seconds * self.num_held)
            self.fair += seconds * max(1.0, self.demand / self.num_devices)

    def add(self, work: NDArray[np.float64]) -> None:
        """Adds work (f64[7], `iteration_work`) that is done at once: an iteration."""
        self._work[self._parts] += work

    def parts(self) -> tuple[Work, Work]:
        """Gives the work of the whole run and of its busy part."""
        return self._part(0), self._part(1)

    def _part(self, part: int) -> Work:
        work, (seconds, held) = self._work[part], self._times[part].tolist()
        storage, cpu, device, network = work[_FLOOR:].tolist()
        return Work(
            seconds,
            seconds * self.num_devices,
            float(work[_BUSY]),
            held,
            float(work[_FINISHED]),
            float(work[_CREDITED]),
            (storage, cpu, device, network),
        )


def iteration_work(columns: JobColumns, job: int, device_seconds: float, credit: float) -> NDArray[np.float64]:
    """Gives what an iteration of `job` adds to the integrals, f64[7]: computing time, worth, credited worth, floors.
    `columns` holds the jobs' constants; the iteration takes `device_seconds` of computing and is worth `credit`
    (`Rates`)."""
    worth = float(columns.iteration_seconds[job] * columns.num_workers[job])
    return np.array([device_seconds, worth, worth * credit, *columns.resource_seconds[job]])
