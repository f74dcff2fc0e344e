"""What packing gains where devices lose time at every switch between jobs: rates of whole runs, makespans and mean
completion times, by what a switch costs."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.jigsaw import common
from splitjax.schedule import Job, Policy, get, simulate
from splitjax.schedule.policies.group_plan import PackingOptions
from splitjax.schedule.policies.orders import srtf
from splitjax.schedule.policies.packing import pack

# `FOLD_ABOVE` was chosen on 103959 and 7f04ca: no figure of theirs is a goal.
TRACES = ("ee9e8c", "6c71a0", "4+ GPUs", "muri 1", "muri 3", "103959", "7f04ca")
CHOSEN_ON = ("103959", "7f04ca")
COSTS_MS = (0, 5, 20, 72)
LOAD, SEEDS, GAIN = 1.5, 3, 1.2
OWN = "own arrivals"
POLICIES = ("jigsaw", "jigsaw, packed only", "temporal-spb")


def _policy(name: str) -> str | Policy:
    if name != "jigsaw, packed only":
        return name
    never = PackingOptions(fold_above=float("inf"))
    return dataclasses.replace(get("jigsaw"), name=name, decide=lambda view: pack(view, srtf(view), "jigsaw", never))


@dataclasses.dataclass(frozen=True)
class Gain:
    """One policy over gang scheduling in the same order (SRTF), the same jobs: finished iterations per device-second
    over the whole run and over the busy part, makespan, mean completion time."""

    rate: float
    busy: float
    makespan: float
    completion: float


def measure(
    trace: str, load: float | None, seed: int, cost_ms: float, policy: str, data_dir: pathlib.Path, quick: bool = False
) -> Gain:
    """Simulates one cell; `load` None: the trace's own arrivals."""
    jobs: Sequence[Job] = common.sizes(trace, data_dir)
    if load is not None:
        jobs = common.draw(jobs, trace, load, seed, quick)
    profiles = {
        job.profile: dataclasses.replace(job.profile, switch_seconds=cost_ms / 1000) for job in jobs
    }  # one each, as rates are remembered by profile
    jobs = [dataclasses.replace(job, profile=profiles[job.profile]) for job in jobs]
    base = simulate(jobs, common.CLUSTER, "gang-srtf")
    result = simulate(jobs, common.CLUSTER, _policy(policy))
    return Gain(
        result.total.rate / base.total.rate,
        result.iteration_efficiency(base),
        result.makespan / base.makespan,
        result.avg_jct / base.avg_jct,
    )


def section(quick: bool, data_dir: pathlib.Path) -> Any:
    """The section of the page."""
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Goal, Section

    asked: list[tuple[str, float | None, int, float, str]] = [
        (trace, LOAD, seed, cost, policy)
        for trace in TRACES[: 1 if quick else None]
        for cost in COSTS_MS[:: 3 if quick else 1]
        for policy in POLICIES
        # temporal partial backpropagation never switches, and packing alone is told for the goal's trace
        if not (policy == "temporal-spb" and cost) and not (policy == "jigsaw, packed only" and trace != TRACES[0])
        for seed in range(1 if quick or policy == "jigsaw, packed only" else SEEDS)
    ]
    if not quick:
        asked += [(TRACES[0], None, 0, cost, policy) for cost in (0, 72) for policy in ("jigsaw", "temporal-spb")
                  if not (policy == "temporal-spb" and cost)]  # fmt: skip
    cells: dict[tuple[str, float | None, float, str], list[Gain]] = {}
    with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        for (trace, load, _, cost, policy), gain in zip(
            asked, pool.map(measure, *zip(*asked), [data_dir] * len(asked), [quick] * len(asked))
        ):
            cells.setdefault((trace, load, cost, policy), []).append(gain)
            print(trace, load, cost, policy, gain, flush=True)

    def mean(gains: Sequence[Gain], figure: str) -> float:
        return float(np.mean([getattr(gain, figure) for gain in gains]))

    rows = [
        [
            trace, OWN if load is None else f"{load}", policy, f"{cost:g}",
            *(f"{mean(gains, figure):.3f}" for figure in ("rate", "makespan", "completion", "busy")), str(len(gains)),
        ]
        for (trace, load, cost, policy), gains in cells.items()
    ]  # fmt: skip
    goals = [
        Goal(f"simulated, {trace}, load {LOAD}, {cost:g} ms a switch: whole-run rate of JigSaw over gang SRTF",
             mean(gains, "rate"), GAIN, False)
        for (trace, load, cost, policy), gains in cells.items()
        if policy == "jigsaw" and load == LOAD and cost == max(COSTS_MS) and trace not in CHOSEN_ON
    ]  # fmt: skip
    lines = [
        (
            f"Simulated; {common.CLUSTER} devices, jobs as in the part on efficiency, SRTF, nothing exposed; means of"
            " the seeds in the last column. A device that goes from a task of one job to one of another loses the"
            " milliseconds of a *switch*; a task takes 110 to 900 ms. All figures are relative to gang scheduling of"
            " the same jobs in the same order, which never switches: *rate* is finished iterations per device-second"
            " from the first arrival to the last finish, *busy* the same over the time in which jobs ask for more"
            " devices than there are, which depends on the policy. *Packed only*: jobs share devices whatever a switch"
            " costs; `jigsaw` gives a job for which a switch takes more than 4 % of a task fewer devices of its own"
            " (`policies/folding.py`). `temporal-spb` needs neither. The 4 % were chosen on 103959 and 7f04ca."
        ),
        "",
        *table(["trace", "load", "policy", "switch, ms", "rate", "makespan", "mean completion", "busy", "seeds"], rows),
    ]
    return Section("Switches: what packing gains where they cost", lines, goals)
