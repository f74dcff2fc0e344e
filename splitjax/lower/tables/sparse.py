"""Evaluates a step whose tables are synchronised by rows.

A `SparseStep` (`planning.tables.finding` makes it) and the step's arguments go in; its results come out, with what was
observed of every table and what rounding on the wire took away. Boundaries are evaluated with edited lookups, so that a
table's gradient never exists whole; the rows are exchanged behind them, and written by what the step computes of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from splitjax import _compat
from splitjax.lower.products.interpret import BoundaryHook, Hooks, evaluate
from splitjax.lower.products.row_values import Rows, RowWriter, dense
from splitjax.lower.tables.collective_order import CollectiveOrder
from splitjax.lower.tables.owned_rows import OwnerSums, Pulled, pull, push
from splitjax.lower.tables.table_rows import Exchanged, exchange
from splitjax.lower.way import hook_of
from splitjax.planning.sites.layout import StepLayout
from splitjax.planning.tables.lookups import EditedLookup, ids_of, rows_of
from splitjax.planning.tables.sparse_step import SparseStep, TableEdit
from splitjax.planning.tables.table_sync import TableSync
from splitjax.planning.ways import Ways
from splitjax.primitives.walk import holds_boundary
from splitjax.step.boundary import is_boundary


@dataclasses.dataclass(eq=False)
class _SparseTrace:
    """Pulls and pushes rows in one evaluation of a step (`way.RowExchanges`), and remembers by table what boundaries
    gave."""

    step: SparseStep
    mesh: Mesh | AbstractMesh
    arguments: Sequence[Any]
    residuals: Mapping[str, Any]
    summed: dict[int, Exchanged | OwnerSums]
    pulled: dict[int, Pulled] = dataclasses.field(default_factory=dict)
    collectives: CollectiveOrder = dataclasses.field(default_factory=CollectiveOrder)

    def pull(self, edit: TableEdit, operands: Sequence[Any]) -> list[Any]:
        """Pulls the rows of the tables that their workers own, before the forward pass. Returns what the lookups of the
        boundary are differentiated by; `operands` are the boundary's own."""
        owned = [number for number in edit.operands if self.step.tables[number].is_owned]
        if owned:
            known = ids_of(edit.edited)
            assert known is not None, "find_sparse lets workers own tables only where ids are known before"
            closed, used = known
            read = [operand for operand, is_used in zip(operands, used, strict=False) if is_used]
            every = _compat.eval_jaxpr(closed, (), *read)
            for number in owned:
                mine = [place for place, (table, _) in enumerate(edit.order) if table == number]
                lookups = [edit.edited.lookups[place] for place in mine]
                ids = [rows_of(lookup, every[place])[0] for place, lookup in zip(mine, lookups, strict=True)]
                table = self._placed(self.step.tables[number], [lookup.num_loops for lookup in lookups], ids)
                self.pulled[number] = pull(table, self.mesh, self.collectives, operands[edit.operands[number]], ids)
        return [self._delta(lookup, *edit.order[place]) for place, lookup in enumerate(edit.edited.lookups)]

    def push(self, edit: TableEdit, eqn: Any, results: Sequence[Any]) -> list[Any]:
        """Exchanges the rows among the `results` of the edited boundary, and remembers them by table. Returns the
        results of the boundary `eqn`, with `Rows` for the gradients of tables."""
        edited, order = edit.edited, edit.order
        num_results, count = len(eqn.outvars) - len(eqn.params["positions"]), len(order)
        ids, gradients = results[num_results : num_results + count], results[num_results + count :]
        kept, cotangents = gradients[: len(edited.kept)], gradients[len(edited.kept) :]
        ready = self.collectives.ready()
        for number in edit.operands:
            rows = [
                rows_of(lookup, own_ids, cotangent)
                for (table, _), lookup, own_ids, cotangent in zip(order, edited.lookups, ids, cotangents, strict=True)
                if table == number
            ]
            residual = self.residuals.get(self.step.tables[number].param)
            if number in self.pulled:
                gradients_of_rows = [values for _, values in rows]
                self.summed[number] = push(self.pulled[number], self.collectives, ready, gradients_of_rows, residual)
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
        table_at = {position: number for number, position in edit.operands.items()}
        for k, position in enumerate(eqn.params["positions"]):
            if k not in whole:
                table = self.step.tables[table_at[position]]
                whole[k] = Rows(table.shape, table.dtype, table_at[position], True)
        return [*results[:num_results], *(whole[k] for k in range(len(whole)))]

    def _delta(self, lookup: EditedLookup, number: int, k: int) -> Any:
        """Gives what lookup number `k` of table `number` is differentiated by: zeros that are added to its rows, or the
        pulled rows themselves."""
        return (
            self.pulled[number].given(lookup, k)
            if number in self.pulled
            else jnp.zeros(lookup.delta.shape, lookup.delta.dtype)
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
    layout: StepLayout,
    arguments: Sequence[Any],
    ways: Ways,
    results_of: Mapping[int, int],
    residuals: Mapping[str, Any],
) -> tuple[list[Any], dict[str, dict[str, Any]], dict[str, Any]]:
    """Evaluates a step whose tables are synchronised by rows.

    **Arguments:**

    - `step`: the tables that are synchronised by rows.
    - `layout`: the mesh on which the step runs, and the constraints by site.
    - `arguments`: its flat arguments.
    - `ways`: by site, how each gradient boundary runs.
    - `results_of`: flat argument of a state leaf -> its flat result.
    - `residuals`: by table that is rounded on the wire f[n, num_rows, *row], what rounding took away from each of n
      workers.

    **Returns:** its flat results; by table what was observed: `fell_back` bool[], whether the capacities did not
    suffice; `touched` i32[n, k], the ids of n workers, while there are no capacities; and the new residuals.
    """
    trace = _SparseTrace(step, layout.mesh, arguments, residuals, {})
    hook = hook_of(ways, layout, trace)
    on_arrays: BoundaryHook = lambda eqn, values, site, forward: hook(eqn, [dense(v) for v in values], site, forward)
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
    results = evaluate(layout, step.jaxpr, operands, Hooks(on_arrays, writer.equation))
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
