"""Registers the policies of structured partial backpropagation with whole devices: what it gives without packing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from splitjax.schedule.model.cluster import Cluster
from splitjax.schedule.model.discipline import GroupState, Iteration, Rates, Task, discipline
from splitjax.schedule.model.jobs import DEVICE, Job
from splitjax.schedule.model.policy import Assignment, Group, View, register
from splitjax.schedule.policies import fifo, las, srtf

_PAPER = (
    "Kumar et al., Partial backpropagation and JigSaw (arXiv 2111.10672), partial backpropagation without the scheduler"
)


@register("spb", paper=_PAPER, order="srtf")
def spb(view: View) -> Assignment:
    """Gang scheduling of partial backpropagation: the worker with full depth is the critical path. The job with the
    least time left first.

    Decides for `view` as `gang-srtf` does.
    """
    return with_discipline(srtf.srtf(view), "spb")


@register("spb-las", paper=_PAPER, order="las")
def spb_las(view: View) -> Assignment:
    """Gang scheduling of partial backpropagation, the job that has had the least device time first.

    Decides for `view` as `gang-las` does.
    """
    return with_discipline(las.las(view), "spb")


@register("spb-fifo", paper=_PAPER, order="fifo")
def spb_fifo(view: View) -> Assignment:
    """Gang scheduling of partial backpropagation, first in, first out.

    Decides for `view` as `gang-fifo` does.
    """
    return with_discipline(fifo.fifo(view), "spb")


def with_discipline(decision: Assignment, name: str) -> Assignment:
    """Gives the same `decision`, with groups that start under the discipline called `name`."""
    return dataclasses.replace(
        decision, start=tuple(dataclasses.replace(group, discipline=name) for group in decision.start)
    )


def _rates(group: Group, jobs: Sequence[Job], cluster: Cluster) -> Rates:
    (job,) = jobs
    profile, seconds = job.profile, job.profile.partial_seconds(job.num_workers)
    return Rates(
        (1 / profile.iteration_seconds,),
        (seconds * job.num_workers,),
        (1 - (profile.task_seconds(0) - seconds) / profile.iteration_seconds,),
    )


@discipline("spb", _rates)
def spb_iteration(group: Group, jobs: Sequence[Job], state: GroupState) -> Iteration:
    """Gives the next iteration of the only member of `group`, which has whole devices: workers at depths 1/N to N/N,
    which rotate from iteration to iteration. `jobs` holds its job, and `state` says from when its devices are free."""
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
    tasks = []
    for worker, device in enumerate(member.devices):
        depth = depths[(worker + state.iterations[0]) % len(depths)]
        tasks.append(Task(worker, device, depth, start, job.profile.task_seconds(depth)))
    return Iteration(0, tuple(tasks), start + job.profile.iteration_seconds)
