"""A step ready to be evaluated: with one evaluator of its boundaries or another."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from splitjax.lower.products.interpret import BoundaryHook, Hooks, Layout, evaluate
from splitjax.lower.tables.sparse import SparseStep, evaluate_sparse

Evaluated = tuple[list[Any], Any, Any]  # flat results, by table what was observed, residuals


@dataclasses.dataclass(frozen=True, eq=False)
class Lowered:
    """A step ready to be evaluated. `matched`: flat argument of a state leaf -> its flat result."""

    mesh: Mesh
    layout: Layout
    jaxpr: Any
    matched: Mapping[int, int]
    sparse: SparseStep | None

    def run(self, hook: BoundaryHook, leaves: Sequence[Any], residuals: Any) -> Evaluated:
        """Flat arguments -> flat results, by table what was observed, and residuals."""
        if self.sparse is None:
            return evaluate(self.layout, self.jaxpr, leaves, Hooks(hook)), None, residuals
        return evaluate_sparse(self.sparse, self.mesh, self.layout, leaves, hook, self.matched, residuals)

    def run_keeping(self, hook: BoundaryHook, kept: Sequence[int], leaves: Sequence[Any], residuals: Any) -> Evaluated:
        """The same, where some flat arguments stay what they are."""
        results, observed, residuals = self.run(hook, leaves, residuals)
        for leaf in kept:
            results[self.matched[leaf]] = jnp.asarray(leaves[leaf])
        return results, observed, residuals
