"""Which tables of a step are synchronised by rows, and the evaluation of such a step.

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
from splitjax.lower.gradient import is_boundary
from splitjax.lower.products.interpret import BoundaryHook, Hooks, Layout, Site, evaluate, holds_boundary
from splitjax.lower.products.row_values import Rows, RowWriter, dense
from splitjax.lower.strategies import Twin
from splitjax.lower.tables.lookups import Edited, Lookup, edit_boundary, ids_of, rows_of
from splitjax.lower.tables.owned_rows import Owned, Pulled, pull, push
from splitjax.lower.tables.sync_request import SyncRequest
from splitjax.lower.tables.table_rows import Exchanged, IdCut, TableSync, Turns, exchange
from splitjax.plan import LeafPlan, Plan, spec_axes
from splitjax.sync.all_gather import AllGather
from splitjax.sync.dense import Dense
from splitjax.sync.description import Exchange, by_owners
from splitjax.sync.owner import OwnerSharded
from splitjax.sync.scheme import ByRows, Capacities, Scheme
from splitjax.trace.flatten import call_body, equation_at
from splitjax.trace.graph import Graph, RowUpdate, Table, itemsize

_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
LAZY_HINT = "; lazy=True would leave these rows alone"
Chosen = Mapping[str, tuple[Exchange, Capacities]]  # by the path of the table


@dataclasses.dataclass(frozen=True)
class SparseStep:
    """The tables of a step that are synchronised by rows, and why the others with lookups are not."""

    graph: Graph
    jaxpr: Any
    tables: tuple[TableSync, ...]
    reasons: Mapping[str, str]

    def table_of(self, sync: TableSync) -> Table:
        return next(one for one in self.graph.tables if one.param == sync.param)

    @property
    def rounded(self) -> tuple[TableSync, ...]:
        """The tables whose values are rounded on the wire: each has a residual."""
        return tuple(one for one in self.tables if one.wire_dtype)

    def at(self, boundary: Site) -> list[int]:
        """The numbers of the tables that a boundary differentiates."""
        return [number for number, one in enumerate(self.tables) if self.table_of(one).boundary == boundary]

    def pulled_at(self, boundary: Site) -> frozenset[str]:
        """The tables whose rows a boundary is given, which does not read them itself: their workers own them."""
        return frozenset(self.tables[number].param for number in self.at(boundary) if self.tables[number].is_owned)

    def edited(self, eqn: Any, site: Site) -> tuple[Edited, list[tuple[int, int]], dict[int, int]]:
        """A boundary with its lookups edited; per lookup (table, its number there); per table the operand."""
        numbers = self.at(site)
        operands = {number: self._operand(number, site) for number in numbers}
        order = [(number, k) for number in numbers for k in range(len(self.tables[number].lookups))]
        sites = [self.table_of(self.tables[number]).lookups[k].site[len(site) + 1 :] for number, k in order]
        given = [place for place, (number, _) in enumerate(order) if self.tables[number].is_owned]
        return edit_boundary(eqn, sites, list(operands.values()), given), order, operands

    def _operand(self, number: int, site: Site) -> int:
        """The operand position of a table in its boundary."""
        found = next(one for one in self.graph.gradients if one.site == site and one.param == self.tables[number].param)
        eqn = equation_at(self.jaxpr, site)
        positions = eqn.params["positions"]
        return positions[found.result - (len(eqn.outvars) - len(positions))]

    def twin_of(self, twin_of: Twin) -> Twin:
        """The same for the step traced with other numbers of examples."""
        if not self.tables:
            return twin_of

        def edited_twin(eqn: Any, site: Site, num_examples: int) -> Any:
            twin = twin_of(equation_at(self.jaxpr, site), site, num_examples)
            return self.edited(twin, site)[0].eqn if self.at(site) else twin

        return edited_twin


def find_sparse(graph: Graph, jaxpr: Any, plan: Plan, request: SyncRequest, chosen: Chosen | None) -> SparseStep:
    """The tables to synchronise by rows.

    **Arguments:** `chosen`: schemes and capacities, once they are known; None while the first steps are observed."""
    if not graph.num_boundaries:
        raise SyncError(
            "sync needs a gradient boundary: the step takes its gradient with plain jax.grad, whose tables cannot be"
            " told apart",
            place="parallelize, sync",
            remedy="use splitjax.value_and_grad for the gradient",
        )
    request.check([leaf.path for leaf in graph.params])
    leaves = {leaf.path: leaf for leaf in plan.leaves}
    tables, reasons = [], {}
    for table in graph.tables:
        asked = request.of(table.param)
        reason = _reason(table, jaxpr, plan, asked) if request.names(table.param) else "no pattern of sync= fits it"
        if not reason and chosen is not None and isinstance(chosen[table.param][0], Dense):
            reason = "chosen"
        if reason:
            reasons[table.param] = reason
            continue
        tables.append(_table_sync(table, graph, jaxpr, plan, leaves[table.param], asked, chosen))
    step = SparseStep(graph, jaxpr, tuple(tables), reasons)
    # Where the ids are known only with the parameters, rows cannot be brought before the forward pass.
    late = {
        one.param
        for one in tables
        if one.is_owned
        and ids_of(step.edited(equation_at(jaxpr, site := step.table_of(one).boundary), site)[0]) is None
    }
    again = lambda one: _table_sync(
        step.table_of(one), graph, jaxpr, plan, leaves[one.param], request.of(one.param), chosen, may_own=False
    )
    return dataclasses.replace(step, tables=tuple(again(one) if one.param in late else one for one in tables))


def _reason(table: Table, jaxpr: Any, plan: Plan, asked: ByRows) -> str:
    """Why a table stays dense; empty if it need not."""
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
        and any(spec_axes(one.spec[1:]) for one in planned)
    ):
        return (
            f"its rows are split, and {asked.scheme.name} tells rows by their values, of which each device has a part"
        )
    if any(one.gradient is not None for one in planned):
        return "its gradient is summed into parts (shard_state)"
    if len({spec_axes(one.spec[:1]) for one in planned}) > 1:
        return "its rows and those of its optimizer state are laid out differently"
    return ""


def _inside(loop: Any) -> str:
    """Why a gradient that is taken inside an equation stays dense."""
    line = _compat.source_line(loop)
    return f"its gradient is taken inside {loop.primitive.name}, more than once a step{f' ({line})' if line else ''}"


def gradient_in_loop(jaxpr: Any) -> str:
    """In words, the first loop or condition of a step that takes a gradient inside; empty without one."""
    for eqn in _compat.open_jaxpr(jaxpr)[0].eqns:
        if is_boundary(eqn) or not holds_boundary(eqn):
            continue
        body = call_body(eqn)
        return gradient_in_loop(body) if body is not None else _inside(eqn)
    return ""


def _update(table: Table, asked: ByRows) -> RowUpdate | None:
    return table.update if table.update is not None or not asked.lazy else table.lazy_update


def _table_sync(
    table: Table,
    graph: Graph,
    jaxpr: Any,
    plan: Plan,
    leaf: LeafPlan,
    asked: ByRows,
    chosen: Chosen | None,
    may_own: bool = True,
) -> TableSync:
    split = spec_axes(leaf.spec[1:])
    axes = tuple(axis for axis in plan.mesh.present(plan.batch_axes) if axis not in split)
    num_workers = plan.mesh.size(axes)
    is_owned = may_own and bool(axes) and spec_axes(leaf.spec[:1]) == axes
    if chosen is not None:
        scheme, capacities = chosen[table.param]
        is_owned = is_owned and isinstance(scheme, OwnerSharded)
    else:
        scheme, capacities = _asked(asked, table.num_rows, leaf, num_workers, is_owned), None
    row_size = math.prod(leaf.shape[1:]) // plan.mesh.size(split)
    index = next(index for index, one in enumerate(graph.leaves) if one.path == table.param)
    lookups = tuple(
        IdCut(_example_dim(one, graph, jaxpr, num_workers), one.mode.removesuffix("_or_drop")) for one in table.lookups
    )
    return TableSync(
        table.param,
        index,
        _update(table, asked).leaves,
        leaf.shape,
        leaf.dtype,
        leaf.spec,
        axes,
        num_workers,
        lookups,
        is_owned,
        row_size,
        scheme,
        capacities,
    )


def _asked(asked: ByRows, num_rows: int, leaf: LeafPlan, num_workers: int, is_owned: bool) -> Exchange:
    """How a table's rows are added up as far as that is known before steps were observed. What is not sent, or has no
    more digits than are sent, is not rounded."""
    scheme = asked.scheme if isinstance(asked.scheme, Scheme) else AllGather()
    wire_dtype = getattr(scheme, "wire_dtype", None)
    if wire_dtype is not None and (num_workers == 1 or itemsize(leaf.dtype) <= itemsize(wire_dtype)):
        scheme, wire_dtype = dataclasses.replace(scheme, wire_dtype=None), None
    return by_owners(num_rows, wire_dtype=wire_dtype) if is_owned else scheme


def _example_dim(lookup: Any, graph: Graph, jaxpr: Any, num_workers: int) -> int | None:
    """The dim of a lookup's ids, without the loops that it stands in, that is cut over the workers."""
    use = next((one for one in graph.uses if one.site == lookup.site), None)
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
class _Run:
    """One trace of a step: what its boundaries gave."""

    step: SparseStep
    mesh: Mesh
    hook: BoundaryHook
    arguments: Sequence[Any]
    residuals: Mapping[str, Any]
    found: dict[int, Exchanged | Owned]
    turns: Turns = dataclasses.field(default_factory=Turns)

    def boundary(self, eqn: Any, operands: Sequence[Any], site: Site, forward: Callable) -> list[Any]:
        operands = [dense(one) for one in operands]
        if not self.step.at(site):
            return self.hook(eqn, operands, site, forward)
        edited, order, positions = self.step.edited(eqn, site)
        pulled = self._pulled(edited, order, positions, operands)
        deltas = [self._delta(one, place, order, pulled) for place, one in enumerate(edited.lookups)]
        results = self.hook(edited.eqn, [*operands, *deltas], site, forward)
        num_results, count = len(eqn.outvars) - len(eqn.params["positions"]), len(order)
        ids, gradients = results[num_results : num_results + count], results[num_results + count :]
        kept, cotangents = gradients[: len(edited.kept)], gradients[len(edited.kept) :]
        ready = self.turns.ready()
        for number in positions:
            rows = [
                rows_of(lookup, one, cotangent)
                for (table, _), lookup, one, cotangent in zip(order, edited.lookups, ids, cotangents, strict=True)
                if table == number
            ]
            residual = self.residuals.get(self.step.tables[number].param)
            if number in pulled:
                self.found[number] = push(pulled[number], self.turns, ready, [one for _, one in rows], residual)
                continue
            loops = [
                lookup.num_loops for (table, _), lookup in zip(order, edited.lookups, strict=True) if table == number
            ]
            self.found[number] = exchange(
                self._placed(self.step.tables[number], loops, [one for one, _ in rows]),
                self.mesh,
                self.turns,
                ready,
                [one for one, _ in rows],
                [one for _, one in rows],
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
        """The rows of the tables that their workers own, brought before the forward pass."""
        owned = [number for number in positions if self.step.tables[number].is_owned]
        if not owned:
            return {}
        closed, used = ids_of(edited)
        every = _compat.eval_jaxpr(closed, (), *(one for one, is_used in zip(operands, used, strict=False) if is_used))
        pulled = {}
        for number in owned:
            mine = [place for place, (table, _) in enumerate(order) if table == number]
            ids = [rows_of(edited.lookups[place], every[place])[0] for place in mine]
            table = self._placed(self.step.tables[number], [edited.lookups[place].num_loops for place in mine], ids)
            pulled[number] = pull(table, self.mesh, self.turns, operands[positions[number]], ids)
        return pulled

    def _delta(self, lookup: Lookup, place: int, order: Sequence[tuple[int, int]], pulled: Mapping[int, Pulled]) -> Any:
        """What a lookup's rows are differentiated by: zeros that are added to them, or the pulled rows themselves."""
        number, k = order[place]
        return (
            pulled[number].given(lookup, k) if number in pulled else jnp.zeros(lookup.delta.shape, lookup.delta.dtype)
        )

    def _placed(self, table: TableSync, loops: Sequence[int], ids: Sequence[Any]) -> TableSync:
        """The dims of lookups as they are here: behind those of loops. One that no example has is cut where it
        divides."""
        lookups = []
        for one, num_loops, found in zip(table.lookups, loops, ids, strict=True):
            dim = None if one.dim is None else one.dim + num_loops
            if dim is None:
                dim = next((d for d, size in enumerate(found.shape) if size % table.num_workers == 0), None)
            lookups.append(dataclasses.replace(one, dim=dim))
        return dataclasses.replace(table, lookups=tuple(lookups))

    def total(self, eqn: Any, value: Rows) -> Any:
        found = self.found[value.table]
        return found.total({leaf: self.arguments[leaf] for leaf in found.table.leaves}, eqn, value)


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

    **Arguments:** `arguments`: its flat arguments. `results_of`: flat argument of a state leaf -> its flat result.
    `residuals`: by table that is rounded on the wire f[n, num_rows, *row], what rounding took away from each of n
    workers.

    **Returns:** its flat results; by table what was observed: `fell_back` bool[], whether the capacities did not
    suffice; `touched` i32[n, k], the ids of n workers, while there are no capacities; and the new residuals.
    """
    run = _Run(step, mesh, hook, arguments, residuals, {})
    operands = list(arguments)
    for number, table in enumerate(step.tables):
        for leaf in table.leaves:
            operands[leaf] = Rows(
                arguments[leaf].shape, arguments[leaf].dtype, number, False, leaf=leaf, array=arguments[leaf]
            )
    writer = RowWriter(
        frozenset(one.num_rows for one in step.tables), run.total, lambda eqn: is_boundary(eqn) or holds_boundary(eqn)
    )
    results = evaluate(layout, step.jaxpr, operands, Hooks(run.boundary, writer.equation))
    observed = {}
    for number, table in enumerate(step.tables):
        found = run.found[number]
        new = {leaf: results[results_of[leaf]] for leaf in table.leaves}
        new = {leaf: value for leaf, value in new.items() if isinstance(value, Rows) and value.behind}
        changed = found.write({leaf: arguments[leaf] for leaf in table.leaves}, new)
        for leaf in new:
            results[results_of[leaf]] = changed[leaf]
        observed[table.param] = found.observed
    kept = {one.param: run.found[number].residual for number, one in enumerate(step.tables) if one.wire_dtype}
    return [dense(one) for one in results], observed, kept
