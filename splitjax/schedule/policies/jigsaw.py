"""Registers the JigSaw policies, which place work at the granularity of iterations, aware of the unequal task lengths
of structured partial backpropagation.

Jobs share a set of devices on all of which each of them is resident. An iteration's tasks (forward, and backward down
to the worker's depth) go, longest first, to the device that frees earliest, so the holes that shallow workers leave are
filled with other jobs' tasks, or with further tasks of the job itself, and all-reduce is hidden behind others'
computing. Which jobs share which devices is `schedule.policies.packing`.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Sequence

from splitjax.schedule.model.cluster import Cluster
from splitjax.schedule.model.discipline import GroupState, Iteration, Rates, Task, discipline
from splitjax.schedule.model.iterations import Mark, iterations_to_next, measure_rates, settled, within_capacity
from splitjax.schedule.model.jobs import CPU, DEVICE, NETWORK, STORAGE, Job, JobProfile, Stages
from splitjax.schedule.model.policy import Assignment, Group, Member, View, register
from splitjax.schedule.policies.group_plan import PackingOptions
from splitjax.schedule.policies.orders import fifo, las, srtf
from splitjax.schedule.policies.packing import pack

_PAPER = (
    "Kumar et al., Partial backpropagation and JigSaw (arXiv 2111.10672); list scheduling: Graham, Bounds on"
    " Multiprocessing Timing Anomalies (1969)"
)
_RIVAL = "The packing of `jigsaw` without partial backpropagation, to tell what each contributes"
# best without partial backpropagation: all tasks are of full length, and more of them have to wait at a device to keep
# it busy
_FULL = PackingOptions(partial=False, density=1.7)

_TIE = 1e-9  # seconds: sums of the same terms in another order differ by rounding, and must not decide who comes first


@register("jigsaw", paper=_PAPER, order="srtf")
def jigsaw(view: View) -> Assignment:
    """Iteration-level packing of partial backpropagation, the job with the least time left first.

    Decides for `view` by `pack`.
    """
    return pack(view, srtf(view), "jigsaw")


@register("jigsaw-las", paper=_PAPER, order="las")
def jigsaw_las(view: View) -> Assignment:
    """Iteration-level packing of partial backpropagation, the job that has had the least device time first.

    Decides for `view` by `pack`.
    """
    return pack(view, las(view), "jigsaw")


@register("jigsaw-fifo", paper=_PAPER, order="fifo")
def jigsaw_fifo(view: View) -> Assignment:
    """Iteration-level packing of partial backpropagation, first in, first out.

    Decides for `view` by `pack`.
    """
    return pack(view, fifo(view), "jigsaw")


@register("interleave", paper=_RIVAL, order="srtf")
def interleave(view: View) -> Assignment:
    """JigSaw's packing at full depth, the job with the least time left first.

    Decides for `view` by `pack`.
    """
    return pack(view, srtf(view), "interleave", _FULL)


@register("interleave-las", paper=_RIVAL, order="las")
def interleave_las(view: View) -> Assignment:
    """JigSaw's packing at full depth, the job that has had the least device time first.

    Decides for `view` by `pack`.
    """
    return pack(view, las(view), "interleave", _FULL)


@register("interleave-fifo", paper=_RIVAL, order="fifo")
def interleave_fifo(view: View) -> Assignment:
    """JigSaw's packing at full depth, first in, first out.

    Decides for `view` by `pack`.
    """
    return pack(view, fifo(view), "interleave", _FULL)


def _depths(profile: JobProfile, num_workers: int, partial: bool) -> tuple[int, ...]:
    return profile.partial_depths(num_workers) if partial else (0,) * num_workers


def _choose(first_free: float, ready: Sequence[float], progress: Sequence[float], remaining: Sequence[float]) -> int:
    """Chooses the next member: of those that are ready when the first device is free, the one that has progressed least
    (none starves); else the first to be ready."""
    best, soonest, least = -1, math.inf, math.inf
    for member, left in enumerate(remaining):
        if left > 0:
            time, advance = ready[member], progress[member]
            if time < first_free:
                time = first_free
            if time < soonest - _TIE or (time <= soonest + _TIE and advance < least - _TIE):
                best, soonest, least = member, time, advance
    return best


def _next(group: Group, jobs: Sequence[Job], state: GroupState, partial: bool) -> Iteration:
    now, devices = state.now_seconds, group.devices
    first_free = max(now, min(times[DEVICE] for times in state.free_seconds))
    progress = [done * job.profile.iteration_seconds for done, job in zip(state.iterations, jobs)]
    member = _choose(first_free, [max(now, time) for time in state.ready_seconds], progress, state.remaining_iterations)
    profile, num_workers, done = jobs[member].profile, jobs[member].num_workers, state.iterations[member]
    ready = max(now, state.ready_seconds[member])
    # Of devices that free at the same time another one comes first each time, and the worker with full depth is another
    # one: nobody is always deep.
    shift, depths = sum(state.iterations), _depths(profile, num_workers, partial)
    workers = [(place + done) % num_workers for place in range(num_workers)]
    if profile.stages is not None:
        return _staged(member, profile, profile.stages, workers, depths, group, state)
    alone = len(group.members) == 1
    # Alone, a job finds all devices that are free by then alike, and so stays on the same ones.
    times = [max(ready if alone else now, device[DEVICE]) for device in state.free_seconds]
    lost = [profile.switch_seconds if holder not in (-1, member) else 0.0 for holder in state.holders]
    # rounded: equal sums tie
    free = [
        (round(time + switch, 9), rank, index)
        for index, (time, switch, rank) in enumerate(zip(times, lost, _ranks(group, num_workers, shift)))
    ]
    heapq.heapify(free)
    tasks = []
    for worker, depth in zip(workers, depths):
        _, rank, index = free[0]
        start, seconds = max(times[index], ready), profile.task_seconds(depth)
        times[index] = start + seconds
        heapq.heapreplace(free, (round(times[index] + lost[index], 9), rank, index))
        tasks.append(Task(worker, devices[index], depth, start, seconds))
    return Iteration(member, tuple(tasks), max(task.end_seconds for task in tasks) + profile.exposed_seconds)


def _ranks(group: Group, num_workers: int, shift: int) -> list[int]:
    """Says by index of a device of the group which comes first among those that are free at the same time. They come
    first in turn; a job that is left alone on more devices than it has workers stays on its workers' own."""
    count = len(group.devices)
    own = min(count, num_workers) if len(group.members) == 1 else count
    return [(index - shift) % own if index < own else index for index in range(count)]


