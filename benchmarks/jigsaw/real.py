"""Four training jobs of two workers each on two devices of one processor core, run for real through Ray: gang FIFO,
Muri, JigSaw, and what each part of JigSaw gives.

Every worker is a process pinned to its device's core; they are started once, and every run trains from the beginning.
The jobs of a device take turns by its token. All policies run in turns, round by round: each round's jobs come in
another order and see other batches. Profiles, each job alone, and what a switch between jobs costs are measured before
the first round and after every one: a round is simulated from the two measurements around it, as a machine that is
shared may be a fifth slower half an hour later. Policies place by the measurements that were there when they ran.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.jigsaw.jobs import MODELS
from benchmarks.jigsaw.processes import CLUSTER, GUESS, Run, started
from benchmarks.jigsaw.switching import of_kinds, switch_seconds
from splitjax.schedule import Depth, Execution, Job, JobProfile, Options, Policy, TaskRecord, simulate
from splitjax.schedule.model.jobs import DEVICE
from splitjax.schedule.policies.group_plan import PackingOptions
from splitjax.schedule.policies.orders import fifo
from splitjax.schedule.policies.packing import pack

ROUNDS = 5
PROFILE_ROUNDS = 3
MOST_ERROR = 0.05
GANG, MURI, ALONE, FULL, JIGSAW, ALL = (
    "gang FIFO",
    "Muri",
    "partial backpropagation alone",
    "packing alone",
    "JigSaw",
    "JigSaw, all jobs at once",
)
POLICIES: dict[str, str | Policy] = {
    GANG: "gang-fifo",
    MURI: "muri-s",
    ALONE: "spb-fifo",
    FULL: "interleave-fifo",
    JIGSAW: "jigsaw-fifo",
    ALL: Policy(
        "jigsaw-all",
        lambda view: pack(view, fifo(view), "jigsaw", PackingOptions(density=float(len(MODELS)))),
        "",
        "",
        "fifo",
        "gang-fifo",
    ),
}
PARTIAL = (ALONE, JIGSAW, ALL)


Runner = Callable[[str | Policy, Sequence[Job], int], Run]


@dataclasses.dataclass(frozen=True)
class Known:
    """Measured profiles by job: `full` where all workers are at full depth, `partial` under partial backpropagation.

    A worker at full depth takes longer where the other is at full depth, too: they share a machine's memory and, in
    part, its cores."""

    full: dict[str, JobProfile]
    partial: dict[str, JobProfile]


def iterations(name: str, quick: bool) -> int:
    """Gives how many iterations a job does in a run."""
    return max(6, MODELS[name].num_iterations // 20) if quick else MODELS[name].num_iterations


@dataclasses.dataclass(frozen=True)
class Profiled:
    """What was run of the jobs to profile them: with nobody beside them, all workers at full depth (`whole`) and under
    partial backpropagation (`partial`); and all jobs at once (`mixed`), for the cost of a switch."""

    whole: Execution
    partial: Execution
    mixed: Execution


def run_profiled(run: Runner, num_iterations: int) -> Profiled:
    """Runs what profiles are read from: each job for so many iterations of its own, once in each way."""
    jobs = [Job(name, 0.0, 2, num_iterations, GUESS) for name in MODELS]
    return Profiled(*(run(policy, jobs, 0).execution for policy in (POLICIES[GANG], "spb-fifo", POLICIES[ALL])))


def read_profiles(runs: Sequence[Profiled]) -> Known:
    """Each job's profile, by all of `runs` together: times are those for which it has its devices' tokens. What a
    switch to a job costs is by what its tasks take where all jobs run at once."""
    partial = [one.partial for one in runs]
    alone, after = of_kinds(partial, False), of_kinds((one.mixed for one in runs), True)
    found = {
        name: dataclasses.replace(_profile(name, partial), switch_seconds=switch_seconds(name, alone, after))
        for name in MODELS
    }
    return Known({name: _full_profile(name, [one.whole for one in runs], found[name]) for name in MODELS}, found)


def profiles(run: Runner, num_iterations: int, rounds: int = PROFILE_ROUNDS) -> Known:
    """Each job's, from `rounds` runs in each way, in turns: a cost of a few percent is lost in what a machine drifts
    between two runs."""
    return read_profiles([run_profiled(run, num_iterations) for _ in range(rounds)])


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


def _jobs(known: Known, seed: int, quick: bool) -> dict[str, list[Job]]:
    """Gives the jobs of a round by policy, in the round's order: with the profiles of how the policy trains them."""
    order = [*MODELS][seed % len(MODELS) :] + [*MODELS][: seed % len(MODELS)]
    full, partial = (
        [Job(name, 0.0, 2, iterations(name, quick), profile[name]) for name in order]
        for profile in (known.full, known.partial)
    )
    return {title: partial if title in PARTIAL else full for title in POLICIES}


