"""Four training jobs of two workers each on two devices of one processor core, run for real through Ray: gang FIFO, Muri, partial backpropagation alone, JigSaw.

Every worker is a process pinned to its device's core. The jobs of a device take turns by its token. Profiles are measured first, each job alone.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from splitjax.schedule import (
    Assignment,
    Cluster,
    Depth,
    Execution,
    ExecutionOptions,
    Job,
    JobProfile,
    Place,
    Policy,
    RayEngine,
    RayOptions,
    View,
    execute,
    get,
)
from splitjax.schedule.jobs import DEVICE
from splitjax.schedule.orders import fifo
from splitjax.schedule.packing import pack

CLUSTER = Cluster(1, 2)
START_SECONDS = 0.5  # a time without any task that is longer is one in which processes start or compile


@dataclasses.dataclass(frozen=True)
class Model:
    """What a job trains on scikit-learn's digits, `image_size` pixels wide, and for how long: no job shall be much longer than another."""

    family: str
    options: Mapping[str, Any]
    image_size: int
    channels: int
    batch_size: int
    num_iterations: int


# Multi-layer perceptrons: on processors XLA runs the convolutions of a partial backward pass some 15 times slower than those of a whole one.
MODELS = {
    name: Model("mlp", {"features": features, "input_shape": (16, 16, 1)}, 16, 1, 512, num_iterations)
    for name, features, num_iterations in (
        ("wide", (1024,) * 4, 300), ("even", (768,) * 6, 320), ("deep", (512,) * 10, 340), ("narrowing", (1024, 1024, 768, 768, 512, 512), 330),
    )
}  # fmt: skip


def build(name: str, partial: bool, place: Place) -> Any:
    """A `Training`."""
    import jax
    import numpy as np
    import optax

    import splitjax
    from splitjax.runtime.scheduled import Training, partial_steps

    model = MODELS[name]
    spec = splitjax.models.build(model.family, **model.options)
    init_fn, train_step, _ = splitjax.models.make_step(spec, optax.adam(1e-3), value_and_grad=splitjax.value_and_grad)
    data = splitjax.data.load_digits(image_size=model.image_size, channels=model.channels)

    def batch(number: int) -> Any:
        rows = np.random.default_rng(number).integers(0, data.num_train, model.batch_size)
        return data.transform({key: values[rows] for key, values in data.train.items()})

    decorate = lambda backprop: splitjax.parallelize(train_step, mesh={"data": place.num_workers}, rules="data_parallel", backprop=backprop)
    step, at_depths, warm_up = partial_steps(decorate, place.num_workers)
    return Training(step, init_fn, jax.random.key(0), batch, at_depths=at_depths, warm_up=warm_up[: 2 if partial else 1])


def alone(view: View) -> Assignment:
    """Partial backpropagation without packing: gangs in order of arrival, each iteration at JigSaw's depths."""
    decision = get("gang-fifo").decide(view)
    return dataclasses.replace(decision, start=tuple(dataclasses.replace(group, discipline="jigsaw") for group in decision.start))


def packed(view: View) -> Assignment:
    """JigSaw's packing at the density that lets all four jobs share the two devices."""
    return pack(view, fifo(view), "jigsaw", density=float(len(MODELS)))


# Name on the page, the policy, whether it differentiates partially.
POLICIES: tuple[tuple[str, str | Policy, bool], ...] = (
    ("gang FIFO", "gang-fifo", False),
    ("Muri", "muri-s", False),
    ("partial backpropagation alone", Policy("spb-alone", alone, "", "", "fifo", "gang-fifo"), True),
    ("JigSaw", Policy("jigsaw-dense", packed, "", "", "fifo", "gang-fifo"), True),
)


