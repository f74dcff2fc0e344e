"""Predicts what a step does whose every decision is taken: the `Plan` of a `Draft`, and what a changed layout does.

The memory of a device and the collectives are functions of the traced step and its layout. Where gradients are summed
whole over all workers, `cost.Prediction` says what is sent for each leaf; partial backpropagation and tables by rows
take the place of some of that, leaf by leaf. Nothing that is returned is edited afterwards.

A layout that changes at a layer is predicted as a difference from the prediction before: `StepPrediction.changed`. A
leaf's exchange depends on its own layout and on what is sent for it in full backpropagation; how a table goes by rows,
on the layouts of the leaves that its update acts on. What the change does not reach is shared.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping

from splitjax._compat import CPU_DROPS_BARRIERS
from splitjax.cost import LaidOutStep, Manner, Prediction, predict_memory, predict_step, replaced
from splitjax.cost.loop_sums import loop_sums
from splitjax.cost.row_tables import beside_rows
from splitjax.plan import Collective, LeafPlan, Memory, PartialPlan, Plan, Spec, SyncPlan
from splitjax.planning.draft import Draft
from splitjax.planning.partial_plan import PartialCosts, PartialExchange
from splitjax.planning.table_plan import dense_bytes, row_bytes, row_exchange, sync_plans
from splitjax.planning.tables.finding import Found
from splitjax.planning.tables.sparse_step import SparseStep
from splitjax.planning.waste import find_waste
from splitjax.planning.ways import planned_boundaries

Sent = tuple[Collective, ...]


def predict(draft: Draft) -> Plan:
    """Returns the plan of a `draft` that went through all passes: its decisions, and what they cost."""
    predicted = StepPrediction.of(draft)
    boundaries = () if draft.ways is None else planned_boundaries(draft.ways.planned, draft.traced.jaxpr)
    return dataclasses.replace(
        draft.decided,
        memory=predicted.memory,
        collectives=predicted.collectives,
        syncs=predicted.syncs,
        partial=predicted.partial,
        boundaries=boundaries,
        compute=predicted.dense.compute,
        warnings=find_waste(draft, predicted.dense),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class StepPrediction:
    """Holds what a drafted step costs, in the parts that a change of its layout leaves alone or not.

    **Attributes:**

    - `draft`: the decisions that stay; its layout is that of the first prediction. `partial_costs`: what follows from
      them for partial backpropagation; None for full backpropagation.
    - `dense`: the prediction with each gradient summed whole over all of its workers, under the layout that is
      predicted.
    - `found`: what becomes of each table of the graph, where it could own its rows. `tables`: those that go by rows;
      None where the dense exchange alone is asked for.
    - `exchanges`: of each leaf in partial backpropagation; None for leaves whose gradient nobody takes.
    - `sent_in_part`: of each leaf, what partial backpropagation sends. `sent_by_leaf`: the same, without what tables
      that go by rows do not send.
    """

    draft: Draft
    partial_costs: PartialCosts | None
    dense: Prediction
    found: tuple[Found, ...]
    tables: SparseStep | None
    exchanges: tuple[PartialExchange | None, ...]
    sent_in_part: tuple[Sent, ...]
    sent_by_leaf: tuple[Sent, ...]

    @classmethod
    def of(cls, draft: Draft) -> StepPrediction:
        """Returns the prediction of a `draft` that went through all passes, or was laid out anew (`Draft.laid_out`)."""
        costs, dense = _partial_costs(draft), dense_prediction(draft)
        found = () if draft.finder is None else draft.finder.find(dense.leaves)
        exchanges = tuple(_exchange(costs, dense, i) for i in range(len(dense.leaves)))
        in_part = tuple(_in_part(costs, dense, i, exchanges[i]) for i in range(len(dense.leaves)))
        by_rows = {} if draft.tables is None else {table.param for table in draft.tables.tables}
        by_leaf = tuple(beside_rows(sent, by_rows) for sent in in_part) if by_rows else in_part
        return cls(draft, costs, dense, found, draft.tables, exchanges, in_part, by_leaf)

    @property
    def memory(self) -> Memory:
        """The bytes of a device."""
        return self.dense.memory

    @functools.cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives: those of activations in program order, those of gradients in leaf order, those of tables by
        rows."""
        return (*self.dense.activations, *itertools.chain.from_iterable(self.sent_by_leaf), *self._row_exchanges())

    @functools.cached_property
    def syncs(self) -> tuple[SyncPlan, ...]:
        """How each table with lookups is synchronised."""
        if self.tables is None:
            return ()
        position, step = self.dense.structure.position, self.tables
        dense = {
            table.param: dense_bytes(table.param, self.sent_in_part[position[table.param]])
            for table in step.graph.tables
        }
        return sync_plans(step, self.draft.layout.batch_axes, dense, self.draft.decision)

    @functools.cached_property
    def partial(self) -> PartialPlan | None:
        """Who differentiates what, and what is sent for it; None for full backpropagation."""
        costs, position = self.partial_costs, self.dense.structure.position
        if costs is None:
            return None
        exchanges = {}
        for param in costs.segment_of:
            known = self.exchanges[position[param]] if param in position else costs.exchange(param, None, ())
            assert known is not None, "a parameter that the step differentiates is in a segment"
            exchanges[param] = known
        return costs.plan(exchanges)

    def laid_out(self, specs: Mapping[str, Spec]) -> tuple[LeafPlan, ...]:
        """Returns the layouts of the leaves at the paths of `specs`, split by these, as `Prediction.laid_out` does."""
        return self.dense.laid_out(specs)

    def changed(self, leaves: Iterable[LeafPlan]) -> StepPrediction:
        """Predicts the step again after a change of its layout; equal in every field to the prediction of the draft
        that is laid out so, and derived anew only where the change reaches.

        **Arguments:** `leaves`: the new layouts of some leaves, such as `laid_out` returns."""
        before, position = self.dense, self.dense.structure.position
        new = {position[leaf.path]: leaf for leaf in leaves}
        found, tables = self._tables_under(new)
        by_rows = None if tables is self.tables else row_bytes_of(tables)
        dense = before.changed(new.values(), by_rows)
        touched = {i for i, sent in enumerate(dense.sent_by_leaf) if sent is not before.sent_by_leaf[i] or i in new}
        costs = self.partial_costs
        exchanges = replaced(self.exchanges, {i: _exchange(costs, dense, i) for i in touched})
        in_part = replaced(self.sent_in_part, {i: _in_part(costs, dense, i, exchanges[i]) for i in touched})
        now, earlier = _paths(tables), _paths(self.tables)
        touched |= {position[path] for path in now ^ earlier}
        by_leaf = replaced(self.sent_by_leaf, {i: beside_rows(in_part[i], now) for i in touched})
        return StepPrediction(self.draft, costs, dense, found, tables, exchanges, in_part, by_leaf)

    def _tables_under(self, new: Mapping[int, LeafPlan]) -> tuple[tuple[Found, ...], SparseStep | None]:
        """Returns what becomes of the tables where the leaves at the positions of `new` are laid out so."""
        finder = self.draft.finder
        if finder is None:
            return self.found, self.tables
        reached = [k for k, table in enumerate(self.draft.graph.tables) if not finder.reaches(table).isdisjoint(new)]
        if not reached:
            return self.found, self.tables
        layout = replaced(self.dense.leaves, new)
        tables = self.draft.graph.tables
        found = replaced(self.found, {k: finder.find_table(tables[k], layout) for k in reached})
        return found, finder.sparse_step(found)

    def _row_exchanges(self) -> Iterator[Collective]:
        """Yields what is sent for tables that go by rows."""
        if self.tables is None:
            return
        names = {param: layer.name for layer in self.draft.layout.layers for param in layer.params}
        syncs = {sync.param: sync for sync in self.syncs}
        for table in self.tables.tables:
            if not table.joins:
                together = [syncs[each.param] for each in self.tables.together(table)]
                yield from row_exchange(together, names.get(table.param, table.param))


