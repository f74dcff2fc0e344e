"""The contest's own rules: names and time limits of its problems, how an answer is judged, and what its teams reached.

The judge shares no code with the solver: it reads the file by itself and adds whole numbers.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

# The contest's letters in its order, with the seconds that a team had (github.com/google/iopddl).
LIMIT_SECONDS = {letter: 60.0 * (1 + number // 5) for number, letter in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXY")}
# Problems that the contest does not know have its shortest time.
OTHER_SECONDS = 60.0
PREFIX = "asplos-2025-iopddl-"
# A choice at this cost is forbidden.
FORBIDDEN = 10**18
# The standings write sums above this where a limit was broken.
BROKEN = 10**17
# Three problems are small: 816 nodes.
SMALL = ("B", "G", "V")


class Invalid(Exception):
    """An answer is no answer to the problem. Its text says why."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the judge finds. `cost`: the sum of what was chosen; `peak_bytes`: the most memory at any time; `feasible`:
    whether that is within the limit and nothing chosen is forbidden."""

    cost: int | float
    peak_bytes: int | float
    feasible: bool


def name_of(path: pathlib.Path) -> str:
    """The name of the problem in a file: the contest's letter, else the file's name without its ending."""
    stem = path.name.removesuffix(".gz").removesuffix(".json")
    return stem.removeprefix(PREFIX)


def limit_of(name: str) -> float:
    """Seconds that the contest allows for a problem."""
    return LIMIT_SECONDS.get(name, OTHER_SECONDS)


def problems(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Name -> file of every problem in a folder. Raises `OSError` where it cannot be read, and `Invalid` for none."""
    files = sorted(path for path in folder.iterdir() if path.name.endswith((".json", ".json.gz")))
    found: dict[str, pathlib.Path] = {}
    for path in files:
        if name_of(path) in found:
            raise Invalid(f"{found[name_of(path)].name} and {path.name} are both problem {name_of(path)}")
        found[name_of(path)] = path
    if not found:
        raise Invalid(f"{folder} holds no problem (*.json or *.json.gz)")
    return found


def judge(path: pathlib.Path, solution: Sequence[int]) -> Verdict:
    """Judges an answer, the strategy of every node, to the problem in a file. Raises `Invalid` for one that names no
    strategies."""
    data = path.read_bytes()
    problem: Any = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)["problem"]
    nodes, edges = problem["nodes"], problem["edges"]
    if len(solution) != len(nodes["costs"]):
        raise Invalid(f"{len(solution)} strategies for {len(nodes['costs'])} nodes")
    cost, forbidden = 0, False
    changes: dict[int, int] = {}
    for node, strategy in enumerate(solution):
        if type(strategy) is not int or not 0 <= strategy < len(nodes["costs"][node]):
            raise Invalid(f"node {node} has no strategy {strategy!r}")
        paid = nodes["costs"][node][strategy]
        cost, forbidden = cost + paid, forbidden or paid >= FORBIDDEN
        begin, end = nodes["intervals"][node]
        if begin < end:
            usage = nodes["usages"][node][strategy]
            changes[begin] = changes.get(begin, 0) + usage
            changes[end] = changes.get(end, 0) - usage
    for (first, second), costs in zip(edges["nodes"], edges["costs"]):
        paid = costs[solution[first] * len(nodes["costs"][second]) + solution[second]]
        cost, forbidden = cost + paid, forbidden or paid >= FORBIDDEN
    used, peak = 0, 0
    for time in sorted(changes):
        used += changes[time]
        peak = max(peak, used)
    limit = problem.get("usage_limit")
    return Verdict(cost, peak, not forbidden and (limit is None or peak <= limit))


@dataclasses.dataclass(frozen=True)
class Standings:
    """What the teams reached: `costs[team][problem]`; a limit that was broken, or no answer, is infinity."""

    costs: Mapping[str, Mapping[str, float]]

    @property
    def teams(self) -> list[str]:
        """The teams, in the contest's order; XLA's own solver, `"XLA"`, was none."""
        return [team for team in self.costs if team != "XLA"]

    def best(self, name: str) -> float:
        """The least cost that any team reached; NaN for a problem that is not of the contest."""
        reached = [self.costs[team][name] for team in self.teams if name in self.costs[team]]
        return min(reached) if reached and math.isfinite(min(reached)) else math.nan

    def ratio(self, team: str, names: Sequence[str]) -> float:
        """The geometric mean of a team's cost over the best team's; infinity where it has no answer."""
        return geometric_mean([self.costs[team].get(name, math.inf) / self.best(name) for name in names])


def read_standings(path: pathlib.Path) -> Standings:
    """Reads the contest's `final_results.csv`."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    letters = rows[0][1:]

    def cost(entry: str) -> float:
        return float(entry) if entry and float(entry) < BROKEN else math.inf

    return Standings({row[0]: {name: cost(entry) for name, entry in zip(letters, row[1:])} for row in rows[1:] if row})


def geometric_mean(ratios: Sequence[float]) -> float:
    """The geometric mean; NaN for none, infinity if any is."""
    if not ratios:
        return math.nan
    return (
        math.inf if any(math.isinf(ratio) for ratio in ratios) else math.exp(sum(map(math.log, ratios)) / len(ratios))
    )
