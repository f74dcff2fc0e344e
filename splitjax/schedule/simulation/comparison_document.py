"""The document of a comparison of policies: times of jobs, efficiencies of devices, and what the columns mean.

What goes in is a `Comparison`; `splitjax.display` lays the document out as text or HTML. `splitjax.schedule` registers
it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from splitjax.display.document import Document, Pairs, Section, Table
from splitjax.schedule.simulation.compare import Comparison

# The figures of the columns in between, as `SimulationResult.figures` calls them.
_DURATIONS = ("avg_jct", "p99_jct", "makespan", "queueing")
_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))
_TIMES = ("policy", "avg JCT", "p99 JCT", "makespan", "queue", "unfair", "worst")
_EFFICIENCIES = ("policy", "busy", "iterations", "cost", "bound", "relative to")
_LEGEND = (
    ("JCT", "job completion time, from arrival to finish: mean, and 99th percentile"),
    ("queue", "mean time of a job without devices"),
    ("unfair", "completion time over that on an equal share of the cluster: mean; worst: the most"),
    ("busy", "share of all device time that was computing"),
    (
        "iterations",
        "finished per device time while jobs asked for all devices, over the same of the policy in the last column;"
        " cost: the same, less the backward passes that were skipped; bound: what perfect packing of these iterations"
        " would have had",
    ),
)


def comparison_document(comparison: Comparison) -> Document:
    """Makes the document of `comparison`, a row for each policy in each table."""
    policies = comparison.to_json()
    durations = [_durations([figures[key] for figures in policies.values()]) for key in _DURATIONS]
    times, efficiencies = [], []
    for number, (name, figures) in enumerate(policies.items()):
        unfair = (f"{figures['unfairness_mean']:.2f}", f"{figures['unfairness_max']:,.0f}")
        times.append((name, *(column[number] for column in durations), *unfair))
        ratios = (_ratio(figures[key]) for key in ("iteration_efficiency", "cost_efficiency", "bound"))
        efficiencies.append((name, f"{100 * figures['busy']:.1f} %", *ratios, figures["baseline"] or "full devices"))
    return Document(
        "",
        (
            Section("times of jobs", (Table.of(_TIMES, tuple(times), range(1, 7)),)),
            Section("efficiencies of devices", (Table.of(_EFFICIENCIES, tuple(efficiencies), range(1, 5)),)),
            Pairs(tuple((title, (text,)) for title, text in _LEGEND)),
        ),
    )


def _durations(column: Sequence[float]) -> list[str]:
    """Times in seconds that stand below each other, all in the largest unit of which the longest has two, and with as
    many decimals as show three digits of the longest."""
    unit, unit_seconds = next(unit for unit in _UNITS if max(column) >= 2 * unit[1] or unit is _UNITS[-1])
    longest = max(column) / unit_seconds
    decimals = 2 if longest < 10 else 1 if longest < 100 else 0
    return [f"{seconds / unit_seconds:,.{decimals}f} {unit}" for seconds in column]


def _ratio(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.3f}"
