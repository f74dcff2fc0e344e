"""Runs a boundary that is differentiated partially: by all workers alike (temporal), or by each worker to its own depth
(spatial).

A `PartialStep` and the way in which the boundary runs in full come in while a step is planned; out come the ways of its
depths (`PartialWays`), each prepared once, which programs of the step choose from. They leave out what is not
differentiated, and hand everything else to the loop or way that they wrap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax.numpy as jnp

from splitjax.errors import PartialError, Refusal
from splitjax.lower.microbatch.loop import PreparedBoundary
from splitjax.lower.microbatch.microbatched import Microbatched, microbatched, placed, uneven_jobs
from splitjax.lower.microbatch.places import RunnableLoops, Runner
from splitjax.lower.partial.own_loss import own_loss
from splitjax.lower.partial.truncation import Truncation
from splitjax.lower.partial.uneven import Balancing
from splitjax.lower.tables.with_rows import WithRows
from splitjax.lower.way import Whole, Wrapping
from splitjax.partial.request import COUNT, LOCAL
from splitjax.planning.partial_step import PartialStep
from splitjax.planning.tables.sparse_step import TableEdit
from splitjax.planning.tables.table_sync import TableSync
from splitjax.planning.ways import BoundaryCall, BoundaryWay, DecidedStep, SumWithin, Ways, example_dim
from splitjax.primitives.walk import Site

MakeRunner = Callable[[Truncation], Runner[RunnableLoops]]
# Prepares the part of a boundary that a temporal depth differentiates: its equation -> how it runs.
WayOf = Callable[[Any], BoundaryWay | Refusal]


class WorkerLoopsWay(Protocol):
    """Runs the loops of the workers of a boundary by a runner: `Microbatched`, `Uneven`, `OwnLossWay`, or none
    (`Whole`)."""

    @property
    def how(self) -> str:
        """Returns the name of the way, one of `BoundaryPlan.how`."""
        ...

    @property
    def why(self) -> str:
        """Returns the reason for the choice, as a clause."""
        ...

    def sum_within(self, position: int) -> SumWithin:
        """Returns how the gradient of the operand at `position` is added up within a worker."""
        ...

    def run(self, call: BoundaryCall, runner: Any) -> list[Any]:
        """Returns the results of the boundary `call`, with the loops run by `runner`."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class PartialBoundary:
    """Holds the boundary that is differentiated partially, as every depth sees it.

    - `step`: the partial backpropagation of the step.
    - `segments`: by position of a differentiated operand its segment: of the tables' deltas, too.
    - `tables`: the table of every delta, in their order.
    """

    step: PartialStep
    segments: Mapping[int, int]
    tables: Sequence[TableSync]

    @property
    def further(self) -> list[str]:
        """The parameters of the boundary's further operands: the tables whose lookups have deltas."""
        return [table.param for table in self.tables]


@dataclasses.dataclass(frozen=True, eq=False)
class Uneven:
    """Runs the loops of workers that have different numbers of examples.

    - `even`: the boundary prepared for equal shares. `jobs`: by share, the boundary prepared for it.
    - `num_examples`: of the whole batch.
    """

    even: Microbatched | Whole
    jobs: Mapping[int, PreparedBoundary]
    num_examples: int
    how: str = dataclasses.field(default="truncated", init=False)
    why: str = dataclasses.field(default="workers have unequal shares", init=False)

    def sum_within(self, position: int) -> SumWithin:
        """Returns how the gradient of the operand at `position` is added up within a worker."""
        return self.even.sum_within(position)

    def run(self, call: BoundaryCall, runner: Runner[RunnableLoops]) -> list[Any]:
        """Returns the results of the boundary `call`, with the loops run by `runner`."""
        if not isinstance(self.even, Microbatched):
            return self.even.run(call, runner)
        jobs = {share: placed(job, call) for share, job in self.jobs.items()}
        return self.even.run(call, Balancing(runner, jobs, self.num_examples))


