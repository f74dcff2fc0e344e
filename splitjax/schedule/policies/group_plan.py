"""Makes the groups of one moment, for `packing`: those that run, as they are to change, and those that are to begin."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitjax.schedule.model.jobs import DEVICE, resident_bytes
from splitjax.schedule.model.policy import Assignment, Group, Member, View
from splitjax.schedule.policies.folding import alone_throughput, folded_devices, folded_sizes, switch_shares
from splitjax.schedule.policies.gang import admit, place
from splitjax.schedule.policies.group_shares import group_throughput, shared_devices
from splitjax.schedule.policies.orders import Order

MAX_MEMBERS = 8
DENSITY = 1.4  # demand per device at which devices always have work: the list schedule's holes close between 1 and this
LEAST_GAIN = 0.005
SETTLE_SECONDS = 300.0
FOLD_ABOVE = 0.04  # of a task; on Philly's clusters 103959 and 7f04ca folding is as good as packing at 3 to 6 %


@dataclasses.dataclass(frozen=True)
class PackingOptions:
    """Says how jobs are put into groups.

    - `partial`: demands are those of partial backpropagation, else of full.
    - `max_members`: jobs in a group, fewer where memory does not suffice. `density`: demand per device up to which jobs
      are admitted.
    - `settle_seconds`: the least time between two looks at whether all is to be grouped anew. `least_gain`: share of
      the throughput that this has to gain.
    - `fold_above`: jobs to which a switch costs more than this share of a task get devices of their own, fewer than
      they have workers (`folding`), while there are not enough devices for all.
    """

    partial: bool = True
    max_members: int = MAX_MEMBERS
    density: float = DENSITY
    settle_seconds: float = SETTLE_SECONDS
    least_gain: float = LEAST_GAIN
    fold_above: float = FOLD_ABOVE


def demands(view: View, partial: bool) -> NDArray[np.float64]:
    """Gives the devices that each of all jobs of `view` keeps computing at its full speed (or whose storage, CPU or
    network it does, if that is more), f64[jobs]; with `partial` under partial backpropagation, else under full."""
    seconds = view.columns.resource_seconds.copy()
    if not partial:
        seconds[:, DEVICE] = [job.num_workers * job.profile.task_seconds(0) for job in view.jobs]
    return seconds.max(axis=1) / view.columns.iteration_seconds


class GroupPlan:
    """Decides on the groups of one moment: those that run, as they are to change, and those that are to begin."""

    view: View
    order: Order
    discipline: str
    max_members: int
    density: float
    partial: bool
    densest: float
    demands: NDArray[np.float64]
    all_folds: NDArray[np.bool_]
    num_workers: NDArray[np.int64]
    demand: NDArray[np.float64]
    limit: int
    scarce: bool
    folds: NDArray[np.bool_]
    admitted: NDArray[np.bool_]
    free: NDArray[np.bool_]
    rank: NDArray[np.int64]
    ids: NDArray[np.int64]
    size: NDArray[np.float64]
    slot: NDArray[np.int64]
    had: NDArray[np.int64]
    load: NDArray[np.float64]
    width: NDArray[np.float64]
    count: NDArray[np.int64]
    folded: NDArray[np.bool_]

    def __init__(self, view: View, order: Order, discipline: str, options: PackingOptions):
        self.view, self.order, self.discipline, self.max_members = view, order, discipline, options.max_members
        self.density, self.partial = options.density, options.partial
        self.densest = 1.25 * options.density  # a group takes further jobs up to this demand per device
        self.memory: dict[str, Any] = view.memory or {}
        self.demands = self.memory["demand"] if self.memory else demands(view, options.partial)
        self.all_folds = self.memory["folds"] if self.memory else switch_shares(view) > options.fold_above
        self.num_workers, self.demand = view.num_workers, self.demands[view.active]
        self.limit = view.cluster.memory_bytes
        self.scarce = int(self.num_workers.sum()) > view.cluster.num_devices
        self._is_fixed = self.demand > self.num_workers - 1e-9  # nothing to gain by packing
        self.folds = self.all_folds[view.active] & ~self._is_fixed & (self.num_workers > 1)
        self.admitted = np.ones(len(view.active), bool)
        if self.scarce:
            need = np.where(self._is_fixed, self.num_workers, self.demand / options.density)
            need = np.where(self.folds, folded_devices(self.num_workers), need)
            chosen = admit(
                np.ceil(need[order.positions] * 1000 - 1e-6).astype(np.int64), view.cluster.num_devices * 1000
            )
            self.admitted[:] = False
            self.admitted[order.positions[chosen]] = True
            self._fill()
        self.free = view.free.copy()
        self.stopped: list[int] = []
        self.rank = np.empty(len(order.positions), np.int64)
        self.rank[order.positions] = np.arange(len(order.positions))
        # Groups as arrays, one entry each: those that run, then those that are to begin. Members and devices are looked
        # up only of those that change.
        numbers = sorted(view.groups)
        self.ids = np.array(numbers, np.int64)
        self.size = np.array([view.groups[number].option for number in numbers], np.float64)
        running = view.group_of >= 0
        self.slot = np.where(running, np.searchsorted(self.ids, view.group_of), -1)
        self.had = np.bincount(self.slot[running], minlength=len(self.ids))
        kept = self.slot[running & self.admitted]
        self.load, self.width = (
            np.bincount(kept, values[running & self.admitted], len(self.ids)).astype(np.float64)
            for values in (self.demand, self.num_workers)
        )
        self.count = np.bincount(kept, minlength=len(self.ids))
        self.folded = np.bincount(kept, self.folds[running & self.admitted], len(self.ids)) > 0
        self.members: dict[int, list[int]] = {}
        self.devices: dict[int, tuple[int, ...]] = {}
        self.changed: set[int] = set()

    def _fill(self) -> None:
        """Admits a job more where those admitted cannot keep all devices computing: the next that may still join them.
        On few devices a job more or less is much."""
        waiting = self.order.positions[~self.admitted[self.order.positions]]
        while len(waiting) and (load := float(self.demand[self.admitted].sum())) < self.view.cluster.num_devices - 1e-9:
            waiting = waiting[load + self.demand[waiting] <= self.densest * self.view.cluster.num_devices]
            self.admitted[waiting[:1]] = True
            waiting = waiting[1:]

    def keep(self) -> None:
        """Keeps what runs, without those that have to make way."""
        for index in np.flatnonzero(self.count < self.had).tolist():
            if self.count[index]:
                self._of(index)
                self.changed.add(index)
            else:
                self.stopped.append(int(self.ids[index]))
                self.free[list(self.view.groups[int(self.ids[index])].devices)] = True

    def join(self) -> None:
        """Places jobs that wait, in order: on devices of their own where there are enough, else in the sparsest
        group."""
        waiting = self.order.positions[(self.admitted & (self.view.group_of < 0))[self.order.positions]].tolist()
        num_free = int(self.free.sum())
        for position in waiting:
            demand, wanted = float(self.demand[position]), int(self.num_workers[position])
            if self.scarce and self.folds[position]:
                wanted = int(folded_devices(self.num_workers[position]))
            if num_free >= wanted:
                self._alone(position, wanted)
                num_free -= wanted
                continue
            room = (self.count > 0) & (self.count < self.max_members) & ~self.folded & ~self.folds[position]
            densities = np.where(room, (self.load + demand) / np.maximum(self.size, 1), math.inf)
            alone = demand / num_free if num_free and self.scarce else math.inf
            best = self._sparsest(position, densities)
            if alone <= self.densest and (best is None or alone <= densities[best]):
                self._alone(position, num_free)
                num_free = 0
            elif best is not None and densities[best] <= self.densest:
                self._put(best, [*self._of(best), position])
            elif self.scarce:
                self._replace(position)

    def _replace(self, position: int) -> None:
        """Gives a job that fits nowhere the place of one that is served later: of the last such, where it then fits."""
        victims = np.flatnonzero((self.slot >= 0) & self.admitted & (self.rank > self.rank[position]))
        slot = self.slot[victims]
        victims = victims[
            self.load[slot] - self.demand[victims] + self.demand[position] <= self.densest * self.size[slot]
        ]
        for victim in victims[np.argsort(-self.rank[victims])].tolist():
            index = int(self.slot[victim])
            members = [*(member for member in self._of(index) if member != victim), position]
            if self._fits(members) and (len(members) == 1 or not self.folds[members].any()):
                self._put(index, members)
                self.slot[victim] = -1
                return

    def _of(self, index: int) -> list[int]:
        """Lists the members of a group, by position in `View.active`."""
        if index not in self.members:
            self.members[index] = np.flatnonzero((self.slot == index) & self.admitted).tolist()
        return self.members[index]

    def _put(self, index: int, members: list[int]) -> None:
        self.members[index] = members
        self.changed.add(index)
        self.slot[members] = index
        self.folded[index] = self.folds[members].any()
        self.load[index], self.width[index], self.count[index] = (
            self.demand[members].sum(),
            self.num_workers[members].sum(),
            len(members),
        )

    def _alone(self, position: int, count: int) -> None:
        devices = place(self.free, count, self.view.cluster)
        self.free[list(devices)] = False
        self._begin([position], devices)

    def _begin(self, members: list[int], devices: tuple[int, ...]) -> None:
        index = len(self.size)
        self.size = np.append(self.size, float(len(devices)))
        self.load, self.width, self.count, self.folded = (
            np.append(values, 0) for values in (self.load, self.width, self.count, self.folded)
        )
        self.devices[index] = devices
        self._put(index, members)

    def _sparsest(self, position: int, densities: NDArray[np.float64]) -> int | None:
        """Finds, among the sparsest groups that have the memory, one whose jobs have this job's iteration time, or else
        the sparsest."""
        seconds, active = self.view.columns.iteration_seconds, self.view.active
        sparsest = None
        for index in np.argsort(densities, kind="stable")[:8].tolist():
            if not math.isfinite(densities[index]) or (
                sparsest is not None and densities[index] > densities[sparsest] + 0.15
            ):
                break
            members = self._of(index)
            if self._fits([*members, position]):
                if seconds[active[members[0]]] == seconds[active[position]]:
                    return index
                sparsest = index if sparsest is None else sparsest
        return sparsest

    def _fits(self, members: list[int]) -> bool:
        jobs = self.view.jobs
        return (
            not self.limit
            or resident_bytes(jobs[int(self.view.active[member])].profile for member in members) <= self.limit
        )

    def waste(self) -> float:
        """Gives the share of the admitted jobs' throughput, perfectly packed, that the groups as they are do not
        have."""
        best = self._best()
        return 1 - self._throughput() / best if best else 0.0

    def _throughput(self) -> float:
        """Gives the throughput, in full-speed workers, of the groups as they are."""
        folded = {index: self._of(index)[0] for index in np.flatnonzero(self.folded & (self.count == 1)).tolist()}
        packed = np.ones(len(self.size), bool)
        packed[list(folded)] = False
        alone = sum(self._alone_throughput(position, int(self.size[index])) for index, position in folded.items())
        return group_throughput(self.width[packed], self.load[packed], self.size[packed]) + alone

    def _alone_throughput(self, position: int, num_devices: int) -> float:
        return alone_throughput(self.view.jobs[int(self.view.active[position])], num_devices, self.partial)

    def _best(self) -> float:
        """Gives the throughput of the admitted jobs, in full-speed workers, perfectly packed at one density."""
        total = float(self.demand[self.admitted].sum())
        return float(self.num_workers[self.admitted].sum()) * min(1.0, self.view.cluster.num_devices / max(total, 1e-9))

    def share(self) -> NDArray[np.float64]:
        """Gives each job devices of its group by the share that it computes, f64[active]."""
        held = (self.slot >= 0) & self.admitted
        shares = np.zeros(len(held))
        slot = self.slot[held]
        shares[held] = self.demand[held] * self.size[slot] / self.load[slot]
        return shares

    def anew(self, least_gain: float) -> None:
        """Groups all jobs again: those that are alike together, devices in proportion to demand. Nothing changes where
        that gains less than `least_gain`: jobs that hold whole devices, and whole numbers of devices, leave some of the
        throughput unused however often all is grouped."""
        num_devices = self.view.cluster.num_devices
        columns, active = self.view.columns, self.view.active
        positions = np.flatnonzero(self.admitted)
        seconds = columns.iteration_seconds[active]
        single: list[list[int]] = []
        folded: list[list[int]] = []
        classes: dict[float, list[int]] = {}
        whole = self._whole(positions)
        for position in positions[
            np.lexsort((active[positions], -self.num_workers[positions], seconds[positions]))
        ].tolist():
            if position in whole:
                single.append([position])
            elif self.folds[position]:
                folded.append([position])
            else:
                classes.setdefault(float(seconds[position]), []).append(position)
        # Jobs in step pack best, so none is put to jobs of another iteration time unless it would be alone.
        odd = [members.pop() for members in classes.values() if len(members) == 1]
        groups = [part for members in [*classes.values(), odd] for part in self._parts(members)]
        sizes = [int(self.num_workers[members].sum()) for members in single]
        if folded:
            folded.sort(key=lambda members: self.rank[members[0]])
            jobs = [self.view.jobs[int(active[members[0]])] for members in folded]
            packed = math.ceil(sum(float(self.demand[members].sum()) for members in groups) / self.density)
            sizes += folded_sizes(jobs, num_devices - sum(sizes) - packed, self.partial)
        sizes += shared_devices(
            [float(self.demand[members].sum()) for members in groups],
            [int(self.num_workers[members].sum()) for members in groups],
            num_devices - sum(sizes),
        )
        every = [*single, *folded, *groups]
        width, load = (
            np.array([values[members].sum() for members in groups], np.float64)
            for values in (self.num_workers, self.demand)
        )
        num_alone = len(single) + len(folded)
        gained = group_throughput(width, load, np.array(sizes[num_alone:])) - self._throughput()
        gained += sum(self._alone_throughput(members[0], size) for members, size in zip(every, sizes[:num_alone]))
        if gained <= least_gain * self._best():
            return
        running = [index for index in range(len(self.ids)) if self.count[index] and index not in self.changed]
        before = {tuple(self._of(index)): index for index in running}
        self.stopped = [int(number) for number in self.ids]
        self.free[:] = True
        rest = []
        stay = set()
        for members, size in zip(every, sizes):
            index = before.get(tuple(sorted(members)))
            if index is not None and self.size[index] == size:
                stay.add(index)
                self.stopped.remove(int(self.ids[index]))
                self.free[list(self.view.groups[int(self.ids[index])].devices)] = False
            elif size:
                rest.append((members, size))
        for index in range(len(self.size)):
            if index not in stay:
                self.load[index] = self.width[index] = self.count[index] = 0
        self.slot[~np.isin(self.slot, list(stay))] = -1
        self.changed.clear()
        for members, size in sorted(rest, key=lambda item: -item[1]):
            devices = place(self.free, size, self.view.cluster)
            self.free[list(devices)] = False
            self._begin(members, devices)

    def _whole(self, positions: NDArray[np.int64]) -> set[int]:
        """Jobs with devices of their own: all while there are enough, else those that gain nothing by packing. Of these
        the last to be served share devices too where the rest would not have enough."""
        if not self.scarce:
            return set(positions.tolist())
        fixed = self._is_fixed[positions]
        whole, shared = (
            positions[fixed][np.argsort(self.rank[positions[fixed]])],
            float(self.demand[positions[~fixed]].sum()),
        )
        while (
            len(whole)
            and shared > self.densest * (self.view.cluster.num_devices - self.num_workers[whole].sum()) + 1e-9
        ):
            shared += float(self.demand[whole[-1]])
            whole = whole[:-1]
        return set(whole.tolist())

    def _parts(self, members: list[int]) -> list[list[int]]:
        """Splits `members` into groups of as equal a number of jobs as can be, at most `max_members` and what memory
        holds; wide and narrow ones in each."""
        count = -(-len(members) // self.max_members)
        parts: list[list[int]] = [[] for _ in range(count)]
        for index, member in enumerate(members):
            part = parts[index % count]
            if self._fits([*part, member]):
                part.append(member)
            else:
                parts.append([member])
        return [part for part in parts if part]

    def assignment(self, wake_seconds: float, memory: Any) -> Assignment:
        """Makes the change from what runs; `wake_seconds` and `memory` are as in `Assignment`."""
        stop, start = list(self.stopped), []
        for index in sorted(self.changed):
            if index < len(self.ids):
                stop.append(int(self.ids[index]))
                self.devices[index] = self.view.groups[int(self.ids[index])].devices
            devices = tuple(sorted(self.devices[index]))
            members = tuple(self._member(position, devices) for position in sorted(self.members[index], key=self._kind))
            # the option: steady rates depend on how many there are
            start.append(Group(members, self.discipline, len(devices)))
        return Assignment(tuple(stop), tuple(start), wake_seconds, memory)

    def _kind(self, position: int) -> tuple[float, int, str]:
        """Gives a key by which groups of like jobs have them in the same order, so that their steady rates need to be
        found only once."""
        profile = self.view.jobs[int(self.view.active[position])].profile
        return profile.iteration_seconds, int(self.num_workers[position]), profile.name

    def _member(self, position: int, devices: tuple[int, ...]) -> Member:
        """Places a job on all devices of its group: its workers on the first, or several on each where it has more."""
        count, job = int(self.num_workers[position]), int(self.view.active[position])
        if count <= len(devices):
            return Member(job, devices[:count], devices[count:])
        return Member(job, tuple(devices[worker % len(devices)] for worker in range(count)))