def _staged(
    member: int,
    profile: JobProfile,
    stages: Stages,
    workers: Sequence[int],
    depths: Sequence[int],
    group: Group,
    state: GroupState,
) -> Iteration:
    """Gives the next iteration of a job whose stages are known: it occupies the storage, CPU and network beside each
    device too. It overlaps its own stages as far as its iteration time alone says: the next stage begins once a share
    of the one before has passed. What it waits for longer than all of them take comes last."""
    seconds = stages.seconds
    outside = sum(seconds) - seconds[DEVICE]
    share = min(1.0, profile.exposed_seconds / outside) if outside else 0.0
    now, devices = state.now_seconds, group.devices
    ready, count = max(now, state.ready_seconds[member]), len(devices)
    free = [[max(now, time) for time in times] for times in state.free_seconds]

    def starts(times: Sequence[float]) -> tuple[float, float, float]:
        storage = max(ready, times[STORAGE]) if seconds[STORAGE] else ready
        cpu = storage + share * seconds[STORAGE]
        cpu = max(cpu, times[CPU]) if seconds[CPU] else cpu
        return storage, cpu, max(cpu + share * seconds[CPU], times[DEVICE])

    tasks, end = [], 0.0
    earliest = [starts(times) for times in free]
    begins = [start for *_, start in earliest]
    shift = sum(state.iterations)
    rotated = [(shift + place) % count for place in range(count)]
    for worker, depth in zip(workers, depths):
        index = min(rotated, key=begins.__getitem__)
        *before, start = earliest[index]
        length = profile.task_seconds(depth)
        network = max(start + length, free[index][NETWORK]) if seconds[NETWORK] else start + length
        for kind, time, busy in (
            (STORAGE, before[0], seconds[STORAGE]),
            (CPU, before[1], seconds[CPU]),
            (DEVICE, start, length),
            (NETWORK, network, seconds[NETWORK]),
        ):
            if busy:
                tasks.append(Task(worker, devices[index], depth, time, busy, kind))
                free[index][kind] = time + busy
        earliest[index] = starts(free[index])
        begins[index] = earliest[index][2]
        end = max(end, network + share * seconds[NETWORK])
    return Iteration(member, tuple(tasks), end + max(0.0, profile.exposed_seconds - outside))


@functools.lru_cache(maxsize=1 << 16)
def _steady(members: tuple[tuple[JobProfile, int], ...], num_devices: int, partial: bool) -> tuple[float, ...]:
    """Gives the iterations per second of each member: the discipline's rule, on nothing but the times at which devices
    free."""
    seconds = [
        [profile.task_seconds(depth) for depth in _depths(profile, num_workers, partial)]
        for profile, num_workers in members
    ]
    cost, exposed = (
        [profile.iteration_seconds for profile, _ in members],
        [profile.exposed_seconds for profile, _ in members],
    )
    count = len(members)
    free, ready, progress, done, ends = [0.0] * num_devices, [0.0] * count, [0.0] * count, [0] * count, [0.0] * count
    endless, replace = [math.inf] * count, heapq.heapreplace
    marks: list[Mark] = []
    while (steady := settled(marks)) is None:
        window, slow = iterations_to_next(len(marks)), count  # how many members have not done so many iterations yet
        due = [num + window for num in done]
        while slow:
            member = _choose(free[0], ready, progress, endless)
            when, last = ready[member], 0.0
            for length in seconds[member]:
                end = (free[0] if free[0] > when else when) + length
                replace(free, end)
                if end > last:
                    last = end
            ready[member] = ends[member] = last + exposed[member]
            if count == 1:  # its devices are all free when it begins, so every iteration is like the first
                return (1 / ends[0],)
            progress[member] += cost[member]
            done[member] += 1
            slow -= done[member] == due[member]
        marks.append(Mark(tuple(done), tuple(ends)))
    return within_capacity(steady[0].rates_until(steady[1]), [(sum(each),) for each in seconds], num_devices)