@dataclasses.dataclass(frozen=True, eq=False)
class Truncated:
    """Runs a boundary whose workers each differentiate to a depth of their own.

    - `boundary`: what is differentiated partially. `loops`: runs the workers' loops.
    - `ids_dims`: per delta of a table the dim of its ids that lies over the workers; None where no id is left out.
    - `cycle_step`: i32[], the step's number in the cycle of the depths.
    - `runner`: makes of the truncation what runs the workers' loops, by default as branches.
    """

    boundary: PartialBoundary
    loops: WorkerLoopsWay
    ids_dims: Sequence[int | None]
    cycle_step: Any = 0
    runner: MakeRunner = lambda truncation: truncation

    @property
    def how(self) -> str:
        """The name of the way."""
        return "own loss" if self.loops.how == "own loss" else "truncated"

    @property
    def num_parts(self) -> int:
        """The number of depths that workers have."""
        return len(self.boundary.step.depths.distinct)

    @property
    def worker_axes(self) -> tuple[str, ...]:
        """None: what is sent hangs on the depths of the workers."""
        return ()

    @property
    def why(self) -> str:
        """The reason for the way of its loops."""
        return self.loops.why

    def evaluate(self, call: BoundaryCall) -> list[Any]:
        """Returns the results of the boundary `call`."""
        step, platform = self.boundary.step, call.layout.where.platform
        own = self.runner(Truncation.of(step, platform, call.eqn, self.boundary.further, self.cycle_step))
        return self._without_rows_of_others(call.eqn, self.loops.run(call, own))

    def _without_rows_of_others(self, eqn: Any, results: list[Any]) -> list[Any]:
        """Gives the results with the ids of lookups that a worker did not differentiate outside of their tables: it has
        no rows to send."""
        tables, step = self.boundary.tables, self.boundary.step
        first = len(results) - len(eqn.params["positions"]) - len(tables)
        masked = list(results)
        for k, (table, dim) in enumerate(zip(tables, self.ids_dims, strict=True)):
            slots = step.depths.contributors(self.boundary.segments[len(eqn.invars) - len(tables) + k])
            if dim is None or table.exchange.pulls or len(slots) == step.depths.num_slots:
                continue
            is_sent = jnp.asarray([step.contributes(slots, number) for number in range(step.depths.num_cycle_steps)])[
                self.cycle_step
            ]
            ids = masked[first + k]
            shape = [-1 if d == dim else 1 for d in range(ids.ndim)]
            masked[first + k] = jnp.where(is_sent.reshape(shape), ids, jnp.asarray(table.num_rows, ids.dtype))
        return masked


@dataclasses.dataclass(frozen=True, eq=False)
class EndedEarly(Wrapping):
    """Runs a boundary of which all workers differentiate the same part: the segments from a number on.

    - `boundary`: what is differentiated partially.
    - `live`: the numbers of the gradients that are computed, ascending; `part`: the boundary with these alone.
    - `inner`: how that part runs.
    """

    boundary: PartialBoundary
    live: Sequence[int]
    part: Any

    def evaluate(self, call: BoundaryCall) -> list[Any]:
        """Returns the results of the boundary `call`, with gradients divided by the share of steps that compute
        them."""
        eqn = call.eqn
        results = self.inner.evaluate(dataclasses.replace(call, eqn=self.part))
        num_values = len(eqn.outvars) - len(eqn.params["positions"])
        computed = dict(zip(self.live, results[num_values:], strict=True))
        # Nobody reads the zeros: what follows from a skipped gradient is dropped with the new state.
        grads = [
            computed[k] if k in computed else jnp.zeros(v.aval.shape, v.aval.dtype)
            for k, v in enumerate(eqn.outvars[num_values:])
        ]
        return [*results[:num_values], *self._scaled(eqn, grads)]

    def _scaled(self, eqn: Any, grads: list[Any]) -> list[Any]:
        """Gives the gradients divided by the share of steps that compute them, where the estimator says so."""
        step = self.boundary.step
        if step.request.estimator != COUNT:
            return grads
        shares = [step.share_of_steps(self.boundary.segments[position]) for position in eqn.params["positions"]]
        return [
            grad if share in (0.0, 1.0) else grad * jnp.asarray(1 / share, grad.dtype)
            for share, grad in zip(shares, grads, strict=True)
        ]


