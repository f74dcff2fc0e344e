"""Efficiency: what packing iterations of partial backpropagation finishes more than gang scheduling in the same order,
over traces, loads and orders."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import pathlib
from typing import Any

import numpy as np

from benchmarks.jigsaw import common
from splitjax.schedule import SimulationResult, simulate

GAIN, SHARE, STRETCH = 1.28, 0.80, 1.28
EXPOSED = (0.0, 0.15)
LOADS = (0.7, 1.0, 1.5)
SEEDS = 3


@dataclasses.dataclass(frozen=True)
class Cell:
    """One trace, load, order and seed: `outcomes`, (exposed communication, policy) -> (iterations, bound, there, cost,
    share of the bound's gain), and `whole`, policy -> (rate of the whole run, makespan, mean completion time) against
    gang scheduling's."""

    trace: str
    load: float
    order: str
    seed: int
    outcomes: dict[tuple[float, str], tuple[float, float, float, float, float]]
    whole: dict[str, tuple[float, float, float]]


def measure(trace: str, load: float, order: str, seed: int, quick: bool, data_dir: pathlib.Path) -> Cell | None:
    """None where the cluster was never busy."""
    jobs = common.draw(common.sizes(trace, data_dir), trace, load, seed, quick)
    # the same with exposed communication: an iteration takes as long
    base = simulate(jobs, common.CLUSTER, f"gang-{order}")
    if not base.busy_part.seconds:
        return None
    outcomes, whole = {}, {}
    for exposed in EXPOSED:
        drawn = (
            common.draw(common.sizes(trace, data_dir, exposed=exposed), trace, load, seed, quick) if exposed else jobs
        )
        for policy in ("jigsaw", "interleave") if exposed and load == max(LOADS) else ("jigsaw",):
            one = common.outcome(drawn, common.named(policy, order), base)
            outcomes[exposed, policy] = (one.efficiency, one.bound, one.attainable, one.cost, one.share)
            if not exposed:
                whole[policy] = _whole(one.result, base)
    whole["temporal-spb"] = _whole(simulate(jobs, common.CLUSTER, common.named("temporal-spb", order)), base)
    return Cell(trace, load, order, seed, outcomes, whole)


def _whole(result: SimulationResult, base: SimulationResult) -> tuple[float, float, float]:
    return result.total.rate / base.total.rate, result.makespan / base.makespan, result.avg_jct / base.avg_jct


def section(quick: bool, data_dir: pathlib.Path) -> Any:
    """The section of the page."""
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Goal, Section

    traces = common.TRACES[:: 4 if quick else 1]
    # Highest load first, seed by seed: what the goals are about.
    asked = [
        (trace, load, order, seed)
        for load in sorted((1.5,) if quick else LOADS, reverse=True)
        for seed in range(1 if quick else SEEDS)
        for trace in traces
        for order in common.ORDERS
    ]
    cells: dict[tuple[str, float, str], list[Cell]] = {}
    with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        for cell in pool.map(measure, *zip(*asked), [quick] * len(asked), [data_dir] * len(asked)):
            if cell is not None:
                cells.setdefault((cell.trace, cell.load, cell.order), []).append(cell)
                print(cell, flush=True)
    rows, goals, gains, over, idle = [], [], {}, {}, []
    for trace in traces:
        shares = []
        for load in LOADS:
            for order in common.ORDERS:
                found = cells.get((trace, load, order), [])
                if len(found) < len([one for one in asked if one[:3] == (trace, load, order)]):
                    idle.append(f"{trace}, {load}, {order} ({len(found)} left)")
                if not found:
                    continue
                row = [trace, f"{load}", order]
                for exposed in EXPOSED:
                    row += [
                        f"{np.mean([cell.outcomes[exposed, 'jigsaw'][figure] for cell in found]):.3f}"
                        for figure in range(4)
                    ]
                rivals = [
                    cell.outcomes[0.15, "interleave"][0] for cell in found if (0.15, "interleave") in cell.outcomes
                ]
                rows.append(
                    [
                        *row,
                        f"{np.mean(rivals):.3f}" if rivals else "",
                        *(
                            f"{np.mean([cell.whole[policy][figure] for cell in found]):.{digits}f}"
                            for policy in ("jigsaw", "temporal-spb")
                            for figure, digits in ((0, 3), (1, 3), (2, 2))
                        ),
                    ]
                )
                if load == max(LOADS):
                    shares += [cell.outcomes[0.0, "jigsaw"][4] for cell in found]
                    gains[trace, order] = float(np.mean([cell.outcomes[0.0, "jigsaw"][0] for cell in found]))
                    over[trace, order] = float(
                        np.mean([cell.outcomes[0.15, "jigsaw"][0] / rival for cell, rival in zip(found, rivals)])
                    )
        if shares:
            what = (
                f"efficiency, {trace}, load 1.5: share of the bound's gain, mean of orders and seeds ({min(shares):.2f}"
                f" to {max(shares):.2f})"
            )
            goals.append(Goal(what, float(np.mean(shares)), SHARE, False))
    goals = [
        *(
            Goal(
                f"efficiency, ee9e8c, load 1.5: iterations against gang {order.upper()}",
                gains["ee9e8c", order],
                GAIN,
                False,
            )
            for order in ("srtf", "las")
        ),
        *goals,
        *(
            Goal(
                "stretch, ee9e8c, load 1.5, 15 % exposed: against interleaving without partial backpropagation,"
                f" {order.upper()}",
                over["ee9e8c", order],
                STRETCH,
                False,
            )
            for order in common.ORDERS
        ),
    ]
    lines = [
        (
            f"{common.CLUSTER} devices. Each job of a trace once, in random order (of `6c71a0` 5,000, of `all` 8,000,"
            " of `4+ GPUs` and muri 2 2,000 jobs drawn), Poisson arrivals, load met exactly, means of"
            f" {1 if quick else SEEDS} seeds. Models of 32 equal layers, backward twice the forward pass; Philly tells"
            " no iteration times: 0.2, 0.35, 0.5, 0.7 and 0.9 s in turn. Restarts take 30 s. Iterations, bound, there,"
            " cost: over the busy part, relative to gang scheduling in the same order. *Bound*: perfect packing of the"
            " iterations finished. *There*: perfect packing of the jobs present at each moment, none faster than"
            " alone, which is less where they ask for little more than the devices. *Full*: the same packing without"
            " partial backpropagation (`interleave`). The busy part depends on the policy, so rate, makespan and mean"
            " completion time (JCT) of the whole run stand beside it, relative to gang; and those of `temporal-spb`,"
            " which needs no packing."
        ),
        "",
        *table(
            [
                "trace",
                "load",
                "order",
                "iterations",
                "bound",
                "there",
                "cost",
                "iterations, 15 % exposed",
                "bound",
                "there",
                "cost",
                "full, 15 % exposed",
                "whole-run rate",
                "makespan",
                "JCT",
                "temporal-spb: rate",
                "temporal-spb: makespan",
                "temporal-spb: JCT",
            ],
            rows,
        ),
    ]
    if idle:
        lines += [
            "",
            "Seeds are left out, and rows with none left, in which gang scheduling was never asked for all devices at"
            " once, so that there is no busy part to compare: " + "; ".join(idle) + ".",
        ]
    return Section("Efficiency: iterations finished per device-second (simulated)", lines, goals)
