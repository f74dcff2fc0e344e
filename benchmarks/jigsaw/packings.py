"""Packings: what JigSaw's choices of how to group jobs, and when to group them anew, are worth."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import pathlib
from typing import Any

import numpy as np

from benchmarks.jigsaw import common
from splitjax.schedule import get, simulate
from splitjax.schedule.policies import orders
from splitjax.schedule.policies.group_plan import PackingOptions
from splitjax.schedule.policies.packing import pack

# Where constants are chosen: the clusters that `switches` reports no goal of.
TRACES = ("7f04ca", "103959")
LOAD, SEEDS = 1.5, 3
# Each with the changes of those before it, up to the packing as it is; then single changes of that.
VARIANTS: dict[str, dict[str, Any]] = {
    "up to 4 jobs in a group; all anew where that gains 2 %, looked at each 1200 s": {
        "max_members": 4,
        "settle_seconds": 1200.0,
        "least_gain": 0.02,
    },
    "where it gains 1 %": {"max_members": 4, "settle_seconds": 1200.0, "least_gain": 0.01},
    "where it gains 0.5 %": {"max_members": 4, "settle_seconds": 1200.0},
    "and up to 6 jobs": {"max_members": 6, "settle_seconds": 1200.0},
    "and up to 8 jobs": {"settle_seconds": 1200.0},
    "and looked at each 300 s (**as it is**)": {},
    "but up to 12 jobs": {"max_members": 12},
    "but admitting 1.6 instead of 1.4 times what the devices can do": {"density": 1.6},
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """By variant, of one trace, order and seed: share of the bound's gain, mean completion time against gang
    scheduling's, starts of a job."""

    trace: str
    found: dict[str, tuple[float, float, float]]


def measure(trace: str, order: str, seed: int, quick: bool, data_dir: pathlib.Path) -> Cell:
    jobs = common.draw(common.sizes(trace, data_dir), trace, LOAD, seed, quick)
    base, served = simulate(jobs, common.CLUSTER, f"gang-{order}"), getattr(orders, order)
    found = {}
    for name, options in VARIANTS.items():
        policy = dataclasses.replace(
            get(common.named("jigsaw", order)),
            decide=lambda view, options=options: pack(view, served(view), "jigsaw", PackingOptions(**options)),
        )
        one = common.outcome(jobs, policy, base)
        found[name] = (
            one.share,
            one.result.avg_jct / base.avg_jct,
            float(np.mean([record.num_starts for record in one.result.records])),
        )
    return Cell(trace, found)


def section(quick: bool, data_dir: pathlib.Path) -> Any:
    """The section of the page."""
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Section

    asked = [
        (trace, order, seed) for trace in TRACES for order in common.ORDERS for seed in range(1 if quick else SEEDS)
    ]
    with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        cells = list(pool.map(measure, *zip(*asked), [quick] * len(asked), [data_dir] * len(asked)))
    rows = []
    for name in VARIANTS:
        means = [np.mean([cell.found[name] for cell in cells if cell.trace == trace], axis=0) for trace in TRACES]
        rows.append(
            [
                name,
                *(
                    text
                    for share, completion, starts in means
                    for text in (f"{share:.4f}", f"{completion:.3f}", f"{starts:.1f}")
                ),
            ]
        )
    lines = [
        (
            f"{common.CLUSTER} devices, load {LOAD}, nothing exposed: means of the orders {', '.join(common.ORDERS)}"
            f" and {1 if quick else SEEDS} seeds, on the jobs of the part on efficiency."
            " *Share* is the share of the bound's gain, *JCT* the mean completion time relative to gang"
            " scheduling in the same order, *starts* those of a job. Each row has the changes of the rows"
            " before it, up to the packing as it is; each row after that one changes one thing alone."
        ),
        "",
        *table(["packing", *(f"{trace}, {figure}" for trace in TRACES for figure in ("share", "JCT", "starts"))], rows),
    ]
    return Section("Packings: how jobs are grouped, and when anew (simulated)", lines, [])
