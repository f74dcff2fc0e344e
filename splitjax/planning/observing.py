"""From the first steps to the scheme and capacities of every table: what was observed, when it suffices, and what
follows.

The program of the first steps gathers all rows and returns the ids. Afterwards their sparsity is known, and the step is
built once more. While it runs, steps in which the capacities did not suffice are counted; too many of them, and steps
are observed anew: capacities then have room for all that was seen. All processes see the same numbers and decide alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from splitjax.cost import predict_memory
from splitjax.lower.tables.sparse import Chosen, SparseStep, gradient_in_loop
from splitjax.lower.tables.sync_request import AUTO, SyncRequest
from splitjax.lower.tables.table_rows import TableSync
from splitjax.plan import ROW_EXCHANGE, Collective, Plan, SyncPlan, spec_axes
from splitjax.planning.carried import Seen
from splitjax.sync.choose import candidates, choose
from splitjax.sync.dense import Dense
from splitjax.sync.description import Exchange, name_of, options_of, sizes_of
from splitjax.sync.link import measure_link
from splitjax.sync.owner import plan_owner
from splitjax.sync.profile import Sparsity, measure
from splitjax.sync.profile import Table as Costs
from splitjax.sync.scheme import Capacities, Link, Scheme
from splitjax.trace.graph import Table, itemsize

OBSERVED_STEPS = 3
CHECKED_STEPS = 64
MOST_FALLBACKS = 2  # of so many steps

_KEPT = "each worker keeps what that takes away from gradients, in an array of the table's size"

Observed = Mapping[str, Mapping[str, Any]]  # by table, see `sparse.evaluate_sparse`


@dataclasses.dataclass
class Observer:
    """What was seen of one signature's steps.

    - `samples`: by table, of every observed step the ids of n workers, i32[n, k].
    - `waiting`: what steps returned since the last look, still on the device. `before`: how many more there were since
      then, before a run was resumed; `fell_back`: in how many of these the capacities of each table did not suffice.
    """

    samples: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=dict)
    waiting: list[Observed] = dataclasses.field(default_factory=list)
    before: int = 0
    fell_back: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def note(self, observed: Observed) -> None:
        """Keeps what a step returned, on the device: nothing waits for it."""
        self.waiting.append(observed)

    def is_ready(self, observes: bool) -> bool:
        """Whether it is time to look. `observes`: the program is that of the first steps."""
        return self.before + len(self.waiting) >= (OBSERVED_STEPS if observes else CHECKED_STEPS)

    def take_samples(self) -> dict[str, list[np.ndarray]]:
        """The ids of all observed steps; waits for the last of them."""
        self.samples, self.waiting, self.before = self._samples(), [], 0
        return self.samples

    def overflows(self) -> bool:
        """Whether the capacities of some table sufficed too rarely since the last look."""
        counts = self._fell_back()
        self.waiting, self.before, self.fell_back = [], 0, {}
        return max(counts.values(), default=0) > MOST_FALLBACKS

    def seen(self, observes: bool, syncs: tuple[SyncPlan, ...]) -> Seen:
        """All of it as a value. `syncs`: how the program that runs now synchronises its tables."""
        samples = {param: np.stack(steps) for param, steps in (self._samples() if observes else self.samples).items()}
        return Seen(
            () if observes else syncs, samples, self.before + len(self.waiting), {} if observes else self._fell_back()
        )

    @staticmethod
    def of(seen: Seen) -> Observer:
        """The inverse of `seen`."""
        return Observer(
            {param: list(steps) for param, steps in seen.samples.items()}, [], seen.num_steps, dict(seen.fell_back)
        )

    def _samples(self) -> dict[str, list[np.ndarray]]:
        found = {param: list(steps) for param, steps in self.samples.items()}
        for observed in self.waiting:
            for param, one in observed.items():
                found.setdefault(param, []).append(np.asarray(one["touched"]))
        return found

    def _fell_back(self) -> dict[str, int]:
        counts = dict(self.fell_back)
        for observed in self.waiting:
            for param, one in observed.items():
                counts[param] = counts.get(param, 0) + bool(one["fell_back"])
        return counts


@dataclasses.dataclass(frozen=True)
class Decision:
    """How each table is synchronised from now on, and why, for the plan."""

    chosen: Chosen
    why: Mapping[str, str]


def decide(step: SparseStep, request: SyncRequest, samples: Mapping[str, list[np.ndarray]], mesh: Mesh) -> Decision:
    """Schemes and capacities of the observed tables. Measures the links where some table's scheme is to be chosen."""
    chosen: dict[str, tuple[Exchange, Capacities]] = {}
    why = {}
    links: dict[tuple[str, ...], Any] = {}
    for table in step.tables:
        sparsity, asked = sparsity_of(table, samples[table.param]), request.of(table.param).scheme
        if table.is_owned:
            capacities = plan_owner(sparsity, table.scheme.ownership)
            chosen[table.param] = dataclasses.replace(table.scheme, capacities=capacities), capacities
            busiest = max(sparsity.skewness, 1.0)
            hint = "; ids that are sorted by frequency load the first owners: hash them once" if busiest > 2 else ""
            why[table.param] = (
                "each worker owns its rows: those read are pulled, gradients pushed; the busiest owner has"
                f" {busiest:.2f} times the mean{hint}"
            )
            continue
        seen = f"capacities from {len(samples[table.param])} steps, density {sparsity.density:.3g}"
        if asked != AUTO:
            chosen[table.param], why[table.param] = (table.scheme, table.scheme.plan(sparsity)), f"asked for; {seen}"
            continue
        if sparsity.num_workers > 1 and table.axes not in links:
            links[table.axes] = measure_link(mesh, table.axes)
        found = choose(sparsity, links.get(table.axes, Link(0.0, float("inf"))), _candidates(step, table))
        chosen[table.param] = found.scheme, found.best.capacities
        why[table.param] = f"chosen: {found.reason}; {seen}"
    return Decision(chosen, why)


