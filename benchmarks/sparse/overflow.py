"""What capacities cost over many steps that they were not chosen from: padding of every step, and fallbacks, in bytes
and in programs compiled anew.

Steps are routed on the host by the code that capacities come from: nothing is timed, so that other work on the machine
changes nothing. Rules of how much room there is, and of when steps are observed again, stand beside each other.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.sparse.data import Workload, named

TABLES = ("lm1b_input", "lm1b_softmax", "criteo", "wikitext", "wikitext_in_order")
STEPS = 500  # unseen ones; those that are observed again are among them


@dataclasses.dataclass(frozen=True)
class Demand:
    """What a step asks of each size of `row_exchange`."""

    local: int
    codes: int
    union: int
    push: int

    def fits(self, capacities: Any) -> bool:
        """Whether it has room."""
        codes = capacities.codes or math.inf  # other codes have room whenever the ids have
        room = (capacities.local, codes, capacities.union, capacities.push)
        return all(need <= size for need, size in zip(dataclasses.astuple(self), room, strict=True))


@dataclasses.dataclass(frozen=True)
class Rule:
    """How much room there is, and when steps are observed again.

    - `plan(sparsity)`: the capacities of `row_exchange`.
    - `checked`: steps between two looks. `most`: fallbacks from which on steps are observed again.
    - `since_look`: whether those since the last look count alone, and not all since capacities were chosen.
    """

    name: str
    plan: Callable[[Any], Any]
    checked: int
    most: int
    since_look: bool = False


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a run of `steps` steps cost.

    - `padded`, `fallen_back`, `observed`: bytes of a worker in the exchanges, in fallbacks, and in steps that were
      observed again. `least`: what the formula gives without padding and fallbacks.
    - `fallbacks`, `built`: steps that fell back, and programs compiled anew.
    """

    name: str
    rule: str
    steps: int
    padded: int
    fallen_back: int
    observed: int
    fallbacks: int
    built: int
    least: int

    @property
    def sent(self) -> int:
        """Bytes of a worker in all."""
        return self.padded + self.fallen_back + self.observed


def rules() -> tuple[Rule, ...]:
    """splitjax's own first; then what it did before, and no room but for what was seen."""
    from splitjax import sync
    from splitjax.planning.observing import CHECKED_STEPS, MOST_FALLBACKS

    scheme = sync.RowExchange()
    poisson = lambda largest: largest + 1.5 * math.sqrt(largest)
    return (
        Rule("by cost", scheme.plan, CHECKED_STEPS, MOST_FALLBACKS),
        Rule("1.5 deviations of a Poisson count, 3 in 64", lambda seen: _above_largest(seen, poisson), 64, 3, True),
        Rule(
            "the most that was seen, 3 in 64", lambda seen: _above_largest(seen, lambda largest: largest), 64, 3, True
        ),
    )


