"""Whether less room would do: two other ways to choose it by cost, and other steps to choose it from.

Counted on the host by what `overflow` counts with. `splitjax` does neither of them: what they give is on the page, so
that it need not be tried again.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.sparse.data import Workload, named
from benchmarks.sparse.overflow import STEPS, TABLES, Cost, Demand, Rule, demand, follow, rules

STARTS = 4  # runs of a table, each of which begins with other steps
LATER = 16  # steps after which capacities are chosen once more
OWN, ONCE_MORE = "by cost, each count by its own kind", f"by cost, once more after {LATER} steps"


def by_own_kind(sparsity: Any) -> Any:
    """Capacities of `row_exchange` by cost; how much a union varies is told by unions, and of pairs by pairs.

    A union's variance is told by what it lacks without each of the workers (Efron and Stein, "The jackknife estimate of
    variance", 1981), and not by that of the workers' rows. All pairs of workers are one count, seen in every step as
    often as there are pairs.
    """
    from splitjax import sync
    from splitjax.sync.costs.capacities import odds_of, room
    from splitjax.sync.costs.row_exchange import routed

    table, n, samples = sparsity.table, sparsity.num_workers, sparsity.samples
    usual = sync.RowExchange().plan(sparsity)
    size = lambda sets: np.unique(np.concatenate(sets)).size
    without = np.array([[size(step[:worker] + step[worker + 1 :]) for step in samples] for worker in range(n)])
    # Variance over the mean is then (n - 1) times that of `without` over the workers, as the jackknife asks for.
    price = (n - 1) / n * table.row_bytes
    union = room([[size(step)] for step in samples], table.num_rows, odds_of(sparsity, price), (n - 1) * without)
    pull = -(-union // n)
    pairs = np.array([routed(step, table.num_rows, pull, 0, "contributor")[0] for step in samples])
    odds = odds_of(sparsity, (n - 1) * table.row_bytes) / pairs.shape[1]
    push = room(pairs.reshape(-1, 1), usual.local, odds)
    return dataclasses.replace(usual, union=union, pull=pull, push=push)


def remembering() -> Callable[[Sequence[np.ndarray], int, int], Demand]:
    """`overflow.demand`, which counts the same step with the same room of owners once."""
    known: dict[tuple[int, int], tuple[Any, Demand]] = {}  # with the step, so that its number stays its own

    def needs(step: Sequence[np.ndarray], num_rows: int, pull: int) -> Demand:
        key = (id(step), pull)
        if key not in known:
            known[key] = (step, demand(step, num_rows, pull))
        return known[key][1]

    return needs


def once_more(
    workload: Workload,
    steps: Sequence[Sequence[np.ndarray]],
    lookups: int,
    observed: int,
    needs: Callable[[Sequence[np.ndarray], int, int], Demand],
) -> Cost:
    """What the usual rule costs if capacities are chosen once more, `LATER` steps after they were, by all steps until
    then. Looking at these steps costs nothing here; the program that is built anew is counted and not charged for."""
    usual, later = rules()[0], observed + LATER
    first = follow(usual, workload, steps[:later], lookups, observed, needs)
    second = follow(usual, workload, steps, lookups, later, needs)
    parts = ("steps", "padded", "fallen_back", "observed", "fallbacks", "built")
    both = {part: getattr(first, part) + getattr(second, part) for part in parts}
    return dataclasses.replace(first, rule=ONCE_MORE, **{**both, "built": both["built"] + 1})


@dataclasses.dataclass(frozen=True)
class Needs:
    """What the usual rule gives room for, beside what the steps of a run then need.

    - `rows`, `unions`: variance over the mean of a worker's rows and of the union, from step to step: 1 for a Poisson
      count.
    - `union`, `push`: room for the union's rows, and for those from one worker to another; `most_union`, `most_push`:
      the most that was needed.
    """

    name: str
    rows: float
    unions: float
    union: int
    most_union: int
    push: int
    most_push: int


@dataclasses.dataclass(frozen=True)
class Tried:
    """What was counted of a table. `costs`: [start][rule], the rule that is compared with last."""

    needs: Needs
    costs: tuple[tuple[Cost, ...], ...]


def needs_of(
    workload: Workload,
    steps: Sequence[Sequence[np.ndarray]],
    lookups: int,
    observed: int,
    needs: Callable[[Sequence[np.ndarray], int, int], Demand],
) -> Needs:
    """Room by the first `observed` steps, and needs of the others. Arguments as of `overflow.follow`."""
    from splitjax import sync

    seen = sync.measure([list(step) for step in steps[:observed]], workload.num_rows, workload.width)
    room = rules()[0].plan(dataclasses.replace(seen, lookups=lookups))
    others = steps[observed:]
    asked = [needs(step, workload.num_rows, room.pull) for step in others]
    rows = np.array([[ids.size for ids in step] for step in others])
    unions = np.array([one.union for one in asked])
    ratio = lambda counts: float((counts.var(axis=0) / counts.mean(axis=0)).mean())
    return Needs(
        workload.name, ratio(rows), ratio(unions), room.union, max(unions.tolist()), room.push,
        max(one.push for one in asked),
    )  # fmt: skip


def tried(workload: Workload, num_workers: int, num_steps: int, starts: int) -> Tried:
    """What each rule costs over `num_steps` steps, beginning with other steps each time: those before come after the
    last."""
    from splitjax.planning.observing import OBSERVED_STEPS

    steps = workload.sets(range(OBSERVED_STEPS + num_steps), num_workers)
    lookups, needs = workload.ids(0, 0, num_workers).size, remembering()
    usual, rival, *_ = rules()
    own = Rule(OWN, by_own_kind, usual.checked, usual.most, usual.since_look)
    found = []
    for start in range(0, num_steps, -(-num_steps // starts)):
        turned = steps[start:] + steps[:start]
        ours, by_own, theirs = (
            follow(rule, workload, turned, lookups, OBSERVED_STEPS, needs) for rule in (usual, own, rival)
        )
        found.append((ours, by_own, once_more(workload, turned, lookups, OBSERVED_STEPS, needs), theirs))
    return Tried(needs_of(workload, steps, lookups, OBSERVED_STEPS, needs), tuple(found))


def jobs(options: Any) -> dict[str, dict[str, Any]]:
    """Key of a section -> what it is counted with."""
    return {f"overflow_tried, {num_workers} workers": {"num_workers": num_workers} for num_workers in options.workers}


def section(quick: bool, data_dir: pathlib.Path, num_workers: int) -> Any:
    """The section of one number of workers."""
    tables, steps, starts = (TABLES[2:3], 40, 2) if quick else (TABLES, STEPS, STARTS)
    return report([tried(named(name, data_dir), num_workers, steps, starts) for name in tables], num_workers)


def report(found: Sequence[Tried], num_workers: int) -> Any:
    """What was counted, as a section."""
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Section

    needs = [
        [one.name, f"{one.rows:.1f}", f"{one.unions:.1f}", *map(str, (one.union, one.most_union)),
         *map(str, (one.push, one.most_push))]
        for one in (of_table.needs for of_table in found)
    ]  # fmt: skip
    rows = [_row([costs[rule] for costs in of_table.costs], [costs[-1] for costs in of_table.costs])
            for of_table in found for rule in range(len(of_table.costs[0]))]  # fmt: skip
    starts, rival = len(found[0].costs), found[0].costs[0][-1]
    why = (
        f"{num_workers} workers, `row_exchange`: where the room of the section above goes. Variances over the mean are"
        " from step to step, and 1 for a Poisson count. Of a union there is one in a step, so its variance is taken to"
        " be over its mean what that of workers' rows is, and that of rows from one worker to another is pooled with"
        f" it. *Needed* is the most that any of {rival.steps} steps needed that capacities were not chosen from."
    )
    what = (
        f"Two other ways by cost, in bytes over those of *{rival.rule}*: with the first three steps as above, and in"
        f" {starts} runs, each of which begins with other steps (those before them come last). *Each count by its own"
        " kind*: the variance of a union is told by unions without one of the workers, and of rows from one worker to"
        f" another by all such counts, as if of one. *Once more after {LATER} steps*: capacities are chosen again by"
        " all steps until then, as if looking at them and building the program anew cost nothing. splitjax does"
        " neither of them."
    )
    asked = [
        "table", "variance over mean, rows of a worker", "union", "room for a union", "needed",
        "room from worker to worker", "needed",
    ]  # fmt: skip
    titles = [
        "table", "room", "fallbacks", "all, MB", "over the other rule", "fallbacks, mean of runs",
        "built anew, mean of runs", "all, MB, mean of runs", "over the other rule, mean of runs",
    ]  # fmt: skip
    lines = [why, "", *table(asked, needs), "", what, "", *table(titles, rows)]
    return Section(f"Steps that do not fit, what else was tried: {num_workers} workers", lines, [])


def _row(costs: Sequence[Cost], rivals: Sequence[Cost]) -> list[str]:
    """A rule's row. `costs`, `rivals`: of the rule, and of the one that it is compared with, by start."""
    first, runs = costs[0], len(costs)
    sent, theirs = (sum(one.sent for one in of_rule) for of_rule in (costs, rivals))
    return [
        first.name, first.rule, str(first.fallbacks), f"{first.sent / 1e6 / first.steps:.3f}",
        f"**{first.sent / rivals[0].sent:.3f}**", f"{sum(one.fallbacks for one in costs) / runs:.1f}",
        f"{sum(one.built for one in costs) / runs:.1f}", f"{sent / 1e6 / first.steps / runs:.3f}",
        f"**{sent / theirs:.3f}**",
    ]  # fmt: skip
