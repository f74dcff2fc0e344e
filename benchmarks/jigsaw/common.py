"""What the scheduler's sections share: the traces of the efficiency goals, and the bound that the jobs present set at
each moment."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Sequence

import numpy as np

from splitjax.schedule import (
    Cluster,
    Job,
    JobProfile,
    Policy,
    SimulationResult,
    View,
    generate,
    get,
    read_muri,
    read_philly,
    simulate,
)
from splitjax.schedule.policies.group_plan import demands

CLUSTER = Cluster(16, 8)
ORDERS = ("srtf", "las", "fifo")
PHILLY = ("ee9e8c", "7f04ca", "103959", "6c71a0", "4+ GPUs", "all")
# Jobs drawn of the longer traces; of the others each job once. Of the mixed ones, where few jobs make most of the load,
# it takes many to keep a cluster asked for.
DRAWN = {"6c71a0": 5000, "4+ GPUs": 2000, "all": 8000, "muri 2": 2000}
MURI = {"muri 1": "trace1.csv", "muri 2": "trace2.csv", "muri 3": "trace3.csv"}
TRACES = (*PHILLY, *MURI)
# Philly tells no iteration times: jobs take these in turn, so that not all are in step
_SECONDS = (0.2, 0.35, 0.5, 0.7, 0.9)


def named(policy: str, order: str) -> str:
    """`jigsaw` in another order is `jigsaw-ORDER`."""
    return policy if order == "srtf" else f"{policy}-{order}"


@functools.lru_cache(maxsize=4)
def _philly(path: pathlib.Path):
    return read_philly(path, skip_malformed=True)


@functools.lru_cache(maxsize=32)
def sizes(trace: str, data_dir: pathlib.Path, *, exposed: float = 0.0, memory_bytes: int = 0) -> tuple[Job, ...]:
    """The jobs of one of `TRACES`, computing all the time but `exposed` of it, in equal layers."""
    if trace in MURI:
        return read_muri(data_dir / "muri" / MURI[trace], stages=False, exposed_fraction=exposed).jobs
    read = _philly(data_dir / "philly_jobs.csv.gz")
    read = read.only(min_workers=4) if trace == "4+ GPUs" else read if trace == "all" else read.only(tags=[trace])
    profiles = [
        JobProfile.uniform(f"{seconds} s", seconds, exposed_fraction=exposed, memory_bytes=memory_bytes)
        for seconds in _SECONDS
    ]
    found = []
    for number, job in enumerate(read.jobs):
        profile = profiles[number % len(profiles)]
        found.append(
            dataclasses.replace(
                job, profile=profile, num_iterations=max(1, round(job.exclusive_seconds / profile.iteration_seconds))
            )
        )
    return tuple(found)


def draw(jobs: Sequence[Job], trace: str, load: float, seed: int, quick: bool = False) -> tuple[Job, ...]:
    """Poisson arrivals at `load` on `CLUSTER`."""
    return generate(jobs, CLUSTER, load=load, seed=seed, num_jobs=300 if quick else DRAWN.get(trace))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A policy beside gang scheduling in its order: iteration efficiency, cost efficiency, bound, and `attainable`, the
    bound that counts only jobs that were there (`attainable_rate`)."""

    result: SimulationResult
    efficiency: float
    cost: float
    bound: float
    attainable: float

    @property
    def share(self) -> float:
        """Of the bound's gain, the part that was had."""
        return (self.efficiency - 1) / (self.bound - 1) if self.bound > 1 else 1.0


def outcome(
    jobs: Sequence[Job], policy: str | Policy, baseline: SimulationResult, cluster: Cluster = CLUSTER
) -> Outcome:
    """Simulates `policy`. Raises `AssertionError` if it is above a bound."""
    policy = get(policy) if isinstance(policy, str) else policy
    watched, attainable = _watched(policy)
    result = simulate(jobs, cluster, watched)
    efficiency, bound = result.iteration_efficiency(baseline), result.bound(baseline)
    reachable = attainable(result) / baseline.busy_part.rate if baseline.busy_part.seconds else 1.0
    if efficiency > bound * (1 + 1e-9) or efficiency > reachable * (1 + 1e-6):
        raise AssertionError(f"{policy.name} is above a bound: {efficiency} > {bound} or {reachable}")
    return Outcome(result, efficiency, result.cost_efficiency(baseline), bound, min(bound, reachable))


def _watched(policy: Policy):
    """The policy, and a function that tells the rate that perfect packing could have had of the jobs that were there:
    no job faster than alone (temporal variants, which shorten every iteration, excepted: they are held to the bound
    alone), demand no more than the devices."""
    log: list[tuple[float, float]] = []
    known: dict[str, np.ndarray] = {}
    free = policy.name.startswith("temporal")

    def decide(view: View):
        if not known:
            known["demand"] = demands(view, True)
        wide, need, devices = view.num_workers, known["demand"][view.active], view.cluster.num_devices
        rate = -1.0
        if wide.sum() >= devices:
            order = np.argsort(need / wide, kind="stable")
            served = np.clip((devices - (np.cumsum(need[order]) - need[order])) / need[order], 0, 1)
            rate = float((served * wide[order]).sum() / devices)
        log.append((view.now_seconds, rate))
        return policy.decide(view)

    def attainable(result: SimulationResult) -> float:
        ends = [*(time for time, _ in log[1:]), max(record.finish_seconds for record in result.records)]
        parts = [(end - begin, rate) for (begin, rate), end in zip(log, ends) if rate >= 0]
        seconds = sum(length for length, _ in parts)
        return float("inf") if free or not seconds else sum(length * rate for length, rate in parts) / seconds

    return dataclasses.replace(policy, decide=decide), attainable
