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
from benchmarks.jigsaw.limits import LastJob, Limits, why_below
from splitjax.schedule import Job, Policy, get, simulate
from splitjax.schedule.policies.group_plan import PackingOptions
from splitjax.schedule.policies.orders import srtf
from splitjax.schedule.policies.packing import pack

# `FOLD_ABOVE` was chosen on 103959 and 7f04ca: no figure of theirs is a goal.
TRACES = ("ee9e8c", "6c71a0", "4+ GPUs", "muri 1", "muri 3", "103959", "7f04ca")
CHOSEN_ON = ("103959", "7f04ca")
COSTS_MS = (0, 5, 20, 72)
LOAD, SEEDS, GAIN = 1.5, 1, 1.2
OWN = "own arrivals"
OWN_TRACES = ("ee9e8c", "muri 1", "muri 3")
POLICIES = ("jigsaw", "jigsaw, packed only", "temporal-spb")

_TITLES = (
    "trace", "load", "policy", "switch, ms", "rate", "at most", "makespan", "mean completion", "busy", "seeds",
)  # fmt: skip
_LAST_TITLES = ("trace", "workers", "alone, h", "waits, h", "slowed, h", "may lose, h")
_ORDER_TITLES = (
    "trace", "shortest first: rate", "completion", "last first: rate", "completion", "last first, full: rate",
    "completion",
)  # fmt: skip


def _policy(name: str) -> str | Policy:
    if name != "jigsaw, packed only":
        return name
    never = PackingOptions(fold_above=float("inf"))
    return dataclasses.replace(get("jigsaw"), name=name, decide=lambda view: pack(view, srtf(view), "jigsaw", never))


@dataclasses.dataclass(frozen=True)
class Gain:
    """One policy over gang scheduling in the same order (SRTF), the same jobs: finished iterations per device-second
    over the whole run and over the busy part, makespan, mean completion time; the rate that no policy of its kind can
    pass, the limits of all kinds, and the job that ended the run."""

    rate: float
    busy: float
    makespan: float
    completion: float
    at_most: float
    limits: Limits
    last: LastJob


def _place(cell: tuple[str, float | None, float, str]) -> tuple[int, bool, int, float]:
    """Gives where a cell stands on the page."""
    trace, load, cost, policy = cell
    return TRACES.index(trace), load is None, POLICIES.index(policy), cost


def measure(
    trace: str, load: float | None, seed: int, chosen: Sequence[tuple[float, str]], data_dir: pathlib.Path, quick: bool
) -> list[Gain]:
    """Simulates the cells of one draw of jobs: those of `chosen`, (milliseconds of a switch, policy). `load` None: the
    trace's own arrivals."""
    drawn: Sequence[Job] = common.sizes(trace, data_dir)
    if load is not None:
        drawn = common.draw(drawn, trace, load, seed, quick)
    base = simulate(drawn, common.CLUSTER, "gang-srtf")  # which never switches
    limits = Limits.of(drawn, common.CLUSTER, base)
    gains = []
    for cost_ms, policy in chosen:
        profiles = {
            job.profile: dataclasses.replace(job.profile, switch_seconds=cost_ms / 1000) for job in drawn
        }  # one each, as rates are remembered by profile
        jobs = [dataclasses.replace(job, profile=profiles[job.profile]) for job in drawn]
        result = simulate(jobs, common.CLUSTER, _policy(policy))
        busy = base.busy_part.seconds and result.busy_part.seconds
        reachable = limits.temporal if policy == "temporal-spb" else limits.at_most
        if result.total.rate > reachable * base.total.rate * (1 + 1e-6):
            raise AssertionError(f"{trace}, {policy}: {result.total.rate / base.total.rate} is above {reachable}")
        gains.append(
            Gain(
                result.total.rate / base.total.rate,
                result.iteration_efficiency(base) if busy else float("nan"),
                result.makespan / base.makespan,
                result.avg_jct / base.avg_jct,
                reachable,
                limits,
                LastJob.of(result, limits, GAIN),
            )
        )
        print(trace, load, seed, cost_ms, policy, gains[-1], flush=True)
    return gains


def _hours(gain: Gain) -> list[str]:
    """The times of the job that ended a run, in hours."""
    last = gain.last
    times = (last.alone_seconds, last.waits_seconds, last.slowed_seconds, last.allowed_seconds)
    return [f"{seconds / 3600:,.0f}" for seconds in times]


def _orders(limits: Limits) -> list[str]:
    """Rate and mean completion time of perfect packing in each order."""
    found = (limits.shortest, limits.last_first, limits.full_last_first)
    return [f"{figure:.3f}" for packed in found for figure in (packed.rate, packed.completion)]


