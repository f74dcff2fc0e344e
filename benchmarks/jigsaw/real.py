"""Four training jobs of two workers each on two devices of one processor core, run for real through Ray: gang FIFO,
Muri, JigSaw, and what each part of JigSaw gives.

Every worker is a process pinned to its device's core; they are started once, and every run trains from the beginning.
The jobs of a device take turns by its token. Profiles are measured first, each job alone. Then all policies run in
turns, round by round: each round's jobs come in another order and see other batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.jigsaw.jobs import MODELS, Lasting, LastingEngine, build, processor_seconds
from splitjax.schedule import (
    Cluster,
    Depth,
    Execution,
    ExecutionOptions,
    Job,
    JobProfile,
    Options,
    Policy,
    RayEngine,
    RayOptions,
    execute,
    simulate,
)
from splitjax.schedule.model.jobs import DEVICE
from splitjax.schedule.policies.group_plan import PackingOptions
from splitjax.schedule.policies.orders import fifo
from splitjax.schedule.policies.packing import pack

CLUSTER = Cluster(1, 2)
ROUNDS = 5
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


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a policy: seconds of processor that jobs, and Ray and the executor, took in it."""

    execution: Execution
    jobs_seconds: float
    other_seconds: float

    @property
    def makespan(self) -> float:
        return self.execution.result.makespan

    @property
    def busy(self) -> float:
        return self.execution.result.busy

    @property
    def computing(self) -> float:
        """Share of the cores' time in which jobs' processes computed."""
        return self.jobs_seconds / (CLUSTER.num_devices * self.makespan)

    @property
    def losses(self) -> dict[str, float]:
        return {name: metrics["loss"] for name, metrics in self.execution.metrics.items()}


Runner = Callable[[str | Policy, Sequence[Job], int], Run]


@contextlib.contextmanager
def started() -> Iterator[Runner]:
    """Processes of all jobs; `run(policy, jobs, seed)`."""
    from splitjax.runtime.scheduled import DecoratedJob, one_core_environment

    cores = tuple(sorted(os.sched_getaffinity(0)))[: CLUSTER.num_devices]
    environment = {
        **one_core_environment(),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
    }
    guess = JobProfile("guess", 0.05, (Depth(1.0, 0.1), Depth(0.5, 0.05)))
    jobs = [Job(name, 0.0, 2, 1, guess) for name in MODELS]
    with tempfile.TemporaryDirectory() as root:
        folders = {job.name: pathlib.Path(root) / job.name for job in jobs}
        programs = {
            name: Lasting(DecoratedJob(functools.partial(build, name), folder)) for name, folder in folders.items()
        }
        engine = LastingEngine(
            RayEngine(CLUSTER, RayOptions(cores=cores, environment=environment)), jobs, programs, folders
        )

        def run(policy: str | Policy, jobs: Sequence[Job], seed: int) -> Run:
            engine.rewind(jobs, seed)
            before = processor_seconds()
            execution = execute(
                jobs, programs, CLUSTER, policy, engine, ExecutionOptions(checkpoint_every_seconds=3600.0)
            )
            after = processor_seconds()
            if execution.failed or any(execution.restarts.values()):
                raise RuntimeError(f"jobs failed: {execution.failed}, {execution.restarts}")
            return Run(execution, after[0] - before[0], after[1] - before[1])

        try:
            yield run
        finally:
            engine.end()


def profiles(run: Runner, num_iterations: int) -> dict[str, JobProfile]:
    """Each job's, from iterations of its own with nobody beside it: times are those for which it has its devices'
    tokens."""
    guess = JobProfile("guess", 0.05, (Depth(1.0, 0.1), Depth(0.5, 0.05)))
    found = run("spb-fifo", [Job(name, 0.0, 2, num_iterations, guess) for name in MODELS], 0).execution
    return {name: _profile(name, found) for name in MODELS}


