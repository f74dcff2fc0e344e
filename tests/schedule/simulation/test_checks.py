"""Groups that may not start, each for one reason alone."""

from __future__ import annotations

import numpy as np
import pytest

from splitjax.errors import ScheduleError
from splitjax.schedule import Cluster, Job, JobProfile
from splitjax.schedule.model.jobs import JobColumns
from splitjax.schedule.model.policy import Group, Member
from splitjax.schedule.simulation.checks import check_group
from splitjax.schedule.simulation.progress import Progress

PROFILE = JobProfile.uniform("model", 1.0)
JOBS = [Job("runs", 0, 1, 10, PROFILE), Job("waits", 0, 2, 10, PROFILE), Job("late", 50, 1, 10, PROFILE)]
CLUSTER = Cluster(1, 4)


def check(*members, now=5.0, finished=()):
    """Job 0 runs in group 0, on device 0."""
    progress = Progress(JOBS, JobColumns.of(JOBS))
    progress.hold(0, 0.0, group=0, share=1.0, rate=1.0, progress_from=0.0)
    for number in finished:
        progress.release(number, 1.0)
        progress.finished[number] = 1.0
    free = np.array([False, True, True, True])
    check_group(Group(tuple(Member(*member) for member in members)), JOBS, CLUSTER, now, free, progress, "a test")


def test_what_may_start_is_let():
    check((1, (1, 3)))
    check((1, (1, 3)), (2, (2,)), now=50.0)


@pytest.mark.parametrize(
    ("members", "options", "match"),
    [
        ([(0, (1,))], {}, "runs, is done"),
        ([(0, (1,))], {"finished": [0]}, "runs, is done"),
        ([(1, (1,))], {}, "another number of devices"),
        ([(2, (1,))], {"now": 49.0}, "has not arrived"),
        ([(1, (0, 1))], {}, "not free"),
        ([], {}, "or on none"),
    ],
    ids=["running", "done", "narrow", "early", "taken", "empty"],
)
def test_each_reason_is_told(members, options, match):
    with pytest.raises(ScheduleError, match=match):
        check(*members, **options)
