"""Holds what the policies with whole devices share: gang scheduling, jobs in some order, each with all its devices or
none.

`gang(view, key)` serves the jobs with the smallest keys and fills what is left with the next that fit. What runs and
still may keeps its devices; only jobs that come to run are placed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitjax.errors import ScheduleError
from splitjax.schedule.model.cluster import Cluster
from splitjax.schedule.model.policy import Assignment, Group, Member, View

TOLERANCE = 1e-6  # device-seconds: a threshold is reached where rounding alone is missing


def gang(
    view: View,
    *keys: NDArray[Any],
    backfill: bool = True,
    consolidate: bool = False,
    wake_seconds: float = math.inf,
    memory: Any = None,
) -> Assignment:
    """Gives whole devices to whole jobs, smallest keys first (the first key counts most; ties: first come).

    **Arguments:**

    - `view`: what is known.
    - `keys`: arrays [active] by which jobs are ordered.
    - `backfill`: a job that does not fit is passed over for later ones that do; without, it holds up all behind it.
    - `consolidate`: a job that fits on a node runs on one node, a larger one has whole nodes for all but the rest;
      where that cannot be, it does not fit. All jobs are placed anew, in order, so what runs may move. Without, jobs
      stay where they are, on whatever devices.
    - `wake_seconds`, `memory`: as in `Assignment`.
    """
    order = np.lexsort(tuple(reversed(keys)))  # stable, and `active` is in order of arrival
    if consolidate:
        return _consolidated(view, order, backfill, wake_seconds, memory)
    chosen = admit(view.num_workers[order], view.cluster.num_devices, backfill=backfill)
    admitted = np.zeros(len(order), bool)
    admitted[order[chosen]] = True
    return assign(view, admitted, order, wake_seconds=wake_seconds, memory=memory)


def admit(num_workers: NDArray[np.int64], num_devices: int, *, backfill: bool = True) -> NDArray[np.int64]:
    """Chooses the jobs that run together, taken in the order given while they fit; O(jobs) numpy work for each job
    passed over.

    **Arguments:**

    - `num_workers`: i64[jobs], devices that each wants.
    - `num_devices`: how many there are.
    - `backfill`: go on with later jobs that fit after one that does not.

    **Returns:** positions of these jobs in `num_workers`, i64, ascending.
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
    view: View,
    admitted: NDArray[np.bool_],
    order: NDArray[np.int64],
    *,
    wake_seconds: float = math.inf,
    memory: Any = None,
) -> Assignment:
    """Makes the change from what runs in `view` to the `admitted` jobs (bool[active]); those that begin are placed in
    `order` (i64[active], positions), the larger first. `wake_seconds` and `memory` are as in `Assignment`."""
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


def _consolidated(view: View, order: NDArray[np.int64], backfill: bool, wake_seconds: float, memory: Any) -> Assignment:
    free = np.ones((view.cluster.num_nodes, view.cluster.devices_per_node), bool)
    counts = free.sum(axis=1)
    held = {member.job: (number, member.devices) for number, group in view.groups.items() for member in group.members}
    stop, start = {number for number, _ in held.values()}, []
    num_workers = view.num_workers.tolist()
    for position in order.tolist():
        nodes = nodes_for(counts, num_workers[position], view.cluster.devices_per_node)
        if nodes is None:
            if backfill:
                continue
            break
        devices: list[int] = []
        for node, count in nodes:
            here = np.flatnonzero(free[node])[:count]
            free[node, here] = False
            counts[node] -= count
            devices += (here + node * view.cluster.devices_per_node).tolist()
        job = int(view.active[position])
        number, before = held.get(job, (None, ()))
        if before == tuple(devices):
            stop.discard(number)
        else:
            start.append(Group((Member(job, tuple(devices)),)))
        if not counts.any():
            break
    return Assignment(tuple(sorted(stop)), tuple(start), wake_seconds, memory)


def nodes_for(counts: NDArray[np.int64], num_workers: int, per_node: int) -> list[tuple[int, int]] | None:
    """Chooses nodes for `num_workers` workers, as (node, devices there): the first that do, free ones for all but the
    rest; None where there are none. `counts` is i64[nodes], free devices of each, of `per_node` in all."""
    whole, rest = divmod(num_workers, per_node)
    empty = np.flatnonzero(counts == per_node)[:whole]
    if len(empty) < whole:
        return None
    chosen = [(int(node), per_node) for node in empty]
    if rest:
        fitting = [node for node in np.flatnonzero(counts >= rest).tolist() if node not in set(empty.tolist())]
        if not fitting:
            return None
        chosen.append((fitting[0], rest))
    return chosen


def place(free: NDArray[np.bool_], num_workers: int, cluster: Cluster) -> tuple[int, ...]:
    """Chooses free devices for a job of `num_workers` workers, on as few nodes of `cluster` as can be: the fullest node
    that holds it all, else whole nodes and the fullest that holds the rest. `free`: bool[num_devices].

    Raises `ScheduleError` if fewer than `num_workers` are free.
    """
    if (num_free := int(np.count_nonzero(free))) < num_workers:
        raise ScheduleError(
            f"{num_workers} devices are wanted, {num_free} are free",
            value=num_workers,
            place="schedule.gang.place",
            remedy="ask for at most as many as are free",
        )
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


def runs_after(view: View, decision: Assignment) -> NDArray[np.bool_]:
    """Marks the jobs of `view` that are in a group once `decision` is carried out, bool[active]."""
    started = [member.job for group in decision.start for member in group.members]
    kept = (view.group_of >= 0) & ~np.isin(view.group_of, decision.stop)
    return kept | np.isin(view.active, started)


def crossing_seconds(
    view: View, devices: NDArray[np.float64] | NDArray[np.int64], thresholds: Sequence[float]
) -> float:
    """Gives the first time at which a job of `view` reaches the next of ascending `thresholds` of attained
    device-seconds, if from now on they hold so many `devices` (f64[active]); infinite where none will."""
    growing = devices > 0
    if not growing.any():
        return math.inf
    attained, limits = view.attained_device_seconds[growing], np.array([*thresholds, math.inf])
    following = limits[np.searchsorted(limits, attained + TOLERANCE, side="right")]
    return view.now_seconds + float(np.min((following - attained) / devices[growing]))
