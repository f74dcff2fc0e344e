"""Lets the jobs of a group take turns: each does one iteration in a cycle, its stages at times of the cycle that are
its own.

When the stages of whom begin comes in, the next iteration of a group comes out. Who is matched with whom, and how long
a cycle is, the policies that interleave say (`muri`, `muri_testbed`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from splitjax.schedule.model.discipline import GroupState, Iteration, Rates, Task
from splitjax.schedule.model.jobs import DEVICE, RESOURCES, Job, JobProfile
from splitjax.schedule.model.policy import Group

Times = tuple[float, ...]  # seconds of one iteration on each of RESOURCES
_KINDS = len(RESOURCES)


@dataclasses.dataclass(frozen=True)
class Turns:
    """Says when the members of a group are on which resource.

    **Attributes:**

    - `cycle_seconds`: in which each member does one iteration.
    - `begins_seconds`: by member, how far into the first cycle its first iteration begins.
    - `stages_seconds`: by member and resource, how long after its iteration's begin that stage begins.
    """

    cycle_seconds: float
    begins_seconds: tuple[float, ...]
    stages_seconds: tuple[Times, ...]


def stage_seconds(profile: JobProfile) -> Times:
    """Gives the seconds of an iteration of `profile` on each resource; without measured stages, computing and what the
    device waits, taken for network."""
    return profile.stages.seconds if profile.stages else (0.0, 0.0, profile.task_seconds(0), profile.exposed_seconds)


def with_switch(times: Times, switch_seconds: float) -> Times:
    """Gives the stages `times` of a job that shares its devices: each cycle they go over to it once."""
    return (*times[:DEVICE], times[DEVICE] + switch_seconds, *times[DEVICE + 1 :])


def steady_rates(jobs: Sequence[Job], turns: Turns | None) -> Rates:
    """Gives the steady state of `jobs` that take `turns`, each with full backpropagation; None for one job alone."""
    cycle = jobs[0].profile.iteration_seconds if turns is None else turns.cycle_seconds
    seconds = tuple(stage_seconds(job.profile)[DEVICE] * job.num_workers for job in jobs)
    return Rates((1 / cycle,) * len(jobs), seconds, (1.0,) * len(jobs))


def next_in_turn(group: Group, jobs: Sequence[Job], state: GroupState, turns: Turns | None) -> Iteration:
    """Gives the next iteration of `group` in `state`: one cycle after the other. A job alone overlaps its own stages as
    its iteration time says.

    **Arguments:** `jobs`: those of the members, in order. `turns`: None for a group of one.
    """
    left = [index for index, remaining in enumerate(state.remaining_iterations) if remaining > 0]
    begin = max(state.now_seconds, max(map(max, state.free_seconds)) if not any(state.iterations) else 0.0)
    if turns is None:
        member, times = 0, stage_seconds(jobs[0].profile)
        begin = max(begin, state.ready_seconds[0])
        squeeze = min(1.0, jobs[0].profile.iteration_seconds / sum(times))
        starts = [begin + squeeze * sum(times[:kind]) for kind in range(_KINDS)]
        end = begin + jobs[0].profile.iteration_seconds
    else:
        cycle, lag = turns.cycle_seconds, turns.begins_seconds
        known = [
            ready - lag[index] - done * cycle
            for index, (done, ready) in enumerate(zip(state.iterations, state.ready_seconds))
            if done
        ]
        first = max(known) if known else max(begin, *state.ready_seconds)
        begins = [first + lag[index] + done * cycle for index, done in enumerate(state.iterations)]
        member = min(left, key=lambda index: (begins[index], index))
        times, begin = stage_seconds(jobs[member].profile), begins[member]
        starts = [begin + after for after in turns.stages_seconds[member]]
        end = begin + cycle
    devices = group.members[member].devices
    # what is still under way from before the group began is let out first
    index_of = {device: index for index, device in enumerate(group.devices)}
    late = max(
        [
            0.0,
            *(
                state.free_seconds[index_of[device]][kind] - starts[kind]
                for device in devices
                for kind in range(_KINDS)
                if times[kind] > 0
            ),
        ]
    )
    starts, end = [start + late for start in starts], end + late
    tasks = tuple(
        Task(worker, device, 0, starts[kind], times[kind], kind)
        for worker, device in enumerate(devices) for kind in range(_KINDS) if times[kind] > 0
    )  # fmt: skip
    return Iteration(member, tasks, end)
