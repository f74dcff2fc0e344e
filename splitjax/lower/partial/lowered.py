"""Holds a step that is ready to be evaluated: `Lowered` takes how its boundaries run and the flat arguments, and
gives the flat results.

Partial backpropagation makes several programs of a step, which differ in nothing but how its boundaries run, and
in the leaves that stay what they are. So all of them are made from the same `Lowered`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from splitjax.lower.products.interpret import Hooks, evaluate
from splitjax.lower.tables.sparse import evaluate_sparse
from splitjax.lower.way import hook_of
from splitjax.planning.sites.layout import StepLayout
from splitjax.planning.tables.sparse_step import SparseStep
from splitjax.planning.ways import Ways

Evaluated = tuple[list[Any], Any, Any]  # flat results, by table what was observed, residuals


@dataclasses.dataclass(frozen=True, eq=False)
class Lowered:
    """A step ready to be evaluated.

    - `layout`: the mesh on which it runs, and the constraints by site.
    - `jaxpr`: the traced step, a closed jaxpr over its flat arguments.
    - `matched`: flat argument of a state leaf -> its flat result.
    - `sparse`: the tables that are synchronised by rows; None without `sync=`.
    """

    layout: StepLayout
    jaxpr: Any
    matched: Mapping[int, int]
    sparse: SparseStep | None

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        """The mesh on which it runs."""
        return self.layout.mesh

    def run(self, ways: Ways, leaves: Sequence[Any], residuals: Any) -> Evaluated:
        """Evaluates the step.

        **Arguments:** `ways`: by site, how each gradient boundary runs. `leaves`: its flat arguments. `residuals`: by
        table that is rounded on the wire, what rounding took away in earlier steps.

        Returns the flat results, by table what was observed (None without `sparse`), and the new residuals.
        """
        if self.sparse is None:
            return evaluate(self.layout, self.jaxpr, leaves, Hooks(hook_of(ways, self.layout))), None, residuals
        return evaluate_sparse(self.sparse, self.layout, leaves, ways, self.matched, residuals)

    def run_keeping(self, ways: Ways, kept: Sequence[int], leaves: Sequence[Any], residuals: Any) -> Evaluated:
        """Evaluates the step as `run` does with `ways`, `leaves` and `residuals`, where the flat arguments `kept` stay
        what they are."""
        results, observed, residuals = self.run(ways, leaves, residuals)
        for leaf in kept:
            results[self.matched[leaf]] = jnp.asarray(leaves[leaf])
        return results, observed, residuals
