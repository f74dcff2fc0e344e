"""Holds a step that is ready to be evaluated: `Lowered` takes an evaluator of boundaries and the flat arguments, and
gives the flat results.

Partial backpropagation makes several programs of a step, which differ in nothing but the evaluator of boundaries, and
in the leaves that stay what they are. So all of them are made from the same `Lowered`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from splitjax.lower.products.interpret import BoundaryHook, Hooks, evaluate
from splitjax.lower.products.layout import StepLayout
from splitjax.lower.tables.sparse import evaluate_sparse
from splitjax.lower.tables.sparse_step import SparseStep

Evaluated = tuple[list[Any], Any, Any]  # flat results, by table what was observed, residuals


@dataclasses.dataclass(frozen=True, eq=False)
class Lowered:
    """A step ready to be evaluated.

    - `mesh`, `layout`: where it runs, and the constraints by site.
    - `jaxpr`: the traced step, a closed jaxpr over its flat arguments.
    - `matched`: flat argument of a state leaf -> its flat result.
    - `sparse`: the tables that are synchronised by rows; None without `sync=`.
    """

    mesh: Mesh
    layout: StepLayout
    jaxpr: Any
    matched: Mapping[int, int]
    sparse: SparseStep | None

    def run(self, hook: BoundaryHook, leaves: Sequence[Any], residuals: Any) -> Evaluated:
        """Evaluates the step.

        **Arguments:** `hook`: evaluates its gradient boundaries. `leaves`: its flat arguments. `residuals`: by table
        that is rounded on the wire, what rounding took away in earlier steps.

        Returns the flat results, by table what was observed (None without `sparse`), and the new residuals.
        """
        if self.sparse is None:
            return evaluate(self.layout, self.jaxpr, leaves, Hooks(hook)), None, residuals
        return evaluate_sparse(self.sparse, self.mesh, self.layout, leaves, hook, self.matched, residuals)

    def run_keeping(self, hook: BoundaryHook, kept: Sequence[int], leaves: Sequence[Any], residuals: Any) -> Evaluated:
        """Evaluates the step as `run` does with `hook`, `leaves` and `residuals`, where the flat arguments `kept` stay
        what they are."""
        results, observed, residuals = self.run(hook, leaves, residuals)
        for leaf in kept:
            results[self.matched[leaf]] = jnp.asarray(leaves[leaf])
        return results, observed, residuals
