"""The four training jobs of `jigsaw.jobs` as processes, started once, and runs of them through the executor.

A device is a processor core, and every worker is a process pinned to its device's core. A run begins all jobs anew, or
goes on where they are; what is held out is judged between runs, so that no run's time has that in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.jigsaw.jobs import Model, build, judge
from benchmarks.jigsaw.lasting import Lasting, LastingEngine
from splitjax.schedule import (
    Cluster,
    Depth,
    Execution,
    ExecutionOptions,
    Job,
    JobProfile,
    Policy,
    RayEngine,
    RayOptions,
    execute,
)

CLUSTER = Cluster(1, 2)
GUESS = JobProfile("guess", 0.05, (Depth(1.0, 0.1), Depth(0.5, 0.05)))  # where nothing has been measured yet


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
    def mean_completion(self) -> float:
        return self.execution.result.avg_jct

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


class Processes:
    """The processes of all jobs. Called as `run(policy, jobs, seed)`, it runs `jobs` from their beginning.

    **Arguments:** `engine`: holds the processes. `programs`: by name of a job, what they train.
    """

    def __init__(self, engine: LastingEngine, programs: Mapping[str, Lasting]):
        self._engine, self._programs = engine, programs

    def __call__(self, policy: str | Policy, jobs: Sequence[Job], seed: int, *, is_temporal: bool = False) -> Run:
        """Runs `jobs` from their beginning. `seed`: draws their batches. `is_temporal`: whether depths are those of a
        temporal assignment."""
        self.rewind(jobs, seed, is_temporal=is_temporal)
        before = processor_seconds()
        execution = self._execute(policy, jobs)
        after = processor_seconds()
        return Run(execution, after[0] - before[0], after[1] - before[1])

    def rewind(self, jobs: Sequence[Job], seed: int, *, is_temporal: bool = False) -> None:
        """Puts `jobs` back to their beginning; arguments as of a call."""
        self._engine.rewind(jobs, seed, is_temporal)

    def go_on(self, policy: str | Policy, jobs: Sequence[Job]) -> None:
        """Trains each of `jobs` from where it is to its number of iterations."""
        self._engine.go_on(jobs)
        self._execute(policy, jobs)

    def held_out(self, jobs: Sequence[Job]) -> dict[str, Mapping[str, float]]:
        """What each of `jobs`, as it is now, makes of examples that are held out: loss and accuracy."""
        return self._engine.held_out(jobs)

    def _execute(self, policy: str | Policy, jobs: Sequence[Job]) -> Execution:
        options = ExecutionOptions(checkpoint_every_seconds=3600.0)
        execution = execute(jobs, self._programs, CLUSTER, policy, self._engine, options)
        if execution.failed or any(execution.restarts.values()):
            raise RuntimeError(f"jobs failed: {execution.failed}, {execution.restarts}")
        return execution


@contextlib.contextmanager
def started(models: Mapping[str, Model]) -> Iterator[Processes]:
    """Processes of all jobs: by name, what each trains."""
    from splitjax.runtime.scheduled import DecoratedJob, one_core_environment

    cores = tuple(sorted(os.sched_getaffinity(0)))[: CLUSTER.num_devices]
    environment = {
        **one_core_environment(),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
    }
    jobs = [Job(name, 0.0, 2, 1, GUESS) for name in models]
    with tempfile.TemporaryDirectory() as root:
        folders = {job.name: pathlib.Path(root) / job.name for job in jobs}
        programs = {
            name: Lasting(
                DecoratedJob(functools.partial(build, models[name]), folder), functools.partial(judge, models[name])
            )
            for name, folder in folders.items()
        }
        engine = LastingEngine(
            RayEngine(CLUSTER, RayOptions(cores=cores, environment=environment)), jobs, programs, folders, cores
        )
        try:
            yield Processes(engine, programs)
        finally:
            engine.end()


def processor_seconds() -> tuple[float, float]:
    """Used so far by the processes of jobs, and by what runs them: this process and Ray's own."""
    parents, used, names = {}, {}, {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            names[int(folder.name)] = (folder / "cmdline").read_text()
        except OSError:
            continue  # it has ended
        parents[int(folder.name)], used[int(folder.name)] = (
            int(fields[1]),
            (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
        )
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    jobs = sum(used[pid] for pid in ours if names.get(pid, "").startswith("ray::"))
    return jobs, sum(used[pid] for pid in ours) - jobs
