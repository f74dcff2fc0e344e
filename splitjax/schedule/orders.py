"""Orders in which jobs are served, for policies that pack: what gang policies of the same name sort by."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitjax.schedule.gang import TOLERANCE, crossing_seconds
from splitjax.schedule.memory import carry
from splitjax.schedule.policies.las import THRESHOLDS
from splitjax.schedule.policy import View


@dataclasses.dataclass(frozen=True)
class Order:
    """`positions`: i64[active], first served first. `wake_seconds`: when it may change though no job comes or goes. `memory`: what it has to
    remember, to be found as `View.memory["order"]`."""

    positions: NDArray[np.int64]
    wake_seconds: float = math.inf
    memory: Any = None


def srtf(view: View) -> Order:
    """Shortest remaining time first."""
    return Order(np.argsort(view.remaining_seconds, kind="stable"))


def fifo(view: View) -> Order:
    """In order of arrival, after those that run."""
    return Order(np.argsort(view.group_of < 0, kind="stable"))


def las(view: View) -> Order:
    """Least attained device time first, in the steps of `gang-las`."""
    queue = np.searchsorted(np.asarray(THRESHOLDS) - TOLERANCE, view.attained_device_seconds, side="right")
    before = carry(view, (view.memory or {}).get("order"), queue=-1, entered=0.0)
    entered = np.where(before["queue"] == queue, before["entered"], np.where(queue == 0, view.arrival_seconds, view.now_seconds))
    memory = {"jobs": view.active, "queue": queue, "entered": entered}
    return Order(np.lexsort((entered, queue)), crossing_seconds(view, THRESHOLDS), memory)
