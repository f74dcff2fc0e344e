"""Least attained service: Tiresias."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from splitjax.schedule.gang import TOLERANCE, crossing_seconds, gang
from splitjax.schedule.memory import carry
from splitjax.schedule.policy import Assignment, View, register

THRESHOLDS = (3250.0, 7200.0, 18000.0)


@register("gang-las", paper="Gu et al., Tiresias (NSDI'19, section 3.2): discretised two-dimensional least attained service; times not known")
def las(view: View, *, thresholds: Sequence[float] = THRESHOLDS, consolidate: bool = False) -> Assignment:
    """The job that has had the least device time first, in steps.

    **Arguments:**

    - `thresholds`: device-seconds at which a job falls into the next queue (default: those of the paper's public simulator); within a queue, first
      to enter it is first served.
    - `consolidate`: as in `gang`.
    """
    queue = np.searchsorted(np.asarray(thresholds) - TOLERANCE, view.attained_device_seconds, side="right")
    before = carry(view, view.memory, queue=-1, entered=0.0)
    entered = np.where(before["queue"] == queue, before["entered"], np.where(queue == 0, view.arrival_seconds, view.now_seconds))
    memory = {"jobs": view.active, "queue": queue, "entered": entered}
    return gang(view, queue, entered, consolidate=consolidate, wake_seconds=crossing_seconds(view, thresholds), memory=memory)
