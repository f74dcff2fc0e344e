"""Runs jobs for real, under the policies and disciplines that the simulator asks: `execute`.

A job has a process per worker. A policy's groups say which devices they are on; a group's discipline says which job's
iteration is next, at which depths; all of the iteration's tokens are granted at once (`schedule.execution.granted`).
Times that iterations really take go into what policies and disciplines see next. A job that loses its devices is
checkpointed first; one that loses a process begins again from its checkpoint. Neither touches other jobs.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from splitjax.errors import ScheduleError
from splitjax.schedule.execution.engine import Engine, Kind, Place, Program, WorkerReport
from splitjax.schedule.execution.granted import GrantedIterations
from splitjax.schedule.execution.real_jobs import JobRun, Status
from splitjax.schedule.execution.records import Execution, ExecutionOptions
from splitjax.schedule.model.cluster import Cluster
from splitjax.schedule.model.discipline import get_discipline
from splitjax.schedule.model.jobs import Job, JobColumns
from splitjax.schedule.model.policy import Group, Member, Policy, get
from splitjax.schedule.model.result import SimulationResult, Span
from splitjax.schedule.simulation.checks import check_group, check_jobs
from splitjax.schedule.simulation.progress import Integrals, Progress

logger: logging.Logger = logging.getLogger("splitjax")


def execute(
    jobs: Sequence[Job],
    programs: Mapping[str, Program],
    cluster: Cluster,
    policy: str | Policy,
    engine: Engine,
    options: ExecutionOptions | None = None,
) -> Execution:
    """Runs all `jobs` on `cluster` under a policy (or the name of a registered one), in real time, and returns when all
    are done.

    **Arguments:**

    - `jobs`: `arrival_seconds` are counted from the first arrival on; profiles say what policies shall believe.
    - `programs`: by name of job, what it trains.
    - `cluster`: the devices. `policy`: decides which jobs have which of them.
    - `engine`: holds the processes. It is closed at the end, however that comes.
    - `options`: how often to save, and when to give up.

    Raises `ScheduleError` for a job without program or with too many workers, a policy that leaves jobs waiting for
    ever, or a decision that cannot be carried out.
    """
    try:
        return _Executor(
            tuple(jobs),
            programs,
            cluster,
            get(policy) if isinstance(policy, str) else policy,
            engine,
            options or ExecutionOptions(),
        ).run()
    finally:
        engine.close()


class _Executor:
    """Holds the state of one real run: the books, the groups and jobs that run, and the queues of tokens."""

    def __init__(
        self,
        jobs: tuple[Job, ...],
        programs: Mapping[str, Program],
        cluster: Cluster,
        policy: Policy,
        engine: Engine,
        options: ExecutionOptions,
    ):
        self.jobs, self.cluster, self.policy, self.engine, self.options = jobs, cluster, policy, engine, options
        check_jobs(jobs, cluster)
        names = [job.name for job in jobs]
        if len(set(names)) < len(names) or set(names) - set(programs):
            raise ScheduleError(
                "every job needs a name and a program of its own",
                value=names,
                place="programs",
                remedy="give programs={job.name: program, ...}",
            )
        columns = JobColumns.of(jobs)
        self.progress, self.sums = Progress(jobs, columns), Integrals(cluster.num_devices)
        self.runs = [JobRun(number, job, programs[job.name]) for number, job in enumerate(jobs)]
        self.iterations = GrantedIterations(self.runs, engine, columns, self.progress, self.sums)
        self.arrivals = np.argsort(columns.arrival_seconds, kind="stable").tolist()
        self.active: list[int] = []
        self.groups: dict[int, Group] = {}
        self.since: dict[int, float] = {}
        self.num_groups = self.num_decisions = 0
        self.memory: Any = None
        self.wake_at, self.must_decide = math.inf, False
        self.spans: list[Span] = []
        self.first_arrival = float(columns.arrival_seconds.min())
        self.began = time.monotonic()
        self.now = self.first_arrival

    def run(self) -> Execution:
        while self.arrivals or self.active:
            self._tick()
            self._arrive()
            if self.must_decide or self.wake_at <= self.now:
                self._decide()
            self._serve()
            if not self.arrivals and not self.active:
                break
            self._check_progress()
            report = self.engine.next(0.0 if self.must_decide else self._patience())
            self._tick()
            while report is not None:
                self._take(report)
                report = self.engine.next(0.0)
        return self._execution()

    def _tick(self) -> None:
        now = self.first_arrival + time.monotonic() - self.began
        self.sums.advance(now - self.now)
        self.now = now

    def _patience(self) -> float:
        """Gives the seconds for which nothing but a report can happen."""
        arrival = self.jobs[self.arrivals[0]].arrival_seconds if self.arrivals else math.inf
        due = min(
            (
                run.checkpoint_due(self.options.checkpoint_every_seconds)
                for run in self.runs
                if run.status is Status.RUNNING
            ),
            default=math.inf,
        )
        return min(
            max(0.0, min(arrival, self.wake_at, due if due > self.now else math.inf) - self.now),
            self.options.stall_seconds / 10,
            1.0,
        )

    def _arrive(self) -> None:
        while self.arrivals and self.jobs[self.arrivals[0]].arrival_seconds <= self.now:
            job = self.arrivals.pop(0)
            self.progress.fair_at_arrival[job] = self.sums.fair
            self.sums.demand += self.jobs[job].num_workers
            self.active.append(job)
            self.must_decide = True

    def _check_progress(self) -> None:
        """Notices processes that do not answer, and policies that leave everybody waiting."""
        for run in self.runs:
            if run.status in (Status.STARTING, Status.SAVING):
                since = run.asked
            else:
                since = run.grants[0].silent_since if run.grants else math.inf
            if self.now - since > self.options.stall_seconds:
                self._died(run, f"no answer for {self.options.stall_seconds:g} s")
        idle = not self.groups and all(run.status in (Status.WAITING, Status.DONE) for run in self.runs)
        if idle and self.active and not self.arrivals and self.wake_at == math.inf and not self.must_decide:
            raise ScheduleError(
                "the policy leaves jobs waiting though nothing else will happen",
                value=[self.jobs[job].name for job in self.active[:5]],
                place=f"policy {self.policy.name!r} at {self.now:.1f} s",
                remedy="let the policy start every job that fits once the cluster is free",
            )

    # Decisions

    def _decide(self) -> None:
        self.must_decide, self.wake_at = False, math.inf
        self.num_decisions += 1
        view = self.progress.view(
            self.now,
            self.cluster,
            np.array(self.active, np.int64),
            self.sums.fair,
            MappingProxyType(dict(self.groups)),
            self._free(),
            self.memory,
        )
        decision = self.policy.decide(view)
        self.memory = decision.memory
        self.wake_at = decision.wake_seconds if decision.wake_seconds > self.now else math.inf
        place = f"policy {self.policy.name!r} at {self.now:.1f} s"
        for number in decision.stop:
            if number not in self.groups:
                raise ScheduleError(
                    "a group is to stop that does not run",
                    value=number,
                    place=place,
                    remedy="let the policy stop groups of the view that it was given",
                )
            for member in self._dissolve(number):
                self.runs[member.job].wanted = None
        for group in decision.start:
            check_group(group, self.jobs, self.cluster, self.now, self._free(), self.progress, place)
            for member in group.members:
                self.runs[member.job].wanted = member.devices
            self._enter(group)

    def _free(self) -> np.ndarray:
        free = np.ones(self.cluster.num_devices, bool)
        for group in self.groups.values():
            free[list(group.devices)] = False
        return free

    def _enter(self, group: Group) -> None:
        number = self.num_groups = self.num_groups + 1
        self.groups[number], self.since[number] = group, self.now
        self.sums.num_held += len(group.devices)
        rates = get_discipline(group.discipline).rates(
            group, [self.jobs[member.job] for member in group.members], self.cluster
        )
        computing = [rate * seconds for rate, seconds in zip(rates.iterations_per_second, rates.device_seconds)]
        for index, member in enumerate(group.members):
            share = len(group.devices) * computing[index] / sum(computing)
            self.progress.hold(member.job, self.now, number, share, 0.0, self.now)

    def _dissolve(self, number: int) -> Sequence[Member]:
        group = self.groups.pop(number)
        self.sums.num_held -= len(group.devices)
        self.spans.append(
            Span(
                tuple(member.job for member in group.members), group.computing_devices, self.since.pop(number), self.now
            )
        )
        self.iterations.withdraw(number, self.now)
        for member in group.members:
            self.progress.release(member.job, self.now)
        return group.members

    def _leave(self, job: int) -> None:
        """Lets a job that is done leave; the rest of its group goes on."""
        for number, group in list(self.groups.items()):
            if all(member.job != job for member in group.members):
                continue
            rest = tuple(member for member in group.members if member.job != job)
            self._dissolve(number)
            if rest:
                self._enter(dataclasses.replace(group, members=rest))
        self.runs[job].wanted = None
        self.active.remove(job)
        self.sums.demand -= self.jobs[job].num_workers
        self.progress.finished[job], self.progress.fair_at_finish[job] = self.now, self.sums.fair
        self.must_decide = True

    # Processes

    def _serve(self) -> None:
        """Starts everything that can begin now: processes, checkpoints, iterations, tasks."""
        while any([self._settle(run) for run in self.runs]):  # one that leaves makes room for another
            pass
        self.iterations.dispatch(self.now)
        for number in list(self.groups):
            while self._grant(number):
                self.iterations.dispatch(self.now)

    def _settle(self, run: JobRun) -> bool:
        """Moves the processes of a job to where its policy wants them. Returns whether there was something to do."""
        before = run.status
        if not run.grants:
            self._settle_idle(run)
        return run.status is not before

    def _settle_idle(self, run: JobRun) -> None:
        if run.status is Status.RUNNING:
            is_done = run.num_done >= run.job.num_iterations
            is_due = run.checkpoint_due(self.options.checkpoint_every_seconds) <= self.now
            if (is_done or is_due or run.wanted != run.devices) and run.num_done > run.num_saved:
                self.engine.save(run.number, run.num_done)
                run.status, run.asked = Status.SAVING, self.now
                return
            if is_done:
                self.engine.stop(run.number)
                run.status, run.devices = Status.DONE, ()
                self._leave(run.number)
                return
            if run.wanted != run.devices:
                self.engine.stop(run.number)
                run.status, run.devices = Status.WAITING, ()
        if (
            run.status is Status.WAITING
            and run.wanted is not None
            and not any(blocker.blocks(run.wanted) for blocker in self.runs if blocker is not run)
        ):
            self._start(run, run.wanted)

    def _start(self, run: JobRun, devices: tuple[int, ...]) -> None:
        run.attempt += 1
        run.status, run.devices, run.asked = Status.STARTING, devices, self.now
        self.progress.starts[run.number] += 1
        per_node = self.cluster.devices_per_node
        self.engine.start(
            run.number,
            run.program,
            tuple(
                Place(run.job.name, worker, len(devices), device, device % per_node, run.attempt)
                for worker, device in enumerate(devices)
            ),
        )

    def _died(self, run: JobRun, reason: str) -> None:
        """Lets a job begin again from the checkpoint, on the same devices if its policy does not say otherwise
        meanwhile."""
        self.engine.stop(run.number)
        for grant in list(run.grants):
            self.iterations.cancel(grant, self.now)
        self._set_done(run, run.num_saved)
        run.status, run.devices = Status.WAITING, ()
        run.attempt += 1  # what its processes still report is void
        run.restarts += 1
        if run.restarts <= self.options.max_restarts:
            logger.warning(
                "job %s: %s; it begins again after iteration %d, restart %d",
                run.job.name,
                reason,
                run.num_saved,
                run.restarts,
            )
            return
        logger.warning("job %s: %s; given up after %d restarts", run.job.name, reason, self.options.max_restarts)
        run.status, run.failed = Status.DONE, reason
        self._leave(run.number)

    def _set_done(self, run: JobRun, num_done: int) -> None:
        """Sets how many iterations of a job are done; what is lost is no work."""
        self.sums.add(run.roll_back(num_done))
        self.progress.remaining[run.number] = run.job.num_iterations - num_done

    def _grant(self, number: int) -> bool:
        """Grants a group's next iteration if it can begin at once, among the members whose processes are up and have no
        checkpoint to write first."""
        group = self.groups.get(number)
        if group is None:
            return False
        every = self.options.checkpoint_every_seconds
        ready = tuple(
            member
            for member in group.members
            if (run := self.runs[member.job]).can_go_on(member.devices) and run.checkpoint_due(every) > self.now
        )
        return self.iterations.grant(number, dataclasses.replace(group, members=ready), self.now)

    # Reports

    def _take(self, report: WorkerReport) -> None:
        run = self.runs[report.job]
        if report.attempt != run.attempt or run.status in (Status.WAITING, Status.DONE):
            return
        if report.kind is Kind.DIED:
            self._died(run, f"worker {report.worker}: {report.reason}")
        elif report.kind is Kind.STARTED:
            self._set_done(run, report.number)
            run.num_saved, run.status, run.saved_at, run.ready_at = report.number, Status.RUNNING, self.now, self.now
        elif report.kind is Kind.SAVED:
            run.saved(report.number, self.now)
        else:
            self.iterations.report(run, report, self.now)

    # Results

    def _execution(self) -> Execution:
        total, busy = self.sums.parts()
        result = SimulationResult(
            self.policy.name, self.cluster, self.progress.records(), total, busy, self.num_decisions, tuple(self.spans)
        )
        by_name = lambda value: {run.job.name: value(run) for run in self.runs}
        failed = {run.job.name: run.failed for run in self.runs if run.failed}
        return Execution(
            result,
            tuple(self.iterations.tasks),
            by_name(lambda run: run.metrics),
            by_name(lambda run: run.restarts),
            failed,
        )