def dense_prediction(draft: Draft) -> Prediction:
    """Returns what the layout of a `draft` costs under its decisions so far: its memory, and its collectives with each
    gradient summed whole over all of its workers. `Prediction.changed` predicts other layouts of the step from it."""
    layout = draft.layout
    step = LaidOutStep(
        draft.graph,
        layout.leaves,
        layout.layers,
        draft.shape,
        layout.batch_axes,
        layout.replicated_batch,
        draft.saving_axes,
    )
    cpu = draft.request.platform == "cpu"
    planned = {} if draft.ways is None else draft.ways.planned
    adding = [set(way.worker_axes) for way in planned.values()]
    within = tuple(axis for axis in draft.shape.names if adding and all(axis in axes for axes in adding))
    by_rows = row_bytes_of(draft.tables)
    params = (leaf for leaf in layout.leaves if leaf.role == "param" and leaf.path not in by_rows)
    gathers = any(set(leaf.axes) & set(within) for leaf in params)  # workers have what is stored over them whole
    manner = Manner(
        draft.takes_gradient,
        draft.group_comm,
        by_rows,
        sums_apart=cpu,
        widens=cpu,
        maxima_apart=draft.request.platform != "tpu",
        drops_barriers=cpu and CPU_DROPS_BARRIERS,
        within=within,
        gathering=within if gathers else (),
        gathered={} if draft.ways is None else draft.ways.gathered,
        loop_sums=draft.graph.once(loop_sums, frozenset() if draft.ways is None else draft.ways.left),
        sums_statistics=draft.partial is None,
        microbatches={
            site: way.num_parts for site, way in planned.items() if way.how == "microbatches" and way.num_parts > 1
        },
    )
    return predict_step(step, manner)


