"""Refuses jobs that no policy could run, and groups that cannot start.

The simulator and real execution ask it before they begin and at every decision; a typed error comes out where something
does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from splitjax.errors import ScheduleError
from splitjax.schedule.model.cluster import Cluster
from splitjax.schedule.model.jobs import Job, JobProfile, resident_bytes
from splitjax.schedule.model.policy import Group
from splitjax.schedule.simulation.progress import Progress


def check_jobs(jobs: Sequence[Job], cluster: Cluster) -> None:
    """Raises `ScheduleError` where there are no `jobs`, or one that `cluster` is too small for."""
    if not jobs:
        raise ScheduleError("there is no job to run", place="jobs", remedy="give at least one")
    for job in jobs:
        if job.num_workers > cluster.num_devices:
            raise ScheduleError(
                f"job {job.name!r} wants {job.num_workers} devices, the cluster has {cluster.num_devices}",
                value=job.num_workers,
                place=f"cluster {cluster}",
                remedy="take a larger cluster, or leave such jobs out",
            )
        if cluster.memory_bytes and resident_bytes([job.profile]) > cluster.memory_bytes:
            raise ScheduleError(
                f"job {job.name!r} needs {resident_bytes([job.profile])} bytes of a device's {cluster.memory_bytes}",
                value=job.profile.name,
                place=f"cluster {cluster}",
                remedy="give the devices more memory, or leave such jobs out",
            )


def check_group(
    group: Group,
    jobs: Sequence[Job],
    cluster: Cluster,
    now: float,
    free: NDArray[np.bool_],
    progress: Progress,
    place: str,
) -> None:
    """Raises `ScheduleError` for a group whose devices are taken, whose jobs cannot start, or whose memory does not
    suffice.

    **Arguments:**

    - `group`: what is to start. `jobs`: all of the trace.
    - `cluster`: the devices there are. `free`: bool[num_devices], those in no group.
    - `now`: the time, in seconds. `progress`: how far each job is.
    - `place`: who decided, for the error.
    """
    devices = list(group.devices)
    if not group.members or not all(0 <= device < cluster.num_devices for device in devices) or not free[devices].all():
        raise ScheduleError(
            "a group is to start on devices that are not free, or on none",
            value=group,
            place=place,
            remedy="let the policy choose among the devices that the view says are free",
        )
    load: dict[int, list[JobProfile]] = {}
    for member in group.members:
        job = jobs[member.job]
        if (
            len(member.devices) != job.num_workers
            or progress.group_of[member.job] >= 0
            or not np.isnan(progress.finished[member.job])
        ):
            raise ScheduleError(
                "a job is to start that runs, is done, or wants another number of devices",
                value=(job.name, member.devices),
                place=place,
                remedy="let the policy start waiting jobs, each on as many devices as it has workers",
            )
        if job.arrival_seconds > now:
            raise ScheduleError(
                "a job is to start that has not arrived",
                value=job.name,
                place=place,
                remedy="let the policy start jobs that the view shows as waiting",
            )
        for device in {*member.devices, *member.resident} if cluster.memory_bytes else ():
            load.setdefault(device, []).append(job.profile)
    for device, profiles in load.items():
        if (needed := resident_bytes(profiles)) > cluster.memory_bytes:
            raise ScheduleError(
                f"jobs that share a device need {needed} of its {cluster.memory_bytes} bytes",
                value=[profile.name for profile in profiles],
                place=f"device {device}, {place}",
                remedy="let the policy put jobs together whose memory fits",
            )
