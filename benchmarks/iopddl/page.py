"""Writes the page of the contest: rivals first, then every problem."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks._common import table, virtual_devices
from benchmarks.iopddl.contest import SMALL, Standings, geometric_mean
from benchmarks.machine import PACKAGES, header, this_machine, version

TARGET, STRETCH = 1.25, 1.10


def page(
    runs: Mapping[str, Sequence[dict[str, Any]]],
    answers: Mapping[str, dict[str, Any]],
    standings: Standings | None,
    options: argparse.Namespace,
) -> list[str]:
    """Returns the lines of the page. `runs`: every run's entries by problem; `answers`: those of median cost."""
    lines = ["# The solver against the world: the ASPLOS'25 contest on intra-operator parallelism", ""]
    if options.page:  # looking at the machine starts JAX
        virtual_devices(1)
        lines += [*header(this_machine((*PACKAGES, "scipy")), _command(options)).rstrip().splitlines(), ""]
    lines += [_conditions(runs, options), ""]
    feasible = sum(bool(answer["feasible"]) for answer in answers.values())
    if standings is not None:
        lines += ["## Cost over the best team's, geometric mean", ""]
        lines += [
            "Below 1 is cheaper than the best of the 20 teams. Who lacks a feasible answer to some problem has no "
            "mean; how many were solved stands last. XLA's auto-sharding is the solver that comes with it.",
            "",
        ]
        lines += _rivals(answers, standings)
        lines += ["", f"{feasible} of {len(answers)} problems have a feasible answer.", ""]
    lines += ["## Problems", ""]
    lines += [
        "The gap is proven: no assignment within the memory is cheaper than the answer by more than this share.",
        "",
    ]
    lines += _rows(runs, answers, standings)
    return lines


def _command(options: argparse.Namespace) -> str:
    parts = ["python -m benchmarks iopddl DIR"]
    parts += [f"--runs {options.runs}"] if options.runs > 1 else []
    parts += [f"--clock {options.clock} --at-once {options.at_once}"] if options.clock != "wall" else []
    parts += [f"--share {options.share:g}"] if options.share != 1 else []
    parts += [f"--solver {options.solver}"] if options.solver != "auto" else []
    return " ".join([*parts, "--page"])


def _conditions(runs: Mapping[str, Sequence[dict[str, Any]]], options: argparse.Namespace) -> str:
    loads = [entry["load"] for entries in runs.values() for entry in entries]
    text = f"{options.processes} processes of a core each for a problem, solver `{options.solver}`, "
    text += f"pytoulbar2 {version('pytoulbar2')}. "
    text += f"Median of {options.runs} runs. " if options.runs > 1 else "One run. "
    if options.clock == "wall":
        text += "Time is the wall's. "
    else:
        text += (
            "Time is each process's own processor time, reading the file included: what the wall's clock would show on "
            "an idle machine with two cores. "
        )
    if options.share != 1:
        text += f"**Only {options.share:.0%} of the contest's time was used.** "
    return text + f"Other work shared the machine: its load was {min(loads):.0f} to {max(loads):.0f} on its cores."


def _rivals(answers: Mapping[str, dict[str, Any]], standings: Standings) -> list[str]:
    names = [name for name in answers if not math.isnan(standings.best(name))]
    small = [name for name in names if name in SMALL]
    large = [name for name in names if name not in SMALL]

    def ours(group: Sequence[str]) -> float:
        return geometric_mean([_ratio(answers[name], standings, name) for name in group])

    def show(ratio: float) -> str:
        return "none" if not math.isfinite(ratio) else f"{ratio:.3f}"

    def row(title: str, team: str) -> list[str]:
        solved = sum(math.isfinite(standings.costs[team].get(name, math.inf)) for name in names)
        return [
            title,
            *(show(standings.ratio(team, group)) for group in (names, large, small)),
            f"{solved} of {len(names)}",
        ]

    ranked = sorted(standings.teams, key=lambda team: standings.ratio(team, names))
    rows = [row(f"{team} ({place})", team) for place, team in zip(("first here", "second", "third"), ranked)]
    if "XLA" in standings.costs:
        rows.append(row("XLA's auto-sharding", "XLA"))
    solved = sum(bool(answers[name]["feasible"]) for name in names)
    rows.append(["**splitjax**", *(show(ours(group)) for group in (names, large, small)), f"{solved} of {len(names)}"])
    rows.append(["target (stretch)", f"{TARGET} ({STRETCH})", "", "", f"{len(names)} of {len(names)}"])
    titles = ["solver", "all", "without " + ", ".join(small), ", ".join(small) + " (816 nodes)", "feasible"]
    return table(titles, rows)


def _ratio(answer: dict[str, Any], standings: Standings, name: str) -> float:
    return answer["cost"] / standings.best(name) if answer["feasible"] else math.inf


def _rows(
    runs: Mapping[str, Sequence[dict[str, Any]]], answers: Mapping[str, dict[str, Any]], standings: Standings | None
) -> list[str]:
    titles = ["problem", "cost", "over best team's", "of all runs", "XLA over best", "bound", "gap", "processor s"]
    titles += ["wall s", "limit s"]
    rows = []
    for name, answer in answers.items():
        known = standings is not None and not math.isnan(standings.best(name))
        ratios = [_ratio(entry, standings, name) for entry in runs[name]] if standings is not None and known else []
        xla = (
            standings.costs.get("XLA", {}).get(name, math.inf) / standings.best(name)
            if standings and known
            else math.inf
        )
        bound = answer["bound"]
        gap = (answer["cost"] - bound) / answer["cost"] if answer["feasible"] and bound is not None else math.nan
        used = [s for s in answer.get("processor_seconds", ()) if s is not None]
        row = [name, f"{answer['cost']}" if answer["feasible"] else answer.get("error", {}).get("type", "not feasible")]
        row += [f"{_ratio(answer, standings, name):.4f}" if standings is not None and known else ""]
        row += [f"{min(ratios):.4f} to {max(ratios):.4f}" if len(ratios) > 1 else ""]
        row += [("" if not known else f"{xla:.2f}" if math.isfinite(xla) else "none")]
        row += ["" if bound is None else f"{bound:.0f}", "" if math.isnan(gap) else f"{gap:.2%}"]
        row += [f"{max(used):.1f}" if used else "ended"]
        row += [f"{statistics.median(e['seconds'] for e in runs[name]):.1f}", f"{answer['limit_seconds']:g}"]
        rows.append(row)
    return table(titles, rows)
