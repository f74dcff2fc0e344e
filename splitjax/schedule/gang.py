"""Gang scheduling, what the policies with whole devices share: jobs in some order, each with all its devices or none.

`gang(view, key)` serves the jobs with the smallest keys and fills what is left with the next that fit. What runs and still may keeps its devices;
only jobs that come to run are placed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitjax.schedule.cluster import Cluster
from splitjax.schedule.policy import Assignment, Group, Member, View


def gang(view: View, *keys: NDArray[Any], backfill: bool = True, wake_seconds: float = math.inf, memory: Any = None) -> Assignment:
    """Whole devices for whole jobs, smallest keys first (the first key counts most; ties: first come).

    **Arguments:**

    - `backfill`: a job that does not fit is passed over for later ones that do; without, it holds up all behind it.
    - `wake_seconds`, `memory`: as in `Assignment`.
    """
    order = np.lexsort(tuple(reversed(keys)))  # stable, and `active` is in order of arrival
    chosen = admit(view.num_workers[order], view.cluster.num_devices, backfill=backfill)
    admitted = np.zeros(len(order), bool)
    admitted[order[chosen]] = True
    return assign(view, admitted, order, wake_seconds=wake_seconds, memory=memory)


def admit(num_workers: NDArray[np.int64], num_devices: int, *, backfill: bool = True) -> NDArray[np.int64]:
    """Positions of the jobs that run together, taken in the order given while they fit; O(jobs) numpy work for each job passed over.

    **Returns:** i64, ascending.
    """
    taken, positions, left = [], np.arange(len(num_workers)), num_devices
    while len(positions) and left > 0:
        total = np.cumsum(num_workers[positions])
        count = int(np.searchsorted(total, left, side="right"))
        taken.append(positions[:count])
        left -= int(total[count - 1]) if count else 0
        if not backfill:
            break
        positions = positions[count + 1 :]
        positions = positions[num_workers[positions] <= left]
    return np.concatenate(taken) if taken else np.zeros(0, np.int64)


def assign(
    view: View, admitted: NDArray[np.bool_], order: NDArray[np.int64], *, wake_seconds: float = math.inf, memory: Any = None
) -> Assignment:
    """The change from what runs to the `admitted` jobs (bool[active]); those that begin are placed in `order`, the larger first."""
    running = view.group_of >= 0
    stop = tuple(view.group_of[running & ~admitted].tolist())
    beginning = order[(admitted & ~running)[order]]
    if not len(beginning):
        return Assignment(stop, (), wake_seconds, memory)
    free = view.free.copy()
    for group in stop:
        free[list(view.groups[group].devices)] = True
    jobs = view.active[beginning]
    start = []
    for job in jobs[np.argsort(-view.columns.num_workers[jobs], kind="stable")].tolist():
        devices = place(free, int(view.columns.num_workers[job]), view.cluster)
        free[list(devices)] = False
        start.append(Group((Member(job, devices),)))
    return Assignment(stop, tuple(start), wake_seconds, memory)


def place(free: NDArray[np.bool_], num_workers: int, cluster: Cluster) -> tuple[int, ...]:
    """Free devices for a job, on as few nodes as can be: the fullest node that holds it all, else whole nodes and the fullest that holds the
    rest. `free`: bool[num_devices], with at least `num_workers` true."""
    by_node = free.reshape(cluster.num_nodes, cluster.devices_per_node)
    counts = by_node.sum(axis=1)
    chosen: list[int] = []
    while num_workers > 0:
        fitting = np.flatnonzero(counts >= num_workers)
        node = int(fitting[np.argmin(counts[fitting])]) if len(fitting) else int(np.argmax(counts))
        here = np.flatnonzero(by_node[node])[:num_workers] + node * cluster.devices_per_node
        chosen += here.tolist()
        num_workers -= len(here)
        counts[node] = 0
    return tuple(chosen)


def crossing_seconds(view: View, jobs: NDArray[np.bool_] | Sequence[bool], values: NDArray[np.float64], rates: NDArray[np.float64], thresholds: Iterable[float]) -> float:
    """The first time at which one of `jobs` (bool[active]), whose `values` grow by `rates` a second, reaches the next of ascending `thresholds`."""
    limits = np.array([*thresholds, math.inf])
    chosen = np.asarray(jobs) & (rates > 0)
    if not chosen.any():
        return math.inf
    reached = limits[np.searchsorted(limits, values[chosen] * (1 + 1e-12) + 1e-9, side="right")]
    return view.now_seconds + float(np.min((reached - values[chosen]) / rates[chosen]))
