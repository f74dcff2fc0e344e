"""Says what rule sets make of a step while its rules are chosen: its padding, and which of its tables go by rows.

The recipe, the call traced for a mesh and a rule set come in; the step as these rules have it comes out, and what its
tables store and send (`choosing.StepUnderRules`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from splitjax.compile.building import plan_request
from splitjax.compile.entry import Recipe
from splitjax.cost.row_tables import RowTable
from splitjax.lower.strategies import CHOOSER
from splitjax.mesh import MeshShape, abstract_mesh, platform_of
from splitjax.plan import BlockRemat, LeafPlan
from splitjax.planning.draft import Draft
from splitjax.planning.padding import find_padding
from splitjax.planning.table_plan import row_tables
from splitjax.planning.tables.finding import TableFinder
from splitjax.rules.ruleset import AUTO, RuleSet, load_rules
from splitjax.step.padding.stored import padded_traced
from splitjax.step.traced import Traced
from splitjax.trace.graph import Graph

Blocks = tuple[BlockRemat, ...]
_OWNERS = "embedding_owner"  # the shipped rule set that splits all tables by their rows


class PricedStep:
    """A call of a step on a mesh, as rule sets have it.

    **Arguments:** `recipe`: the step, whose rules are to be chosen. `shape`: of the mesh. `traced`: returns the call
    with blocks computed again.
    """

    def __init__(self, recipe: Recipe, shape: MeshShape, traced: Callable[[Blocks], Traced]) -> None:
        self._recipe, self._shape, self._traced = recipe, shape, traced
        self._padded: dict[tuple[str, Blocks], Traced] = {}
        self._finders: dict[tuple[str, Blocks, tuple[str, ...]], TableFinder | None] = {}

    def graph(self, rules: RuleSet, remat: Blocks) -> Graph:
        """Returns the step with the padding that `rules` ask for, with blocks computed again as `remat` says; under
        rules of the search, that of tables that may have owners."""
        return self._under(rules, remat).graph

    def tables(
        self, rules: RuleSet, remat: Blocks, leaves: Sequence[LeafPlan], batch_axes: Sequence[str]
    ) -> tuple[RowTable, ...]:
        """Returns the tables that go by rows where the `leaves` are laid out so, and the batch lies over
        `batch_axes`."""
        recipe = dataclasses.replace(self._recipe, rules=rules)
        if not recipe.returns_state or recipe.request.is_dense:
            return ()
        key = rules.name, remat, tuple(batch_axes)
        if key not in self._finders:
            self._finders[key] = self._finder(recipe, remat, tuple(batch_axes))
        finder = self._finders[key]
        if finder is None:
            return ()
        return row_tables(finder.sparse_step(finder.find(leaves)), finder.request, self._shape, batch_axes)

    def _finder(self, recipe: Recipe, remat: Blocks, batch_axes: tuple[str, ...]) -> TableFinder | None:
        """Returns what finds the tables under the rules of a `recipe`; None for a step whose gradient JAX takes by
        itself, which the error says when it is built. Raises `SyncError` for a pattern that fits no parameter."""
        traced = self._under(recipe.rules, remat)
        if not traced.graph.num_boundaries:
            return None
        return TableFinder(traced.graph, traced.jaxpr, self._shape, batch_axes, recipe.request, None)

    def _under(self, rules: RuleSet, remat: Blocks) -> Traced:
        """Returns the call with the padding that `rules` ask for. Under rules of the search, parts of which divide, it
        is that of tables that may have owners, where these go by rows."""
        traced = self._traced(remat)
        if rules.name == AUTO:
            return traced if self._recipe.sync.is_dense else self._under(load_rules(_OWNERS), remat)
        if self._recipe.uneven != "pad":
            return traced
        if (rules.name, remat) not in self._padded:
            mesh, recipe = abstract_mesh(self._shape), dataclasses.replace(self._recipe, rules=rules)
            padding = find_padding(Draft.of(traced, mesh, plan_request(recipe, platform_of(mesh)), CHOOSER))
            self._padded[rules.name, remat] = padded_traced(traced, padding) if padding else traced
        return self._padded[rules.name, remat]