def section(quick: bool, data_dir: pathlib.Path) -> Any:
    """Makespan, busy share and final losses under each policy."""
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Goal, Section

    rounds: list[dict[str, Run]] = []
    predicted: list[dict[str, float]] = []
    with started() as run:
        profiled = [run_profiled(run, 5 if quick else 20)]
        for seed in range(1 if quick else ROUNDS):
            jobs = _jobs(read_profiles(profiled), seed, quick)
            turn = [*POLICIES][seed % len(POLICIES) :] + [*POLICIES][: seed % len(POLICIES)]
            found = {title: run(POLICIES[title], jobs[title], seed) for title in turn}
            rounds.append({title: found[title] for title in POLICIES})
            profiled.append(run_profiled(run, 5 if quick else 20))
            jobs = _jobs(read_profiles(profiled[-2:]), seed, quick)
            predicted.append(
                {
                    title: simulate(jobs[title], CLUSTER, policy, Options(restart_seconds=0.0, exact=True)).makespan
                    for title, policy in POLICIES.items()
                }
            )
            print(
                {
                    title: f"{one.makespan:.1f} s, simulated {predicted[-1][title]:.1f}, computing {one.computing:.0%}"
                    for title, one in rounds[-1].items()
                },
                flush=True,
            )

    known = read_profiles(profiled)

    def median(what: Callable[[Run], float], title: str) -> float:
        return statistics.median(what(one[title]) for one in rounds)

    def ratio(title: str, base: str = GANG, what: Callable[[Run], float] = lambda run: run.makespan) -> float:
        return statistics.median(what(one[title]) / what(one[base]) for one in rounds)

    def spread(title: str) -> str:
        ratios = sorted(one[title].makespan / one[GANG].makespan for one in rounds)
        return f"{ratios[0]:.3f} to {ratios[-1]:.3f}"

    def error(title: str) -> float:
        return statistics.median(
            simulated[title] / one[title].makespan - 1 for simulated, one in zip(predicted, rounds, strict=True)
        )

    per_iteration = sum(iterations(name, quick) for name in MODELS)
    lines = [
        (
            "Four jobs of two workers each (VGG-11 and a perceptron on digits, a transformer and an LSTM on text,"
            f" Adam), all there from the beginning; two devices of one core; Ray. Medians of {len(rounds)} rounds; in"
            " each, all policies run in turn, jobs in another order and on other batches. Processes are started and"
            " programs compiled before. *Busy*: share of the time in which a device's token is with a job."
            " *Computing*: share of the cores' time that the jobs' processes used. *Simulated*: the simulator's, from"
            " profiles that were measured right before the round and right after it, at full depth for policies with"
            " full backpropagation and under partial backpropagation for the others, each with nobody beside it, and"
            " with what a switch between jobs was measured to cost; no run of a policy is used for them. The load"
            f" average was {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores when it ended."
        ),
        "",
        *table(
            (
                "policy",
                "makespan, s",
                "over gang FIFO",
                "least to most",
                "simulated, s",
                "error",
                "busy",
                "computing",
                "of jobs, CPU s",
                "of Ray and executor, CPU ms an iteration",
            ),
            (
                (
                    title,
                    f"{median(lambda run: run.makespan, title):.1f}",
                    f"{ratio(title):.3f}",
                    spread(title),
                    f"{statistics.median(one[title] for one in predicted):.1f}",
                    f"{error(title):+.1%}",
                    f"{median(lambda run: run.busy, title):.1%}",
                    f"{median(lambda run: run.computing, title):.1%}",
                    f"{median(lambda run: run.jobs_seconds, title):.1f}",
                    f"{1000 * median(lambda run: run.other_seconds, title) / per_iteration:.1f}",
                )
                for title in POLICIES
            ),
        ),
        "",
        "Measured profiles, all measurements together, ms:",
        "",
        *table(
            ("job", "depths", "forward", "backward", "exposed", "a switch", "iterations"),
            (
                (
                    name,
                    what,
                    *(
                        f"{1000 * value:.1f}"
                        for value in (
                            one.forward_seconds,
                            one.depths[0].backward_seconds,
                            one.exposed_seconds,
                            one.switch_seconds,
                        )
                    ),
                    str(iterations(name, quick)),
                )
                for what, profile in (("full", known.full), ("partial", known.partial))
                for name, one in profile.items()
            ),
        ),
        "",
        "Loss of the last iteration, first round:",
        "",
        *table(
            ("job", *POLICIES),
            ((name, *(f"{rounds[0][title].losses[name]:.6g}" for title in POLICIES)) for name in MODELS),
        ),
        "",
        (
            f"`{FULL}` is JigSaw at full depth, `{ALONE}` has whole devices: what each of JigSaw's parts gives. Partial"
            " backpropagation does less backward work, which changes the numbers; the packing does not: a job's depths"
            " and batches depend on the number of its iteration alone."
        ),
    ]

    def apart(titles: Sequence[str], base: str) -> float:
        return max(
            abs(one[title].losses[name] - one[base].losses[name])
            for one in rounds
            for title in titles
            for name in MODELS
        )

    goals = [
        Goal(
            "real, final losses under Muri and packing alone less those under gang FIFO",
            apart((MURI, FULL), GANG),
            0.0,
            True,
            ".3g",
        ),
        Goal(
            "real, final losses under JigSaw less those of partial backpropagation alone",
            apart((JIGSAW, ALL), ALONE),
            0.0,
            True,
            ".3g",
        ),
        Goal("real, makespan of JigSaw over gang FIFO", ratio(JIGSAW), 1.0, True),
        Goal("real, makespan of JigSaw over Muri", ratio(JIGSAW, MURI), 1.0, True),
        *(
            Goal(f"real, makespan of {title}: error of the simulated", abs(error(title)), MOST_ERROR, True, ".1%")
            for title in POLICIES
        ),
        Goal("real, busy share of JigSaw over gang FIFO", ratio(JIGSAW, GANG, lambda run: run.busy), 1.0, False),
    ]
    return Section("Real execution", lines, goals)