@functools.lru_cache(maxsize=1 << 16)
def _steady_with_switches(
    members: tuple[tuple[JobProfile, int], ...], num_devices: int, partial: bool
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Gives what `_steady` does where a device that goes over to a member loses its `switch_seconds`, and for how long
    an iteration of each member keeps devices busy, all together, with what they lose."""
    seconds = [
        [profile.task_seconds(depth) for depth in _depths(profile, num_workers, partial)]
        for profile, num_workers in members
    ]
    count = len(members)
    free, holder = [0.0] * num_devices, [-1] * num_devices
    ready, progress, done, ends = [0.0] * count, [0.0] * count, [0] * count, [0.0] * count
    busy = [[0.0] for _ in range(count)]
    marks: list[Mark] = []
    totals: list[tuple[float, ...]] = []
    while (steady := settled(marks)) is None:
        window = iterations_to_next(len(marks))
        due = [num + window for num in done]
        while any(num < wanted for num, wanted in zip(done, due)):
            member = _choose(min(free), ready, progress, [math.inf] * count)
            profile = members[member][0]
            when, last, switch = ready[member], 0.0, profile.switch_seconds
            for length in seconds[member]:
                begins = [time if held in (-1, member) else time + switch for time, held in zip(free, holder)]
                index = begins.index(min(begins))
                lost = begins[index] - free[index]
                free[index] = max(free[index], when) + lost + length
                holder[index] = member
                busy[member][0] += lost + length
                last = max(last, free[index])
            ready[member] = ends[member] = last + profile.exposed_seconds
            progress[member] += profile.iteration_seconds
            done[member] += 1
        marks.append(Mark(tuple(done), tuple(ends)))
        totals.append(tuple(each[0] for each in busy))
    first, after = steady
    taken = zip(totals[marks.index(first)], totals[marks.index(after)], first.done, after.done)
    each = [((late - early) / (num - before),) for early, late, before, num in taken]
    speeds = within_capacity(first.rates_until(after), each, num_devices)
    return speeds, tuple(occupied for (occupied,) in each)


@functools.lru_cache(maxsize=1 << 12)
def _measured(jobs: tuple[Job, ...], num_devices: int, partial: bool) -> Rates:
    devices = tuple(range(num_devices))
    group = Group(tuple(Member(number, devices) for number in range(len(jobs))))
    return measure_rates(functools.partial(_next, partial=partial), group, jobs)


def _rates(partial: bool, group: Group, jobs: Sequence[Job], cluster: Cluster) -> Rates:
    if any(job.profile.stages is not None for job in jobs):
        return _measured(
            tuple(dataclasses.replace(job, name="", arrival_seconds=0.0, num_iterations=1, tag="") for job in jobs),
            len(group.devices),
            partial,
        )
    computing, credit = [], []
    for job in jobs:
        profile = job.profile
        seconds = profile.partial_seconds(job.num_workers) if partial else profile.task_seconds(0)
        computing.append(seconds * job.num_workers)
        credit.append(1 - (profile.task_seconds(0) - seconds) / profile.iteration_seconds)
    members = tuple((job.profile, job.num_workers) for job in jobs)
    if len(jobs) > 1 and any(job.profile.switch_seconds for job in jobs):
        return Rates(*_steady_with_switches(members, len(group.devices), partial), tuple(credit))
    return Rates(_steady(members, len(group.devices), partial), tuple(computing), tuple(credit))


@discipline("jigsaw", functools.partial(_rates, True))
def jigsaw_iteration(group: Group, jobs: Sequence[Job], state: GroupState) -> Iteration:
    """Gives the next iteration of `group` in `state`: of the least advanced member that can start next, at depths 1/N
    to N/N; longest task first, onto the device that frees earliest. `jobs` are those of the members, in order."""
    return _next(group, jobs, state, True)


@discipline("interleave", functools.partial(_rates, False))
def interleave_iteration(group: Group, jobs: Sequence[Job], state: GroupState) -> Iteration:
    """Gives the next iteration of `group` with its members' `jobs` in `state` as `jigsaw_iteration` does, at full
    depth."""
    return _next(group, jobs, state, False)