def _above_largest(sparsity: Any, above: Callable[[float], float]) -> Any:
    """Capacities of `row_exchange` by the largest counts that were seen alone."""
    from splitjax.sync.costs.capacities import Capacities, bucket
    from splitjax.sync.costs.codes import shortest

    table, n = sparsity.table, sparsity.num_workers
    sets = [ids for step in sparsity.samples for ids in step]
    room = lambda counts, most: max(bucket(above(max(counts)), most), 1)
    local = room([ids.size for ids in sets], table.num_rows)
    union = room([np.unique(np.concatenate(step)).size for step in sparsity.samples], table.num_rows)
    pull, code = -(-union // n), shortest(sets, local, table.num_rows)
    push = room([demand(step, table.num_rows, pull).push for step in sparsity.samples], local)
    return Capacities(local, union, push, pull, code.num_codes, code.bits)


def demand(step: Sequence[np.ndarray], num_rows: int, pull: int) -> Demand:
    """What a step asks for, with owners of `pull` rows each. `step`: the sorted unique ids of each worker."""
    from splitjax.sync.costs.codes import GAPS8, num_gap_codes
    from splitjax.sync.costs.row_exchange import routed

    pairs, _ = routed(tuple(step), num_rows, pull, 0, "contributor")
    return Demand(
        max(ids.size for ids in step),
        max(num_gap_codes(ids, GAPS8) for ids in step),
        np.unique(np.concatenate(step)).size,
        max(pairs, default=0),
    )


def run(rule: Rule, workload: Workload, steps: Sequence[Sequence[np.ndarray]], lookups: int, observed: int) -> Cost:
    """Follows a rule as `follow` does, and says beside it what the formula gives for these steps."""
    from splitjax import sync

    cost = follow(rule, workload, steps, lookups, observed)
    unseen = sync.measure([list(step) for step in steps[observed:]], workload.num_rows, workload.width)
    return dataclasses.replace(cost, least=round(sync.RowExchange().formula_bytes(unseen) * cost.steps))


def follow(
    rule: Rule,
    workload: Workload,
    steps: Sequence[Sequence[np.ndarray]],
    lookups: int,
    observed: int,
    needs: Callable[[Sequence[np.ndarray], int, int], Demand] = demand,
) -> Cost:
    """Follows a rule through the steps of a run, the first `observed` of which it is not charged for.

    `steps`: [step][worker] sorted unique ids. `lookups`: ids of a worker in a step, repeated ones included. `needs`:
    what gives a step's demand, as `demand` does. `least` stays 0.
    """
    from splitjax import sync

    scheme, samples = sync.RowExchange(), [list(step) for step in steps[:observed]]

    def choose() -> Any:
        seen = sync.measure(samples, workload.num_rows, workload.width)
        seen = dataclasses.replace(seen, lookups=lookups)
        return seen, rule.plan(seen)

    seen, capacities = choose()
    padded = fallen_back = again = fallbacks = built = since = looked = to_observe = 0
    for step in steps[observed:]:
        if to_observe:
            samples.append(list(step))
            again += seen.fallback_bytes
            to_observe -= 1
            if not to_observe:
                (seen, capacities), built, since, looked = choose(), built + 1, 0, 0
            continue
        padded += scheme.predicted_bytes(capacities, seen.table)
        if not needs(step, workload.num_rows, capacities.pull).fits(capacities):
            fallen_back, fallbacks, since = fallen_back + seen.fallback_bytes, fallbacks + 1, since + 1
        looked += 1
        if looked % rule.checked == 0:
            to_observe = observed if since >= rule.most else 0
            since = 0 if rule.since_look else since
    return Cost(workload.name, rule.name, len(steps) - observed, padded, fallen_back, again, fallbacks, built, 0)


def count(workload: Workload, num_workers: int, num_steps: int) -> list[Cost]:
    """What each rule costs over `num_steps` steps that nothing was chosen from."""
    from splitjax.planning.observing import OBSERVED_STEPS

    steps = workload.sets(range(OBSERVED_STEPS + num_steps), num_workers)
    lookups = workload.ids(0, 0, num_workers).size
    return [run(rule, workload, steps, lookups, OBSERVED_STEPS) for rule in rules()]


def jobs(options: Any) -> dict[str, dict[str, Any]]:
    """Key of a section -> what it is counted with."""
    return {f"overflow, {num_workers} workers": {"num_workers": num_workers} for num_workers in options.workers}


def section(quick: bool, data_dir: pathlib.Path, num_workers: int) -> Any:
    """The section of one number of workers."""
    tables, steps = (TABLES[2:3], 40) if quick else (TABLES, STEPS)
    return report([count(named(name, data_dir), num_workers, steps) for name in tables], num_workers)


def report(found: Sequence[Sequence[Cost]], num_workers: int) -> Any:
    """What was counted, as a section."""
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Goal, Section
    from splitjax.planning.observing import CHECKED_STEPS, MOST_FALLBACKS, OBSERVED_STEPS

    rows, goals = [], []
    for costs in found:
        ours = costs[0]
        for cost in costs:
            rows.append(
                [
                    cost.name,
                    cost.rule,
                    str(cost.fallbacks),
                    str(cost.built),
                    *(f"{part / 1e6 / cost.steps:.3f}" for part in (cost.padded, cost.fallen_back, cost.observed)),
                    f"{cost.sent / 1e6 / cost.steps:.3f}",
                    f"**{cost.sent / cost.least:.3f}**",
                ]
            )
        best = min(costs[1:], key=lambda cost: cost.sent)
        goals.append(
            Goal(f"{ours.name}, {num_workers} workers: bytes by cost over those of the better of the other rules",
                 ours.sent / best.sent, 1.0, True)
        )  # fmt: skip
    lines = [
        (
            f"{num_workers} workers, `row_exchange`. Capacities come from {OBSERVED_STEPS} steps, and"
            f" {found[0][0].steps} other steps follow. A step that does not fit sends all rows once more, and what it"
            " tried in vain counts too; steps that are observed again send as much. MB (10^6 bytes) are those of a"
            " worker and step, in the mean of all steps, counted on the host: nothing is timed. *By cost* is what"
            " splitjax does: each capacity is where padding and fallbacks together cost least, by a Student's t"
            " distribution of what was seen, and steps are observed again after"
            f" {MOST_FALLBACKS} fallbacks, looked for every {CHECKED_STEPS} steps. The other rules observe again after"
            " three fallbacks of 64 steps. *Over the least*: over what the formula gives for these steps with no"
            " padding and no fallbacks. The rule's constant (how much a Poisson count is believed) was chosen on lm1b."
        ),
        "",
        *table(
            [
                "table", "room", "fallbacks", "programs built anew", "exchanges, MB", "fallbacks, MB",
                "observed again, MB", "all, MB", "over the least",
            ],
            rows,
        ),
    ]  # fmt: skip
    return Section(f"Steps that do not fit: {num_workers} workers", lines, goals)