@dataclasses.dataclass(frozen=True, eq=False)
class PartialWays:
    """Holds how the boundaries of a step run at each of its depths.

    - `step`: the partial backpropagation of the step.
    - `full`: by site, how each boundary runs in full backpropagation.
    - `truncated`: spatial, how the partial boundary runs; None for a temporal assignment.
    - `by_first`: temporal, by the first segment that is differentiated, how the partial boundary runs.
    - `edit`: the partial boundary with edited lookups; None where no table of it goes by rows.
    """

    step: PartialStep
    full: Ways
    truncated: Truncated | None
    by_first: Mapping[int, EndedEarly]
    edit: TableEdit | None

    def together(self, first: int) -> Ways:
        """Returns how boundaries run in steps in which all workers differentiate from segment number `first` on."""
        return self._with(self.by_first[first])

    def apart(self, cycle_step: Any, runner: MakeRunner | None = None) -> Ways:
        """Returns how boundaries run where each worker differentiates to its own depth.

        **Arguments:** `cycle_step`: i32[], the step's number in the cycle of the depths. `runner`: makes from the
        truncation what runs the workers' loops; None for branches.
        """
        assert self.truncated is not None, "workers have depths of their own in a spatial assignment alone"
        way = dataclasses.replace(self.truncated, cycle_step=cycle_step)
        return self._with(way if runner is None else dataclasses.replace(way, runner=runner))

    @property
    def planned(self) -> Ways:
        """What the plan records: in steps behind the warm-up, the deepest of them."""
        way = self.truncated or self.by_first[min(self.by_first)]
        return self._with(way)

    @property
    def sums_within(self) -> Mapping[str, SumWithin]:
        """By parameter, how its gradient is added up within a worker that is a group of devices; nothing for a temporal
        assignment, whose boundary runs as in full backpropagation."""
        if self.truncated is None:
            return {}
        return {param: self.truncated.loops.sum_within(position) for position, param in self.step.params.items()}

    def _with(self, way: BoundaryWay) -> Ways:
        return {**self.full, self.step.site: way if self.edit is None else WithRows(way, self.edit)}


@dataclasses.dataclass(frozen=True, eq=False)
class OrdinaryBoundary:
    """Holds the boundary of a step as it runs without partial backpropagation.

    - `step`: the step around it. `site`: where it stands.
    - `eqn`: its equation, with edited lookups. `edit`: the edit; None where no table of it goes by rows.
    - `tables`: the table of every delta, in their order.
    - `inner`: how `eqn` runs in full. `way_of`: prepares the same boundary with fewer gradients.
    """

    step: DecidedStep
    site: Site
    eqn: Any
    edit: TableEdit | None
    tables: Sequence[TableSync]
    inner: BoundaryWay
    way_of: WayOf


def partial_ways(partial: PartialStep, ordinary: OrdinaryBoundary, full: Ways) -> PartialWays | Refusal:
    """Prepares the partial boundary of a step for all of its depths.

    **Arguments:** `partial`: the partial backpropagation of the step. `ordinary`: its boundary. `full`: by site, how
    each boundary runs in full backpropagation.

    Returns a refusal where the boundary cannot run so: a `PartialError` where workers cannot have depths of their own.
    """
    eqn = ordinary.eqn
    segments = partial.segments_for(eqn, [table.param for table in ordinary.tables])
    boundary = PartialBoundary(partial, segments, ordinary.tables)
    if not partial.is_temporal:
        truncated = _truncated(boundary, ordinary)
        return truncated if isinstance(truncated, Refusal) else PartialWays(partial, full, truncated, {}, ordinary.edit)
    by_first: dict[int, EndedEarly] = {}
    positions = eqn.params["positions"]
    num_values = len(eqn.outvars) - len(positions)
    for first in partial.depths.distinct:
        live = [k for k, position in enumerate(positions) if first == 0 or segments[position] >= first]
        outvars = [*eqn.outvars[:num_values], *(eqn.outvars[num_values + k] for k in live)]
        part = eqn.replace(params={**eqn.params, "positions": tuple(positions[k] for k in live)}, outvars=outvars)
        inner = ordinary.inner if first == 0 else ordinary.way_of(part)
        if isinstance(inner, Refusal):
            return inner
        by_first[first] = EndedEarly(inner, boundary, live, part)
    return PartialWays(partial, full, None, by_first, ordinary.edit)


