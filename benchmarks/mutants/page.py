"""Keeps the outcomes of all faults as JSON and writes them as a page, room by room."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence

from benchmarks._common import table, write_page
from benchmarks.mutants.faults import Fault
from benchmarks.mutants.run import KILLED, Outcome


@dataclasses.dataclass(frozen=True)
class Result:
    """Holds a fault as it was, and what came of it."""

    fault: Fault
    outcome: Outcome


@dataclasses.dataclass(frozen=True)
class Results:
    """Holds a run over all faults: the page's `header`, how many processes (`num_jobs`) and `seconds` it took."""

    header: str
    num_jobs: int
    seconds: float
    results: tuple[Result, ...]


def make_results(
    header: str, num_jobs: int, seconds: float, faults: Sequence[Fault], outcomes: Mapping[str, Outcome]
) -> Results:
    """Joins `faults` with their `outcomes` (by name); `header`, `num_jobs` and `seconds` are those of the run."""
    return Results(header, num_jobs, seconds, tuple(Result(fault, outcomes[fault.name]) for fault in faults))


def write(results: Results, folder: pathlib.Path) -> pathlib.Path:
    """Writes `results` as mutants.json and mutants.md into `folder`; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mutants.json").write_text(json.dumps(dataclasses.asdict(results), indent=1) + "\n", encoding="utf-8")
    return write_page("mutants", lines(results), folder)


def lines(results: Results) -> list[str]:
    """Gives the lines of the page: totals, how it is counted, rooms, then the faults of each room."""
    entries = results.results
    by_room: dict[str, list[Result]] = {}
    for entry in sorted(entries, key=lambda entry: (entry.fault.room, entry.fault.file, entry.fault.name)):
        by_room.setdefault(entry.fault.room, []).append(entry)
    num_killed = sum(entry.outcome.verdict == KILLED for entry in entries)
    slowest = max((entry.outcome.seconds for entry in entries), default=0.0)
    page = [
        "# Mutants: faults that the tests have to notice",
        "",
        f"**{num_killed} of {len(entries)} faults killed, in {len(by_room)} rooms.**",
        "",
        results.header.rstrip(),
        f"- {results.seconds / 60:.1f} minutes in {results.num_jobs} processes, with a run of all named tests without a"
        f" fault; the slowest fault took {slowest:.0f} s",
        "",
        "Each fault changes one line of the package, in a copy of it, and only the tests that are named for it run.",
        "It is killed where one of them fails: an error when a test is collected or set up, or a time-out, would not",
        "count. Seconds are those of the fault's tests, of which the start of Python and JAX is the most. The faults",
        "are kept in `benchmarks/mutants/faults.toml`.",
        "",
        "## Totals",
        "",
        *table(
            ("room", "faults", "killed"),
            [
                (f"`{room}`", str(len(group)), str(sum(entry.outcome.verdict == KILLED for entry in group)))
                for room, group in by_room.items()
            ],
        ),
    ]
    missed = [entry for entry in entries if entry.outcome.verdict != KILLED]
    if missed:
        rows = [(f"`{it.fault.name}`", it.outcome.verdict, it.outcome.message) for it in missed]
        page += ["", "## Not killed", "", *table(("fault", "verdict", "why"), rows)]
    for room, group in by_room.items():
        page += ["", f"## {room}", "", *table(("fault", "file", "line", "noticed by", "seconds"), map(_row, group))]
    return page


def _row(entry: Result) -> tuple[str, ...]:
    fault, outcome = entry.fault, entry.outcome
    change = f"`{fault.old.strip()}` becomes `{fault.new.strip()}`"
    noticed = f"`{outcome.noticed_by}`" if outcome.verdict == KILLED else f"**{outcome.verdict}**"
    return fault.breaks, f"`{fault.file}`", change, noticed, f"{outcome.seconds:.0f}"
