"""What no packing can better about a whole run: the earliest end of all jobs, and the ends where they are packed
perfectly but served in some order; and the job that ends a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from splitjax.schedule import Cluster, Job, Options, SimulationResult


@dataclasses.dataclass(frozen=True)
class Needs:
    """What each job takes at least, f64[jobs]: the moment from which it can compute (`ready_seconds`), its time from
    then on if nothing holds it up (`seconds`), and the time of devices, all together (`device_seconds`)."""

    ready_seconds: NDArray[np.float64]
    seconds: NDArray[np.float64]
    device_seconds: NDArray[np.float64]

    @staticmethod
    def of(jobs: Sequence[Job], way: str = "spatial") -> Needs:
        """Those of `jobs` by `way`. "full": full backpropagation. "spatial": partial backpropagation; an iteration is
        over when its deepest worker is, which differentiates the whole model. "temporal": all workers share one depth,
        so that an iteration takes the mean of the depths."""
        partial = [job.profile.partial_seconds(job.num_workers) for job in jobs]
        computing = [job.profile.task_seconds(0) for job in jobs] if way == "full" else partial
        longest = partial if way == "temporal" else [job.profile.task_seconds(0) for job in jobs]
        each = np.array(longest) + [job.profile.exposed_seconds for job in jobs]
        iterations = np.array([job.num_iterations for job in jobs], np.float64)
        workers = np.array([job.num_workers for job in jobs], np.float64)
        ready = np.array([job.arrival_seconds for job in jobs], np.float64) + Options().restart_seconds
        return Needs(ready, iterations * each, iterations * computing * workers)


def earliest_end(needs: Needs, num_devices: int) -> float:
    """The time, in seconds, before which no policy has done all jobs. Whatever ran before a moment, no job has then got
    further than it would have at its full speed since it was ready; what is left of all keeps `num_devices` devices
    computing for that long. The latest end that follows from any moment; from that at which the last job is done at
    its full speed follows that end itself."""
    ends = needs.ready_seconds + needs.seconds
    latest = 0.0
    # Between these moments the end that follows rises or falls evenly.
    for moment in np.unique(np.concatenate([needs.ready_seconds, ends])).tolist():
        left = np.clip((ends - moment) / needs.seconds, 0.0, 1.0)
        latest = max(latest, moment + float(left @ needs.device_seconds) / num_devices)
    return latest


def packed_ends(needs: Needs, num_devices: int, last_first: bool = False) -> NDArray[np.float64]:
    """When each job is done, f64[jobs] in seconds, where the job with the least time left gets all it can use of
    `num_devices` devices, then the next, in fractions of devices, without a loss. With `last_first` those jobs come
    before all others, the longest first, that would be alone in the end: alone they take longer than all that are there
    would take together. Asked anew when a job comes or is done."""
    arriving = np.argsort(needs.ready_seconds, kind="stable")
    wanted, left = needs.device_seconds / needs.seconds, needs.seconds.copy()  # devices at full speed
    present, now, arrived, ends = np.zeros(0, np.int64), 0.0, 0, np.zeros(len(arriving))
    while arrived < len(arriving) or len(present):
        following = float(needs.ready_seconds[arriving[arrived]]) if arrived < len(arriving) else np.inf
        key = left[present]
        if last_first:
            key = np.where(key >= float(key @ wanted[present]) / num_devices, -key, key)
        present = present[np.argsort(key, kind="stable")]
        served = np.cumsum(wanted[present])
        speeds = np.clip((num_devices - served) / wanted[present] + 1, 0.0, 1.0)
        runs = speeds > 1e-12
        step = float(np.min(left[present][runs] / speeds[runs], initial=following - now))
        left[present] -= speeds * step
        now += step
        done = left[present] <= 1e-6
        ends[present[done]] = now
        present = present[~done]
        while arrived < len(arriving) and needs.ready_seconds[arriving[arrived]] <= now:
            present = np.append(present, arriving[arrived])
            arrived += 1
    return ends


@dataclasses.dataclass(frozen=True)
class Packed:
    """Perfect packing in some order, over gang scheduling shortest first: the rate of the whole run, and the mean
    completion time."""

    rate: float
    completion: float


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of whole runs of the same jobs, as rates over gang scheduling shortest first: `at_most` for a policy
    under which an iteration waits for its deepest worker, `temporal` for one depth for all workers. Beside them perfect
    packing in two orders (`packed_ends`): `shortest` first, and `last_first`, this with full backpropagation too
    (`full_last_first`). `seconds`: gang scheduling's, from the first arrival to the last finish; `first_seconds`: the
    first arrival."""

    at_most: float
    temporal: float
    shortest: Packed
    last_first: Packed
    full_last_first: Packed
    seconds: float
    first_seconds: float

    @staticmethod
    def of(jobs: Sequence[Job], cluster: Cluster, base: SimulationResult) -> Limits:
        """Those of `jobs` on `cluster`, which gang scheduling runs as `base`."""
        arrivals = np.array([job.arrival_seconds for job in jobs])
        first, count = float(arrivals.min()), cluster.num_devices
        needs, full, temporal = (Needs.of(jobs, way) for way in ("spatial", "full", "temporal"))

        def packed(found: Needs, last_first: bool) -> Packed:
            ends = packed_ends(found, count, last_first)
            return Packed(base.makespan / float(ends.max() - first), float((ends - arrivals).mean()) / base.avg_jct)

        return Limits(
            base.makespan / (earliest_end(needs, count) - first),
            base.makespan / (earliest_end(temporal, count) - first),
            packed(needs, False),
            packed(needs, True),
            packed(full, True),
            base.makespan,
            first,
        )