def section(quick: bool, data_dir: pathlib.Path) -> Any:
    """The section of the page."""
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Goal, Section

    ends = (float(COSTS_MS[0]), float(COSTS_MS[-1]))
    # temporal partial backpropagation never switches; between the ends, and by packing alone, the goal's trace is told
    every = [*((cost, "jigsaw") for cost in ends), (0.0, "temporal-spb")]
    further = [(float(cost), "jigsaw") for cost in COSTS_MS[1:-1]]
    further += [(float(cost), "jigsaw, packed only") for cost in COSTS_MS]
    asked: list[tuple[str, float | None, int, list[tuple[float, str]]]] = [
        (trace, LOAD, seed, every + (further if trace == TRACES[0] and seed == 0 and not quick else []))
        for seed in range(1 if quick else SEEDS)
        for trace in TRACES[: 1 if quick else None]
    ]
    asked += [(trace, None, 0, every) for trace in OWN_TRACES[: 1 if quick else None]]
    cells: dict[tuple[str, float | None, float, str], list[Gain]] = {}
    with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        found = pool.map(measure, *zip(*asked), [data_dir] * len(asked), [quick] * len(asked))
        for (trace, load, _, chosen), gains in zip(asked, found, strict=True):
            for (cost, policy), gain in zip(chosen, gains, strict=True):
                cells.setdefault((trace, load, cost, policy), []).append(gain)
    cells = dict(sorted(cells.items(), key=lambda item: _place(item[0])))

    def mean(gains: Sequence[Gain], figure: str) -> float:
        return float(np.mean([getattr(gain, figure) for gain in gains]))

    rows = [
        [
            trace, OWN if load is None else f"{load}", policy, f"{cost:g}",
            *(f"{mean(gains, figure):.3f}" for figure in ("rate", "at_most", "makespan", "completion")),
            "never busy" if np.isnan(mean(gains, "busy")) else f"{mean(gains, 'busy'):.3f}", str(len(gains)),
        ]
        for (trace, load, cost, policy), gains in cells.items()
    ]  # fmt: skip
    held = {
        trace: gains
        for (trace, load, cost, policy), gains in cells.items()
        if policy == "jigsaw" and load == LOAD and cost == max(COSTS_MS)
    }
    drawn = [(trace, gain) for trace, gains in held.items() for gain in gains]
    last_rows = [[trace, str(gain.last.num_workers), *_hours(gain)] for trace, gain in drawn]
    order_rows = [[trace, *_orders(gain.limits)] for trace, gain in drawn]
    reasons = [
        why_below(trace, GAIN, gain.limits, gain.last, mean(cells[trace, LOAD, 0.0, "temporal-spb"], "rate"))
        for trace, gain in drawn
        if trace not in CHOSEN_ON and gain.rate < GAIN
    ]
    goals = [
        Goal(f"simulated, {trace}, load {LOAD}, {max(COSTS_MS)} ms a switch: whole-run rate of JigSaw over gang SRTF",
             mean(gains, "rate"), GAIN, False)
        for trace, gains in held.items()
        if trace not in CHOSEN_ON
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
            " (`policies/folding.py`). `temporal-spb` needs neither. The 4 % were chosen on 103959 and 7f04ca. *Own"
            " arrivals*: jobs come as the trace says; where they seldom ask for all devices, nothing can be gained."
        ),
        "",
        (
            "*At most*: the rate of the whole run that no policy can pass, whatever it knows of jobs to come and"
            " however it packs (`benchmarks/jigsaw/limits.py`). No job is done before it has come and computed for its"
            " time alone, and all that is left at any moment has to fit on the devices from then on. An iteration is"
            " over when its deepest worker is, so partial backpropagation frees devices for other jobs and makes no job"
            " shorter; under `temporal-spb`, where all workers of an iteration have one depth, it does, and more is"
            " possible."
        ),
        "",
        *table(_TITLES, rows),
        "",
        (
            f"The job that ends the whole run of `jigsaw` at load {LOAD} and {max(COSTS_MS)} ms a switch: its time"
            f" *alone*, how long it *waits* without devices, how much longer than alone it then takes (*slowed*:"
            f" starts, shared devices, or fewer than it has workers), and how much of both together it *may lose* for a"
            f" rate of {GAIN:.2f} (below 0: that rate is out of reach)."
        ),
        "",
        *table(_LAST_TITLES, last_rows),
        *(line for reason in reasons for line in ("", reason)),
        "",
        (
            "What the order does: rate and mean completion of perfect packing, in fractions of devices, without"
            " switches and starts anew. *Shortest first*: the job with the least time left is served first, as by"
            " `jigsaw`, which may pass these rates, as it also lets a few jobs with more time left share devices. *Last"
            " first*: before all others come jobs that alone would take longer than all that are there together."
            " *Full*: with full backpropagation, where there is next to nothing to pack, so that what this gains over"
            " gang SRTF is the order's. `jigsaw` keeps the order of what it is compared with."
        ),
        "",
        *table(_ORDER_TITLES, order_rows),
    ]
    return Section("Switches: what packing gains where they cost", lines, goals)
