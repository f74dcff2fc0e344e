"""Groups iteration by iteration, and the rates that they settle at, worked out by hand."""

from __future__ import annotations

import pytest

from splitjax.errors import ScheduleError
from splitjax.schedule.model.iterations import Mark, advance, settled, start_state, within_capacity
from splitjax.schedule.model.jobs import CPU, DEVICE, Job, JobProfile
from splitjax.schedule.model.policy import Group, Member
from splitjax.schedule.model.tasks import Iteration, Task

JOBS = [Job(name, 0, 1, 10, JobProfile.uniform("model", 1.0)) for name in "ab"]
GROUP = Group((Member(0, (4,)), Member(1, (5,))))


def test_device_time_alone_counts_as_attained():
    state = start_state(GROUP, JOBS, 2.0)
    tasks = (Task(0, 5, 0, 2.0, 3.0, CPU), Task(0, 5, 0, 5.0, 1.5, DEVICE))
    after = advance(GROUP, state, Iteration(1, tasks, 7.0))
    assert after.attained_device_seconds == (0.0, 1.5)
    assert (
        after.iterations == (0, 1) and after.remaining_iterations == (10.0, 9.0) and after.ready_seconds == (2.0, 7.0)
    )
    assert (after.free_seconds[1][CPU], after.free_seconds[1][DEVICE]) == (5.0, 6.5)
    assert set(after.free_seconds[0]) == {2.0}
    with pytest.raises(ScheduleError, match="before its device is free"):
        advance(GROUP, after, Iteration(1, (Task(0, 5, 0, 6.0, 1.0, DEVICE),), 7.0))


def test_members_together_take_no_more_than_there_is():
    assert within_capacity((1.0, 2.0), [[1.0, 0.5], [0.5, 0.5]], 2) == (1.0, 2.0)
    assert within_capacity((1.0, 2.0), [[1.0, 0.5], [0.5, 0.5]], 1) == (0.5, 1.0)


def test_rates_are_steady_once_two_windows_agree():
    marks = [Mark((done,), (float(ends),)) for done, ends in ((4, 4), (20, 12), (36, 28), (52, 44))]
    assert settled(marks[:3]) is None, "two iterations a second, then one"
    assert settled(marks) == (marks[1], marks[3])
    assert marks[1].rates_until(marks[3]) == (1.0,)
