"""Evaluates a step whose tables are synchronised by rows.

A `SparseStep` (`lower.tables.finding` makes it) and the step's arguments go in; its results come out, with what was
observed of every table and what rounding on the wire took away. Boundaries are evaluated with edited lookups, so that a
table's gradient never exists whole; the rows are exchanged behind them, and written by what the step computes of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from splitjax import _compat
from splitjax.lower.boundary import is_boundary
from splitjax.lower.products.interpret import BoundaryHook, Hooks, evaluate
from splitjax.lower.products.layout import StepLayout
from splitjax.lower.products.row_values import Rows, RowWriter, dense
from splitjax.lower.tables.collective_order import CollectiveOrder
from splitjax.lower.tables.lookups import Edited, EditedLookup, ids_of, rows_of
from splitjax.lower.tables.owned_rows import OwnerSums, Pulled, pull, push
from splitjax.lower.tables.sparse_step import SparseStep
from splitjax.lower.tables.table_rows import Exchanged, exchange
from splitjax.lower.tables.table_sync import TableSync
from splitjax.primitives.walk import Site, holds_boundary


@dataclasses.dataclass(eq=False)
class _SparseTrace:
    """A trace of a step with sparse tables: evaluates its boundaries and remembers by table what they gave."""

    step: SparseStep
    mesh: Mesh
    hook: BoundaryHook
    arguments: Sequence[Any]
    residuals: Mapping[str, Any]
    summed: dict[int, Exchanged | OwnerSums]
    collectives: CollectiveOrder = dataclasses.field(default_factory=CollectiveOrder)

    def boundary(self, eqn: Any, operands: Sequence[Any], site: Site, forward: Callable) -> list[Any]:
        """Evaluates a boundary, and exchanges the rows of its tables."""
        operands = [dense(operand) for operand in operands]
        if not self.step.at(site):
            return self.hook(eqn, operands, site, forward)
        edited, order, positions = self.step.edited(eqn, site)
        pulled = self._pulled(edited, order, positions, operands)
        deltas = [self._delta(lookup, place, order, pulled) for place, lookup in enumerate(edited.lookups)]
        results = self.hook(edited.eqn, [*operands, *deltas], site, forward)
        num_results, count = len(eqn.outvars) - len(eqn.params["positions"]), len(order)
        ids, gradients = results[num_results : num_results + count], results[num_results + count :]
        kept, cotangents = gradients[: len(edited.kept)], gradients[len(edited.kept) :]
        ready = self.collectives.ready()
        for number in positions:
            rows = [
                rows_of(lookup, own_ids, cotangent)
                for (table, _), lookup, own_ids, cotangent in zip(order, edited.lookups, ids, cotangents, strict=True)
                if table == number
            ]
            residual = self.residuals.get(self.step.tables[number].param)
            if number in pulled:
                gradients_of_rows = [values for _, values in rows]
                self.summed[number] = push(pulled[number], self.collectives, ready, gradients_of_rows, residual)
                continue
            loops = [
                lookup.num_loops for (table, _), lookup in zip(order, edited.lookups, strict=True) if table == number
            ]
            self.summed[number] = exchange(
                self._placed(self.step.tables[number], loops, [numbers for numbers, _ in rows]),
                self.mesh,
                self.collectives,
                ready,
                [numbers for numbers, _ in rows],
                [values for _, values in rows],
                residual,
            )
        whole: dict[int, Any] = dict(zip(edited.kept, kept, strict=True))
        table_at = {position: number for number, position in positions.items()}
        for k, position in enumerate(eqn.params["positions"]):
            if k not in whole:
                table = self.step.tables[table_at[position]]
                whole[k] = Rows(table.shape, table.dtype, table_at[position], True)
        return [*results[:num_results], *(whole[k] for k in range(len(whole)))]

    def _pulled(
        self, edited: Edited, order: Sequence[tuple[int, int]], positions: Mapping[int, int], operands: Sequence[Any]
    ) -> dict[int, Pulled]:
        """Pulls the rows of the tables that their workers own, before the forward pass."""
        owned = [number for number in positions if self.step.tables[number].is_owned]
        if not owned:
            return {}
        known = ids_of(edited)
        assert known is not None, "find_sparse lets workers own tables only where ids are known before"
        closed, used = known
        read = [operand for operand, is_used in zip(operands, used, strict=False) if is_used]
        every = _compat.eval_jaxpr(closed, (), *read)
        pulled = {}
        for number in owned:
            mine = [place for place, (table, _) in enumerate(order) if table == number]
            ids = [rows_of(edited.lookups[place], every[place])[0] for place in mine]
            table = self._placed(self.step.tables[number], [edited.lookups[place].num_loops for place in mine], ids)
            pulled[number] = pull(table, self.mesh, self.collectives, operands[positions[number]], ids)
        return pulled

    def _delta(
        self, lookup: EditedLookup, place: int, order: Sequence[tuple[int, int]], pulled: Mapping[int, Pulled]
    ) -> Any:
        """Gives what a lookup's rows are differentiated by: zeros that are added to them, or the pulled rows
        themselves."""
        number, k = order[place]
        return (
            pulled[number].given(lookup, k) if number in pulled else jnp.zeros(lookup.delta.shape, lookup.delta.dtype)
        )

    def _placed(self, table: TableSync, loops: Sequence[int], ids: Sequence[Any]) -> TableSync:
        """Gives the table with the dims of lookups as they are here: behind those of loops. Ids without examples are
        cut where a dim divides."""
        lookups = []
        for lookup, num_loops, numbers in zip(table.lookups, loops, ids, strict=True):
            dim = None if lookup.dim is None else lookup.dim + num_loops
            if dim is None:
                dim = next((d for d, size in enumerate(numbers.shape) if size % table.num_workers == 0), None)
            lookups.append(dataclasses.replace(lookup, dim=dim))
        return dataclasses.replace(table, lookups=tuple(lookups))

    def total(self, eqn: Any, value: Rows) -> Any:
        """Reduces over all touched rows of the table that `value` belongs to."""
        assert value.table is not None, "what depends on a table's gradient belongs to this table"
        summed = self.summed[value.table]
        return summed.total({leaf: self.arguments[leaf] for leaf in summed.table.leaves}, eqn, value)


def evaluate_sparse(
    step: SparseStep,
    mesh: Mesh,
    layout: StepLayout,
    arguments: Sequence[Any],
    hook: BoundaryHook,
    results_of: Mapping[int, int],
    residuals: Mapping[str, Any],
) -> tuple[list[Any], dict[str, dict[str, Any]], dict[str, Any]]:
    """Evaluates a step whose tables are synchronised by rows.

    **Arguments:**

    - `step`: the tables that are synchronised by rows.
    - `mesh`, `layout`: where the step runs, and the constraints by site.
    - `arguments`: its flat arguments.
    - `hook`: evaluates its gradient boundaries.
    - `results_of`: flat argument of a state leaf -> its flat result.
    - `residuals`: by table that is rounded on the wire f[n, num_rows, *row], what rounding took away from each of n
      workers.

    **Returns:** its flat results; by table what was observed: `fell_back` bool[], whether the capacities did not
    suffice; `touched` i32[n, k], the ids of n workers, while there are no capacities; and the new residuals.
    """
    trace = _SparseTrace(step, mesh, hook, arguments, residuals, {})
    operands = list(arguments)
    for number, table in enumerate(step.tables):
        for leaf in table.leaves:
            operands[leaf] = Rows(
                arguments[leaf].shape, arguments[leaf].dtype, number, False, leaf=leaf, array=arguments[leaf]
            )
    writer = RowWriter(
        frozenset(table.num_rows for table in step.tables),
        trace.total,
        lambda eqn: is_boundary(eqn) or holds_boundary(eqn),
    )
    results = evaluate(layout, step.jaxpr, operands, Hooks(trace.boundary, writer.equation))
    observed = {}
    for number, table in enumerate(step.tables):
        summed = trace.summed[number]
        new = {leaf: results[results_of[leaf]] for leaf in table.leaves}
        new = {leaf: value for leaf, value in new.items() if isinstance(value, Rows) and value.behind}
        changed = summed.write({leaf: arguments[leaf] for leaf in table.leaves}, new)
        for leaf in new:
            results[results_of[leaf]] = changed[leaf]
        observed[table.param] = summed.observed
    kept = {table.param: trace.summed[number].residual for number, table in enumerate(step.tables) if table.wire_dtype}
    return [dense(result) for result in results], observed, kept