def memory_of(draft: Draft) -> Memory:
    """Returns the memory that the step takes under the decisions of a `draft` so far, the flows among them; nothing
    that is sent is predicted for it."""
    layout = draft.layout
    return predict_memory(
        draft.graph,
        layout.leaves,
        draft.flows,
        draft.shape,
        layout.batch_axes,
        group_comm=draft.group_comm,
        by_rows=row_bytes_of(draft.tables),
    )


def row_bytes_of(tables: SparseStep | None) -> dict[str, int]:
    """Returns the bytes that a device has of the gradients that go by rows, by the path of the table; None has none."""
    return {} if tables is None else row_bytes(tables)


def _partial_costs(draft: Draft) -> PartialCosts | None:
    """Returns what predicts the partial backpropagation of a draft; None for full backpropagation."""
    if draft.partial is None:
        return None
    pinned = None if draft.request.pinned is None else draft.request.pinned.partial
    within = {} if draft.ways is None else draft.ways.sums_within
    return PartialCosts(draft.partial, draft.shape, draft.request.platform, pinned, within)


def _exchange(costs: PartialCosts | None, dense: Prediction, i: int) -> PartialExchange | None:
    """Returns what is exchanged for the gradient of the leaf at position `i` in partial backpropagation."""
    if costs is None:
        return None
    leaf, weight = dense.leaves[i], dense.weights[i]
    num_parts = 1 if weight is None else dense.setting.mesh.size(weight.parts)
    return costs.exchange(leaf.path, leaf, dense.sent_by_leaf[i], num_parts)


def _in_part(costs: PartialCosts | None, dense: Prediction, i: int, exchange: PartialExchange | None) -> Sent:
    """Returns what is sent for the leaf at position `i`."""
    sent = dense.sent_by_leaf[i]
    if costs is None or not sent:
        return sent
    return costs.sent(sent, {} if exchange is None else {dense.leaves[i].path: exchange})


def _paths(tables: SparseStep | None) -> frozenset[str]:
    """Returns the paths of the tables that go by rows."""
    return frozenset() if tables is None else frozenset(table.param for table in tables.tables)
