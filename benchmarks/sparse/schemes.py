"""Every scheme on the same tables, ids and links, in one run: milliseconds a step, bytes really sent, and how they
stand to the formulas."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.sparse.launch import Answers, Measured, others_text, over_workers, run_workers

ROUNDS, STEPS = 6, 3
# workers up to which messages are timed alone too: that is twice as much to compile, for every worker on this machine
MOST_ALONE = 8
# Workers and links for which speeds are asked; bytes are asked for always. At 100 Mb/s sixteen processes wait for two
# cores as well as for the network; at 25 Mb/s for the network alone, nearly.
GOALS_AT = (16, "25mbit"), (16, "100mbit")
MOST_OVER_BOUND, MOST_OFF_FORMULA = 1.08, 0.05
UNPADDED = ", without padding (scaled)"


@dataclasses.dataclass(frozen=True)
class Row:
    """One way over all workers. `alone`: of its messages and nothing else; None where that was not measured."""

    took: Measured
    alone: Measured | None
    predicted: int
    formula: float | None
    missed: int  # steps whose rows did not fit the capacities

    @property
    def off_formula(self) -> float:
        """How far what was sent is from the formula, as a share of it."""
        return abs(self.took.sent / self.formula - 1)


def jobs(options: Any) -> dict[str, dict[str, Any]]:
    """Key of a section -> what it is measured with."""
    return {
        f"schemes, {num_workers} workers, {link}, {table}": {"num_workers": num_workers, "link": link, "table": table}
        for num_workers in options.workers for link in options.links for table in options.tables
    }  # fmt: skip


def section(quick: bool, data_dir: pathlib.Path, num_workers: int, link: str, table: str) -> Any:
    """The section of one number of workers, one link and one table."""
    from benchmarks.sparse import ways

    settings = {
        "workloads": [table], "choose": False, "transfer": num_workers <= MOST_ALONE, "rounds": 2 if quick else ROUNDS,
        "steps": 1 if quick else STEPS, "data_dir": str(data_dir),
        "ways": [*ways.SCHEMES, ways.ROWS_AHEAD, ways.ROWS_BF16, ways.OWNER, ways.OWNER_BF16],
    }  # fmt: skip
    return report(run_workers("sparse.worker", settings, num_workers, link), num_workers, link)


def rows_of(answers: Answers, workload: str) -> dict[str, Row]:
    """By way, what all workers measured of a workload."""
    of_worker = [worker["workloads"][workload]["ways"] for worker in answers.workers]
    found = {}
    for way, first in of_worker[0].items():
        alone = over_workers([one[way]["alone"] for one in of_worker]) if first["alone"] else None
        missed = sum(not fitted for fitted in first["fitted"])
        found[way] = Row(
            over_workers([one[way]["turns"] for one in of_worker]), alone, first["predicted"], first["formula"], missed
        )
    return found


def report(answers: Answers, num_workers: int, link: str) -> Any:
    """What the workers measured, as a section."""
    from benchmarks.splitbrain.common import Section

    ((name, facts),) = answers.workers[0]["workloads"].items()
    rows = rows_of(answers, name)
    lines = [
        (
            f"{num_workers} processes of one thread on one machine, each behind a link of {link} a second in each"
            " direction."
            " What is timed begins with the rows that each worker has and ends with their sum on every"
            f" worker. The processes try all ways in turns, with the same ids: {STEPS} to 40 steps a turn, or"
            " one where a step takes seconds. Every sum was compared with the exact one. Milliseconds are"
            " those of the slowest worker: the median over the turns, with quartiles. *Messages alone* sends"
            f" the same messages without any work on the workers (measured for up to {MOST_ALONE} workers)."
            " Processor time is that of one worker, which on this machine shares its cores with all others. A"
            " MB is 10^6 bytes, read from the network device of the busiest worker, so that TCP's headers are"
            " included. The bound is the least that can be sent, values alone, if each row is added up by a"
            " worker that has it. Zen is run with running counts to find what goes where, which is faster"
            " here than its hashes and sends the same."
            f" {others_text(answers.others)}"
        ),
        "",
        (
            f"{facts['what']}; {facts['num_rows']:,} rows x {facts['width']}; {facts['rows']:,.0f} rows of a worker"
            f" (density {facts['density']:.2%}), {facts['union']:,.0f} of all; bound {facts['bound'] / 1e6:.3f} MB."
        ),
        "",
        *_table(rows, facts["bound"]),
        "",
    ]
    goals = goals_of(name, facts["name"], rows, facts["bound"], (num_workers, link))
    return Section(f"Schemes: {num_workers} workers, {link}: {facts['name']}", lines, goals)


def _table(rows: Mapping[str, Row], bound: float) -> list[str]:
    from benchmarks._common import table
    from benchmarks.sparse import ways

    dense, out = rows[ways.DENSE].took.seconds, []
    for way, row in rows.items():
        took, sent = row.took, row.took.sent
        out.append(
            [
                way,
                f"{1e3 * took.seconds:.0f}",
                f"{1e3 * took.low:.0f} to {1e3 * took.high:.0f}",
                "" if row.alone is None else f"{1e3 * row.alone.seconds:.0f}",
                f"{1e3 * took.cpu:.1f}",
                f"**{dense / took.seconds:.1f}**",
                _mb(sent),
                _mb(row.predicted),
                _mb(row.formula),
                "" if sent is None else f"{sent / bound:.2f}",
                "" if not row.missed else str(row.missed),
            ]
        )
        if way == ways.OMNIREDUCE or (way in rivals(rows) and sent and row.off_formula > MOST_OFF_FORMULA):
            seconds = unpadded_seconds(row)
            out.append(
                [
                    f"{way}{UNPADDED}",
                    f"{1e3 * seconds:.0f}",
                    "",
                    "",
                    "",
                    f"{dense / seconds:.1f}",
                    "",
                    "",
                    _mb(row.formula),
                    f"{row.formula / bound:.2f}",
                    "",
                ]
            )
    titles = [
        "",
        "ms",
        "quartiles",
        "messages alone, ms",
        "processor time, ms",
        "times as fast as dense",
        "MB sent",
        "predicted",
        "by formula",
        "sent / bound",
        "steps that did not fit",
    ]
    return table(titles, out)


def unpadded_seconds(rival: Row) -> float:
    """Of a rival if it sent no padding, which static shapes need: its time in proportion to the bytes of its
    formula."""
    return rival.took.seconds * min(1.0, rival.formula / (rival.took.sent or rival.predicted))


def goals_of(key: str, name: str, rows: Mapping[str, Row], bound: float, at: tuple[int, str]) -> list[Any]:
    """The goals of one workload; those on speed for the workers and link that they were set for."""
    from benchmarks.sparse import ways
    from benchmarks.splitbrain.common import Goal

    seconds = {way: row.took.seconds for way, row in rows.items()}
    faster = lambda what, than, way, limit: Goal(f"{name}: {way} over {what}", than / seconds[way], limit, False, ".2f")
    goals = []
    if at in GOALS_AT and key == "lm1b_input":
        sparse = min(seconds[ways.AGSPARSE], seconds[ways.SPARCML])
        goals += [
            faster("dense", seconds[ways.DENSE], ways.ROWS, 45),
            faster("the better of AGsparse and SparCML", sparse, ways.ROWS, 2.5),
            faster("OmniReduce without padding", unpadded_seconds(rows[ways.OMNIREDUCE]), ways.ROWS, 7),
            faster("Zen as published", seconds[ways.ZEN], ways.ROWS, 1.8),
            faster("dense", seconds[ways.DENSE], ways.OWNER, 90),
            faster("dense", seconds[ways.DENSE], ways.OWNER_BF16, 200),
        ]
    if at in GOALS_AT and key == "criteo":
        goals += [
            faster("dense", seconds[ways.DENSE], ways.ROWS, 8),
            faster("Zen as published", seconds[ways.ZEN], ways.ROWS, 1.3),
        ]
    if any(row.took.sent is None for row in rows.values()):
        return goals
    if key.startswith("lm1b"):
        goals.append(
            Goal(
                f"{name}: bytes of {ways.ROWS} over the bound", rows[ways.ROWS].took.sent / bound, MOST_OVER_BOUND, True
            )
        )
    worst = max(rivals(rows), key=lambda way: rows[way].off_formula)
    goals.append(
        Goal(
            f"{name}: a rival's bytes off its formula, at most ({worst})",
            rows[worst].off_formula,
            MOST_OFF_FORMULA,
            True,
        )
    )
    return goals


def rivals(rows: Mapping[str, Row]) -> Sequence[str]:
    """The ways that are not this library's own."""
    from benchmarks.sparse import ways

    return [way for way in rows if way in ways.SCHEMES and not way.startswith(ways.ROWS)]


def _mb(count: float | None) -> str:
    return "" if count is None else f"{count / 1e6:.3f}"
