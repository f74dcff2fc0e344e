"""Chooses the tables of a step that are synchronised by rows, and evaluates such a step.

A step's graph, its plan and what is asked for go in, a `SparseStep` comes out; with the step's arguments, its results.
A table takes part if its gradient has rows (`trace.lookups`), its update acts on rows (`trace.row_update`), its
boundary runs once a step, and its state is laid out alike. Every other table with lookups stays dense, with the reason
in the plan.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from splitjax import _compat
from splitjax.errors import SyncError
from splitjax.lower.boundary import is_boundary
from splitjax.lower.products.interpret import BoundaryHook, Hooks, Layout, Site, evaluate, holds_boundary
from splitjax.lower.products.row_values import Rows, RowWriter, dense
from splitjax.lower.strategies import Twin
from splitjax.lower.tables.lookups import Edited, EditedLookup, edit_boundary, ids_of, rows_of
from splitjax.lower.tables.owned_rows import OwnerSums, Pulled, pull, push
from splitjax.lower.tables.sync_request import SyncRequest
from splitjax.lower.tables.table_rows import CollectiveOrder, Exchanged, IdCut, TableSync, exchange
from splitjax.plan import LeafPlan, Plan, spec_axes
from splitjax.sync.all_gather import AllGather
from splitjax.sync.dense import Dense
from splitjax.sync.description import Exchange, by_owners
from splitjax.sync.owner import OwnerSharded
from splitjax.sync.scheme import ByRows, Capacities, Scheme
from splitjax.trace.flatten import call_body, equation_at
from splitjax.trace.graph import Graph, RowUpdate, Table, itemsize

_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
LAZY_HINT: str = "; lazy=True would leave these rows alone"
Chosen = Mapping[str, tuple[Exchange, Capacities]]  # by the path of the table


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

    def table_of(self, sync: TableSync) -> Table:
        """Gives the graph's table whose synchronisation `sync` is."""
        return next(table for table in self.graph.tables if table.param == sync.param)

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
        return frozenset(self.tables[number].param for number in self.at(boundary) if self.tables[number].is_owned)

    def edited(self, eqn: Any, site: Site) -> tuple[Edited, list[tuple[int, int]], dict[int, int]]:
        """Edits the lookups of a boundary.

        **Arguments:** `eqn`: its equation. `site`: where it stands in the step.

        Returns the edited boundary; per lookup (number of the table, number of the lookup among the table's); by number
        of a table the position of its operand.
        """
        numbers = self.at(site)
        operands = {number: self._operand(number, site) for number in numbers}
        order = [(number, k) for number in numbers for k in range(len(self.tables[number].lookups))]
        sites = [self.table_of(self.tables[number]).lookups[k].site[len(site) + 1 :] for number, k in order]
        given = [place for place, (number, _) in enumerate(order) if self.tables[number].is_owned]
        return edit_boundary(eqn, sites, list(operands.values()), given), order, operands

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
            return self.edited(twin, site)[0].eqn if self.at(site) else twin

        return edited_twin


def find_sparse(graph: Graph, jaxpr: Any, plan: Plan, request: SyncRequest, chosen: Chosen | None) -> SparseStep:
    """Finds the tables to synchronise by rows.

    **Arguments:**

    - `graph`, `jaxpr`, `plan`: the step's graph, its closed jaxpr and its plan.
    - `request`: what is asked for by parameter.
    - `chosen`: schemes and capacities, once they are known; None while the first steps are observed.

    Raises `SyncError` for a step without a gradient boundary, and for a pattern that fits no parameter.
    """
    if not graph.num_boundaries:
        raise SyncError(
            "sync needs a gradient boundary: the step takes its gradient with plain jax.grad, whose tables cannot be"
            " told apart",
            place="parallelize, sync",
            remedy="use splitjax.value_and_grad for the gradient",
        )
    request.check([leaf.path for leaf in graph.params])
    syncing = _Syncing(graph, jaxpr, plan, request, chosen)
    tables, reasons = [], {}
    for table in graph.tables:
        asked = request.of(table.param)
        reason = _reason(table, jaxpr, plan, asked) if request.names(table.param) else "no pattern of sync= fits it"
        if not reason and chosen is not None and isinstance(chosen[table.param][0], Dense):
            reason = "chosen"
        if reason:
            reasons[table.param] = reason
            continue
        tables.append(syncing.table_sync(table))
    step = SparseStep(graph, jaxpr, tuple(tables), reasons)
    # Where the ids are known only with the parameters, rows cannot be brought before the forward pass.
    late = {
        sync.param
        for sync in tables
        if sync.is_owned
        and ids_of(step.edited(equation_at(jaxpr, site := step.table_of(sync).boundary), site)[0]) is None
    }
    again = lambda sync: syncing.table_sync(step.table_of(sync), may_own=False)
    return dataclasses.replace(step, tables=tuple(again(sync) if sync.param in late else sync for sync in tables))


