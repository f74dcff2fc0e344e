"""Registers the policy `gang-las`: least attained service, as in Tiresias."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from splitjax.schedule.model.policy import Assignment, View, register
from splitjax.schedule.policies.gang import TOLERANCE, crossing_seconds, gang, runs_after
from splitjax.schedule.policies.memory import carry

THRESHOLDS = (3250.0, 7200.0, 18000.0)


@register(
    "gang-las",
    paper=(
        "Gu et al., Tiresias (NSDI'19, section 3.2): discretised two-dimensional least attained service; times not"
        " known"
    ),
)
def las(view: View, *, thresholds: Sequence[float] = THRESHOLDS, consolidate: bool = False) -> Assignment:
    """The job that has had the least device time first, in steps.

    **Arguments:**

    - `view`: what is known.
    - `thresholds`: device-seconds at which a job falls into the next queue (default: those of the paper's public
      simulator). Within a queue what runs goes on, before what waits in the order in which it came to wait there.
    - `consolidate`: as in `gang`.
    """
    queue = np.searchsorted(np.asarray(thresholds) - TOLERANCE, view.attained_device_seconds, side="right")
    before = carry(view, view.memory, queue=-1, place=np.inf)
    place = np.where(before["queue"] == queue, before["place"], np.inf)
    decision = gang(view, queue, place, consolidate=consolidate)
    running = runs_after(view, decision)
    place[np.lexsort((place, ~running, queue))] = np.arange(len(place))
    wake = crossing_seconds(view, running * view.num_workers, thresholds)
    return dataclasses.replace(
        decision, wake_seconds=wake, memory={"jobs": view.active, "queue": queue, "place": place}
    )
