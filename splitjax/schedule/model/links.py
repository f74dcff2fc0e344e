"""Adds the time that the exchange of gradients takes over a cluster's links to jobs, before they are simulated.

A ring all-reduce sends 2 (N - 1) / N of the gradient's bytes from each of N workers (Patarasuk and Yuan 2009,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", section 3). Nothing of it is taken to hide
behind the job's own computing; other jobs compute meanwhile, where they share devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from splitjax.schedule.model.cluster import Cluster
from splitjax.schedule.model.jobs import Job, JobProfile, Stages


def exchange_seconds(cluster: Cluster, num_workers: int, num_bytes: int) -> float:
    """Gives the seconds in which `num_workers` workers all-reduce `num_bytes` bytes: over the links of `cluster` within
    a node where one node holds them all, else over those between nodes. 0 for links without a rate."""
    rate = (
        cluster.node_bytes_per_second if num_workers <= cluster.devices_per_node else cluster.network_bytes_per_second
    )
    return 2 * (num_workers - 1) / num_workers * num_bytes / rate if rate else 0.0


def over_links(jobs: Sequence[Job], cluster: Cluster) -> tuple[Job, ...]:
    """Gives `jobs` with iterations that wait for their exchange over the links of `cluster`, or for longer where their
    profiles say so. With shallower depths it is still that of the full gradient, which is an upper bound. Where it
    takes longer than computing does, no two of a device's jobs exchange at a time (`Stages.network_seconds`). A second
    call changes nothing."""
    known: dict[tuple[JobProfile, int], JobProfile] = {}

    def linked(job: Job) -> Job:
        key = job.profile, job.num_workers
        if key not in known:
            known[key] = _waiting(
                job.profile,
                job.num_workers,
                exchange_seconds(cluster, job.num_workers, job.profile.depths[0].gradient_bytes),
            )
        return job if known[key] == job.profile else dataclasses.replace(job, profile=known[key])

    if not cluster.node_bytes_per_second and not cluster.network_bytes_per_second:
        return tuple(jobs)
    return tuple(map(linked, jobs))


def _waiting(profile: JobProfile, num_workers: int, seconds: float) -> JobProfile:
    stages = profile.stages
    # links, not devices, are what jobs compete for
    if stages is None and seconds > profile.partial_seconds(num_workers):
        stages = Stages(device_seconds=profile.task_seconds(0))
    if stages is not None and seconds > stages.network_seconds:
        stages = dataclasses.replace(stages, network_seconds=seconds)
    return dataclasses.replace(profile, exposed_seconds=max(profile.exposed_seconds, seconds), stages=stages)
