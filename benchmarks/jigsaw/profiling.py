"""Profiles of the jobs of real execution, and what a switch between jobs costs: run through the executor, and read.

Each job is run by itself on both devices, and all jobs are run at once, so that a device goes from one to another after
every task."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.jigsaw.jobs import MODELS
from benchmarks.jigsaw.processes import GUESS, Run
from benchmarks.jigsaw.switching import of_kinds, switch_seconds
from splitjax.schedule import Depth, Execution, Job, JobProfile, Policy, TaskRecord
from splitjax.schedule.model.jobs import DEVICE
from splitjax.schedule.policies.group_plan import PackingOptions
from splitjax.schedule.policies.orders import fifo
from splitjax.schedule.policies.packing import pack

PROFILE_ROUNDS = 3
ALONE_ITERATIONS, MIXED_ITERATIONS = 7, 12  # of each job, where it is profiled between two runs; two warm up
# JigSaw with all jobs on the devices at once.
ALL_AT_ONCE = Policy(
    "jigsaw-all",
    lambda view: pack(view, fifo(view), "jigsaw", PackingOptions(density=float(len(MODELS)))),
    "",
    "",
    "fifo",
    "gang-fifo",
)

Runner = Callable[[str | Policy, Sequence[Job], int], Run]


@dataclasses.dataclass(frozen=True)
class Known:
    """Measured profiles by job: `full` where all workers are at full depth, `partial` under partial backpropagation.

    A worker at full depth takes longer where the other is at full depth, too: they share a machine's memory and, in
    part, its cores."""

    full: dict[str, JobProfile]
    partial: dict[str, JobProfile]


@dataclasses.dataclass(frozen=True)
class Profiled:
    """What was run of the jobs to profile them, one job after the other, each with nobody beside it: all workers at
    full depth (`whole`), and under partial backpropagation (`partial`)."""

    whole: Execution
    partial: Execution


def run_alone(run: Runner, names: Iterable[str], num_iterations: int = ALONE_ITERATIONS) -> Profiled:
    """Runs each job by itself for so many iterations, in each way."""
    jobs = [Job(name, 0.0, 2, num_iterations, GUESS) for name in names]
    return Profiled(*(run(policy, jobs, 0).execution for policy in ("gang-fifo", "spb-fifo")))


def run_mixed(run: Runner, names: Iterable[str], num_iterations: int = MIXED_ITERATIONS) -> Execution:
    """Runs all jobs at once, so that a device goes from one to another after every task."""
    return run(ALL_AT_ONCE, [Job(name, 0.0, 2, num_iterations, GUESS) for name in names], 0).execution


def read_switches(alone: Sequence[Profiled], mixed: Sequence[Execution]) -> dict[str, float]:
    """By job, the seconds that a device loses when it goes from another job's task to one of it."""
    same, other = of_kinds((one.partial for one in alone), False), of_kinds(mixed, True)
    return {name: switch_seconds(name, same, other) for name in dict.fromkeys(job for job, _ in same)}


def read_profiles(alone: Sequence[Profiled], switches: Mapping[str, float]) -> Known:
    """Each job's profile, by all of `alone` together: times are those for which it has its devices' tokens."""
    partial = [one.partial for one in alone]
    found = {name: dataclasses.replace(_profile(name, partial), switch_seconds=lost) for name, lost in switches.items()}
    return Known({name: _full_profile(name, [one.whole for one in alone], found[name]) for name in found}, found)


def profiles(run: Runner, names: Iterable[str], num_iterations: int, rounds: int = PROFILE_ROUNDS) -> Known:
    """Each job's, from `rounds` runs in each way, in turns: a cost of a few percent is lost in what a machine drifts
    between two runs."""
    names = tuple(names)
    pairs = [(run_alone(run, names, num_iterations), run_mixed(run, names, num_iterations)) for _ in range(rounds)]
    alone, mixed = zip(*pairs, strict=True)
    return read_profiles(alone, read_switches(alone, mixed))


def _tasks_of(name: str, executions: Sequence[Execution]) -> list[list[TaskRecord]]:
    """Gives the tasks of a job on devices by run, without its first two iterations."""
    return [
        [task for task in execution.tasks if task.job == name and task.resource == DEVICE and task.number > 2]
        for execution in executions
    ]


def _full_profile(name: str, executions: Sequence[Execution], partial: JobProfile) -> JobProfile:
    """The profile of a job whose workers are all at full depth, from runs of such iterations; forward and backward pass
    have the shares of `partial`."""
    runs = _tasks_of(name, executions)
    full = statistics.median(task.end_seconds - task.start_seconds for tasks in runs for task in tasks)
    scale = full / partial.task_seconds(0)
    depths = tuple(
        dataclasses.replace(depth, backward_seconds=depth.backward_seconds * scale) for depth in partial.depths
    )
    exposed = max(0.0, _period(runs) - full)
    return dataclasses.replace(
        partial, forward_seconds=partial.forward_seconds * scale, depths=depths, exposed_seconds=exposed
    )


def _period(runs: Sequence[Sequence[TaskRecord]]) -> float:
    """Gives the median time from the begin of an iteration to that of the next of the same run."""
    starts = [sorted({task.number: task.start_seconds for task in tasks if task.worker == 0}.items()) for tasks in runs]
    return statistics.median(after[1] - before[1] for own in starts for before, after in zip(own, own[1:]))


def _profile(name: str, executions: Sequence[Execution]) -> JobProfile:
    runs = _tasks_of(name, executions)
    full, half = (
        statistics.median(
            task.end_seconds - task.start_seconds for tasks in runs for task in tasks if task.depth == depth
        )
        for depth in (0, 1)
    )
    period = _period(runs)
    backward = min(max(2 * (full - half), 0.1 * full), 0.9 * full)
    return JobProfile(name, full - backward, (Depth(1.0, backward), Depth(0.5, backward / 2)), max(0.0, period - full))
