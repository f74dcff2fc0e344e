"""Evaluates a step whose tables are synchronised by rows.

A `SparseStep` (`planning.tables.finding` makes it) and the step's arguments go in; its results come out, with what was
observed of every table and what rounding on the wire took away. Boundaries are evaluated with edited lookups, so that a
table's gradient never exists whole; the rows are exchanged behind them, and written by what the step computes of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from splitjax import _compat
from splitjax.lower.products.interpret import BoundaryHook, Hooks, evaluate
from splitjax.lower.products.row_values import Rows, RowWriter, all_dense
from splitjax.lower.tables.around import BeginRows, LookedUp, RowGradients, RowsInStep, SummedRows, Surroundings
from splitjax.lower.tables.collective_order import CollectiveOrder
from splitjax.lower.tables.owned_rows import begin_owned
from splitjax.lower.tables.table_rows import begin_summed
from splitjax.lower.way import hook_of
from splitjax.planning.sites.layout import StepLayout
from splitjax.planning.tables.lookups import ids_of, rows_of
from splitjax.planning.tables.sparse_step import SparseStep, TableEdit
from splitjax.planning.ways import Ways
from splitjax.primitives.calls import BOUNDARY
from splitjax.primitives.walk import holds_boundary
from splitjax.sync.costs.exchange import ByOwners, ByScheme, Exchange

# Who runs an exchange, by what was planned.
_BEGIN: Mapping[type[Exchange], BeginRows] = {ByScheme: begin_summed, ByOwners: begin_owned}


@dataclasses.dataclass(eq=False)
class _SparseTrace:
    """Pulls and pushes rows in one evaluation of a step (`planning.ways.RowExchanges`), and remembers by table what
    boundaries gave."""

    step: SparseStep
    mesh: Mesh | AbstractMesh
    arguments: Sequence[Any]
    residuals: Mapping[str, Any]
    rows: dict[int, tuple[RowsInStep, int]] = dataclasses.field(default_factory=dict)
    summed: dict[int, SummedRows] = dataclasses.field(default_factory=dict)
    collectives: CollectiveOrder = dataclasses.field(default_factory=CollectiveOrder)

    def pull(self, edit: TableEdit, operands: Sequence[Any]) -> list[Any]:
        """Begins the exchanges of the tables of a boundary before its forward pass: rows that their workers own are
        pulled. Returns what its lookups are differentiated by; `operands` are the boundary's own."""
        around, every = Surroundings(self.mesh, self.collectives), self._ids(edit, operands)
        for together in self._together(edit):
            looked_up = [self._looked_up(edit, number, operands, every) for number in together]
            rows = _BEGIN[type(looked_up[0].table.exchange)](around, looked_up)
            self.rows |= {number: (rows, which) for which, number in enumerate(together)}
        given = []
        for place, (number, k) in enumerate(edit.order):
            rows, which = self.rows[number]
            given.append(rows.given(which, edit.edited.lookups[place], k))
        return given

    def _together(self, edit: TableEdit) -> list[list[int]]:
        """Returns the numbers of the tables of a boundary, those together whose rows travel in the same messages."""
        groups: dict[str, list[int]] = {}
        for number in edit.operands:
            table = self.step.tables[number]
            groups.setdefault(table.joins or table.param, []).append(number)
        return list(groups.values())

    def _looked_up(
        self, edit: TableEdit, number: int, operands: Sequence[Any], every: Sequence[Any] | None
    ) -> LookedUp:
        """Returns the lookups of table `number`. `every`: the ids of all lookups of the boundary, where these are
        known."""
        table = self.step.tables[number]
        mine = [place for place, (of_table, _) in enumerate(edit.order) if of_table == number]
        lookups = [edit.edited.lookups[place] for place in mine]
        ids = None
        if table.exchange.pulls:
            assert every is not None, "find_sparse lets workers own tables only where ids are known before"
            ids = [rows_of(lookup, every[place])[0] for place, lookup in zip(mine, lookups, strict=True)]
        loops = [lookup.num_loops for lookup in lookups]
        return LookedUp(table, operands[edit.operands[number]], loops, ids)

    def _ids(self, edit: TableEdit, operands: Sequence[Any]) -> list[Any] | None:
        """Returns the ids of all lookups of a boundary, where a table of it needs them before the forward pass."""
        known = ids_of(edit.edited) if any(self.step.tables[k].exchange.pulls for k in edit.operands) else None
        if known is None:
            return None
        closed, used = known
        read = [operand for operand, is_used in zip(operands, used, strict=False) if is_used]
        return _compat.eval_jaxpr(closed, (), *read)

    def push(self, edit: TableEdit, eqn: Any, results: Sequence[Any]) -> list[Any]:
        """Exchanges the rows among the `results` of the edited boundary, and remembers them by table. Returns the
        results of the boundary `eqn`, with `Rows` for the gradients of tables."""
        edited, order = edit.edited, edit.order
        num_results, count = len(eqn.outvars) - len(eqn.params["positions"]), len(order)
        ids, gradients = results[num_results : num_results + count], results[num_results + count :]
        kept, cotangents = gradients[: len(edited.kept)], gradients[len(edited.kept) :]
        ready = self.collectives.ready()
        for together in self._together(edit):
            pushed = []
            for number in together:
                rows = [
                    rows_of(lookup, own_ids, cotangent)
                    for (table, _), lookup, own_ids, cotangent in zip(
                        order, edited.lookups, ids, cotangents, strict=True
                    )
                    if table == number
                ]
                residual = self.residuals.get(self.step.tables[number].param)
                pushed.append(RowGradients([own for own, _ in rows], [values for _, values in rows], residual))
            summed = self.rows[together[0]][0].push(ready, pushed)
            self.summed.update(zip(together, summed, strict=True))
        whole: dict[int, Any] = dict(zip(edited.kept, kept, strict=True))
        table_at = {position: number for number, position in edit.operands.items()}
        for k, position in enumerate(eqn.params["positions"]):
            if k not in whole:
                table = self.step.tables[table_at[position]]
                whole[k] = Rows(table.shape, table.dtype, table_at[position], True)
        return [*results[:num_results], *(whole[k] for k in range(len(whole)))]

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
    trace = _SparseTrace(step, layout.mesh, arguments, residuals)
    hook = hook_of(ways, layout, trace)
    on_arrays: BoundaryHook = lambda eqn, values, site, forward: hook(eqn, all_dense(values), site, forward)
    operands = list(arguments)
    for number, table in enumerate(step.tables):
        for leaf in table.leaves:
            operands[leaf] = Rows(
                arguments[leaf].shape, arguments[leaf].dtype, number, False, leaf=leaf, array=arguments[leaf]
            )
    writer = RowWriter(
        frozenset(table.num_rows for table in step.tables),
        trace.total,
        lambda eqn: eqn.primitive.name == BOUNDARY or holds_boundary(eqn),
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
    return all_dense(results), observed, kept
