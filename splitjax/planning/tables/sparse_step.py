"""Holds the tables of a step that are synchronised by rows, as a value, and finds their places in its boundaries.

`planning.tables.finding` makes a `SparseStep`; evaluation (`lower.tables.sparse`) asks it which tables a boundary
differentiates, where their operands stand, and for the boundary with edited lookups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from splitjax.errors import Refusal
from splitjax.planning.tables.lookups import Edited, edit_boundary
from splitjax.planning.tables.table_sync import TableSync
from splitjax.primitives.walk import Site, equation_at
from splitjax.step.boundary import Twin
from splitjax.trace.graph import Graph
from splitjax.trace.tables import LookupTable


@dataclasses.dataclass(frozen=True, eq=False)
class TableEdit:
    """Holds a boundary whose lookups are edited.

    - `edited`: the edited boundary.
    - `order`: per lookup (number of the table, number of the lookup among the table's).
    - `operands`: by number of a table the position of its operand.
    """

    edited: Edited
    order: Sequence[tuple[int, int]]
    operands: Mapping[int, int]


@dataclasses.dataclass(frozen=True)
class SparseStep:
    """The tables of a step that are synchronised by rows, and why all other tables with lookups are not.

    - `graph`, `jaxpr`: the step's graph and its closed jaxpr.
    - `tables`: those that are synchronised by rows.
    - `reasons`: by path of a table that stays dense, why.
    """

    graph: Graph
    jaxpr: Any
    tables: tuple[TableSync, ...]
    reasons: Mapping[str, str]

    def table_of(self, sync: TableSync) -> LookupTable:
        """Gives the graph's table whose synchronisation `sync` is."""
        return next(table for table in self.graph.tables if table.param == sync.param)

    def num_ids(self, sync: TableSync) -> int:
        """Gives how many ids a worker looks up in a table in a step, with all repetitions: those of examples are its
        own, and others every worker has."""
        lookups = zip(self.table_of(sync).lookups, sync.lookups, strict=True)
        return sum(traced.num_ids // (sync.num_workers if lookup.dim is not None else 1) for traced, lookup in lookups)

    def together(self, sync: TableSync) -> tuple[TableSync, ...]:
        """Gives the tables whose rows travel in the same messages as those of `sync`, itself among them."""
        first = sync.joins or sync.param
        return tuple(table for table in self.tables if first in (table.param, table.joins))

    @property
    def rounded(self) -> tuple[TableSync, ...]:
        """The tables whose values are rounded on the wire: each has a residual."""
        return tuple(table for table in self.tables if table.wire_dtype)

    def at(self, boundary: Site) -> list[int]:
        """Gives the numbers of the tables that the boundary at site `boundary` differentiates."""
        return [number for number, table in enumerate(self.tables) if self.table_of(table).boundary == boundary]

    def pulled_at(self, boundary: Site) -> frozenset[str]:
        """Gives the paths of the tables whose rows the boundary at site `boundary` is given, which does not read them
        itself: their workers own them."""
        return frozenset(
            self.tables[number].param for number in self.at(boundary) if self.tables[number].exchange.pulls
        )

    def edited(self, eqn: Any, site: Site) -> TableEdit:
        """Edits the lookups of the boundary `eqn`, which stands at `site` in the step."""
        numbers = self.at(site)
        operands = {number: self._operand(number, site) for number in numbers}
        order = [(number, k) for number in numbers for k in range(len(self.tables[number].lookups))]
        sites = [self.table_of(self.tables[number]).lookups[k].site[len(site) + 1 :] for number, k in order]
        given = [place for place, (number, _) in enumerate(order) if self.tables[number].exchange.pulls]
        return TableEdit(edit_boundary(eqn, sites, list(operands.values()), given), order, operands)

    def _operand(self, number: int, site: Site) -> int:
        """Gives the operand position of a table in its boundary."""
        param = self.tables[number].param
        result = next(leaf.result for leaf in self.graph.gradients if leaf.site == site and leaf.param == param)
        eqn = equation_at(self.jaxpr, site)
        positions = eqn.params["positions"]
        return positions[result - (len(eqn.outvars) - len(positions))]

    def twin_of(self, twin_of: Twin) -> Twin:
        """Gives a `Twin` whose boundaries have edited lookups, from `twin_of`, whose boundaries have not: equations of
        the step traced with other numbers of examples."""
        if not self.tables:
            return twin_of

        def edited_twin(eqn: Any, site: Site, num_examples: int) -> Any:
            twin = twin_of(equation_at(self.jaxpr, site), site, num_examples)
            return self.edited(twin, site).edited.eqn if self.at(site) and not isinstance(twin, Refusal) else twin

        return edited_twin
