"""Four training jobs of two workers each on two devices of one processor core, run for real through Ray: gang FIFO,
Muri, JigSaw, and what each part of JigSaw gives.

Every worker is a process pinned to its device's core; they are started once, and every run trains from the beginning.
The jobs of a device take turns by its token. All policies run in turns, round by round: each round's jobs come in
another order and see other batches. Before the first run and after every one, each job is profiled alone: a run is
simulated from the two profiles around it, for a machine that others share changes its speed within minutes. What a
switch between jobs costs is measured before the first round and after every one, and all these measurements are taken
together. Policies place by what was known when they ran.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.jigsaw.jobs import MODELS, SMALL_MODELS, Model
from benchmarks.jigsaw.processes import CLUSTER, GUESS, Run, started
from benchmarks.jigsaw.switching import of_kinds, switch_seconds
from splitjax.schedule import Depth, Execution, Job, JobProfile, Options, Policy, TaskRecord, simulate
from splitjax.schedule.model.jobs import DEVICE
from splitjax.schedule.policies.group_plan import PackingOptions
from splitjax.schedule.policies.orders import fifo
from splitjax.schedule.policies.packing import pack

ROUNDS = 5
PROFILE_ROUNDS = 3
ALONE_ITERATIONS, MIXED_ITERATIONS = 7, 12  # of each job, where it is profiled between two runs; two warm up
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


@dataclasses.dataclass(frozen=True)
class Profiled:
    """What was run of the jobs to profile them, one job after the other, each with nobody beside it: all workers at
    full depth (`whole`), and under partial backpropagation (`partial`)."""

    whole: Execution
    partial: Execution


def run_alone(run: Runner, names: Iterable[str], num_iterations: int = ALONE_ITERATIONS) -> Profiled:
    """Runs each job by itself for so many iterations, in each way."""
    jobs = [Job(name, 0.0, 2, num_iterations, GUESS) for name in names]
    return Profiled(*(run(policy, jobs, 0).execution for policy in (POLICIES[GANG], "spb-fifo")))


def run_mixed(run: Runner, names: Iterable[str], num_iterations: int = MIXED_ITERATIONS) -> Execution:
    """Runs all jobs at once, so that a device goes from one to another after every task."""
    return run(POLICIES[ALL], [Job(name, 0.0, 2, num_iterations, GUESS) for name in names], 0).execution


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


@dataclasses.dataclass(frozen=True)
class Taken:
    """What was run: by round and policy the run; `around`: the profiles right before and right after it; `known`: by
    everything that was measured; `models`: what each job trains."""

    rounds: Sequence[Mapping[str, Run]]
    around: Sequence[Mapping[str, Known]]
    known: Known
    models: Mapping[str, Model]

    def jobs(self, seed: int, title: str) -> list[Job]:
        """The jobs of a round under a policy, with the profiles around its run."""
        return jobs_of(self.models, self.around[seed][title], seed, title)


def jobs_of(models: Mapping[str, Model], known: Known, seed: int, title: str) -> list[Job]:
    """The jobs of a round, in its order, with the profiles of how the policy `title` trains them."""
    order = [*models][seed % len(models) :] + [*models][: seed % len(models)]
    profile = known.partial if title in PARTIAL else known.full
    return [Job(name, 0.0, 2, models[name].num_iterations, profile[name]) for name in order]


def take(models: Mapping[str, Model], num_rounds: int) -> Taken:
    """Runs all policies in turns, with profiles of the jobs before the first run and after every one."""
    rounds: list[dict[str, Run]] = []
    places: list[dict[str, int]] = []  # by round and policy, which of the profiles came right before the run
    with started(models) as run:
        alone, mixed = [run_alone(run, models)], [run_mixed(run, models)]
        for seed in range(num_rounds):
            turn = [*POLICIES][seed % len(POLICIES) :] + [*POLICIES][: seed % len(POLICIES)]
            found, place = {}, {}
            switches = read_switches(alone, mixed)
            for title in turn:
                place[title] = len(alone) - 1
                now = read_profiles(alone[-1:], switches)
                found[title] = run(POLICIES[title], jobs_of(models, now, seed, title), seed)
                alone.append(run_alone(run, models))
                around = read_profiles(alone[-2:], switches)
                expected = simulated(jobs_of(models, around, seed, title), title)
                print(
                    f"{title}: {found[title].makespan:.1f} s, simulated {expected:.1f},"
                    f" computing {found[title].computing:.0%}",
                    flush=True,
                )
            mixed.append(run_mixed(run, models))
            rounds.append({title: found[title] for title in POLICIES})
            places.append(place)
    switches = read_switches(alone, mixed)
    around = [
        {title: read_profiles(alone[number : number + 2], switches) for title, number in place.items()}
        for place in places
    ]
    return Taken(rounds, around, read_profiles(alone, switches), models)


def simulated(jobs: Sequence[Job], title: str) -> float:
    """The makespan of `jobs` under a policy, in seconds, as the simulator has it."""
    return simulate(jobs, CLUSTER, POLICIES[title], Options(restart_seconds=0.0, exact=True)).makespan


def section(quick: bool, data_dir: pathlib.Path) -> Any:
    """Makespan, busy share and final losses under each policy."""
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Goal, Section

    models = SMALL_MODELS if quick else MODELS
    taken = take(models, 1 if quick else ROUNDS)
    rounds, known = taken.rounds, taken.known
    predicted = [
        {title: simulated(taken.jobs(seed, title), title) for title in POLICIES} for seed in range(len(rounds))
    ]

    def median(what: Callable[[Run], float], title: str) -> float:
        return statistics.median(what(one[title]) for one in rounds)

    def ratio(title: str, base: str = GANG, what: Callable[[Run], float] = lambda run: run.makespan) -> float:
        return statistics.median(what(one[title]) / what(one[base]) for one in rounds)

    def spread(title: str) -> str:
        ratios = sorted(one[title].makespan / one[GANG].makespan for one in rounds)
        return f"{ratios[0]:.3f} to {ratios[-1]:.3f}"

    errors = {
        title: [expected[title] / one[title].makespan - 1 for expected, one in zip(predicted, rounds, strict=True)]
        for title in POLICIES
    }
    per_iteration = sum(model.num_iterations for model in models.values())
    lines = [
        (
            "Four jobs of two workers each (VGG-11 and a perceptron on digits, a transformer and an LSTM on text,"
            f" Adam), all there from the beginning; two devices of one core; Ray. Medians of {len(rounds)} rounds; in"
            " each, all policies run in turn, jobs in another order and on other batches. Processes are started and"
            " programs compiled before. *Busy*: share of the time in which a device's token is with a job."
            " *Computing*: share of the cores' time that the jobs' processes used. *Simulated*: the simulator's, from"
            " profiles that were measured right before the run and right after it, at full depth for policies with"
            " full backpropagation and under partial backpropagation for the others, each with nobody beside it, and"
            " with what a switch between jobs was measured to cost, before the first round and after each; no run of a"
            " policy is used for them. The load average was"
            f" {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores when it ended."
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
                "errors, least to most",
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
                    f"{statistics.median(errors[title]):+.1%}",
                    f"{min(errors[title]):+.1%} to {max(errors[title]):+.1%}",
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
                    str(models[name].num_iterations),
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
            ((name, *(f"{rounds[0][title].losses[name]:.6g}" for title in POLICIES)) for name in models),
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
            for name in models
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
            Goal(
                f"real, makespan of {title}: error of the simulated",
                abs(statistics.median(errors[title])),
                MOST_ERROR,
                True,
                ".1%",
            )
            for title in POLICIES
        ),
        Goal("real, busy share of JigSaw over gang FIFO", ratio(JIGSAW, GANG, lambda run: run.busy), 1.0, False),
    ]
    return Section("Real execution", lines, goals)
