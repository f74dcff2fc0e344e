"""Draws what an iteration costs a worker, and how disciplines place the tasks of iterations on devices.

Profiles of jobs, or jobs and the names of disciplines, come in; figures of matplotlib come out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from splitjax.display.pictures import new_figure, without_frame
from splitjax.errors import ScheduleError
from splitjax.schedule.model.discipline import get_discipline
from splitjax.schedule.model.iterations import advance, start_state
from splitjax.schedule.model.jobs import DEVICE, Job, JobProfile
from splitjax.schedule.model.policy import Group, Member
from splitjax.schedule.model.tasks import Task

_PLACE = "plot"


def draw_job_profile(profile: JobProfile) -> Any:
    """Draws by depth the time of an iteration (forward, backward, update, waiting for the exchange) and the memory that
    it needs, and returns the figure.

    **Arguments:** `profile`: of a job; a depth is called by the layer down to which its backward pass goes.

    Raises `ScheduleError` where matplotlib is not installed.
    """
    figure = new_figure(11, 2.0 + 0.24 * len(profile.depths), ScheduleError, _PLACE)
    left, right = figure.subplots(1, 2)
    names = [depth.layer.removeprefix("params/") for depth in profile.depths]
    places, start = np.arange(len(names)), np.zeros(len(names))
    parts = {
        "forward": profile.forward_seconds,
        "backward": [depth.backward_seconds for depth in profile.depths],
        "update": profile.update_seconds,
        "waiting": profile.exposed_seconds,
    }
    for color, (title, seconds) in zip(("tab:blue", "tab:orange", "tab:green", "0.85"), parts.items()):
        width = 1e3 * np.broadcast_to(np.asarray(seconds, float), len(names))
        left.barh(places, width, left=start, color=color, label=title)
        start = start + width
    left.set(xlabel="ms of an iteration", title="time, backward pass down to ...")
    left.set_yticks(places, names)
    memory = {
        "all that it needs": ("tab:purple", [depth.memory_bytes for depth in profile.depths]),
        "state, which stays while others compute": ("tab:red", [profile.state_bytes] * len(names)),
    }
    for title, (color, num_bytes) in memory.items():
        right.barh(places, [count / 1e6 for count in num_bytes], color=color, alpha=0.8, label=title)
    right.set(yticks=[], xlabel="MB", title="memory")
    for axes, columns in ((left, 4), (right, 2)):
        axes.invert_yaxis()
        axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=columns)
        without_frame(axes)
    return figure


@dataclasses.dataclass(frozen=True)
class Placed:
    """Holds what a discipline places on devices until a horizon.

    - `tasks`: by task on a device the number of its job, and the task.
    - `num_iterations`: by job how many iterations are finished by then.
    """

    tasks: tuple[tuple[int, Task], ...]
    num_iterations: tuple[int, ...]


def placed_tasks(discipline: str, jobs: Sequence[Job], num_devices: int, horizon_seconds: float) -> Placed:
    """Returns what the `discipline` (its name) places on the devices of a group of `jobs`, all on the same
    `num_devices` devices, in iterations that begin before `horizon_seconds`.

    Raises `ScheduleError` for a discipline that is not known.
    """
    devices = tuple(range(num_devices))
    group = Group(tuple(Member(number, devices) for number in range(len(jobs))), discipline)
    next_iteration, state = get_discipline(discipline).next_iteration, start_state(group, jobs)
    tasks: list[tuple[int, Task]] = []
    finished = [0] * len(jobs)
    while min(state.ready_seconds) < horizon_seconds:
        iteration = next_iteration(group, jobs, state)
        state = advance(group, state, iteration)
        tasks += [(iteration.member, task) for task in iteration.tasks if task.resource == DEVICE]
        finished[iteration.member] += iteration.ready_seconds <= horizon_seconds + 1e-9
    return Placed(tuple(tasks), tuple(finished))


def draw_tasks(ways: Mapping[str, tuple[str, Sequence[Job]]], num_devices: int, horizon_seconds: float) -> Any:
    """Draws which device computes which task when, a panel for each way to share devices, and returns the figure.

    **Arguments:**

    - `ways`: title of a panel -> the name of a discipline, and the jobs that it runs. A colour is a job, the number in
      a task its depth, as a share of the backward pass.
    - `num_devices`: which all jobs of a way share.
    - `horizon_seconds`: where the panels end.

    Raises `ScheduleError` for a discipline that is not known, and where matplotlib is not installed.
    """
    columns = 2
    rows = -(-len(ways) // columns)
    figure = new_figure(11, 0.6 + 2.0 * rows, ScheduleError, _PLACE)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, (title, (discipline, jobs)) in zip(panels.T.flat, ways.items()):
        placed = placed_tasks(discipline, jobs, num_devices, horizon_seconds)
        busy = 0.0
        for member, task in placed.tasks:
            if task.start_seconds >= horizon_seconds:
                continue
            busy += min(task.end_seconds, horizon_seconds) - task.start_seconds
            _draw_task(axes, task, member, jobs[member], task.end_seconds <= horizon_seconds)
        iterations = " + ".join(map(str, placed.num_iterations))
        axes.set_title(
            f"{title}: busy {busy / (num_devices * horizon_seconds):.0%}, iterations {iterations}",
            fontsize=10,
            loc="left",
        )
        axes.set(xlim=(0, horizon_seconds), yticks=range(num_devices))
        without_frame(axes)
    panels[0, 0].invert_yaxis()
    for axes in panels[-1]:
        axes.set_xlabel("seconds")
    for axes in panels[:, 0]:
        axes.set_ylabel("device")
    return figure


def _draw_task(axes: Any, task: Task, member: int, job: Job, is_whole: bool) -> None:
    axes.barh(
        task.device,
        task.seconds,
        left=task.start_seconds,
        height=0.86,
        color=f"C{member}",
        alpha=0.85,
        edgecolor="white",
        linewidth=1.2,
    )
    if is_whole:
        axes.text(
            task.start_seconds + task.seconds / 2,
            task.device,
            f"{job.profile.depths[task.depth].fraction:.0%}",
            ha="center",
            va="center",
            fontsize=7,
            color="white",
        )
