"""Keeps what the simulator knows of a group that runs, and makes the state in which its exact mode begins.

A group that begins, or goes on with other members, and the groups that its devices and jobs come from go in; a
`GroupState` for its discipline comes out, in which what they still do is finished first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from splitjax.schedule.model.discipline import GroupState, Rates
from splitjax.schedule.model.iterations import start_state
from splitjax.schedule.model.jobs import Job
from splitjax.schedule.model.policy import Group
from splitjax.schedule.simulation.progress import Progress


class RunningGroup:
    """Holds a group that runs, and what its discipline makes of it.

    **Arguments:**

    - `group`: which jobs are on which devices. `rates`: how fast they go. `now`: since when, in seconds.
    """

    def __init__(self, group: Group, rates: Rates, now: float):
        self.group, self.rates, self.since = group, rates, now
        self.devices: list[int] = list(group.devices)
        self.state: GroupState | None = None  # exact mode
        self.version: int = 0  # exact mode: events of an earlier one are void
        self.granting: bool = False  # exact mode: an event is on its way at which the next iteration is asked for


def primed_state(
    group: Group, jobs: Sequence[Job], before: Sequence[RunningGroup], progress: Progress, now: float
) -> tuple[GroupState, list[tuple[float, int]]]:
    """Makes the state of a group that begins, or goes on with other members; what its devices and jobs still do is
    finished first.

    **Arguments:**

    - `group`, `jobs`: the group, and the jobs of its members.
    - `before`: the groups that end for it.
    - `progress`: how far every job is. `now`: the time, in seconds.

    Returns the state, and (time in seconds, position among the members) of every iteration that is still under way.
    """
    state = start_state(group, jobs, now, [float(progress.remaining[member.job]) for member in group.members])
    free, ready = dict(zip(group.devices, state.free_seconds)), list(state.ready_seconds)
    flying: list[tuple[float, int]] = []
    for index, member in enumerate(group.members):
        ready[index] = max(now, float(progress.progress_from[member.job]))
        for earlier in before:
            numbers = [old.job for old in earlier.group.members]
            if member.job in numbers and earlier.state is not None and ready[index] <= now:
                ready[index] = max(ready[index], earlier.state.ready_seconds[numbers.index(member.job)])
                if ready[index] > now:
                    flying.append((ready[index], index))
    staying = {member.job: index for index, member in enumerate(group.members)}
    holder = dict.fromkeys(group.devices, -1)
    for earlier in before:
        if earlier.state is not None and staying.keys() & {old.job for old in earlier.group.members}:
            held = zip(earlier.group.devices, earlier.state.free_seconds, earlier.state.holders)
            for device, times, last in held:
                if device in free:
                    holder[device] = staying.get(earlier.group.members[last].job, -1) if last >= 0 else -1
                    storage, cpu, compute, network = (max(now, time) for time in times)
                    free[device] = storage, cpu, compute, network
    # Members that are only starting are not to be chosen yet: `_begin` adds them.
    starting = [progress.progress_from[member.job] > now for member in group.members]
    remaining = [0.0 if late else left for late, left in zip(starting, state.remaining_iterations)]
    for _, index in flying:
        remaining[index] -= 1
    state = dataclasses.replace(
        state, ready_seconds=tuple(ready), free_seconds=tuple(free.values()), remaining_iterations=tuple(remaining),
        holders=tuple(holder.values()),
    )  # fmt: skip
    return state, flying
