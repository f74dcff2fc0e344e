"""Grants iterations to the groups that run, and follows their tasks until they end.

The executor asks for a group's next iteration, and hands on what processes report; tokens, tasks that begin, records of
those that ended and the work that they were come out. All tokens of an iteration are granted at once
(`schedule.execution.tokens`); a task begins when it has its token and the task before it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from splitjax.schedule.execution.engine import Engine, Kind, StepOrder, WorkerReport
from splitjax.schedule.execution.real_groups import Standing, group_state, pinned
from splitjax.schedule.execution.real_jobs import JobRun
from splitjax.schedule.execution.records import TaskRecord
from splitjax.schedule.execution.tokens import Claim, Grant, Tokens
from splitjax.schedule.model.discipline import get_discipline
from splitjax.schedule.model.iterations import iteration_credit
from splitjax.schedule.model.jobs import CPU, DEVICE, NETWORK, STORAGE, JobColumns
from splitjax.schedule.model.policy import Group
from splitjax.schedule.simulation.progress import Integrals, Progress, iteration_work


class GrantedIterations:
    """Holds the iterations under way of one real run, the queues of their tokens, and records of their tasks.

    **Arguments:**

    - `runs`: by number of a job, its processes and how far it is. `engine`: holds the processes.
    - `columns`: constants of the jobs. `progress`, `sums`: the books, into which work goes.
    """

    def __init__(
        self, runs: Sequence[JobRun], engine: Engine, columns: JobColumns, progress: Progress, sums: Integrals
    ):
        self.runs, self.engine, self.columns, self.progress, self.sums = runs, engine, columns, progress, sums
        self.tokens = Tokens()
        self.grants: list[Grant] = []  # in the order in which they were granted
        self.tasks: list[TaskRecord] = []

    def grant(self, number: int, group: Group, now: float) -> bool:
        """Asks a group's discipline for its next iteration, and grants it if one of its tasks can begin at once: what
        is granted earlier could only stand in the way of a member that turns out to be ready first.

        **Arguments:** `number`: of the group. `group`: without members that cannot go on. `now`: the time, in seconds.

        Returns whether an iteration was granted.
        """
        runs = [self.runs[member.job] for member in group.members]
        if all(run.grants for run in runs):
            return False
        jobs = [run.job for run in runs]
        standings = [self._standing(run) for run in runs]
        state = group_state(group, standings, self.grants, now)
        iteration = get_discipline(group.discipline).next_iteration(group, jobs, state)
        job, run = jobs[iteration.member], runs[iteration.member]
        if run.grants:
            return False
        free = {device: times[DEVICE] for device, times in zip(group.devices, state.free_seconds)}
        next_number = run.num_done + len(run.grants) + 1
        iteration = pinned(iteration, next_number, run.devices, free, max(now, state.ready_seconds[iteration.member]))
        depths = {task.worker: task.depth for task in iteration.tasks if task.resource == DEVICE}
        order = StepOrder(
            next_number, tuple(job.profile.depths[depths[worker]].fraction for worker in range(job.num_workers))
        )
        grant = Grant(run.number, number, order, iteration, now)
        if not any(self.tokens.is_free(claims[0]) for claims in grant.claims):
            return False
        self.grants.append(grant)
        run.grants.append(grant)
        self.tokens.grant(grant)
        return True

    def _standing(self, run: JobRun) -> Standing:
        flying = sum(claim.task.seconds for claim in self._under_way(run) if claim.task.resource == DEVICE)
        granted = run.num_done + len(run.grants)
        return Standing(granted, run.job.num_iterations - granted, run.device_seconds + flying, run.ready_at)

    def _under_way(self, run: JobRun) -> list[Claim]:
        return [claim for grant in run.grants for claim in grant.all_claims() if claim.ended is None]

    def dispatch(self, now: float) -> None:
        """Starts the tasks that have their token `now`, in seconds."""
        for claim in self.tokens.holders():
            grant = claim.grant
            run = self.runs[grant.job]
            stages = grant.claims[claim.task.worker]
            if (
                claim.started is not None
                or run.grants[0] is not grant
                or next(stage for stage in stages if stage.ended is None) is not claim
            ):
                continue
            claim.started = now
            if np.isnan(self.progress.started[run.number]):
                self.progress.started[run.number] = now
            if claim.task.resource in (STORAGE, CPU):
                self.engine.stage(run.number, claim.task.worker, grant.order.number, claim.task.resource)
            elif claim.task.resource == DEVICE:
                self.engine.step(run.number, claim.task.worker, grant.order)
            # NETWORK: the exchange is under way since the device was done with it; its end is the step's

    def _end(self, claim: Claim, now: float) -> None:
        if claim.ended is not None:
            return
        self.tokens.give_back(claim)
        claim.started, claim.ended = now if claim.started is None else claim.started, now
        task, run = claim.task, self.runs[claim.grant.job]
        self.tasks.append(
            TaskRecord(
                run.job.name,
                task.worker,
                task.device,
                task.resource,
                claim.grant.order.number,
                task.depth,
                claim.started,
                now,
            )
        )
        if task.resource == DEVICE:
            run.device_seconds += now - claim.started

    def withdraw(self, number: int, now: float) -> None:
        """Takes back what was granted to the group of this `number` and has not begun by `now`, in seconds."""
        for grant in [grant for grant in self.grants if grant.group == number and not grant.has_started]:
            self.cancel(grant, now)

    def cancel(self, grant: Grant, now: float) -> None:
        """Ends what has begun of a `grant` at `now`, in seconds, and takes the rest back."""
        for claim in grant.all_claims():
            if claim.started is not None:
                self._end(claim, now)
        self.tokens.cancel(grant)
        self.grants.remove(grant)
        self.runs[grant.job].grants.remove(grant)

    def report(self, run: JobRun, report: WorkerReport, now: float) -> None:
        """Takes the `report` of a worker of the job `run`, at `now` in seconds, on the iteration under way."""
        if not run.grants or run.grants[0].order.number != report.number:
            return
        grant = run.grants[0]
        claims = grant.claims[report.worker]
        if report.kind is Kind.STAGED:
            self._end(next(claim for claim in claims if claim.task.resource == report.resource), now)
        elif report.kind is Kind.COMPUTED:
            for claim in claims:
                if claim.task.resource != NETWORK:
                    self._end(claim, now)
        else:
            for claim in claims:
                self._end(claim, now)
            grant.finished.add(report.worker)
            if report.worker == 0:
                grant.metrics = dict(report.values)
            if grant.is_over:
                self._over(run, grant, now)

    def _over(self, run: JobRun, grant: Grant, now: float) -> None:
        run.grants.remove(grant)
        self.grants.remove(grant)
        run.num_done, run.ready_at = run.num_done + 1, now
        run.metrics = grant.metrics
        self.progress.remaining[run.number] -= 1
        seconds = sum(claim.seconds for claim in grant.all_claims() if claim.task.resource == DEVICE)
        work = iteration_work(self.columns, run.number, seconds, iteration_credit(run.job, grant.iteration))
        self.sums.add(work)
        run.unsaved.append(work)
