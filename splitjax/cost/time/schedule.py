"""Simulates when a device does what: tasks come in with their seconds, begin and end come out.

A device computes one task at a time. Where its compiler overlaps, a collective runs beside that on its links as soon as
what it sends is there, and the compiler computes whatever is ready meanwhile, first what comes first in the program, as
XLA's latency-hiding scheduler does (xla/service/latency_hiding_scheduler.h). Elsewhere everything takes turns; there
processes wait at each collective between them for the last one to come, the longer the longer they computed since the
collective before.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

from splitjax.cost.time.machine import Machine
from splitjax.cost.time.work import Task, walk


@dataclasses.dataclass(frozen=True)
class Timed:
    """Is a task with what it takes.

    **Attributes:** `task`: the task. `seconds`: of a run of it; of a loop, of all its turns. `begin`: after the begin
    of the step, or of the turn that it is in. `inside`: of a loop, the tasks of a turn. `waiting_seconds`: of a
    collective, what of its seconds is waiting for the last process to come."""

    task: Task
    seconds: float
    begin: float
    inside: tuple[Timed, ...] = ()
    waiting_seconds: float = 0.0


def simulate(tasks: Sequence[Task], machine: Machine) -> tuple[tuple[Timed, ...], float]:
    """Returns the tasks with their times, and when the last one ends.

    **Arguments:** `tasks`: in the order of the program. `machine`: what they run on."""
    timed = _beside_each_other(tasks, machine) if machine.overlaps else _in_turn(tasks, machine, 0.0)[0]
    return timed, _end(timed)


def _end(timed: Sequence[Timed]) -> float:
    return max((each.begin + each.seconds for each in timed), default=0.0)


def _in_turn(tasks: Sequence[Task], machine: Machine, computed: float) -> tuple[tuple[Timed, ...], float]:
    """Returns the tasks with their times, one behind the other, and for how long a device has computed in the end since
    it last waited for others. `computed`: the same of their begin."""
    found: list[Timed] = []
    now = 0.0
    for task in tasks:
        inside: tuple[Timed, ...] = ()
        waiting = 0.0
        if task.inside:
            inside, at_end = _in_turn(task.inside, machine, 0.0)
            if waits := any(machine.has_waits(each) for each, _ in walk(task.inside)):
                # Each turn but the first begins as the one before has ended.
                inside, at_end = _in_turn(task.inside, machine, at_end)
            seconds = task.turns * _end(inside)
            computed = at_end if waits else computed + seconds
        else:
            seconds = machine.seconds(task)
            if machine.has_waits(task):
                waiting, computed = machine.waiting_seconds(computed), 0.0
                seconds += waiting
            elif not task.op:
                computed += seconds
        found.append(Timed(task, seconds, now, inside, waiting))
        now += seconds
    return tuple(found), computed


def _beside_each_other(tasks: Sequence[Task], machine: Machine) -> tuple[Timed, ...]:
    inner = [simulate(task.inside, machine) if task.inside else ((), 0.0) for task in tasks]
    takes = [
        task.turns * end if task.inside else machine.seconds(task) for task, (_, end) in zip(tasks, inner, strict=True)
    ]
    begins = _overlapped(tasks, takes, machine)
    return tuple(
        Timed(task, seconds, begin, inside)
        for task, seconds, begin, (inside, _) in zip(tasks, takes, begins, inner, strict=True)
    )


def _overlapped(tasks: Sequence[Task], takes: Sequence[float], machine: Machine) -> list[float]:
    """Returns when each task begins, collectives beside what is computed."""
    writer = {value: number for number, task in enumerate(tasks) for value in task.writes}
    waits = [
        {before for value in task.reads if (before := writer.get(value, number)) != number and before < number}
        for number, task in enumerate(tasks)
    ]
    followers: list[list[int]] = [[] for _ in tasks]
    for number, before in enumerate(waits):
        for each in before:
            followers[each].append(number)
    open_waits = [len(before) for before in waits]
    ready_at, begins = [0.0] * len(tasks), [0.0] * len(tasks)
    free_links: dict[str, float] = {}
    computing_until = 0.0
    # Tasks that wait for nothing more: collectives and those ready later by (when, number), others by number.
    sending: list[tuple[float, int]] = []
    later: list[tuple[float, int]] = []
    ready: list[int] = []
    for number, task in enumerate(tasks):
        if not open_waits[number]:
            heapq.heappush(sending if task.op else later, (0.0, number))
    while sending or later or ready:
        if sending:
            _, number = heapq.heappop(sending)
            places = machine.places(tasks[number])
            begins[number] = max(ready_at[number], *(free_links.get(place, 0.0) for place in places), 0.0)
            free_links |= dict.fromkeys(places, begins[number] + takes[number])
        else:
            # What is ready when the device is free, first in the program; otherwise what is ready soonest.
            while later and later[0][0] <= computing_until:
                heapq.heappush(ready, heapq.heappop(later)[1])
            number = heapq.heappop(ready) if ready else heapq.heappop(later)[1]
            begins[number] = max(ready_at[number], computing_until)
            computing_until = begins[number] + takes[number]
        for follower in followers[number]:
            ready_at[follower] = max(ready_at[follower], begins[number] + takes[number])
            open_waits[follower] -= 1
            if not open_waits[follower]:
                heapq.heappush(sending if tasks[follower].op else later, (ready_at[follower], follower))
    return begins
