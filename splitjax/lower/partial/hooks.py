"""Boundaries that are differentiated partially: by all workers alike (temporal), or by each to its own depth (spatial,
as branches)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from splitjax.errors import MicrobatchError, PartialError
from splitjax.lower.microbatch.places import Runner
from splitjax.lower.partial.own_loss import OwnLoss, own_loss
from splitjax.lower.partial.step import PartialStep
from splitjax.lower.partial.truncation import Truncation
from splitjax.lower.partial.uneven import Balancing
from splitjax.lower.products.interpret import BoundaryHook, Layout, Site
from splitjax.lower.strategies import Twin, accumulated_boundary, example_dim, uneven_jobs
from splitjax.lower.tables.sparse import SparseStep
from splitjax.lower.tables.table_rows import TableSync
from splitjax.partial.request import COUNT, LOCAL
from splitjax.plan import Plan
from splitjax.trace.flatten import equation_at


@dataclasses.dataclass(frozen=True, eq=False)
class PartialHooks:
    """The evaluators of one step's boundaries. `hook`: evaluates a boundary as a step without partial backpropagation
    would."""

    step: PartialStep
    jaxpr: Any
    mesh: Mesh
    plan: Plan
    layout: Layout
    twin_of: Twin
    sparse: SparseStep | None
    hook: BoundaryHook

    def together(self, first: int) -> BoundaryHook:
        """All workers differentiate from segment `first` on."""

        def hook(eqn: Any, operands: Sequence[Any], site: Site, forward: Callable) -> list[Any]:
            if site != self.step.site or first == 0:
                return self._scaled(eqn, self.hook(eqn, operands, site, forward), site)
            segments, positions = self._segments(eqn, site), eqn.params["positions"]
            num_values = len(eqn.outvars) - len(positions)
            live = [k for k, position in enumerate(positions) if segments[position] >= first]
            outvars = [*eqn.outvars[:num_values], *(eqn.outvars[num_values + k] for k in live)]
            part = eqn.replace(params={**eqn.params, "positions": tuple(positions[k] for k in live)}, outvars=outvars)
            results = self.hook(part, operands, site, forward)
            found = dict(zip(live, results[num_values:], strict=True))
            # Nobody reads the zeros: what follows from a skipped gradient is dropped with the new state.
            grads = [
                found[k] if k in found else jnp.zeros(v.aval.shape, v.aval.dtype)
                for k, v in enumerate(eqn.outvars[num_values:])
            ]
            return self._scaled(eqn, [*results[:num_values], *grads], site)

        return hook

    def apart(self, turn: Any, runner: Callable[[Truncation], Runner] = lambda truncation: truncation) -> BoundaryHook:
        """Each worker differentiates to its own depth. `turn`: i32[]. `runner`: how the workers' loops run, by default
        as branches."""

        def hook(eqn: Any, operands: Sequence[Any], site: Site, forward: Callable) -> list[Any]:
            if site != self.step.site:
                return self.hook(eqn, operands, site, forward)
            run = runner(self.step.truncation(self.mesh, eqn, self._further(site), turn))
            number = eqn.params["microbatches"] or 1
            try:
                if self.step.examples:
                    run = self._balancing(run, eqn, site, number)
                results = accumulated_boundary(
                    eqn,
                    operands,
                    site,
                    forward,
                    number,
                    self.step.graph,
                    self.mesh,
                    self.plan,
                    self.layout,
                    self.twin_of,
                    self.step.axes,
                    run,
                )
                return self._without_rows_of_others(eqn, site, results, turn)
            except MicrobatchError as error:
                if self.step.request.statistics == LOCAL and number == 1 and not self.step.examples:
                    return self._own_loss(eqn, operands, site).results(run)
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

    def _without_rows_of_others(self, eqn: Any, site: Site, results: list[Any], turn: Any) -> list[Any]:
        """The results, where the ids of lookups that a worker did not differentiate are outside of their tables: it has
        no rows to send."""
        tables = self._tables(site)
        if not tables:
            return results
        num_workers, graph = self.step.depths.num_slots, self.step.graph
        twin = self.twin_of(eqn, site, graph.num_examples // num_workers if graph.num_examples > 2 * num_workers else 2)
        first = len(results) - len(eqn.params["positions"]) - len(tables)
        segments, found = self._segments(eqn, site), list(results)
        for k, table in enumerate(tables):
            dim = example_dim(eqn.outvars[first + k].aval.shape, twin.outvars[first + k].aval.shape)
            slots = self.step.depths.contributors(segments[len(eqn.invars) - len(tables) + k])
            if dim is None or table.is_owned or len(slots) == num_workers:
                continue
            is_sent = jnp.asarray(
                [self.step.contributes(slots, number) for number in range(self.step.depths.num_turns)]
            )[turn]
            ids = found[first + k]
            shape = [-1 if d == dim else 1 for d in range(ids.ndim)]
            found[first + k] = jnp.where(is_sent.reshape(shape), ids, jnp.asarray(table.num_rows, ids.dtype))
        return found

    def _tables(self, site: Site) -> list[TableSync]:
        """The table of every delta, in their order."""
        if self.sparse is None or not self.sparse.at(site):
            return []
        _, order, _ = self.sparse.edited(equation_at(self.jaxpr, site), site)
        return [self.sparse.tables[table] for table, _ in order]

    def _balancing(self, runner: Runner, eqn: Any, site: Site, num_microbatches: int) -> Runner:
        if num_microbatches > 1:
            raise PartialError(
                "examples cannot be balanced among workers that accumulate over microbatches",
                value=num_microbatches,
                place=eqn.params["label"],
                remedy="use rebalance=False, or microbatches=None",
            )
        jobs = uneven_jobs(
            eqn,
            site,
            self.step.examples,
            self.step.graph,
            self.mesh,
            self.plan,
            self.layout,
            self.twin_of,
            self.step.axes,
        )
        return Balancing(runner, jobs, self.step.graph.num_examples)

    def _own_loss(self, eqn: Any, operands: Sequence[Any], site: Site) -> OwnLoss:
        twin = self.twin_of(eqn, site, self.step.graph.num_examples // self.step.depths.num_slots)
        return own_loss(eqn, twin, operands, site, self.layout, self.mesh, self.step.axes, self.plan.batch_axes)

    def _segments(self, eqn: Any, site: Site) -> dict[int, int]:
        """By position of an operand of the boundary its segment: of the tables' deltas, too."""
        return self.step.segments_for(eqn, self._further(site))

    def _further(self, site: Site) -> list[str]:
        """The parameters to which the boundary's further operands belong: the tables', whose lookups have deltas."""
        return [table.param for table in self._tables(site)]

    def _scaled(self, eqn: Any, results: list[Any], site: Site) -> list[Any]:
        """Gradients of a temporal assignment divided by the share of steps that compute them."""
        if site != self.step.site or self.step.request.estimator != COUNT:
            return results
        segments, positions = self._segments(eqn, site), eqn.params["positions"]
        num_values = len(results) - len(positions)
        grads = []
        for position, grad in zip(positions, results[num_values:], strict=True):
            share = self.step.share_of_steps(segments[position])
            grads.append(grad if share in (0.0, 1.0) else grad * jnp.asarray(1 / share, grad.dtype))
        return [*results[:num_values], *grads]
