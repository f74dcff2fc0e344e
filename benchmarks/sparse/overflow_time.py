"""What capacities cost in time over many steps that they were not chosen from: fallbacks, steps that are observed
again, and programs compiled anew.

Processes behind links exchange the rows of every step and follow the same rules of room as the part that counts bytes
(`overflow`), a few steps of one and then of another, so that all of them meet the same moments of the machine. A worker
process is `benchmarks.sparse.overflow_worker`.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.sparse.launch import others_text, run_workers
from benchmarks.sparse.overflow import STEPS, rules

TABLES = ("lm1b_input", "criteo", "wikitext_in_order")
BLOCK = 20  # steps of a rule before it is another one's turn


@dataclasses.dataclass(frozen=True)
class Timed:
    """What a rule took over all steps. `stepping`, `building`: seconds of steps, fallbacks and observed steps among
    them, and of compiling programs anew; of the slowest worker in every block."""

    stepping: float
    building: float
    fallbacks: int
    built: int

    @property
    def seconds(self) -> float:
        """Seconds in all."""
        return self.stepping + self.building


def jobs(options: Any) -> dict[str, dict[str, Any]]:
    """Key of a section -> what it is measured with."""
    return {
        f"overflow_time, {num_workers} workers, {link}": {"num_workers": num_workers, "link": link}
        for num_workers in options.workers for link in options.links
    }  # fmt: skip


def section(quick: bool, data_dir: pathlib.Path, num_workers: int, link: str) -> Any:
    """The section of one number of workers and one link."""
    settings = {
        "tables": list(TABLES[1:2] if quick else TABLES), "steps": 2 * BLOCK if quick else STEPS, "block": BLOCK,
        "data_dir": str(data_dir),
    }  # fmt: skip
    answers = run_workers("sparse.overflow_worker", settings, num_workers, link)
    found = {name: over_workers([worker["tables"][name] for worker in answers.workers]) for name in settings["tables"]}
    names = {name: facts["name"] for name, facts in answers.workers[0]["tables"].items()}
    lead = (
        f"{num_workers} processes of one thread on one machine, each behind a link of {link}; `row_exchange` of the"
        f" rows of {settings['steps']} steps that capacities were not chosen from, which begins with each worker's rows"
        f" and ends with their sum on every worker. The rules take turns, {BLOCK} steps each. A step that does not fit"
        " sends all rows once more within the step; steps that are observed again gather all rows. Programs that are"
        f" built anew are compiled while all wait. {others_text(answers.others)}"
    )
    return report(found, names, (num_workers, settings["steps"], lead))


def over_workers(workers: Sequence[Mapping[str, Any]]) -> dict[str, Timed]:
    """By rule, what the `workers` of a run measured of a table: each block as long as its slowest worker took."""
    found = {}
    for rule, first in workers[0]["rules"].items():
        blocks = zip(*(worker["rules"][rule]["blocks"] for worker in workers), strict=True)
        built = zip(*(worker["rules"][rule]["building"] for worker in workers), strict=True)
        found[rule] = Timed(
            sum(map(max, blocks)), sum(map(max, built)), first["fallbacks"], len(first["building"])
        )  # fmt: skip
    return found


def report(found: Mapping[str, Mapping[str, Timed]], names: Mapping[str, str], what: tuple[int, int, str]) -> Any:
    """What was measured, as a section. `names`: of the tables. `what`: the number of workers, the number of steps, and
    what stands above the table."""
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Goal, Section

    num_workers, num_steps, lead = what
    first = rules()[0].name
    rows, goals = [], []
    for key, of_rules in found.items():
        ours = of_rules[first]
        for rule, timed in of_rules.items():
            milliseconds = [1e3 * seconds / num_steps for seconds in (timed.stepping, timed.building, timed.seconds)]
            rows.append(
                [names[key], rule, str(timed.fallbacks), str(timed.built), *(f"{one:.1f}" for one in milliseconds),
                 f"**{timed.seconds / ours.seconds:.3f}**"]
            )  # fmt: skip
        best = min((timed for rule, timed in of_rules.items() if rule != first), key=lambda timed: timed.seconds)
        goals.append(
            Goal(f"{names[key]}, {num_workers} workers: time by cost over that of the better of the other rules",
                 ours.seconds / best.seconds, 1.0, True)
        )  # fmt: skip
    titles = [
        "table", "room", "fallbacks", "programs built anew", "steps, ms each", "building, ms a step", "all, ms a step",
        f"over {first}",
    ]  # fmt: skip
    return Section(f"Steps that do not fit, timed: {num_workers} workers", [lead, "", *table(titles, rows)], goals)
