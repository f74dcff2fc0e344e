"""From the first steps to the scheme and capacities of every table: what was observed, when it suffices, and what follows.

The program of the first steps gathers all rows and returns the ids. Afterwards their sparsity is known, and the step is built once more.
While it runs, steps in which the capacities did not suffice are counted; too many of them, and steps are observed anew: capacities
then have room for all that was seen. All processes see the same numbers and decide alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from splitjax.lower.sparse import Chosen, SparseStep
from splitjax.lower.sync_request import AUTO, SyncRequest
from splitjax.lower.table_rows import TableSync
from splitjax.plan import ROW_EXCHANGE, Collective, Plan, SyncPlan
from splitjax.sync.all_gather import AllGather
from splitjax.sync.choose import choose
from splitjax.sync.dense import Dense
from splitjax.sync.link import measure_link
from splitjax.sync.owner import OwnerSharded, plan_owner
from splitjax.sync.profile import Sparsity, Table, measure
from splitjax.sync.scheme import Capacities, Link, Scheme
from splitjax.trace.graph import itemsize

OBSERVED_STEPS = 3
CHECKED_STEPS = 64
OWNED = "owner_sharded"
MOST_FALLBACKS = 2  # of so many steps

Observed = Mapping[str, Mapping[str, Any]]  # by table, see `sparse.evaluate_sparse`


@dataclasses.dataclass
class Observer:
    """What was seen of one signature's steps. `samples`: by table, [step] i32[n, k]."""

    samples: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=dict)
    waiting: list[Observed] = dataclasses.field(default_factory=list)
    num_steps: int = 0

    def note(self, observed: Observed) -> None:
        """Keeps what a step returned, on the device: nothing waits for it."""
        self.waiting.append(observed)
        self.num_steps += 1

    def is_ready(self, observes: bool) -> bool:
        """Whether it is time to look. `observes`: the program is that of the first steps."""
        return len(self.waiting) >= (OBSERVED_STEPS if observes else CHECKED_STEPS)

    def take_samples(self) -> dict[str, list[np.ndarray]]:
        """The ids of all observed steps; waits for the last of them."""
        for observed in self.waiting:
            for param, found in observed.items():
                self.samples.setdefault(param, []).append(np.asarray(found["touched"]))
        self.waiting = []
        return self.samples

    def overflows(self) -> bool:
        """Whether the capacities of some table sufficed too rarely since the last look."""
        fell_back = [[bool(found["fell_back"]) for found in observed.values()] for observed in self.waiting]
        self.waiting = []
        return bool(fell_back) and max(np.sum(fell_back, axis=0)) > MOST_FALLBACKS


@dataclasses.dataclass(frozen=True)
class Decision:
    """How each table is synchronised from now on, and why, for the plan."""

    chosen: Chosen
    why: Mapping[str, str]


def decide(step: SparseStep, request: SyncRequest, samples: Mapping[str, list[np.ndarray]], mesh: Mesh) -> Decision:
    """Schemes and capacities of the observed tables. Measures the links where some table's scheme is to be chosen."""
    chosen: dict[str, tuple[Scheme, Capacities]] = {}
    why = {}
    links: dict[tuple[str, ...], Any] = {}
    for table in step.tables:
        sparsity, asked = sparsity_of(table, samples[table.param]), request.of(table.param).scheme
        if table.is_owned:
            chosen[table.param] = AllGather(), plan_owner(sparsity, "range")
            busiest = max(sparsity.skewness, 1.0)
            hint = "; ids that are sorted by frequency load the first owners: hash them once" if busiest > 2 else ""
            why[table.param] = f"each worker owns its rows: those read are pulled, gradients pushed; the busiest owner has {busiest:.2f} times the mean{hint}"
            continue
        seen = f"capacities from {len(samples[table.param])} steps, density {sparsity.density:.3g}"
        if asked != AUTO:
            chosen[table.param], why[table.param] = (asked, asked.plan(sparsity)), f"asked for; {seen}"
            continue
        if sparsity.num_workers > 1 and table.axes not in links:
            links[table.axes] = measure_link(mesh, table.axes)
        found = choose(sparsity, links.get(table.axes, Link(0.0, float("inf"))))
        chosen[table.param] = found.scheme, found.best.capacities
        why[table.param] = f"chosen: {found.reason}; {seen}"
    return Decision(chosen, why)


def sparsity_of(table: TableSync, samples: list[np.ndarray]) -> Sparsity:
    """Of a table's gradient, from the ids of all workers in some steps."""
    return measure([list(step) for step in samples], table.num_rows, table.row_size, itemsize(table.dtype))


def with_syncs(plan: Plan, step: SparseStep, decision: Decision | None) -> Plan:
    """The plan of a step whose tables are synchronised by rows: the dense exchanges of their gradients are replaced, and the gathers of
    tables that are stored in pieces: their rows are pulled, or left to XLA, which mostly finds them where they are."""
    syncs = sync_plans(plan, step, decision)
    names = {param: layer.name for layer in plan.layers for param in layer.params}
    sparse = {table.param for table in step.tables}
    stored = {f"{phase}: {param} is stored in pieces" for param in sparse for phase in ("forward", "backward")}
    gone = stored | {_gradient_of(param) for param in sparse}
    kept = tuple(one for one in plan.collectives if one.why not in gone)
    exchanges = tuple(
        Collective(ROW_EXCHANGE, one.axis, one.bytes, names.get(one.param, one.param), f"rows of the gradient of {one.param}, by {one.scheme}")
        for one in syncs if one.param in sparse and one.bytes
    )
    notes = plan.notes if step.graph.tables else (*plan.notes, "sync: no parameter is only looked up by rows, so there is nothing to synchronise by rows")
    return dataclasses.replace(plan, syncs=syncs, collectives=kept + exchanges, notes=notes)


def _gradient_of(param: str) -> str:
    """The reason of the dense exchange of a parameter's gradient among a plan's collectives."""
    return f"gradient of {param}"


def sync_plans(plan: Plan, step: SparseStep, decision: Decision | None) -> tuple[SyncPlan, ...]:
    """The plan's entries for all tables with lookups."""
    entries = []
    tables = {one.param: one for one in step.tables}
    for found in step.graph.tables:
        table = tables.get(found.param)
        dense_bytes = sum(one.bytes for one in plan.collectives if one.why.partition(", onto")[0] == _gradient_of(found.param))
        if table is None:
            why = decision.why[found.param] if decision is not None and found.param in decision.why else step.reasons[found.param]
            entries.append(SyncPlan(found.param, Dense.name, "+".join(plan.batch_axes), found.num_rows, dense_bytes, dense_bytes, why))
            continue
        sizes = Table(table.num_rows, table.row_size, itemsize(table.dtype), plan.mesh.size(table.axes))
        sent, why = 0, f"the first {OBSERVED_STEPS} steps are observed, with all rows gathered"
        if decision is not None:
            exchange = OwnerSharded(table.num_rows, table.capacities, ownership="range") if table.is_owned else None
            sent = exchange.predicted_bytes(sizes) if exchange else table.scheme.predicted_bytes(table.capacities, sizes)
            why = decision.why[found.param]
        if found.update is None:
            why = f"lazy, which changes the numbers: {found.reason}; {why}"
        entries.append(SyncPlan(
            found.param, OWNED if table.is_owned else table.scheme.name, "+".join(table.axes), found.num_rows, sent if sizes.num_workers > 1 else 0,
            dense_bytes, why,
        ))  # fmt: skip
    return tuple(entries)
