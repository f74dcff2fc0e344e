"""The solver against the world: how cheap its answers to the problems of the ASPLOS'25 contest on intra-operator
parallelism are, beside those of the contest's teams and of XLA's own auto-sharding.

    python -m benchmarks iopddl DIR [--json FILE] [--runs 1] [--only A B] [--clock wall|processor] [--share 1.0]

DIR holds problems of github.com/google/iopddl (`*.json`, `*.json.gz`), and `final_results.csv` with the standings where
they are to be compared. Each problem is solved by two processes of a core each, within the time that the contest
allows for its letter (60 s for any other name). FILE gets, for each name, `cost`, `bound`, `feasible`, `seconds` and
`solution`, the strategy of every node, and is written anew after every problem. A file that cannot be read, or a
process that dies, is an entry with `error`; the others go on. A judge that shares no code with the solver adds up
every answer. The exit status is 1 where a problem has no feasible answer.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import pathlib
import statistics
import sys
from typing import Any

from benchmarks._common import RESULTS, write_page
from benchmarks.iopddl.contest import Invalid, Standings, limit_of, problems, read_standings
from benchmarks.iopddl.page import page
from benchmarks.iopddl.run import Settings, solve_file
from splitjax.search.solving import SOLVERS

STANDINGS = "final_results.csv"


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status, 2 for a request that cannot be."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks iopddl", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="where the answers go")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these problems alone")
    parser.add_argument("--runs", type=int, default=1, help="how often; the answer of median cost is kept")
    parser.add_argument("--solver", choices=SOLVERS, default="auto")
    parser.add_argument("--processes", type=int, default=2, help="for each problem, of a core each")
    parser.add_argument(
        "--clock",
        choices=("wall", "processor"),
        default="wall",
        help="processor: what an idle machine's clock would show, where others share the machine",
    )
    parser.add_argument("--share", type=float, default=1.0, help="of the contest's time limits")
    parser.add_argument("--at-once", type=int, default=1, help="problems at a time, with --clock processor")
    parser.add_argument("--page", action="store_true", help="write results/iopddl.md and iopddl.json")
    options = parser.parse_args(argv)
    if options.runs < 1 or options.processes < 1 or options.at_once < 1 or not options.share > 0:
        parser.error("--runs, --processes, --at-once and --share are above 0")
    if options.at_once > 1 and options.clock == "wall":
        parser.error("--at-once shares cores: it goes with --clock processor")
    try:
        files = problems(options.folder)
        standings = _standings(options.folder)
    except (OSError, Invalid) as problem:
        print(f"error: {problem}\n  remedy: give a folder with problems of the contest", file=sys.stderr)
        return 2
    unknown = sorted(set(options.only or ()) - set(files))
    if unknown:
        print(f"error: there is no problem {unknown[0]}\n  remedy: name some of {', '.join(files)}", file=sys.stderr)
        return 2
    files = {name: path for name, path in files.items() if not options.only or name in options.only}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in files}

    def solve_one(task: tuple[int, str]) -> tuple[int, str, dict[str, Any]]:
        number, name = task
        settings = Settings(
            options.processes, options.solver, options.clock, options.share, seed=number * options.processes
        )
        return number, name, solve_file(files[name], limit_of(name) * options.share, settings)

    tasks = [(number, name) for number in range(options.runs) for name in files]
    with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
        for done in concurrent.futures.as_completed([pool.submit(solve_one, task) for task in tasks]):
            number, name, entry = done.result()
            runs[name].append({"run": number} | entry)
            print(_line(name, entry, standings), flush=True)
            if options.json:
                _write(options.json, {name: _median(entries) for name, entries in runs.items() if entries})
    answers = {name: _median(entries) for name, entries in runs.items()}
    lines = page(runs, answers, standings, options)
    print("\n".join(lines))
    if options.page:
        write_page("iopddl", lines)
        kept = {name: [_without_solution(entry) for entry in entries] for name, entries in runs.items()}
        (RESULTS / "iopddl.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return 0 if all(answer["feasible"] for answer in answers.values()) else 1


def _standings(folder: pathlib.Path) -> Standings | None:
    path = folder / STANDINGS
    return read_standings(path) if path.exists() else None


def _median(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """The entry of median cost, the dearer of two in the middle; entries that are not feasible come last."""
    ranked = sorted(entries, key=lambda entry: (not entry["feasible"], entry["cost"] or 0))
    middle = ranked[len(ranked) // 2]
    return middle | {"median_seconds": statistics.median(entry["seconds"] for entry in entries)}


def _without_solution(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "solution"}


def _write(path: pathlib.Path, answers: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(answers), encoding="utf-8")
    beside.replace(path)


def _line(name: str, entry: dict[str, Any], standings: Standings | None) -> str:
    if not entry["feasible"]:
        why = entry.get("error", {}).get("message") or entry.get("conflict") or "the limit is broken"
        return f"{name}: not feasible after {entry['seconds']:.1f} s: {why}"
    text = f"{name}: cost {entry['cost']}, bound {entry['bound']}, {entry['seconds']:.1f} s"
    return text if standings is None else f"{text}, {entry['cost'] / standings.best(name):.4f} of the best team's"


if __name__ == "__main__":
    sys.exit(main())
