"""Honesty: what the gain of packing is worth beside simpler ways, where the skipped work was needed, at low load, and
with little memory."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from benchmarks.jigsaw import common
from splitjax.schedule import Cluster, Job, simulate

TRACE = "ee9e8c"
_GIGABYTE = 10**9
MODEL_BYTES = 24 * _GIGABYTE  # of a worker at full depth, half of it state
MEMORY = (8, 16, 24, 32, 40, 80)


def section(quick: bool, data_dir: pathlib.Path) -> Any:
    """The section of the page."""
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Section

    sizes = {exposed: common.sizes(TRACE, data_dir, exposed=exposed) for exposed in (0.0, 0.15)}
    rows: list[list[str]] = []
    for load in (1.5,) if quick else (0.5, 0.7, 1.0, 1.5):
        for exposed in sizes:
            jobs = common.draw(sizes[exposed], TRACE, load, 0, quick)
            base = simulate(jobs, common.CLUSTER, "gang-srtf")
            for policy in ("spb", "temporal-spb", "interleave", "jigsaw"):
                rows.append([f"{load}", f"{exposed:.0%}", policy, *_figures(common.outcome(jobs, policy, base), base)])
                print(rows[-1], flush=True)
            service = simulate(jobs, common.CLUSTER, "gang-srsf")
            for policy in ("muri-s", "muri-s-testbed"):
                figures = _figures(common.outcome(jobs, policy, service), service)
                rows.append([f"{load}", f"{exposed:.0%}", f"{policy} (against SRSF)", *figures])
    memory = []
    jobs = common.draw(common.sizes(TRACE, data_dir, memory_bytes=MODEL_BYTES), TRACE, 1.5, 0, quick)
    for limit in MEMORY[:: 3 if quick else 1]:
        # Models keep their mix where they fit: sizes of 1/6 to 1 of the largest that a device of this size holds, at
        # most MODEL_BYTES.
        cluster, sized = Cluster(16, 8, memory_bytes=limit * _GIGABYTE), _sized(jobs, limit * _GIGABYTE)
        base = simulate(sized, cluster, "gang-srtf")
        one = common.outcome(sized, "jigsaw", base, cluster)
        members = _mean_group(sized, cluster)
        memory.append(
            [
                f"{limit}",
                f"{one.efficiency:.3f}",
                f"{one.bound:.3f}",
                f"{one.cost:.3f}",
                f"{one.result.avg_jct / base.avg_jct:.2f}",
                members,
            ]
        )
        print(memory[-1], flush=True)
    lines = [
        (
            f"{TRACE} on {common.CLUSTER} devices, SRTF, one seed."
            " *Cost* credits iterations only for the backward work that was really done, relative to gang"
            " scheduling. *Gone at* says how many more iterations a job may need for the same loss, because"
            " of the skipped work, until nothing is left of the gain in finished iterations. Under"
            " `temporal-spb` all workers of a job share one depth in an iteration; it needs no packing and no"
            " shared memory, shortens every job alone too, and gains as much or more. `spb` is partial"
            " backpropagation with whole devices, `interleave` is packing without partial backpropagation."
            " `muri-s` and `muri-s-testbed` know computing and exposed"
            " communication as their stages. Where the cluster is never asked for more devices than it has, only the"
            " completion time can differ."
        ),
        "",
        *table(
            ["load", "exposed", "policy", "iterations", "bound", "cost", "gone at", "mean completion, of gang's"], rows
        ),
        "",
        (
            f"Memory: jobs of 4, 8, 12, 16, 20 and {MODEL_BYTES // _GIGABYTE} GB a worker in turn, none larger than the"
            " device, half of it state that stays on a device while others compute there; load 1.5, SRTF, nothing"
            " exposed."
        ),
        "",
        *table(
            [
                "memory of a device, GB",
                "iterations",
                "bound",
                "cost",
                "mean completion, of gang's",
                "mean jobs in a group",
            ],
            memory,
        ),
    ]
    return Section("Honesty: beside simpler ways (simulated)", lines, [])


def _figures(one: common.Outcome, base: Any) -> list[str]:
    if not base.busy_part.seconds or not one.result.busy_part.seconds:
        return ["never busy", "", "", "", f"{one.result.avg_jct / base.avg_jct:.2f}"]
    gone = f"{one.efficiency - 1:+.0%}" if one.efficiency > 1.005 else "no gain"
    return [
        f"{one.efficiency:.3f}",
        f"{one.bound:.3f}",
        f"{one.cost:.3f}",
        gone,
        f"{one.result.avg_jct / base.avg_jct:.2f}",
    ]


def _sized(jobs: Sequence[Job], limit: int) -> list[Job]:
    found = []
    for number, job in enumerate(jobs):
        wanted = min(limit, MODEL_BYTES * (1 + number % 6) // 6)
        depths = tuple(
            dataclasses.replace(depth, memory_bytes=round(wanted * (0.5 + 0.5 * depth.fraction)))
            for depth in job.profile.depths
        )
        found.append(
            dataclasses.replace(job, profile=dataclasses.replace(job.profile, depths=depths, state_bytes=wanted // 2))
        )
    return found


def _mean_group(jobs: Sequence[Job], cluster: Cluster) -> str:
    """Mean number of jobs in the groups that a run of JigSaw starts."""
    from splitjax.schedule import get

    sizes: list[int] = []
    policy = get("jigsaw")

    def decide(view: Any) -> Any:
        decision = policy.decide(view)
        sizes.extend(len(group.members) for group in decision.start)
        return decision

    simulate(jobs, cluster, dataclasses.replace(policy, decide=decide))
    return f"{sum(sizes) / max(1, len(sizes)):.2f}"
