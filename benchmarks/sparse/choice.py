"""What `auto` chooses, against the scheme that is measured to be the fastest: tables of different sparsity behind
different links."""

from __future__ import annotations

import pathlib
from typing import Any

from benchmarks.sparse.launch import others_text, run_workers
from benchmarks.sparse.schemes import rows_of

REGIMES = ("lm1b_input", "criteo", "wikitext", "few", "all", "half", "same", "apart")
ROUNDS, STEPS = 5, 3
WITHIN = 1.05  # times the fastest: what two schemes of equal cost differ by from turn to turn
LEAST_REGIMES = 4  # in which the fastest is chosen; one of them with dense


def jobs(options: Any) -> dict[str, dict[str, Any]]:
    """Key of a section -> what it is measured with."""
    return {
        f"choice, {n} workers, {link}": {"num_workers": n, "link": link}
        for n in options.workers
        for link in options.links
    }


def section(quick: bool, data_dir: pathlib.Path, num_workers: int, link: str) -> Any:
    """The section of one number of workers and one link."""
    settings = {
        "workloads": ["few", "all"] if quick else list(REGIMES),
        "choose": True,
        "transfer": False,
        "rounds": 2 if quick else ROUNDS,
        "steps": 1 if quick else STEPS,
        "data_dir": str(data_dir),
        "ways": [],
    }
    return report(run_workers("sparse.worker", settings, num_workers, link), num_workers, link)


def report(answers: Any, num_workers: int, link: str) -> Any:
    """What the workers measured, as a section."""
    from benchmarks._common import table
    from benchmarks.sparse import ways
    from benchmarks.splitbrain.common import Goal, Section

    out, met, dense_met, losses = [], 0, 0, []
    for name, facts in answers.workers[0]["workloads"].items():
        choice, rows = facts["choice"], rows_of(answers, name)
        seconds = {way: row.took.seconds for way, row in rows.items()}
        best = min(seconds, key=seconds.get)
        loss = seconds[choice["chosen"]] / seconds[best]
        losses.append(loss)
        met += loss <= WITHIN
        dense_met += loss <= WITHIN and choice["chosen"] == ways.DENSE
        ranked = sorted(seconds, key=seconds.get)
        out.append(
            [
                f"{facts['name']}: {facts['what']}",
                choice["chosen"],
                f"{1e3 * choice['predicted'][choice['chosen']]:.1f}",
                f"{1e3 * seconds[choice['chosen']]:.1f}",
                best,
                f"{1e3 * seconds[best]:.1f}",
                f"{loss:.2f}",
                ", ".join(f"{way} {1e3 * seconds[way]:.1f}" for way in ranked[1:4]),
                f"{1e3 * seconds[ways.DENSE]:.1f}",
                f"{1e3 * choice['latency']:.1f} ms, {8e-6 * choice['rate']:.0f} Mb/s",
            ]
        )
    lines = [
        (
            f"{num_workers} processes behind links of {link}. `auto` measures the links and predicts from the ids of"
            " the first steps; then every scheme that it chose from is timed, in turns, in the same run."
            " The loss is the time of the chosen scheme over that of the fastest; up to"
            f" {WITHIN:g} counts as the fastest."
            f" {others_text(answers.others)}"
        ),
        "",
        *table(
            [
                "table",
                "chosen",
                "predicted, ms",
                "measured, ms",
                "fastest",
                "its ms",
                "loss",
                "next",
                "dense, ms",
                "link as measured",
            ],
            out,
        ),
        "",
    ]
    goals = []
    if len(out) >= LEAST_REGIMES:
        goals = [
            Goal(
                f"choice, {link}: regimes of {len(out)} in which the fastest is chosen", met, LEAST_REGIMES, False, "d"
            ),
            Goal(f"choice, {link}: of these with dense", dense_met, 1, False, "d"),
        ]
    return Section(f"What auto chooses: {num_workers} workers, {link}", lines, goals)
