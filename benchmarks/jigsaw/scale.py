"""Scale: all jobs of the Philly trace, with their own arrivals, on 2,048 devices under JigSaw, on one core."""

from __future__ import annotations

import pathlib
import time
from typing import Any

from benchmarks.jigsaw import common
from splitjax.schedule import Cluster, rescale, simulate

CLUSTER = Cluster(256, 8)
LIMIT_SECONDS = 300.0


def section(quick: bool, data_dir: pathlib.Path) -> Any:
    """The section of the page."""
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Goal, Section

    begun = time.process_time()
    jobs = sorted(common.sizes("all", data_dir), key=lambda job: job.arrival_seconds)[: 2000 if quick else None]
    reading = time.process_time() - begun
    rows, goals = [], []
    for what, some in (("as it was", jobs), ("arrivals closer, load 1.5", rescale(jobs, CLUSTER, load=1.5))):
        for policy in ("gang-srtf", "jigsaw"):
            begun, wall = time.process_time(), time.perf_counter()
            result = simulate(some, CLUSTER, policy)
            seconds, wall = time.process_time() - begun, time.perf_counter() - wall
            rows.append(
                [
                    what,
                    policy,
                    f"{len(some):,}",
                    f"{result.num_decisions:,}",
                    f"{seconds:.0f}",
                    f"{wall:.0f}",
                    f"{result.avg_jct:,.0f}",
                    f"{result.busy_part.rate:.3f}" if result.busy_part.seconds else "never busy",
                ]
            )
            print(rows[-1], flush=True)
            if policy == "jigsaw":
                goals.append(
                    Goal(
                        f"scale, {len(some):,} jobs, {CLUSTER.num_devices:,} devices, {what}: processor seconds on one"
                        " core",
                        seconds,
                        LIMIT_SECONDS,
                        True,
                        ".0f",
                    )
                )
    lines = [
        (
            f"`philly_jobs.csv.gz`, all clusters, {CLUSTER}."
            " The table has processor time and the time that passed; as the machine is shared, the latter"
            " depends on what else it does."
            f" Reading the trace takes {reading:.1f} s more."
            " The rate counts iterations, each at its device time with full backpropagation, per"
            " device-second over the busy part."
        ),
        "",
        *table(["trace", "policy", "jobs", "decisions", "processor s", "passed s", "mean completion s", "rate"], rows),
    ]
    return Section("Scale (simulated)", lines, goals)