def _reason(table: Table, jaxpr: Any, plan: Plan, asked: ByRows) -> str:
    """Says why a table stays dense; empty if it need not."""
    if isinstance(asked.scheme, Dense):
        return "asked for"
    update = _update(table, asked)
    if update is None:
        return f"{table.reason}{LAZY_HINT if table.lazy_update is not None else ''}"
    for depth in range(1, len(table.boundary), 2):
        around = equation_at(jaxpr, table.boundary[:depth])
        if around.primitive.name not in _CALLS:
            return _inside(around)
    planned = [plan.leaves[index] for index in update.leaves]
    if (
        isinstance(asked.scheme, Scheme)
        and asked.scheme.needs_whole_rows
        and any(spec_axes(leaf.spec[1:]) for leaf in planned)
    ):
        return (
            f"its rows are split, and {asked.scheme.name} tells rows by their values, of which each device has a part"
        )
    if any(leaf.gradient is not None for leaf in planned):
        return "its gradient is summed into parts (shard_state)"
    if len({spec_axes(leaf.spec[:1]) for leaf in planned}) > 1:
        return "its rows and those of its optimizer state are laid out differently"
    return ""


def _inside(loop: Any) -> str:
    """Says why a gradient that is taken inside an equation stays dense."""
    line = _compat.source_line(loop)
    return f"its gradient is taken inside {loop.primitive.name}, more than once a step{f' ({line})' if line else ''}"


def gradient_in_loop(jaxpr: Any) -> str:
    """Names in words the first loop or condition of the step `jaxpr` that takes a gradient inside; empty without
    one."""
    for eqn in _compat.open_jaxpr(jaxpr)[0].eqns:
        if is_boundary(eqn) or not holds_boundary(eqn):
            continue
        body = call_body(eqn)
        return gradient_in_loop(body) if body is not None else _inside(eqn)
    return ""


def _update(table: Table, asked: ByRows) -> RowUpdate | None:
    return table.update if table.update is not None or not asked.lazy else table.lazy_update


@dataclasses.dataclass(frozen=True, eq=False)
class _Syncing:
    """Says how tables of a step are synchronised: the step, and what is asked for or chosen."""

    graph: Graph
    jaxpr: Any
    plan: Plan
    request: SyncRequest
    chosen: Chosen | None

    def table_sync(self, table: Table, may_own: bool = True) -> TableSync:
        """Says how a table is synchronised by rows. `may_own`: its workers may own the rows that they hold."""
        mesh, asked = self.plan.mesh, self.request.of(table.param)
        leaf = {leaf.path: leaf for leaf in self.plan.leaves}[table.param]
        update = _update(table, asked)
        assert update is not None, "a table whose update does not act on rows stays dense"
        split = spec_axes(leaf.spec[1:])
        axes = tuple(axis for axis in mesh.present(self.plan.batch_axes) if axis not in split)
        num_workers = mesh.size(axes)
        is_owned = may_own and bool(axes) and spec_axes(leaf.spec[:1]) == axes
        if self.chosen is not None:
            scheme, capacities = self.chosen[table.param]
            is_owned = is_owned and isinstance(scheme, OwnerSharded)
        else:
            scheme, capacities = _asked(asked, table.num_rows, leaf, num_workers, is_owned), None
        lookups = tuple(
            IdCut(_example_dim(lookup, self.graph, self.jaxpr, num_workers), lookup.mode.removesuffix("_or_drop"))
            for lookup in table.lookups
        )
        return TableSync(
            param=table.param,
            leaf=next(index for index, argument in enumerate(self.graph.leaves) if argument.path == table.param),
            leaves=update.leaves,
            shape=leaf.shape,
            dtype=leaf.dtype,
            spec=leaf.spec,
            axes=axes,
            num_workers=num_workers,
            lookups=lookups,
            is_owned=is_owned,
            row_size=math.prod(leaf.shape[1:]) // mesh.size(split),
            scheme=scheme,
            capacities=capacities,
        )


def _asked(asked: ByRows, num_rows: int, leaf: LeafPlan, num_workers: int, is_owned: bool) -> Exchange:
    """Says how a table's rows are added up, as far as that is known before steps were observed. What is not sent, or
    has no more digits than are sent, is not rounded."""
    scheme = asked.scheme if isinstance(asked.scheme, Scheme) else AllGather()
    wire_dtype = getattr(scheme, "wire_dtype", None)
    if wire_dtype is not None and (num_workers == 1 or itemsize(leaf.dtype) <= itemsize(wire_dtype)):
        scheme, wire_dtype = dataclasses.replace(scheme, wire_dtype=None), None
    return by_owners(num_rows, wire_dtype=wire_dtype) if is_owned else scheme


def _example_dim(lookup: Any, graph: Graph, jaxpr: Any, num_workers: int) -> int | None:
    """Gives the dim of a lookup's ids that is cut over the workers, without the loops that the lookup stands in."""
    use = next((use for use in graph.uses if use.site == lookup.site), None)
    if use is None:
        return None
    of_rows = equation_at(jaxpr, lookup.site).params["dimension_numbers"].offset_dims
    of_ids = [dim for dim in range(len(use.out_shape)) if dim not in of_rows]
    return next(
        (
            k
            for k, dim in enumerate(of_ids)
            if graph.is_example(use.out_dims[dim]) and use.out_shape[dim] % num_workers == 0
        ),
        None,
    )


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
    layout: Layout,
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
