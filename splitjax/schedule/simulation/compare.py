"""Compares several policies on the same jobs, each beside gang scheduling in the same order.

Jobs, a cluster and names of policies come in; results come out as values, as JSON, and as tables.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from splitjax.schedule.model.cluster import Cluster
from splitjax.schedule.model.jobs import Job
from splitjax.schedule.model.policy import get, names
from splitjax.schedule.model.result import SimulationResult
from splitjax.schedule.simulation.simulator import Options, simulate


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Holds the results of several policies.

    **Attributes:**

    - `results`: of the policies, in the order asked for.
    - `baselines`: policy -> result of gang scheduling in its order (its own for a gang policy).
    """

    results: tuple[SimulationResult, ...]
    baselines: dict[str, SimulationResult]

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Gives policy -> its figures (`SimulationResult.figures`)."""
        return {result.policy: result.figures(self.baselines.get(result.policy)) for result in self.results}

    def tables(self) -> tuple[Table, Table]:
        """Lays the figures out for reading: times (unfair: finish-time fairness, mean and worst), and efficiencies."""
        times, efficiency = Table(box=SIMPLE_HEAD, padding=(0, 1)), Table(box=SIMPLE_HEAD, padding=(0, 1))
        efficiency.caption = "iterations, cost, bound: over the busy part, relative to the last column"
        for table, columns in (
            (times, ("policy", "avg JCT", "p99 JCT", "makespan", "queue", "unfair", "worst")),
            (efficiency, ("policy", "busy", "iterations", "cost", "bound", "relative to")),
        ):
            for column in columns:
                table.add_column(
                    column, justify="left" if column in ("policy", "relative to") else "right", no_wrap=True
                )
        for name, figures in self.to_json().items():
            times.add_row(
                name,
                *(_duration(figures[key]) for key in ("avg_jct", "p99_jct", "makespan", "queueing")),
                f"{figures['unfairness_mean']:.2f}",
                f"{figures['unfairness_max']:,.0f}",
            )
            ratios = (_times(figures[key]) for key in ("iteration_efficiency", "cost_efficiency", "bound"))
            efficiency.add_row(name, f"{figures['busy']:.1%}", *ratios, figures["baseline"] or "full devices")
        return times, efficiency


def compare(
    jobs: Sequence[Job],
    cluster: Cluster,
    policies: Sequence[str],
    options: Options | None = None,
    on_start: Callable[[str], None] | None = None,
) -> Comparison:
    """Simulates the named policies, and the gang policies that they are compared with.

    **Arguments:**

    - `jobs`, `cluster`, `options`: as in `simulate`.
    - `policies`: names of policies.
    - `on_start`: called with each policy's name before it is simulated.

    Raises `ScheduleError`, for a name that is not known before anything is simulated.
    """
    chosen = {name: get(name) for name in policies}
    done: dict[str, SimulationResult] = {}

    def result(name: str, used: Options | None) -> SimulationResult:
        if name not in done:
            if on_start is not None:
                on_start(name)
            done[name] = simulate(jobs, cluster, name, used)
        return done[name]

    for name in chosen:
        result(name, options)
    quiet = dataclasses.replace(options or Options(), spans=False)
    baselines = {name: result(policy.baseline, quiet) for name, policy in chosen.items() if policy.baseline in names()}
    return Comparison(tuple(done[name] for name in chosen), baselines)


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.1f} s"


def _times(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"
