"""Folds a job onto fewer devices than it has workers, so that no device has to switch between jobs.

Under structured partial backpropagation worker i of N differentiates the last i/N of the model. Two workers whose
depths add up to (N+1)/N take the same time together whichever pair they are: put on a device each, all N/2 devices are
done at once. A job folded so keeps its devices computing all the time, as the best packing with other jobs does, but no
other job's weights ever take the devices' memory and caches. On three quarters as many devices as it has workers it
still goes nearly as fast as on all of them. Packing several jobs instead (`packing`) pays where a switch costs next to
nothing: it fills the holes that odd numbers of workers leave, and those of communication.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from splitjax.schedule.model.jobs import Job, JobProfile
from splitjax.schedule.model.policy import View


def switch_shares(view: View) -> NDArray[np.float64]:
    """Gives, of every job of `view`, the time of a switch to it over that of a task under partial backpropagation,
    f64[jobs]: what sharing devices would cost it, were each task preceded by one of another job."""
    return np.array([job.profile.switch_seconds / job.profile.partial_seconds(job.num_workers) for job in view.jobs])


def folded_devices(num_workers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Gives the devices of jobs of `num_workers` that are folded in two, rounded up: i64[jobs]."""
    return (num_workers + 1) // 2


def folded_sizes(jobs: Sequence[Job], num_devices: int, partial: bool) -> list[int]:
    """Shares `num_devices` out to folded `jobs` so that they finish as much as they can, by greedy choice: all begin
    folded in two, and get devices one step after the other where a device brings most, those first in order where it
    brings the same. Where there are too few, the last jobs are folded in two again.

    **Arguments:** `partial`: with partial backpropagation, else with full.

    Gives a number of devices for each job, at least 1.
    """
    sizes = [-(-job.num_workers // 2) for job in jobs]
    left = num_devices - sum(sizes)
    for index in reversed(range(len(jobs))):
        if left >= 0:
            break
        left += sizes[index] // 2
        sizes[index] = -(-sizes[index] // 2)
    steps = []
    for index, job in enumerate(jobs):
        corners = _corners(job.profile, job.num_workers, partial)
        for (few, slow), (many, fast) in zip(corners, corners[1:]):
            if fast == slow:  # further devices bring nothing
                break
            steps.append((-job.num_workers * (fast - slow) / (many - few), index, many))
    for _, index, many in sorted(steps):  # of one job in order, as each of its steps brings less than the one before
        if sizes[index] < many and many - sizes[index] <= left:
            left -= many - sizes[index]
            sizes[index] = many
    return sizes


@functools.lru_cache(maxsize=1 << 14)
def folded_speed(profile: JobProfile, num_workers: int, num_devices: int, partial: bool) -> float:
    """Gives the speed of a job alone on `num_devices` devices, its tasks longest first onto the device that frees
    earliest, over its speed on as many devices as workers."""
    depths = profile.partial_depths(num_workers) if partial else (0,) * num_workers
    free = [0.0] * num_devices
    for depth in depths:
        heapq.heapreplace(free, free[0] + profile.task_seconds(depth))
    return profile.iteration_seconds / (max(free) + profile.exposed_seconds)


def alone_throughput(job: Job, num_devices: int, partial: bool) -> float:
    """Gives the throughput of `job` alone on `num_devices` devices, in full-speed workers: on fewer devices than
    workers, less than its demand says, as its tasks cannot be cut to fill them. `partial` is as in `folded_sizes`."""
    width = job.num_workers
    if not 0 < num_devices < width:
        return float(width * (num_devices > 0))
    return width * folded_speed(job.profile, width, num_devices, partial)


@functools.lru_cache(maxsize=1 << 14)
def _corners(profile: JobProfile, num_workers: int, partial: bool) -> tuple[tuple[int, float], ...]:
    """Gives (devices, speed) from half as many devices as workers to as many, without those at which a mixture of two
    others would be as fast: the corners of the upper hull."""
    corners: list[tuple[int, float]] = []
    for count in range(-(-num_workers // 2), num_workers + 1):
        point = count, folded_speed(profile, num_workers, count, partial)
        while len(corners) > 1 and _slope(corners[-2], corners[-1]) <= _slope(corners[-1], point) + 1e-12:
            corners.pop()
        corners.append(point)
    return tuple(corners)


def _slope(first: tuple[int, float], second: tuple[int, float]) -> float:
    return (second[1] - first[1]) / (second[0] - first[0]) if second[0] > first[0] else math.inf