def _truncated(boundary: PartialBoundary, ordinary: OrdinaryBoundary) -> Truncated | Refusal:
    """Prepares a boundary whose workers each differentiate to a depth of their own."""
    partial, eqn = boundary.step, ordinary.eqn
    number = eqn.params["microbatches"] or 1
    if partial.examples and number > 1:
        return Refusal(
            "examples cannot be balanced among workers that accumulate over microbatches",
            value=number,
            place=eqn.params["label"],
            remedy="use rebalance=False, or microbatches=None",
            kind=PartialError,
        )
    loops = _loops(partial, ordinary, number)
    ids_dims = _ids_dims(partial, ordinary) if not isinstance(loops, Refusal) else ()
    refusal = loops if isinstance(loops, Refusal) else ids_dims if isinstance(ids_dims, Refusal) else None
    if refusal is None:
        assert not isinstance(loops, Refusal) and not isinstance(ids_dims, Refusal)
        return Truncated(boundary, loops, ids_dims)
    if partial.request.statistics == LOCAL and number == 1 and not partial.examples:
        twin = ordinary.step.twin_of(eqn, ordinary.site, partial.num_examples // partial.depths.num_slots)
        own = twin if isinstance(twin, Refusal) else own_loss(eqn, twin, partial.workers)
        if isinstance(own, Refusal):
            return own
        return Truncated(boundary, own, [None] * len(ordinary.tables))
    return Refusal(
        f"workers cannot have depths of their own: {refusal.message}",
        value=refusal.value,
        place=refusal.place,
        remedy=(
            'use assignment="temporal", or PartialBackprop(statistics="local") with one microbatch, with'
            " which each worker has the loss of its own examples"
        ),
        kind=PartialError,
        cause=refusal.cause,
    )


def _loops(partial: PartialStep, ordinary: OrdinaryBoundary, number: int) -> WorkerLoopsWay | Refusal:
    """Prepares the loops of workers whose loss is that of the whole batch."""
    step, eqn, site = ordinary.step, ordinary.eqn, ordinary.site
    jobs = uneven_jobs(step, eqn, site, partial.examples, partial.workers)
    if isinstance(jobs, Refusal):
        return jobs
    even = microbatched(step, eqn, site, number, partial.workers)
    if isinstance(even, Refusal) or not partial.examples:
        return even
    return Uneven(even, jobs, partial.num_examples)


def _ids_dims(partial: PartialStep, ordinary: OrdinaryBoundary) -> list[int | None] | Refusal:
    """Returns the dim of every lookup's ids that holds examples."""
    eqn, tables = ordinary.eqn, ordinary.tables
    if not tables:
        return []
    num_workers, num_examples = partial.depths.num_slots, partial.num_examples
    twin = ordinary.step.twin_of(
        eqn, ordinary.site, num_examples // num_workers if num_examples > 2 * num_workers else 2
    )
    if isinstance(twin, Refusal):
        return twin
    first = len(eqn.outvars) - len(eqn.params["positions"]) - len(tables)
    pairs = zip(eqn.outvars[first : first + len(tables)], twin.outvars[first : first + len(tables)], strict=True)
    return [example_dim(a.aval.shape, b.aval.shape) for a, b in pairs]
