"""Evaluates boundaries that are differentiated partially: by all workers alike (temporal), or by each worker to its own
depth (spatial).

A `PartialStep` and the evaluator of an ordinary step go in, hooks come out that the interpreter calls at a boundary:
they leave out what is not differentiated, and hand everything else to the ordinary evaluation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from splitjax.errors import MicrobatchError, PartialError
from splitjax.lower.microbatch.places import RunnableLoops, Runner
from splitjax.lower.partial.own_loss import OwnLoss, WorkerMesh, own_loss
from splitjax.lower.partial.step import PartialStep
from splitjax.lower.partial.truncation import Truncation
from splitjax.lower.partial.uneven import Balancing
from splitjax.lower.products.interpret import BoundaryHook
from splitjax.lower.strategies import BoundaryCall, LoweredStep, accumulated_boundary, example_dim, uneven_jobs
from splitjax.lower.tables.sparse_step import SparseStep
from splitjax.lower.tables.table_sync import TableSync
from splitjax.partial.request import COUNT, LOCAL
from splitjax.primitives.walk import Site, equation_at


@dataclasses.dataclass(frozen=True, eq=False)
class PartialHooks:
    """The evaluators of a step's boundaries.

    - `step`: which boundary is differentiated partially, by which workers, and how far.
    - `jaxpr`: the traced step, a closed jaxpr.
    - `lowered`: the step around its boundaries: where it runs, its plan and layout.
    - `sparse`: the tables that are synchronised by rows; None without `sync=`.
    - `hook`: evaluates a boundary as a step without partial backpropagation would.
    """

    step: PartialStep
    jaxpr: Any
    lowered: LoweredStep
    sparse: SparseStep | None
    hook: BoundaryHook

    def together(self, first: int) -> BoundaryHook:
        """Gives the hook with which all workers differentiate from segment number `first` on."""

        def hook(eqn: Any, operands: Sequence[Any], site: Site, forward: Callable) -> list[Any]:
            if site != self.step.site or first == 0:
                return self._scaled(eqn, self.hook(eqn, operands, site, forward), site)
            segments, positions = self._segments(eqn, site), eqn.params["positions"]
            num_values = len(eqn.outvars) - len(positions)
            live = [k for k, position in enumerate(positions) if segments[position] >= first]
            outvars = [*eqn.outvars[:num_values], *(eqn.outvars[num_values + k] for k in live)]
            part = eqn.replace(params={**eqn.params, "positions": tuple(positions[k] for k in live)}, outvars=outvars)
            results = self.hook(part, operands, site, forward)
            computed = dict(zip(live, results[num_values:], strict=True))
            # Nobody reads the zeros: what follows from a skipped gradient is dropped with the new state.
            grads = [
                computed[k] if k in computed else jnp.zeros(v.aval.shape, v.aval.dtype)
                for k, v in enumerate(eqn.outvars[num_values:])
            ]
            return self._scaled(eqn, [*results[:num_values], *grads], site)

        return hook

    def apart(
        self, cycle_step: Any, runner: Callable[[Truncation], Runner[RunnableLoops]] = lambda truncation: truncation
    ) -> BoundaryHook:
        """Gives the hook with which each worker differentiates to its own depth.

        **Arguments:** `cycle_step`: i32[], the step's number in the cycle of the depths. `runner`: makes from the
        truncation what runs the workers' loops, by default as branches.

        The hook raises `PartialError` where workers cannot have depths of their own.
        """

        def hook(eqn: Any, operands: Sequence[Any], site: Site, forward: Callable) -> list[Any]:
            if site != self.step.site:
                return self.hook(eqn, operands, site, forward)
            own = runner(self.step.truncation(self.lowered.mesh, eqn, self._further(site), cycle_step))
            number = eqn.params["microbatches"] or 1
            try:
                run = self._balancing(own, eqn, site, number) if self.step.examples else own
                call = BoundaryCall(eqn, operands, site, forward)
                results = accumulated_boundary(self.lowered, call, number, self.step.axes, run)
                return self._without_rows_of_others(eqn, site, results, cycle_step)
            except MicrobatchError as error:
                if self.step.request.statistics == LOCAL and number == 1 and not self.step.examples:
                    return self._own_loss(eqn, operands, site).results(own)
                raise PartialError(
                    f"workers cannot have depths of their own: {error.message}",
                    value=error.value,
                    place=error.place,
                    remedy=(
                        'use assignment="temporal", or PartialBackprop(statistics="local") with one microbatch, with'
                        " which each worker has the loss of its own examples"
                    ),
                ) from error

        return hook

    def _without_rows_of_others(self, eqn: Any, site: Site, results: list[Any], cycle_step: Any) -> list[Any]:
        """Gives the results with the ids of lookups that a worker did not differentiate outside of their tables: it has
        no rows to send."""
        tables = self._tables(site)
        if not tables:
            return results
        num_workers, num_examples = self.step.depths.num_slots, self.step.num_examples
        twin = self.lowered.twin_of(eqn, site, num_examples // num_workers if num_examples > 2 * num_workers else 2)
        first = len(results) - len(eqn.params["positions"]) - len(tables)
        segments, masked = self._segments(eqn, site), list(results)
        for k, table in enumerate(tables):
            dim = example_dim(eqn.outvars[first + k].aval.shape, twin.outvars[first + k].aval.shape)
            slots = self.step.depths.contributors(segments[len(eqn.invars) - len(tables) + k])
            if dim is None or table.is_owned or len(slots) == num_workers:
                continue
            is_sent = jnp.asarray(
                [self.step.contributes(slots, number) for number in range(self.step.depths.num_cycle_steps)]
            )[cycle_step]
            ids = masked[first + k]
            shape = [-1 if d == dim else 1 for d in range(ids.ndim)]
            masked[first + k] = jnp.where(is_sent.reshape(shape), ids, jnp.asarray(table.num_rows, ids.dtype))
        return masked

    def _tables(self, site: Site) -> list[TableSync]:
        """Gives the table of every delta of a boundary, in their order."""
        if self.sparse is None or not self.sparse.at(site):
            return []
        _, order, _ = self.sparse.edited(equation_at(self.jaxpr, site), site)
        return [self.sparse.tables[table] for table, _ in order]

    def _balancing(self, runner: Runner[RunnableLoops], eqn: Any, site: Site, num_microbatches: int) -> Runner:
        """Gives the runner whose workers have unequal shares, and otherwise do as `runner` does."""
        if num_microbatches > 1:
            raise PartialError(
                "examples cannot be balanced among workers that accumulate over microbatches",
                value=num_microbatches,
                place=eqn.params["label"],
                remedy="use rebalance=False, or microbatches=None",
            )
        jobs = uneven_jobs(self.lowered, eqn, site, self.step.examples, self.step.axes)
        return Balancing(runner, jobs, self.step.num_examples)

    def _own_loss(self, eqn: Any, operands: Sequence[Any], site: Site) -> OwnLoss:
        """Gives a boundary whose workers each have the loss of their own examples."""
        twin = self.lowered.twin_of(eqn, site, self.step.num_examples // self.step.depths.num_slots)
        workers = WorkerMesh(self.lowered.mesh, self.step.axes, self.lowered.plan.batch_axes)
        return own_loss(eqn, twin, operands, site, self.lowered.layout, workers)

    def _segments(self, eqn: Any, site: Site) -> dict[int, int]:
        """Gives by position of a differentiated operand its segment: of the tables' deltas, too."""
        return self.step.segments_for(eqn, self._further(site))

    def _further(self, site: Site) -> list[str]:
        """Gives the parameters of the boundary's further operands: the tables whose lookups have deltas."""
        return [table.param for table in self._tables(site)]

    def _scaled(self, eqn: Any, results: list[Any], site: Site) -> list[Any]:
        """Gives the results with gradients of a temporal assignment divided by the share of steps that compute them."""
        if site != self.step.site or self.step.request.estimator != COUNT:
            return results
        segments, positions = self._segments(eqn, site), eqn.params["positions"]
        num_values = len(results) - len(positions)
        grads = []
        for position, grad in zip(positions, results[num_values:], strict=True):
            share = self.step.share_of_steps(segments[position])
            grads.append(grad if share in (0.0, 1.0) else grad * jnp.asarray(1 / share, grad.dtype))
        return [*results[:num_values], *grads]