def _profile(name: str, execution: Execution) -> JobProfile:
    tasks = [task for task in execution.tasks if task.job == name and task.resource == DEVICE and task.number > 2]
    full, half = (
        statistics.median(task.end_seconds - task.start_seconds for task in tasks if task.depth == depth)
        for depth in (0, 1)
    )
    starts = sorted({task.number: task.start_seconds for task in tasks if task.worker == 0}.items())
    period = statistics.median(after[1] - before[1] for before, after in zip(starts, starts[1:]))
    backward = min(max(2 * (full - half), 0.1 * full), 0.9 * full)
    return JobProfile(name, full - backward, (Depth(1.0, backward), Depth(0.5, backward / 2)), max(0.0, period - full))


def section(quick: bool, data_dir: pathlib.Path) -> Any:
    """Makespan, busy share and final losses under each policy."""
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Goal, Section

    rounds: list[dict[str, Run]] = []
    predicted: list[dict[str, float]] = []
    with started() as run:
        known = profiles(run, 8 if quick else 20)
        for seed in range(1 if quick else ROUNDS):
            order = [*MODELS][seed % len(MODELS) :] + [*MODELS][: seed % len(MODELS)]
            jobs = [
                Job(name, 0.0, 2, MODELS[name].num_iterations // (4 if quick else 1), known[name]) for name in order
            ]
            turn = [*POLICIES][seed % len(POLICIES) :] + [*POLICIES][: seed % len(POLICIES)]
            found = {title: run(POLICIES[title], jobs, seed) for title in turn}
            rounds.append({title: found[title] for title in POLICIES})
            simulated = {
                title: simulate(jobs, CLUSTER, policy, Options(restart_seconds=0.0, exact=True)).makespan
                for title, policy in POLICIES.items()
            }
            predicted.append({title: seconds / simulated[GANG] for title, seconds in simulated.items()})
            print(
                {title: f"{one.makespan:.1f} s, computing {one.computing:.0%}" for title, one in rounds[-1].items()},
                flush=True,
            )

    def median(what: Callable[[Run], float], title: str) -> float:
        return statistics.median(what(one[title]) for one in rounds)

    def ratio(title: str, base: str = GANG, what: Callable[[Run], float] = lambda run: run.makespan) -> float:
        return statistics.median(what(one[title]) / what(one[base]) for one in rounds)

    def spread(title: str) -> str:
        ratios = sorted(one[title].makespan / one[GANG].makespan for one in rounds)
        return f"{ratios[0]:.3f} to {ratios[-1]:.3f}"

    per_iteration = sum(MODELS[name].num_iterations // (4 if quick else 1) for name in MODELS)
    lines = [
        (
            "Four jobs of two workers each (VGG-11 and a perceptron on digits, a transformer and an LSTM on text,"
            f" Adam), all there from the beginning; two devices of one core; Ray. Medians of {len(rounds)} rounds; in"
            " each, all policies run in turn, jobs in another order and on other batches. Processes are started and"
            " programs compiled before. *Busy*: share of the time in which a device's token is with a job."
            " *Computing*: share of the cores' time that the jobs' processes used. *Predicted*: the simulator's, from"
            " the measured profiles."
        ),
        "",
        *table(
            (
                "policy",
                "makespan, s",
                "over gang FIFO",
                "least to most",
                "predicted",
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
                    f"{statistics.median(one[title] for one in predicted):.3f}",
                    f"{median(lambda run: run.busy, title):.1%}",
                    f"{median(lambda run: run.computing, title):.1%}",
                    f"{median(lambda run: run.jobs_seconds, title):.1f}",
                    f"{1000 * median(lambda run: run.other_seconds, title) / per_iteration:.1f}",
                )
                for title in POLICIES
            ),
        ),
        "",
        "Measured profiles, ms:",
        "",
        *table(
            ("job", "forward", "backward", "exposed", "iterations"),
            (
                (
                    name,
                    *(
                        f"{1000 * value:.1f}"
                        for value in (one.forward_seconds, one.depths[0].backward_seconds, one.exposed_seconds)
                    ),
                    str(MODELS[name].num_iterations),
                )
                for name, one in known.items()
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
        Goal("real, busy share of JigSaw over gang FIFO", ratio(JIGSAW, GANG, lambda run: run.busy), 1.0, False),
    ]
    return Section("Real execution", lines, goals)
