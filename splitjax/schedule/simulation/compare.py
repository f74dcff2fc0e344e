"""Compares several policies on the same jobs, each beside gang scheduling in the same order.

Jobs, a cluster and names of policies come in; results come out as values, as JSON, and shown side by side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from splitjax.display import registry
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

    def __repr__(self) -> str:
        # That of a dataclass holds every stretch of every job: megabytes, which a notebook would keep.
        return f"<Comparison of {', '.join(result.policy for result in self.results)}; print it for the tables>"

    def __str__(self) -> str:
        return registry.show(self)

    def _repr_html_(self) -> str:
        return registry.html(self)


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
