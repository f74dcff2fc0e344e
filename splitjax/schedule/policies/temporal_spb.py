"""Registers the policies of temporal partial backpropagation: all workers of a job share one depth in an iteration, and
depths rotate from iteration to iteration."""

from __future__ import annotations

from collections.abc import Sequence

from splitjax.schedule.model.cluster import Cluster
from splitjax.schedule.model.discipline import GroupState, Iteration, Rates, Task, discipline
from splitjax.schedule.model.jobs import DEVICE, Job
from splitjax.schedule.model.policy import Assignment, Group, View, register
from splitjax.schedule.policies import fifo, las, srtf
from splitjax.schedule.policies.spb import with_discipline

_PAPER = (
    "After Kumar et al. (arXiv 2111.10672), depth varied over time instead of over workers, as in Brock et al.,"
    " FreezeOut (arXiv 1706.04983)"
)


@register("temporal-spb", paper=_PAPER, order="srtf")
def temporal_spb(view: View) -> Assignment:
    """Gang scheduling, one depth for all workers of an iteration: needs no packing. The job with the least time left
    first.

    Decides for `view` as `gang-srtf` does.
    """
    return with_discipline(srtf.srtf(view), "temporal-spb")


@register("temporal-spb-las", paper=_PAPER, order="las")
def temporal_spb_las(view: View) -> Assignment:
    """Gang scheduling, one depth for all workers of an iteration, the job that has had the least device time first.

    Decides for `view` as `gang-las` does.
    """
    return with_discipline(las.las(view), "temporal-spb")


@register("temporal-spb-fifo", paper=_PAPER, order="fifo")
def temporal_spb_fifo(view: View) -> Assignment:
    """Gang scheduling, one depth for all workers of an iteration, first in, first out.

    Decides for `view` as `gang-fifo` does.
    """
    return with_discipline(fifo.fifo(view), "temporal-spb")


def _iteration_seconds(job: Job, depth: int) -> float:
    """Gives the time of an iteration at one depth: a shallow one computes for less time than a full one, but its input
    and exchange, hidden or not, take as long."""
    profile = job.profile
    storage, cpu, _, network = profile.resource_seconds(job.num_workers)
    return max(profile.task_seconds(depth) + profile.exposed_seconds, storage, cpu, network)


def _rates(group: Group, jobs: Sequence[Job], cluster: Cluster) -> Rates:
    (job,) = jobs
    profile, seconds = job.profile, job.profile.partial_seconds(job.num_workers)
    credit = 1 - (profile.task_seconds(0) - seconds) / profile.iteration_seconds
    lengths = [_iteration_seconds(job, depth) for depth in profile.partial_depths(job.num_workers)]
    return Rates((len(lengths) / sum(lengths),), (seconds * job.num_workers,), (credit,))


@discipline("temporal-spb", _rates)
def temporal_iteration(group: Group, jobs: Sequence[Job], state: GroupState) -> Iteration:
    """Gives the next iteration of the only member of `group`, which has whole devices; iteration i has, for all
    workers, the depth that worker i mod N would have under `spb`. `jobs` holds its job, and `state` says from when its
    devices are free."""
    ((member,), (job,)) = group.members, jobs
    place = {device: index for index, device in enumerate(group.devices)}
    start = max(
        [
            state.now_seconds,
            state.ready_seconds[0],
            *(state.free_seconds[place[device]][DEVICE] for device in member.devices),
        ]
    )
    depths = job.profile.partial_depths(job.num_workers)
    depth = depths[state.iterations[0] % len(depths)]
    seconds = job.profile.task_seconds(depth)
    tasks = tuple(Task(worker, device, depth, start, seconds) for worker, device in enumerate(member.devices))
    return Iteration(0, tasks, start + _iteration_seconds(job, depth))