def run(policy: str | Policy, jobs: Sequence[Job], partial: bool, compiled: str) -> Execution:
    """All jobs from the beginning, under a policy. A Ray of its own, so that nothing is left over from an earlier one.
    `compiled`: a folder of programs that earlier runs compiled."""
    from splitjax.runtime.scheduled import DecoratedJob, one_core_environment

    cores = tuple(sorted(os.sched_getaffinity(0)))[: CLUSTER.num_devices]
    environment = {
        **one_core_environment(), "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": compiled, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        programs = {job.name: DecoratedJob(functools.partial(build, job.name, partial), pathlib.Path(folder) / job.name) for job in jobs}
        engine = RayEngine(CLUSTER, RayOptions(cores=cores, environment=environment))
        return execute(jobs, programs, CLUSTER, policy, engine, ExecutionOptions(checkpoint_every_seconds=3600.0))


def measured_profiles(num_iterations: int, compiled: str) -> dict[str, JobProfile]:
    """Each job's profile, from iterations of its own with nobody beside it: times are those for which it has its devices' tokens."""
    guess = JobProfile("guess", 0.05, (Depth(1.0, 0.1), Depth(0.5, 0.05)))
    execution = run(POLICIES[2][1], [Job(name, 0.0, 2, num_iterations, guess) for name in MODELS], True, compiled)
    return {name: _profile(name, execution) for name in MODELS}


def _profile(name: str, execution: Execution) -> JobProfile:
    tasks = [task for task in execution.tasks if task.job == name and task.resource == DEVICE and task.number > 2]
    full, half = (statistics.median(task.end_seconds - task.start_seconds for task in tasks if task.depth == depth) for depth in (0, 1))
    starts = sorted({task.number: task.start_seconds for task in tasks if task.worker == 0}.items())
    period = statistics.median(after[1] - before[1] for before, after in zip(starts, starts[1:]))
    backward = min(max(2 * (full - half), 0.1 * full), 0.9 * full)
    return JobProfile(name, full - backward, (Depth(1.0, backward), Depth(0.5, backward / 2)), max(0.0, period - full))


def starting_seconds(execution: Execution) -> float:
    """Time in which nothing runs because processes start, load or compile."""
    found, until = 0.0, 0.0
    for start, end in sorted((task.start_seconds, task.end_seconds) for task in execution.tasks):
        found += start - until if start - until > START_SECONDS else 0.0
        until = max(until, end)
    return found


def section(quick: bool, data_dir: pathlib.Path) -> Any:
    """Makespan, busy share and final losses under each policy."""
    from benchmarks._common import table
    from benchmarks._splitbrain_common import Goal, Section

    with tempfile.TemporaryDirectory() as compiled:
        profiles = measured_profiles(8 if quick else 24, compiled)
        jobs = [Job(name, 0.0, 2, 10 if quick else model.num_iterations, profiles[name]) for name, model in MODELS.items()]
        found = {title: run(policy, jobs, partial, compiled) for title, policy, partial in POLICIES}
    failed = {title: execution.failed for title, execution in found.items() if execution.failed}
    if failed:
        raise RuntimeError(f"jobs failed: {failed}")
    spans = {title: execution.result.makespan - starting_seconds(execution) for title, execution in found.items()}
    busy = {title: execution.result.total.busy_device_seconds / (CLUSTER.num_devices * spans[title]) for title, execution in found.items()}
    base = spans["gang FIFO"]
    lines = [
        "Four jobs on digits, Adam, two workers each, all there from the beginning; two devices of one core; Ray starts every worker as a process of its"
        " own. *Makespan* is less the time in which nothing runs because processes start and compile, which is given beside it."
        " *Busy*: share of the rest in which a device's token is with a job that computes.",
        "", *table(
            ("policy", "makespan, s", "over gang FIFO", "starting, s", "busy", "iterations at full worth per busy device-second"),
            (
                (
                    title, f"{spans[title]:.1f}", f"{spans[title] / base:.3f}", f"{starting_seconds(execution):.1f}", f"{busy[title]:.1%}",
                    f"{execution.result.total.finished_device_seconds / execution.result.total.busy_device_seconds:.3f}",
                )
                for title, execution in found.items()
            ),
        ),
        "", "Measured profiles, ms:", "", *table(
            ("job", "forward", "backward", "exposed", "iterations"),
            (
                (job.name, *(f"{1000 * value:.1f}" for value in (job.profile.forward_seconds, job.profile.depths[0].backward_seconds, job.profile.exposed_seconds)),
                 str(job.num_iterations))
                for job in jobs
            ),
        ),
        "", "Loss of the last iteration:", "", *table(
            ("job", *found), ((job.name, *(f"{execution.metrics[job.name]['loss']:.6g}" for execution in found.values())) for job in jobs),
        ),
        "", "A job's depths depend on the number of its iteration alone, so its losses under JigSaw are those of partial backpropagation without company, and under"
        " Muri those of full backpropagation, to the last bit. Partial backpropagation itself changes the numbers.",
    ]  # fmt: skip
    same = lambda a, b: max(abs(found[a].metrics[job.name]["loss"] - found[b].metrics[job.name]["loss"]) for job in jobs)
    goals = [
        Goal("real, final losses under Muri less those under gang FIFO", same("Muri", "gang FIFO"), 0.0, True, ".3g"),
        Goal("real, final losses under JigSaw less those of partial backpropagation alone", same("JigSaw", "partial backpropagation alone"), 0.0, True, ".3g"),
        Goal("real, makespan of JigSaw over gang FIFO", spans["JigSaw"] / base, 1.0, True),
        Goal("real, makespan of JigSaw over Muri", spans["JigSaw"] / spans["Muri"], 1.0, True),
        Goal("real, busy share of JigSaw over gang FIFO", busy["JigSaw"] / busy["gang FIFO"], 1.0, False),
    ]
    return Section("Real execution", lines, goals)