@dataclasses.dataclass(frozen=True)
class LastJob:
    """The job that ends a run: its workers, its time alone with full backpropagation, how long it is without devices
    (`waits_seconds`), how much longer than alone it has devices, as it starts, shares them or has fewer than workers
    (`slowed_seconds`), and how much it may lose of both if the whole run is to have a wanted rate over gang scheduling
    (`allowed_seconds`; below 0: to lose nothing is not enough)."""

    num_workers: int
    alone_seconds: float
    waits_seconds: float
    slowed_seconds: float
    allowed_seconds: float

    @staticmethod
    def of(result: SimulationResult, limits: Limits, gain: float) -> LastJob:
        """That of `result`, held to the rate `gain`."""
        last = max(result.records, key=lambda record: record.finish_seconds)
        alone = last.exclusive_seconds
        allowed = limits.first_seconds + limits.seconds / gain - last.arrival_seconds - alone
        return LastJob(last.num_workers, alone, last.queueing_seconds, last.running_seconds - alone, allowed)


def why_below(trace: str, gain: float, limits: Limits, last: LastJob, temporal: float) -> str:
    """Says why the whole run of `trace` under JigSaw has a rate below `gain`; `temporal`: the rate of
    `temporal-spb`."""
    alone, waits, slowed, allowed, whole = (
        f"{seconds / 3600:,.0f} h"
        for seconds in (
            last.alone_seconds, last.waits_seconds, last.slowed_seconds, last.allowed_seconds, limits.seconds,
        )
    )  # fmt: skip
    single = last.num_workers == 1
    text = (
        f"Why {trace} is below {gain:.2f}: one job of {last.num_workers} worker{'' if single else 's'} ends the run. It"
        f" takes {alone} alone, of the {whole} that gang SRTF takes for all, and partial backpropagation does not make"
        f" it shorter: {'its only worker' if single else 'the deepest worker of each iteration'} differentiates the"
        f" whole model. It waits {waits} for devices, as jobs with less time left are served first, and loses {slowed}"
        " to starts and on shared or too few devices."
    )
    if limits.at_most < gain:
        text += (
            f" No policy whose iterations wait for their deepest worker can have more than {limits.at_most:.3f}: the"
            " goal is out of reach."
        )
    else:
        text += (
            f" For {gain:.2f} it may lose {allowed} in all. Perfect packing, the least time left first, has"
            f" {limits.shortest.rate:.3f}; whatever the order, {limits.at_most:.3f} is the most."
        )
    shortens = "cannot shorten such a job either" if single else "shortens such a job too"
    return f"{text} `temporal-spb` {shortens}: {temporal:.3f}, at most {limits.temporal:.3f}."
