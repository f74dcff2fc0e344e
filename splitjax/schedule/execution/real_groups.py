"""Works out what disciplines are told in a real run: where a group stands, from what its devices did and what they
still have to do.

Grants that are under way come in, a `GroupState` comes out; and an iteration that a discipline answers with is bound to
the devices of the job's processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from splitjax.schedule.execution.tokens import Grant
from splitjax.schedule.model.discipline import GroupState, Iteration, Task
from splitjax.schedule.model.jobs import DEVICE
from splitjax.schedule.model.policy import Group

_NOT_YET = 1e-6  # seconds: a job whose iteration should be over by now, but is not, comes after those that are ready


@dataclasses.dataclass(frozen=True)
class Standing:
    """Describes a job as its discipline sees it.

    **Attributes:**

    - `iterations`: done or granted. `remaining`: still to be granted.
    - `device_seconds`: device time computed. `ready_seconds`: since when it has nothing under way.
    """

    iterations: int
    remaining: int
    device_seconds: float
    ready_seconds: float


def group_state(group: Group, standings: Sequence[Standing], grants: Iterable[Grant], now: float) -> GroupState:
    """Works out the state of `group` at time `now`; all times are in seconds since the run's beginning.

    What runs is taken to last as long as its discipline said, counted from its real start, and what waits for its token
    follows; what takes longer than that is taken to end now. So every answer of a discipline begins with the times that
    its earlier ones really took.

    **Arguments:**

    - `standings`: of the group's members, in their order.
    - `grants`: all that are under way, those of other groups included, in the order in which they were granted.
    """
    free = {device: [now] * 4 for device in group.devices}
    ready: dict[int, float] = {}
    for grant in grants:
        ends = []
        for claims in grant.claims:
            before = max(now, ready.get(grant.job, now))
            for claim in claims:
                times = free.get(claim.task.device, [now] * 4)
                start = claim.started if claim.started is not None else max(before, times[claim.task.resource])
                before = claim.ended if claim.ended is not None else max(now, start + claim.task.seconds)
                times[claim.task.resource] = max(now, before)
            ends.append(before)
        planned = max(task.end_seconds for task in grant.iteration.tasks)
        ready[grant.job] = max(now + _NOT_YET, max(ends) + grant.iteration.ready_seconds - planned)
    return GroupState(
        now,
        tuple(standing.iterations for standing in standings),
        tuple(float(standing.remaining) for standing in standings),
        tuple(ready.get(member.job, standing.ready_seconds) for member, standing in zip(group.members, standings)),
        tuple(standing.device_seconds for standing in standings),
        tuple((times[0], times[1], times[2], times[3]) for times in free.values()),
        (-1,) * len(free),
    )


def pinned(
    iteration: Iteration, number: int, devices: Sequence[int], free: Mapping[int, float], ready_seconds: float
) -> Iteration:
    """Makes of `iteration` what processes can run: every worker's task on the device of its process, depths rotated by
    the `number` of the iteration.

    Disciplines may place a worker's task on any device of its group, and choose who is deep by what is free; a process
    cannot move from one iteration to the next, and what a job learns shall not depend on what else runs. So in
    iteration 1 worker N-1 is the deepest, and each is deeper than the one before it, as in `PartialBackprop`; then
    depths move on by one worker at a time. Iterations in stages are left as they are.

    **Arguments:**

    - `devices`: of the job's processes, by worker.
    - `free`: by device, from when it is free.
    - `ready_seconds`: from when the job can start.
    """
    tasks, count = iteration.tasks, len(devices)
    if any(task.resource != DEVICE for task in tasks):
        return iteration
    deepest_first = sorted(tasks, key=lambda task: task.depth)
    times, placed = dict(free), []
    by_length = sorted(range(count), key=lambda worker: count - 1 - (worker + number - 1) % count)
    for task, worker in zip(deepest_first, by_length, strict=True):  # longest first where several share a device
        start = max(times[devices[worker]], ready_seconds)
        placed.append(Task(worker, devices[worker], task.depth, start, task.seconds, task.resource))
        times[devices[worker]] = placed[-1].end_seconds
    exposed = iteration.ready_seconds - max(task.end_seconds for task in tasks)
    return Iteration(iteration.member, tuple(placed), max(task.end_seconds for task in placed) + exposed)
