"""Decides the scheme and capacities of every table from what the first steps looked up.

What steps return of their tables and the links between workers come in (`TableObserver`, `Link`); a `TableDecision`
and what it costs come out.

The program of the first steps gathers all rows and returns the ids. Afterwards their sparsity is known, and the step is
built once more. While it runs, steps in which the capacities did not suffice are counted. When they have cost as much
as observing anew would, steps are observed anew: capacities then follow from all that was seen. All processes see the
same numbers and decide alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np

from splitjax.plan import (
    SyncPlan,
    spec_axes,
)
from splitjax.planning.carried import Seen
from splitjax.planning.tables.finding import Chosen, gradient_in_loop
from splitjax.planning.tables.sparse_step import SparseStep
from splitjax.planning.tables.sync_request import AUTO, SyncRequest
from splitjax.planning.tables.table_sync import TableSync
from splitjax.sync.costs.choose import candidates, choose
from splitjax.sync.costs.dense import DenseCosts
from splitjax.sync.costs.exchange import ByScheme, Exchange, seen
from splitjax.sync.costs.schemes import Link, SchemeCosts
from splitjax.sync.profile import Sparsity, measure
from splitjax.trace.graph import itemsize

OBSERVED_STEPS = 3
CHECKED_STEPS = 16
# Observing again costs as much as so many fallbacks: three steps that gather all rows, and a program compiled anew,
# which is counted as eight. When fallbacks have cost that much, steps are observed again: by then at most twice the
# least that could have been spent is spent (the ski rental of Karlin et al., "Competitive snoopy caching", 1988).
# Counts decide, and no clock does, so that runs repeat bit for bit.
MOST_FALLBACKS = OBSERVED_STEPS + 8

# What a step returns of each of its tables, by path: see `sparse.evaluate_sparse`.
Observed = Mapping[str, Mapping[str, jax.Array | np.ndarray]]


@dataclasses.dataclass
class TableObserver:
    """Accumulates what was seen of the steps of a signature.

    **Attributes:**

    - `samples`: by table, the ids that n workers looked up in every observed step, i32[n, k].
    - `waiting`: what steps returned since the last look, still on the device.
    - `before`: how many more steps there were since that look, before a run was resumed.
    - `fell_back`: by table, in how many steps up to that look its capacities did not suffice, since they were chosen
      (or since that was too many of a pinned plan's).
    """

    samples: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=dict)
    waiting: list[Observed] = dataclasses.field(default_factory=list)
    before: int = 0
    fell_back: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def note(self, observed: Observed) -> None:
        """Keeps what a step returned (`observed`), on the device: nothing waits for it."""
        self.waiting.append(observed)

    def is_ready(self, observes: bool) -> bool:
        """Returns whether it is time to look. `observes`: whether the program is that of the first steps."""
        return self.before + len(self.waiting) >= (OBSERVED_STEPS if observes else CHECKED_STEPS)

    def take_samples(self) -> dict[str, list[np.ndarray]]:
        """Returns the ids of all observed steps as `samples` has them; waits for the last of these steps."""
        self.samples, self.waiting, self.before, self.fell_back = self._samples(), [], 0, {}
        return self.samples

    def overflows(self) -> bool:
        """Looks, and returns whether the fallbacks of some table have cost as much as observing steps again would,
        since its capacities were chosen or this was so last."""
        self.fell_back, self.waiting, self.before = self._fell_back(), [], 0
        is_too_much = max(self.fell_back.values(), default=0) >= MOST_FALLBACKS
        self.fell_back = {} if is_too_much else self.fell_back
        return is_too_much

    def seen(self, observes: bool, syncs: tuple[SyncPlan, ...]) -> Seen:
        """Returns all of it as a value. `observes`: whether the program that runs now is that of the first steps.
        `syncs`: how it synchronises its tables."""
        samples = {param: np.stack(steps) for param, steps in (self._samples() if observes else self.samples).items()}
        return Seen(
            () if observes else syncs, samples, self.before + len(self.waiting), {} if observes else self._fell_back()
        )

    @staticmethod
    def of(seen: Seen) -> TableObserver:
        """Returns an observer that goes on from the value `seen`, which an earlier one gave."""
        return TableObserver(
            {param: list(steps) for param, steps in seen.samples.items()}, [], seen.num_steps, dict(seen.fell_back)
        )

    def _samples(self) -> dict[str, list[np.ndarray]]:
        samples = {param: list(steps) for param, steps in self.samples.items()}
        for observed in self.waiting:
            for param, of_table in observed.items():
                samples.setdefault(param, []).append(np.asarray(of_table["touched"]))
        return samples

    def _fell_back(self) -> dict[str, int]:
        counts = dict(self.fell_back)
        for observed in self.waiting:
            for param, of_table in observed.items():
                counts[param] = counts.get(param, 0) + bool(of_table["fell_back"])
        return counts


@dataclasses.dataclass(frozen=True)
class TableDecision:
    """Says how each table is synchronised from now on.

    **Attributes:** `chosen`: by table, its exchange, with capacities. `why`: by table, the reason, for the plan.
    `is_whole`: whether these reasons are those of a plan, which says there what changes the numbers too.
    """

    chosen: Chosen
    why: Mapping[str, str]
    is_whole: bool = False


def decide(
    step: SparseStep,
    request: SyncRequest,
    samples: Mapping[str, list[np.ndarray]],
    links: Mapping[tuple[str, ...], Link],
) -> TableDecision:
    """Decides schemes and capacities of the observed tables.

    **Arguments:** `step`: the tables of the step. `request`: how they are to be synchronised. `samples`: by table, the
    ids of every observed step (`TableObserver.take_samples`). `links`: the links between workers along mesh axes, for
    all of `axes_to_measure`."""
    chosen: dict[str, Exchange] = {}
    why = {}
    for table in step.tables:
        sparsity, asked = sparsity_of(table, samples[table.param]), request.of(table.param).scheme
        if table.joins:
            chosen[table.param], why[table.param] = chosen[table.joins], why[table.joins]
            continue
        if table.exchange.pulls:
            # There is room for as many rows of all tables that travel together, whose ids are the same.
            row_bytes = sum(each.row_size * itemsize(each.dtype) for each in step.together(table))
            as_one = dataclasses.replace(table, row_size=row_bytes // itemsize(table.dtype))
            all_rows = sparsity_of(as_one, samples[table.param])
            chosen[table.param], why[table.param] = table.exchange.planned(all_rows), table.exchange.reason(sparsity)
            continue
        if asked != AUTO:
            chosen[table.param], why[table.param] = table.exchange.planned(sparsity), table.exchange.reason(sparsity)
            continue
        choice = choose(sparsity, links.get(table.axes, Link(0.0, float("inf"))), _candidates(step, table))
        chosen[table.param] = ByScheme(choice.scheme, choice.best.capacities)
        why[table.param] = f"chosen: {choice.reason}; {seen(sparsity)}"
    return TableDecision(chosen, why)


def suppose(step: SparseStep, request: SyncRequest, links: Mapping[tuple[str, ...], Link]) -> TableDecision:
    """Decides schemes and capacities of tables of which no step was observed yet, as if every lookup of a worker found
    another row, evenly among all rows, and workers read the same ones only where there are too few. The arguments are
    those of `decide`."""
    samples = {}
    for table in step.tables:
        n = table.num_workers
        rows = max(min(step.num_ids(table), table.num_rows), 1)
        of_all = np.arange(n)[:, None] + n * np.arange(rows)[None]
        ids = of_all * max(table.num_rows // (n * rows), 1) % table.num_rows
        samples[table.param] = [ids] * OBSERVED_STEPS
    return decide(step, request, samples, links)


def axes_to_measure(step: SparseStep, request: SyncRequest) -> tuple[tuple[str, ...], ...]:
    """Returns the mesh axes whose links `decide` asks for: those between the workers of tables whose scheme is to be
    chosen, in the order of the tables. `step`, `request`: as for `decide`."""
    chosen = (table for table in step.tables if not table.exchange.pulls and request.of(table.param).scheme == AUTO)
    return tuple(dict.fromkeys(table.axes for table in chosen if table.num_workers > 1))


def _candidates(step: SparseStep, table: TableSync) -> list[SchemeCosts]:
    """Returns the schemes that `auto` may choose for a table: no dense one where that would change what a lazy update
    computes, and, where rows are split, none whose devices would not agree on what was touched."""
    is_lazy, is_split = step.table_of(table).update is None, bool(spec_axes(table.row_spec))
    return [
        scheme
        for scheme in candidates()
        if not (is_lazy and isinstance(scheme, DenseCosts)) and not (is_split and scheme.needs_whole_rows)
    ]


def sparsity_of(table: TableSync, samples: list[np.ndarray]) -> Sparsity:
    """Measures the sparsity of the gradient of `table` from `samples`, the ids that n workers looked up in every
    observed step, i32[n, k]."""
    return measure([list(step) for step in samples], table.num_rows, table.row_size, itemsize(table.dtype))


def note_without_tables(step: SparseStep) -> str:
    """Returns the note of a step that has no tables with lookups; empty for one that has some."""
    return "" if step.graph.tables else _nothing(gradient_in_loop(step.jaxpr))


def _nothing(in_loop: str) -> str:
    """Says that a step has no tables. `in_loop`: why, where its gradient is taken in a loop; else empty."""
    why = f": {in_loop}" if in_loop else ""
    return f"sync: no parameter is only looked up by rows, so there is nothing to synchronise by rows{why}"
