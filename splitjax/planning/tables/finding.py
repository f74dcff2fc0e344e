"""Chooses the tables of a step that are synchronised by rows, and says why all others stay dense.

A step's graph, its plan and what is asked for go in, a `SparseStep` comes out. A table takes part if its gradient has
rows (`trace.lookups`), its update acts on rows (`trace.row_update`), its boundary runs once a step, and its state is
laid out alike. Every other table with lookups stays dense, with the reason in the plan.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from splitjax import _compat
from splitjax.errors import SyncError
from splitjax.mesh import MeshShape
from splitjax.plan import LeafPlan, Plan, spec_axes
from splitjax.planning.tables.lookups import ids_of
from splitjax.planning.tables.same_ids import numbered_ids
from splitjax.planning.tables.sparse_step import SparseStep
from splitjax.planning.tables.sync_request import SyncRequest
from splitjax.planning.tables.table_sync import IdCut, TableSync
from splitjax.planning.workers import Workers
from splitjax.primitives.calls import CallKind, kind_of
from splitjax.primitives.walk import Site, boundaries, equation_at
from splitjax.sync.costs.all_gather import AllGatherCosts
from splitjax.sync.costs.dense import DenseCosts
from splitjax.sync.costs.exchange import ByOwners, ByScheme, Exchange
from splitjax.sync.costs.schemes import ByRows, SchemeCosts
from splitjax.trace.graph import Graph, itemsize
from splitjax.trace.tables import LookupTable, RowUpdate

_IN_PARTS = (
    "its gradient is summed into parts (shard_state), of which each worker writes its own, and rows are exchanged for"
    " all workers to write; leave shard_state off for it to go by rows, or split its rows over the axes of the batch"
    ' (rules="embedding_owner"): the workers that own them keep their optimizer state too'
)
CHOSEN_DENSE: str = "chosen"
LAZY_HINT: str = "; lazy=True would leave these rows alone"


Chosen = Mapping[str, Exchange]  # by the path of the table


Found = TableSync | str  # a table that goes by rows, or why it stays dense
_Ids = Mapping[str, tuple["_OfLookup", ...]]  # by the path of a table, of each of its lookups
_OfLookup = tuple[int, tuple[int, ...], int]  # the ids (`same_ids`), which component is the row's, in how many loops


def find_sparse(graph: Graph, jaxpr: Any, plan: Plan, request: SyncRequest, chosen: Chosen | None) -> SparseStep:
    """Finds the tables to synchronise by rows.

    **Arguments:**

    - `graph`, `jaxpr`, `plan`: the step's graph, its closed jaxpr and its plan.
    - `request`: what is asked for by parameter.
    - `chosen`: exchanges with their capacities, once they are known; None while the first steps are observed.

    Raises `SyncError` for a step without a gradient boundary, and for a pattern that fits no parameter.
    """
    finder = TableFinder(graph, jaxpr, plan.mesh, plan.batch_axes, request, chosen)
    return finder.sparse_step(finder.find(plan.leaves))


@dataclasses.dataclass(frozen=True, eq=False)
class TableFinder:
    """Finds the tables of a step that are synchronised by rows, under any layout of its leaves.

    - `graph`, `jaxpr`: the step's graph and its closed jaxpr. `mesh`, `batch_axes`: where its batch lies.
    - `request`: what is asked for by parameter.
    - `chosen`: exchanges with their capacities, once they are known; None while the first steps are observed.
    - `chosen_for`: by table, what they were chosen for: under a layout where a table has other workers, or other rows
      on a device, its steps are to be observed again. None: for whatever is laid out.

    Raises `SyncError` for a step without a gradient boundary, and for a pattern that fits no parameter.
    """

    graph: Graph
    jaxpr: Any
    mesh: MeshShape
    batch_axes: tuple[str, ...]
    request: SyncRequest
    chosen: Chosen | None
    chosen_for: Mapping[str, TableSync] | None = None
    _known_before: dict[tuple[Site, frozenset[str]], _Ids | None] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.graph.num_boundaries:
            raise SyncError(
                "sync needs a gradient boundary: the step takes its gradient with plain jax.grad, whose tables cannot"
                " be told apart",
                place="parallelize, sync",
                remedy="use splitjax.value_and_grad for the gradient",
            )
        self.request.check([leaf.path for leaf in self.graph.params])

    def settled(self, tables: Sequence[TableSync]) -> TableFinder:
        """Returns a finder that keeps what was chosen only for tables that are as they are in `tables`."""
        return dataclasses.replace(self, chosen_for={table.param: table for table in tables})

    def find(self, leaves: Sequence[LeafPlan]) -> tuple[Found, ...]:
        """Returns what becomes of each table of the graph, in order, where it could own its rows. `leaves`: the layout,
        in flat order."""
        return tuple(self.find_table(table, leaves) for table in self.graph.tables)

    def find_table(self, table: LookupTable, leaves: Sequence[LeafPlan]) -> Found:
        """Returns how a `table` is synchronised by rows where it could own its rows, or why it is not. `leaves`: the
        layout, in flat order."""
        asked = self.request.of(table.param)
        if not self.request.names(table.param):
            return "no pattern of sync= fits it"
        if reason := _reason(table, self.jaxpr, leaves, asked):
            return reason
        chosen = None if self.chosen is None else self.chosen.get(table.param)
        if chosen is not None and chosen.is_dense:
            return CHOSEN_DENSE
        return self._table_sync(table, asked, leaves, chosen)

    def reaches(self, table: LookupTable) -> frozenset[int]:
        """Returns the flat arguments whose layout bears on how a `table` is synchronised."""
        update = _update(table, self.request.of(table.param))
        return frozenset((self._position[table.param], *(() if update is None else update.leaves)))

    def sparse_step(self, found: Sequence[Found]) -> SparseStep:
        """Returns the step with its tables, of what `find` found, given that no worker owns rows of tables whose ids
        are known only with the parameters: these cannot be brought before the forward pass."""
        tables = tuple(table for table in found if isinstance(table, TableSync))
        reasons = {
            table.param: reason
            for table, reason in zip(self.graph.tables, found, strict=True)
            if isinstance(reason, str)
        }
        step = SparseStep(self.graph, self.jaxpr, tables, reasons)
        ids = {sync.param: self._ids_before(step, sync) for sync in tables if sync.exchange.pulls}
        late = {param for param, known in ids.items() if known is None}
        tables = tuple(self._unowned(sync) if sync.param in late else sync for sync in tables)
        return dataclasses.replace(step, tables=self._joined(step, tables, ids))

    def _joined(
        self, step: SparseStep, tables: Sequence[TableSync], ids: Mapping[str, tuple[_OfLookup, ...] | None]
    ) -> tuple[TableSync, ...]:
        """Returns the `tables` of a `step`, those with rows that travel with another's saying so: their workers own
        them, have room for as many, and look up the same `ids`. What rounding took away is each table's own, so that
        rounded ones travel alone."""
        first: dict[tuple[Any, ...], str] = {}
        found = []
        for sync in tables:
            known = ids.get(sync.param)
            if known is not None and sync.exchange.pulls and sync.wire_dtype is None and sync.num_workers > 1:
                site = step.table_of(sync).boundary
                key = site, known, sync.axes, sync.row_axes, sync.lookups, sync.exchange
                leads = first.setdefault(key, sync.param)
                sync = dataclasses.replace(sync, joins="" if leads == sync.param else leads)
            found.append(sync)
        return tuple(found)

    @functools.cached_property
    def _position(self) -> Mapping[str, int]:
        """The flat argument of every leaf, by path."""
        return {leaf.path: index for index, leaf in enumerate(self.graph.leaves)}

    def _ids_before(self, step: SparseStep, sync: TableSync) -> tuple[_OfLookup, ...] | None:
        """Returns the ids of the lookups of an owned table, and remembers them: they follow from the boundary, and from
        which of its tables are owned. None where they are not known before the forward pass."""
        site = step.table_of(sync).boundary
        key = site, step.pulled_at(site)
        if key not in self._known_before:
            self._known_before[key] = self._numbered(step, site)
        known = self._known_before[key]
        return None if known is None else known[sync.param]

    def _numbered(self, step: SparseStep, site: Site) -> _Ids | None:
        """Returns the ids of all lookups of the boundary at `site`, by table."""
        edit = step.edited(equation_at(self.jaxpr, site), site)
        before = ids_of(edit.edited)
        if before is None:
            return None
        found: dict[str, tuple[_OfLookup, ...]] = {}
        numbers = numbered_ids(before[0])
        for (table, _), lookup, number in zip(edit.order, edit.edited.lookups, numbers, strict=True):
            param, components = step.tables[table].param, tuple(lookup.params["dimension_numbers"].start_index_map)
            found[param] = (*found.get(param, ()), (number, components, lookup.num_loops))
        return found

    def _unowned(self, sync: TableSync) -> TableSync:
        """Returns a table whose workers could own its rows as it is where they do not."""
        chosen = None if self.chosen is None else self.chosen.get(sync.param)
        if chosen is not None and not chosen.pulls and self._still_fits(sync):
            return dataclasses.replace(sync, exchange=chosen)
        return dataclasses.replace(sync, exchange=_asked(self.request.of(sync.param), sync, False))

    def _still_fits(self, sync: TableSync) -> bool:
        """Tells whether what was chosen for a table fits it as it is laid out."""
        if self.chosen_for is None:
            return True
        before = self.chosen_for.get(sync.param)
        return before is not None and (before.axes, before.row_size) == (sync.axes, sync.row_size)

    def _table_sync(
        self, table: LookupTable, asked: ByRows, leaves: Sequence[LeafPlan], chosen: Exchange | None
    ) -> TableSync:
        """Says how a table is synchronised by rows: as was `chosen`, if that fits."""
        update = _update(table, asked)
        assert update is not None, "a table whose update does not act on rows stays dense"
        position = self._position[table.param]
        leaf = leaves[position]
        split = spec_axes(leaf.spec[1:])
        workers = Workers.beside(self.mesh, self.batch_axes, split)
        axes, num_workers = workers.axes, workers.num_workers
        is_owned = bool(axes) and spec_axes(leaf.spec[:1]) == axes
        lookups = tuple(
            IdCut(_example_dim(lookup, self.graph, self.jaxpr, num_workers), lookup.mode.removesuffix("_or_drop"))
            for lookup in table.lookups
        )
        sync = TableSync(
            param=table.param,
            leaf=position,
            leaves=update.leaves,
            shape=leaf.shape,
            dtype=leaf.dtype,
            spec=leaf.spec,
            axes=axes,
            num_workers=num_workers,
            lookups=lookups,
            row_size=math.prod(leaf.shape[1:]) // self.mesh.size(split),
            exchange=ByScheme(AllGatherCosts()),
        )
        # rows that no worker owns are not pulled from any
        keeps = chosen is not None and self._still_fits(sync) and (is_owned or not chosen.pulls)
        exchange = chosen if chosen is not None and keeps else _asked(asked, sync, is_owned)
        return dataclasses.replace(sync, exchange=exchange)


def _reason(table: LookupTable, jaxpr: Any, leaves: Sequence[LeafPlan], asked: ByRows) -> str:
    """Says why a table stays dense; empty if it need not."""
    if isinstance(asked.scheme, DenseCosts):
        return "asked for"
    update = _update(table, asked)
    if update is None:
        return f"{table.reason}{LAZY_HINT if table.lazy_update is not None else ''}"
    for depth in range(1, len(table.boundary), 2):
        around = equation_at(jaxpr, table.boundary[:depth])
        if kind_of(around) is not CallKind.INLINE:
            return _inside(around)
    planned = [leaves[index] for index in update.leaves]
    if (
        isinstance(asked.scheme, SchemeCosts)
        and asked.scheme.needs_whole_rows
        and any(spec_axes(leaf.spec[1:]) for leaf in planned)
    ):
        return (
            f"its rows are split, and {asked.scheme.name} tells rows by their values, of which each device has a part"
        )
    if any(leaf.gradient is not None for leaf in planned):
        return _IN_PARTS
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
    loop = next((visit.not_inline for visit in boundaries(jaxpr) if visit.not_inline is not None), None)
    return "" if loop is None else _inside(loop)


def _update(table: LookupTable, asked: ByRows) -> RowUpdate | None:
    return table.update if table.update is not None or not asked.lazy else table.lazy_update


def _asked(asked: ByRows, sync: TableSync, is_owned: bool) -> Exchange:
    """Says how the rows of the table `sync` are added up, as far as that is known before steps were observed. What is
    not sent, or has no more digits than are sent, is not rounded."""
    scheme = asked.scheme if isinstance(asked.scheme, SchemeCosts) else AllGatherCosts()
    wire_dtype = getattr(scheme, "wire_dtype", None)
    if wire_dtype is not None and (sync.num_workers == 1 or itemsize(sync.dtype) <= itemsize(wire_dtype)):
        scheme, wire_dtype = dataclasses.replace(scheme, wire_dtype=None), None
    return ByOwners(sync.num_rows, wire_dtype=wire_dtype) if is_owned else ByScheme(scheme)


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