def _candidates(step: SparseStep, table: TableSync) -> list[Scheme]:
    """The schemes that `auto` may choose for a table: no dense one where that would change what a lazy update computes,
    and of rows that are split none whose devices would not agree on what was touched."""
    is_lazy, is_split = step.table_of(table).update is None, bool(spec_axes(table.row_spec))
    return [
        one
        for one in candidates()
        if not (is_lazy and isinstance(one, Dense)) and not (is_split and one.needs_whole_rows)
    ]


def sparsity_of(table: TableSync, samples: list[np.ndarray]) -> Sparsity:
    """Of a table's gradient, from the ids of all workers in some steps."""
    return measure([list(step) for step in samples], table.num_rows, table.row_size, itemsize(table.dtype))


def with_syncs(plan: Plan, step: SparseStep, decision: Decision | None) -> Plan:
    """The plan of a step whose tables are synchronised by rows: the dense exchanges of their gradients are replaced,
    and the gathers of tables that are stored in pieces: their rows are pulled, or left to XLA, which mostly finds them
    where they are."""
    syncs = sync_plans(plan, step, decision)
    names = {param: layer.name for layer in plan.layers for param in layer.params}
    sparse = {table.param for table in step.tables}
    stored = {f"{phase}: {param} is stored in pieces" for param in sparse for phase in ("forward", "backward")}
    gone = stored | {_gradient_of(param) for param in sparse}
    kept = tuple(one for one in plan.collectives if one.why not in gone)
    exchanges = tuple(
        Collective(
            ROW_EXCHANGE,
            one.axis,
            one.bytes,
            names.get(one.param, one.param),
            f"rows of the gradient of {one.param}, by {one.scheme}",
        )
        for one in syncs
        if one.param in sparse and one.bytes
    )
    notes = plan.notes if step.graph.tables else (*plan.notes, _nothing(gradient_in_loop(step.jaxpr)))
    memory = predict_memory(
        step.graph, plan.leaves, plan.mesh, plan.batch_axes, plan.replicated_batch, group_comm=plan.group_comm,
        by_rows={table.param: _row_bytes(table, step.table_of(table)) for table in step.tables},
    )  # fmt: skip
    return dataclasses.replace(plan, syncs=syncs, collectives=kept + exchanges, notes=notes, memory=memory)


def _nothing(in_loop: str) -> str:
    why = f": {in_loop}" if in_loop else ""
    return f"sync: no parameter is only looked up by rows, so there is nothing to synchronise by rows{why}"


def _gradient_of(param: str) -> str:
    """The reason of the dense exchange of a parameter's gradient among a plan's collectives."""
    return f"gradient of {param}"


def _row_bytes(table: TableSync, found: Table) -> int:
    """What a device has of a table's gradient: the rows of its lookups and their sums; then, in the exchange or in its
    fallback, what it sends and gets; and the residual of a table that is rounded."""
    n, capacities = table.num_workers, table.capacities
    num_ids = sum(one.num_ids for one in found.lookups) // n
    local = min(num_ids, table.num_rows)
    everything = n * local + min(n * local, table.num_rows)
    if capacities is None or n == 1:
        moved = everything if n > 1 else 0
    else:
        moved = max(
            everything, capacities.local + capacities.union + capacities.hot + n * (capacities.push + capacities.pull)
        )
    residual = table.num_rows if table.wire_dtype else 0
    return (num_ids + local + moved + residual) * table.row_size * itemsize(table.dtype)


def sync_plans(plan: Plan, step: SparseStep, decision: Decision | None) -> tuple[SyncPlan, ...]:
    """The plan's entries for all tables with lookups."""
    entries = []
    tables = {one.param: one for one in step.tables}
    for found in step.graph.tables:
        table = tables.get(found.param)
        dense_bytes = sum(
            one.bytes for one in plan.collectives if one.why.partition(", onto")[0] == _gradient_of(found.param)
        )
        if table is None:
            why = (
                decision.why[found.param]
                if decision is not None and found.param in decision.why
                else step.reasons[found.param]
            )
            entries.append(
                SyncPlan(
                    found.param, Dense.name, "+".join(plan.batch_axes), found.num_rows, dense_bytes, dense_bytes, why
                )
            )
            continue
        sizes = Costs(table.num_rows, table.row_size, itemsize(table.dtype), table.num_workers)
        sent, why = 0, f"the first {OBSERVED_STEPS} steps are observed, with all rows gathered"
        if decision is not None:
            sent = (
                table.scheme.predicted_bytes(sizes)
                if table.is_owned
                else table.scheme.predicted_bytes(table.capacities, sizes)
            )
            why = decision.why[found.param]
        if table.wire_dtype:
            read = ", and the rows that are read" if table.is_owned else ""
            why = _once(
                f"gradients{read} are rounded to {table.wire_dtype} on the wire, which changes the numbers: {_KEPT}",
                why,
            )
        if found.update is None:
            why = _once(f"lazy, which changes the numbers: {found.reason}", why)
        entries.append(
            SyncPlan(
                found.param,
                name_of(table.scheme),
                "+".join(table.axes),
                found.num_rows,
                sent if table.num_workers > 1 else 0,
                dense_bytes,
                why,
                found.update is None,
                options_of(table.scheme),
                {} if table.capacities is None else sizes_of(table.capacities),
            )
        )
    return tuple(entries)


def _once(words: str, why: str) -> str:
    """A reason with words before it, unless it comes from a plan that has them."""
    return why if words in why else f"{words}; {why}"
