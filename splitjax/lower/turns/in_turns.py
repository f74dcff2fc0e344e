"""Runs a gradient boundary in turns: the way that `turns.take_turns` prepares.

A step and a kind of group communication come in; for every boundary in which examples cross an `InTurns` comes out, or
the reason why one of them cannot run so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from splitjax import _compat
from splitjax.errors import BatchError, Refusal
from splitjax.lower.microbatch.loop import PreparedBoundary
from splitjax.lower.microbatch.microbatch import local_examples
from splitjax.lower.turns.turns import Mode, TurnedBoundary, evaluate_turns, take_turns
from splitjax.planning.sites.exchange import EXAMPLES, SWAP
from splitjax.planning.ways import BoundaryCall, DecidedStep
from splitjax.planning.workers import workers_of
from splitjax.primitives.walk import Site, equation_at
from splitjax.step.boundary import is_boundary


@dataclasses.dataclass(frozen=True, eq=False)
class InTurns:
    """Runs the split layers of a boundary one turn at a time.

    - `turned`: the boundary, cut where examples cross. `job`: what stands behind the cut, analysed.
    """

    turned: TurnedBoundary
    job: PreparedBoundary
    how: str = dataclasses.field(default="turns", init=False)
    why: str = dataclasses.field(default="", init=False)

    @property
    def num_parts(self) -> int:
        """The number of turns."""
        return self.turned.num_turns

    @property
    def worker_axes(self) -> tuple[str, ...]:
        """The axes along which the workers lie behind the cut."""
        return self.job.split.workers.axes

    def evaluate(self, call: BoundaryCall) -> list[Any]:
        """Returns the results of the boundary `call`."""
        return evaluate_turns(self.turned, self.job, call.operands, call.layout)


def boundaries_in_turns(kind: str, step: DecidedStep, jaxpr: _compat.ClosedJaxpr) -> Mapping[Site, InTurns] | Refusal:
    """Prepares the boundaries of a step for a kind of group communication.

    **Arguments:**

    - `kind`: the `group_comm` that is asked for, whatever the plan has.
    - `step`: the step.
    - `jaxpr`: of the step, in which the boundaries are found.

    Returns by site the boundaries in which examples cross, or the refusal of the first that cannot run so.
    """
    sites = {site[:depth] for site in step.sites.exchanges for depth in range(1, len(site))}
    ways: dict[Site, InTurns] = {}
    for site in sorted(sites):
        eqn = equation_at(jaxpr, site)
        if eqn is not None and is_boundary(eqn):
            way = boundary_in_turns(kind, step, eqn, site)
            if isinstance(way, Refusal):
                return way
            if way is not None:
                ways[site] = way
    return ways


def boundary_in_turns(kind: str, step: DecidedStep, eqn: Any, site: Site) -> InTurns | Refusal | None:
    """Prepares a boundary to run in turns; returns None where nothing crosses in it.

    **Arguments:**

    - `kind`: the `group_comm` that is asked for. `step`: the step around the boundary.
    - `eqn`, `site`: the boundary's equation, and where it stands.

    Returns a refusal where the boundary cannot run in turns; it is a `BatchError` for a batch that does not divide into
    them.
    """
    graph, sites = step.graph, step.sites
    prefix = (*site, 0)
    groups = {
        exchange.axes
        for exchange in sites.exchanges.values()
        if exchange.site[: len(prefix)] == prefix and exchange.enter in (EXAMPLES, SWAP)
    }
    if not groups or graph.num_examples is None:
        return None
    mode = Mode(kind, workers_of(step.plan), graph.num_examples)
    group = min(groups)
    num_turns, in_turn = mode.workers.mesh.size(group), mode.in_turn(group)
    unit = num_turns * in_turn.num_batch_parts
    if graph.num_examples % unit:
        below, above = graph.num_examples // unit * unit, -(-graph.num_examples // unit) * unit
        return Refusal(
            f"{graph.num_examples} examples do not divide into {num_turns} turns on {in_turn.num_batch_parts} workers",
            value=graph.num_examples,
            place=f"group_comm={kind!r}",
            remedy=f'use {f"{below} or {above}" if below else above} examples, or group_comm="gather"',
            kind=BatchError,
        )
    size = local_examples(graph.num_examples, num_turns, in_turn)
    twin = size if isinstance(size, Refusal) else step.twin_of(eqn, site, size)
    if isinstance(twin, Refusal):
        return Refusal(twin.message)
    turned = take_turns(eqn, twin, site, sites, mode)
    if turned is None or isinstance(turned, Refusal):
        return turned
    job = turned.prepared()
    return Refusal(job.reason) if isinstance(job, Refusal) else InTurns(turned, job)
