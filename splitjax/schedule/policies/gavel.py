"""Registers the policy `gang-gavel`: max-min fairness in rounds, as in Gavel."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from splitjax.schedule.model.policy import Assignment, View, register
from splitjax.schedule.policies.gang import gang

ROUND_SECONDS = 360.0


@register(
    "gang-gavel",
    paper=(
        "Narayanan et al., Gavel (OSDI'20, section 4.1, on equal devices; rounds: section 5); rounds of 6 minutes as"
        " there"
    ),
)
def gavel(view: View, *, round_seconds: float = ROUND_SECONDS, consolidate: bool = False) -> Assignment:
    """Equal shares of the devices, made of rounds: at the start of each, those served furthest below their share come
    first.

    Between rounds, jobs that wait get what is free, and nobody is preempted.

    **Arguments:**

    - `view`: what is known.
    - `round_seconds`: length of a round.
    - `consolidate`: as in `gang`; all jobs are placed anew then, at the start of a round only.
    """
    ends = view.memory if view.memory is not None else view.now_seconds
    starts_round = view.now_seconds >= ends - 1e-6
    if starts_round:
        ends = view.now_seconds + round_seconds
    present = np.maximum(view.now_seconds - view.arrival_seconds, 1e-9)
    owed = equal_devices(view.num_workers, view.cluster.num_devices) / np.maximum(view.attained_seconds / present, 1e-9)
    first = np.zeros(len(owed), bool) if starts_round else view.group_of < 0
    decision = gang(view, first, -owed, consolidate=consolidate and starts_round)
    return dataclasses.replace(decision, wake_seconds=ends, memory=ends)


def equal_devices(num_workers: NDArray[np.int64], num_devices: int) -> NDArray[np.float64]:
    """Gives the shares of time (f64[jobs]) that give every job equally many of `num_devices` devices on average, none
    more than its `num_workers` (i64[jobs]); what small jobs leave goes to the others."""
    if not len(num_workers) or num_workers.sum() <= num_devices:
        return np.ones(len(num_workers))
    wanted = np.sort(num_workers)
    # if all smaller ones are satisfied
    level = (num_devices - (np.cumsum(wanted) - wanted)) / np.arange(len(wanted), 0, -1)
    return np.minimum(1.0, level[np.argmax(level < wanted)] / num_workers)
