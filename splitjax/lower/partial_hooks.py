"""Boundaries that are differentiated partially: by all workers alike (temporal), or by each to its own depth (spatial, as branches)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from splitjax.errors import MicrobatchError, PartialError
from splitjax.lower.layout import BoundaryHook, Layout, Site
from splitjax.lower.microbatching import Twin, accumulated_boundary
from splitjax.lower.partial_step import PartialStep
from splitjax.lower.sparse import SparseStep
from splitjax.partial.request import COUNT
from splitjax.plan import Plan
from splitjax.trace.flatten import equation_at


@dataclasses.dataclass(frozen=True, eq=False)
class PartialHooks:
    """The evaluators of one step's boundaries. `hook`: evaluates a boundary as a step without partial backpropagation would."""

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
            grads = [found[k] if k in found else jnp.zeros(v.aval.shape, v.aval.dtype) for k, v in enumerate(eqn.outvars[num_values:])]
            return self._scaled(eqn, [*results[:num_values], *grads], site)

        return hook

    def apart(self, turn: Any) -> BoundaryHook:
        """Each worker differentiates to its own depth. `turn`: i32[]."""

        def hook(eqn: Any, operands: Sequence[Any], site: Site, forward: Callable) -> list[Any]:
            if site != self.step.site:
                return self.hook(eqn, operands, site, forward)
            truncation = self.step.truncation(self.mesh, self._segments(eqn, site), turn)
            number = eqn.params["microbatches"] or 1
            try:
                return accumulated_boundary(
                    eqn, operands, site, forward, number, self.step.graph, self.mesh, self.plan, self.layout, self.twin_of, self.step.axes, truncation
                )
            except MicrobatchError as error:
                raise PartialError(
                    f"workers cannot have depths of their own: {error.message}", value=error.value, place=error.place,
                    remedy='use assignment="temporal", or PartialBackprop(statistics="local"), with which each worker has the loss of its own examples',
                ) from error

        return hook

    def _segments(self, eqn: Any, site: Site) -> dict[int, int]:
        """By position of an operand of the boundary its segment: of the tables' deltas, too."""
        more: list[str] = []
        if self.sparse is not None and self.sparse.at(site):
            _, order, _ = self.sparse.edited(equation_at(self.jaxpr, site), site)
            more = [self.sparse.tables[table].param for table, _ in order]
        return self.step.segments_for(eqn, more)

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
