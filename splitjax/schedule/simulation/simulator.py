"""Simulates: events in order of time, the policy asked when a job arrives or finishes and when it asked to be, nothing
else looked at between.

Between events every group of jobs runs at its discipline's steady rates, so an event costs numpy work over the jobs
that are there and Python work over those that change. `Options.exact` runs the groups iteration by iteration instead:
for small cases, and to check the former.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from splitjax.errors import ScheduleError
from splitjax.schedule.model.cluster import Cluster
from splitjax.schedule.model.discipline import get_discipline
from splitjax.schedule.model.iterations import advance, charge_switches, iteration_credit
from splitjax.schedule.model.jobs import DEVICE, Job, JobColumns
from splitjax.schedule.model.links import over_links
from splitjax.schedule.model.policy import Assignment, Group, Policy, get
from splitjax.schedule.model.result import SimulationResult, Span
from splitjax.schedule.simulation.checks import check_group, check_jobs
from splitjax.schedule.simulation.exact import RunningGroup, primed_state
from splitjax.schedule.simulation.progress import Integrals, Progress, iteration_work
from splitjax.schedule.simulation.steady_rates import SteadyRates

_BEGIN, _FINISH, _GRANT, _DONE = range(4)


@dataclasses.dataclass(frozen=True)
class Options:
    """Says how a simulation goes.

    **Attributes:**

    - `restart_seconds`: from when a job gets devices, or other devices, until it computes there: process start,
      compilation, checkpoint.
    - `interval_seconds`: decisions fall on multiples of it; 0 for at once.
    - `restart_all`: every decision restarts all jobs that run, as testbeds do that start each round's jobs anew
      (Muri's).
    - `exact`: go iteration by iteration.
    - `spans`: keep who held which devices when, for Gantt charts.

    Raises `ScheduleError` for a time below 0 or without end.
    """

    restart_seconds: float = 30.0
    interval_seconds: float = 0.0
    restart_all: bool = False
    exact: bool = False
    spans: bool = False

    def __post_init__(self) -> None:
        if not (0 <= self.restart_seconds < math.inf and 0 <= self.interval_seconds < math.inf):
            raise ScheduleError(
                "times are finite and not below 0", value=self, place="options", remedy="give seconds of 0 or more"
            )


def simulate(
    jobs: Sequence[Job], cluster: Cluster, policy: str | Policy, options: Options | None = None
) -> SimulationResult:
    """Runs all `jobs` on `cluster` under a `policy` (or the name of a registered one) as `options` say. The same
    arguments give the same result. Where the cluster's links have rates, iterations wait for their exchange
    (`over_links`).

    Raises `ScheduleError` for a job that the cluster is too small for, a policy that leaves jobs waiting for ever, or a
    decision that cannot be carried out (devices that are not free, memory that does not suffice).
    """
    run = _Simulation(
        over_links(jobs, cluster), cluster, get(policy) if isinstance(policy, str) else policy, options or Options()
    )
    while run.step():
        pass
    return run.result()


class _Simulation:
    """Holds the state of one simulation: the books, the groups that run, and a heap of events."""

    def __init__(self, jobs: tuple[Job, ...], cluster: Cluster, policy: Policy, options: Options):
        self.jobs, self.cluster, self.policy, self.options = jobs, cluster, policy, options
        check_jobs(jobs, cluster)
        self.columns = JobColumns.of(jobs)
        self.progress = Progress(jobs, self.columns)
        self.sums = Integrals(cluster.num_devices)
        self.arrivals = np.argsort(self.columns.arrival_seconds, kind="stable").tolist()
        self.arrival_times = self.columns.arrival_seconds.tolist()
        self.next_arrival = 0
        self.active = np.zeros(0, np.int64)
        self.groups: dict[int, Group] = {}
        self.running: dict[int, RunningGroup] = {}
        self.free = np.ones(cluster.num_devices, bool)
        self.heap: list[tuple[float, int, int, int, int, Any]] = []
        self.num_pushed = self.num_groups = self.num_decisions = 0
        self.stamp = [0] * len(jobs)  # events of a job from before its last change are void
        self.work: dict[int, np.ndarray] = {}  # of jobs that compute: work per second
        self.now = self.arrival_times[self.arrivals[0]] if jobs else 0.0
        self.decide_at, self.wake_at, self.memory = math.inf, math.inf, None
        self.rates = SteadyRates(jobs, cluster)
        self.spans: list[Span] = []

    # Events

    def step(self) -> bool:
        """Goes to the next moment at which something happens; False when all jobs are done."""
        arrival = (
            self.arrival_times[self.arrivals[self.next_arrival]] if self.next_arrival < len(self.arrivals) else math.inf
        )
        if not len(self.active) and arrival == math.inf:
            return False
        while self.heap and not self._stands(self.heap[0]):
            heapq.heappop(self.heap)
        event = self.heap[0][0] if self.heap else math.inf
        now = min(arrival, event, self.decide_at, self._tick(self.wake_at))
        if now == math.inf:
            raise ScheduleError(
                "the policy leaves jobs waiting though nothing else will happen",
                value=[self.jobs[job].name for job in self.active[:5].tolist()],
                place=f"policy {self.policy.name!r} at {self.now:.0f} s",
                remedy="let the policy start every job that fits once the cluster is free",
            )
        self.sums.advance(now - self.now)
        self.now = max(now, self.now)
        if arrival <= now:
            self._arrive(now)
        while self.heap and self.heap[0][0] <= now:
            entry = heapq.heappop(self.heap)
            if self._stands(entry):
                _, _, kind, item, _, what = entry
                if kind in (_BEGIN, _FINISH):
                    (self._begin if kind == _BEGIN else self._finish)(item)
                else:
                    (self._grant if kind == _GRANT else self._done)(item, what)
        if min(self.decide_at, self._tick(self.wake_at)) <= now:
            self._decide()
        return True

    def _stands(self, entry: tuple[float, int, int, int, int, Any]) -> bool:
        """Tells whether an event is not void: its job or group has not changed since."""
        _, _, kind, item, stamp, _ = entry
        if kind in (_BEGIN, _FINISH):
            return self.stamp[item] == stamp
        return item in self.running and self.running[item].version == stamp

    def _push(self, time: float, kind: int, item: int, stamp: int, what: Any = None) -> None:
        self.num_pushed += 1
        heapq.heappush(self.heap, (time, self.num_pushed, kind, item, stamp, what))

    def _tick(self, time: float) -> float:
        """Gives the time at which a decision can fall that is wanted at `time`."""
        interval = self.options.interval_seconds
        if not interval or time == math.inf:
            return time
        tick = round(time / interval) * interval
        return tick if tick >= time - 1e-6 else math.ceil(time / interval) * interval

    def _arrive(self, now: float) -> None:
        first = self.next_arrival
        while self.next_arrival < len(self.arrivals) and self.arrival_times[self.arrivals[self.next_arrival]] <= now:
            job = self.arrivals[self.next_arrival]
            self.progress.fair_at_arrival[job] = self.sums.fair
            self.sums.demand += self.jobs[job].num_workers
            self.next_arrival += 1
        self.active = np.concatenate([self.active, np.array(self.arrivals[first : self.next_arrival], np.int64)])
        self.decide_at = min(self.decide_at, self._tick(now))

    def _begin(self, job: int) -> None:
        """Lets a job that was given devices start to compute."""
        group = int(self.progress.group_of[job])
        running = self.running[group]
        member = [member.job for member in running.group.members].index(job)
        speed = running.rates.iterations_per_second[member]
        if not self.options.exact:
            self.work[job] = speed * iteration_work(
                self.columns, job, running.rates.device_seconds[member], running.rates.credit[member]
            )
            self.sums.speed += self.work[job]
            self._push(
                max(self.now, self.progress.progress_from[job]) + self.progress.remaining[job] / speed,
                _FINISH,
                job,
                self.stamp[job],
            )
        elif running.state is not None:
            remaining = list(running.state.remaining_iterations)
            remaining[member] = float(self.progress.remaining[job])
            running.state = dataclasses.replace(running.state, remaining_iterations=tuple(remaining))
            self._ask(group, running, self.now)
        if np.isnan(self.progress.started[job]):
            self.progress.started[job] = self.now

    def _finish(self, job: int) -> None:
        group = int(self.progress.group_of[job])
        running = self.running[group]
        self._leave(job)
        self.progress.remaining[job], self.progress.finished[job], self.progress.fair_at_finish[job] = (
            0.0,
            self.now,
            self.sums.fair,
        )
        self.active = self.active[self.active != job]
        self.sums.demand -= self.jobs[job].num_workers
        rest = tuple(member for member in running.group.members if member.job != job)
        if rest:
            self._replace(group, dataclasses.replace(running.group, members=rest))
        else:
            self._dissolve(group)
        self.decide_at = min(self.decide_at, self._tick(self.now))

    # Decisions

    def _decide(self) -> None:
        self.decide_at = self.wake_at = math.inf
        self.num_decisions += 1
        view = self.progress.view(
            self.now, self.cluster, self.active, self.sums.fair, MappingProxyType(self.groups), self.free, self.memory
        )
        decision: Assignment = self.policy.decide(view)
        self.memory = decision.memory
        self.wake_at = decision.wake_seconds if decision.wake_seconds > self.now and len(self.active) else math.inf
        # where the jobs of ending groups are, and from when they compute
        held: dict[int, tuple[frozenset[int], float]] = {}
        ending: list[RunningGroup] = []
        for group in decision.stop:
            if group not in self.running:
                raise ScheduleError(
                    "a group is to stop that does not run",
                    value=group,
                    place=f"policy {self.policy.name!r}",
                    remedy="let the policy stop groups of the view that it was given",
                )
            running = self.running[group]
            for member in running.group.members:
                held[member.job] = (
                    frozenset((*member.devices, *member.resident)),
                    float(self.progress.progress_from[member.job]),
                )
                self._leave(member.job)
            ending.append(running)
            self._dissolve(group)
        if self.options.restart_all:
            for group in list(self.running):
                self._restart(group)
        for group in decision.start:
            self._start(group, held, ending)

    def _start(self, group: Group, held: dict[int, tuple[frozenset[int], float]], before: list[RunningGroup]) -> None:
        check_group(
            group,
            self.jobs,
            self.cluster,
            self.now,
            self.free,
            self.progress,
            f"policy {self.policy.name!r} at {self.now:.0f} s",
        )
        number = self.num_groups = self.num_groups + 1
        running = self._enter(number, group)
        for member in group.members:
            devices, computes_from = held.get(member.job, (frozenset(), 0.0))
            if devices == {*member.devices, *member.resident} and not self.options.restart_all:
                progress_from = max(self.now, computes_from)
            else:
                progress_from = self.now + self.options.restart_seconds
                self.progress.starts[member.job] += 1
            self._join(number, running, member.job, progress_from)
        if self.options.exact:
            self._prime(number, running, before)

    def _restart(self, group: int) -> None:
        running = self.running[group]
        for member in running.group.members:
            self._leave(member.job)
            self.progress.starts[member.job] += 1
            self._join(group, running, member.job, self.now + self.options.restart_seconds)
        if self.options.exact:
            running.version, running.granting = running.version + 1, False
            self._prime(group, running, [])

    # Groups

    def _enter(self, number: int, group: Group) -> RunningGroup:
        running = self.running[number] = RunningGroup(group, self.rates.of(group), self.now)
        self.groups[number] = group
        self.free[running.devices] = False
        self.sums.num_held += len(running.devices)
        return running

    def _dissolve(self, number: int) -> None:
        running = self.running.pop(number)
        del self.groups[number]
        self.free[running.devices] = True
        self.sums.num_held -= len(running.devices)
        if self.options.spans and self.now > running.since:
            self.spans.append(
                Span(
                    tuple(member.job for member in running.group.members),
                    running.group.computing_devices,
                    running.since,
                    self.now,
                )
            )

    def _replace(self, number: int, group: Group) -> None:
        """Lets a group go on with fewer members."""
        running = self.running[number]
        times = {member.job: float(self.progress.progress_from[member.job]) for member in group.members}
        for job in times:
            self._leave(job)
        self._dissolve(number)
        after = self._enter(number, group)
        for job, time in times.items():
            self._join(number, after, job, max(self.now, time))
        if self.options.exact:
            after.version = running.version + 1
            self._prime(number, after, [running])

    def _join(self, number: int, running: RunningGroup, job: int, progress_from: float) -> None:
        members = [member.job for member in running.group.members]
        computing = [
            rate * seconds for rate, seconds in zip(running.rates.iterations_per_second, running.rates.device_seconds)
        ]
        index = members.index(job)
        share = len(running.devices) * (computing[index] / sum(computing))
        rate = 0.0 if self.options.exact else running.rates.iterations_per_second[index]
        self.progress.hold(job, self.now, number, share, rate, progress_from)
        self.stamp[job] += 1
        if progress_from <= self.now:
            self._begin(job)
        else:
            self._push(progress_from, _BEGIN, job, self.stamp[job])

    def _leave(self, job: int) -> None:
        """Brings a job up to date and takes it out of the sums; it is in no group then."""
        self.progress.release(job, self.now)
        self.stamp[job] += 1
        work = self.work.pop(job, None)
        if work is not None:
            self.sums.speed -= work

    # Iteration by iteration

    def _prime(self, number: int, running: RunningGroup, before: list[RunningGroup]) -> None:
        """Makes the state of a group that begins, or goes on with other members; what its devices and jobs still do is
        finished first."""
        group = running.group
        jobs = [self.jobs[member.job] for member in group.members]
        state, flying = primed_state(group, jobs, before, self.progress, self.now)
        for time, index in flying:
            job = group.members[index].job
            seconds, credit = running.rates.device_seconds[index], running.rates.credit[index]
            self._push(
                time, _DONE, number, running.version, (index, iteration_work(self.columns, job, seconds, credit))
            )
        running.state = state
        self._ask(number, running, self.now)

    def _ask(self, number: int, running: RunningGroup, time: float) -> None:
        if not running.granting:
            running.granting = True
            self._push(time, _GRANT, number, running.version)

    def _grant(self, number: int, _: Any) -> None:
        """Asks the discipline for the next iteration, once the last one that it gave has started."""
        running = self.running[number]
        running.granting = False
        if running.state is None or max(running.state.remaining_iterations) <= 0:
            return
        running.state = dataclasses.replace(running.state, now_seconds=self.now)
        jobs = [self.jobs[member.job] for member in running.group.members]
        asked = get_discipline(running.group.discipline).next_iteration(running.group, jobs, running.state)
        iteration = charge_switches(running.group, jobs, running.state, asked)
        running.state = advance(running.group, running.state, iteration)
        job = running.group.members[iteration.member].job
        seconds = sum(task.seconds for task in iteration.tasks if task.resource == DEVICE)
        work = iteration_work(self.columns, job, seconds, iteration_credit(jobs[iteration.member], iteration))
        self._push(iteration.ready_seconds, _DONE, number, running.version, (iteration.member, work))
        self._ask(number, running, max(self.now, min(task.start_seconds for task in iteration.tasks)))

    def _done(self, number: int, what: tuple[int, np.ndarray]) -> None:
        member, work = what
        job = self.running[number].group.members[member].job
        self.sums.add(work)
        self.progress.remaining[job] -= 1
        if self.progress.remaining[job] <= 1e-9:
            self._finish(job)

    # Results

    def result(self) -> SimulationResult:
        total, busy = self.sums.parts()
        return SimulationResult(
            self.policy.name, self.cluster, self.progress.records(), total, busy, self.num_decisions, tuple(self.spans)
        )
