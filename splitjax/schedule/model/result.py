"""Holds what a simulation, or a real run, says in the end.

Records of jobs and integrals of work come in; figures such as completion times, efficiencies and fairness come out, as
properties and as JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitjax.display import registry
from splitjax.schedule.model.cluster import Cluster


@dataclasses.dataclass(frozen=True)
class JobRecord:
    """Records what became of a job.

    **Attributes:**

    - `name`, `tag`, `num_workers`, `arrival_seconds`: those of its `Job`.
    - `start_seconds`: its first device time. `finish_seconds`: when its last iteration was over.
    - `exclusive_seconds`: its time alone with full backpropagation.
    - `running_seconds`: how long it had devices. `device_seconds`: what it held of devices (shared ones by the share
      that it computed).
    - `fair_seconds`: its time in the cluster, each moment multiplied by how many times over its devices the cluster was
      asked for (at least 1).
    - `num_starts`: how often its processes were started.
    """

    name: str
    tag: str
    num_workers: int
    arrival_seconds: float
    start_seconds: float
    finish_seconds: float
    exclusive_seconds: float
    running_seconds: float
    device_seconds: float
    fair_seconds: float
    num_starts: int

    @property
    def completion_seconds(self) -> float:
        """Gives the time from arrival to finish."""
        return self.finish_seconds - self.arrival_seconds

    @property
    def queueing_seconds(self) -> float:
        """Gives the part of `completion_seconds` that it spent without devices."""
        return self.completion_seconds - self.running_seconds

    @property
    def unfairness(self) -> float:
        """Gives the finish-time fairness of Mahajan et al., "Themis" (NSDI'20, section 3): completion time over that on
        an equal share of the cluster, here `exclusive_seconds` times the mean number of times that the cluster was
        asked for over while it was there. Fair is 1 or less."""
        contention = self.fair_seconds / self.completion_seconds if self.completion_seconds > 0 else 1.0
        return self.completion_seconds / (self.exclusive_seconds * contention)


@dataclasses.dataclass(frozen=True)
class Work:
    """Integrates over a part of a run.

    **Attributes:**

    - `seconds`: how long it was. `device_seconds`: times the cluster's devices.
    - `busy_device_seconds`: of these, computing. `held_device_seconds`: in a group.
    - `finished_device_seconds`: finished iterations, each at its full-backpropagation device time.
    - `credited_device_seconds`: the same less the backward work that was skipped.
    - `floor_device_seconds`: what these iterations take at least of each resource (`RESOURCES`) with partial
      backpropagation, perfectly packed.
    """

    seconds: float = 0.0
    device_seconds: float = 0.0
    busy_device_seconds: float = 0.0
    held_device_seconds: float = 0.0
    finished_device_seconds: float = 0.0
    credited_device_seconds: float = 0.0
    floor_device_seconds: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    @property
    def rate(self) -> float:
        """Gives the finished full-backpropagation device-seconds per device-second; NaN over no time."""
        return self.finished_device_seconds / self.device_seconds if self.device_seconds else math.nan

    @property
    def credited_rate(self) -> float:
        """Gives the finished device-seconds per device-second, only backward work really done counted; NaN over no
        time."""
        return self.credited_device_seconds / self.device_seconds if self.device_seconds else math.nan

    @property
    def bound(self) -> float:
        """Gives the rate that perfect packing of just these iterations would have: no policy of partial backpropagation
        exceeds it."""
        floor = max(self.floor_device_seconds)
        return self.finished_device_seconds / floor if floor else math.nan


@dataclasses.dataclass(frozen=True)
class Span:
    """Says who computed where for a while, for Gantt charts.

    **Attributes:**

    - `jobs`: numbers of the jobs, which shared the devices if they are several.
    - `devices`: numbers of the devices.
    - `start_seconds`, `end_seconds`: from when and until when.
    """

    jobs: tuple[int, ...]
    devices: tuple[int, ...]
    start_seconds: float
    end_seconds: float


@dataclasses.dataclass(frozen=True)
class SimulationResult:
    """Holds what one policy made of one trace.

    **Attributes:**

    - `policy`: its name. `cluster`: the devices there were.
    - `records`: the jobs, in the trace's order. `total`: the whole run. `busy_part`: the times at which the jobs there
      asked for at least as many devices as there are.
    - `num_decisions`: how often the policy was asked. `spans`: who computed where, where asked for.
    """

    policy: str
    cluster: Cluster
    records: tuple[JobRecord, ...]
    total: Work
    busy_part: Work
    num_decisions: int
    spans: tuple[Span, ...] = ()

    @functools.cached_property
    def completion_seconds(self) -> NDArray[np.float64]:
        """Gives the time from arrival to finish of each job, f64[jobs]."""
        return np.array([record.completion_seconds for record in self.records])

    @property
    def avg_jct(self) -> float:
        """Gives the mean job completion time, in seconds."""
        return float(self.completion_seconds.mean())

    @property
    def p99_jct(self) -> float:
        """Gives the 99th percentile of job completion times, in seconds."""
        return float(np.percentile(self.completion_seconds, 99))

    @property
    def makespan(self) -> float:
        """Gives the seconds from the first arrival to the last finish."""
        return max(record.finish_seconds for record in self.records) - min(
            record.arrival_seconds for record in self.records
        )

    @property
    def queueing(self) -> float:
        """Gives the mean seconds that a job spends without devices."""
        return float(np.mean([record.queueing_seconds for record in self.records]))

    @property
    def busy(self) -> float:
        """Gives the share of all device time, first arrival to last finish, that was computing."""
        return self.total.busy_device_seconds / self.total.device_seconds

    @property
    def unfairness(self) -> NDArray[np.float64]:
        """Gives the finish-time fairness of each job, f64[jobs]; fair is 1 or less."""
        return np.array([record.unfairness for record in self.records])

    def iteration_efficiency(self, baseline: SimulationResult | None = None) -> float:
        """Counts finished iterations, each at its full-backpropagation device-seconds, per device-second over the busy
        part; relative to the same of `baseline`, gang scheduling with the same order, where given. NaN if the cluster
        was never busy."""
        return _over(self.busy_part.rate, baseline and baseline.busy_part.rate)

    def cost_efficiency(self, baseline: SimulationResult | None = None) -> float:
        """Counts as `iteration_efficiency` does, relative to `baseline` where given, but an iteration only for the work
        really done, skipped backward work left out."""
        return _over(self.busy_part.credited_rate, baseline and baseline.busy_part.credited_rate)

    def bound(self, baseline: SimulationResult | None = None) -> float:
        """Gives the `iteration_efficiency` that perfect packing of the iterations finished in the busy part would have
        had, relative to the rate of `baseline` where given."""
        return _over(self.busy_part.bound, baseline and baseline.busy_part.rate)

    def figures(self, baseline: SimulationResult | None = None) -> dict[str, Any]:
        """Gives the figures as JSON values, efficiencies relative to `baseline` where given; null where the cluster was
        never busy."""
        unfair = self.unfairness
        return {
            "policy": self.policy,
            "cluster": str(self.cluster),
            "num_jobs": len(self.records),
            "avg_jct": self.avg_jct,
            "p99_jct": self.p99_jct,
            "makespan": self.makespan,
            "queueing": self.queueing,
            "busy": self.busy,
            "iteration_efficiency": _known(self.iteration_efficiency(baseline)),
            "cost_efficiency": _known(self.cost_efficiency(baseline)),
            "bound": _known(self.bound(baseline)),
            "baseline": baseline.policy if baseline else None,
            "busy_part_seconds": self.busy_part.seconds,
            "unfairness_mean": float(unfair.mean()),
            "unfairness_max": float(unfair.max()),
            "restarts": sum(record.num_starts - 1 for record in self.records),
            "decisions": self.num_decisions,
        }

    def __str__(self) -> str:
        return registry.show(self)

    def _repr_html_(self) -> str:
        return registry.html(self)


def _over(value: float, base: float | None) -> float:
    return value if base is None else value / base if base else math.nan


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
