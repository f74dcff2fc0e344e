"""Orders jobs for policies that pack, as the gang policies of the same name do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitjax.schedule.model.policy import View
from splitjax.schedule.policies.gang import TOLERANCE, crossing_seconds
from splitjax.schedule.policies.las import THRESHOLDS
from splitjax.schedule.policies.memory import carry


@dataclasses.dataclass(frozen=True)
class Order:
    """Says who is served first.

    **Attributes:**

    - `positions`: i64[active], first served first.
    - `after`: takes the decision that was made, as devices that each job then computes on (f64[active], fractions where
      it shares), and tells when the order may change though no job comes or goes, and what it has to remember, to be
      found as `View.memory["order"]`.
    """

    positions: NDArray[np.int64]
    after: Callable[[NDArray[np.float64]], tuple[float, Any]] = lambda devices: (math.inf, None)


def srtf(view: View) -> Order:
    """Orders the jobs of `view` by shortest remaining time first."""
    return Order(np.argsort(view.remaining_seconds, kind="stable"))


def srsf(view: View) -> Order:
    """Orders the jobs of `view` by shortest remaining service first: time left times devices."""
    return Order(np.argsort(view.remaining_seconds * view.num_workers, kind="stable"))


def fifo(view: View) -> Order:
    """Orders the jobs of `view` by arrival, after those that run."""
    return Order(np.argsort(view.group_of < 0, kind="stable"))


def las(view: View) -> Order:
    """Orders the jobs of `view` by least attained device time first, in the steps of `gang-las`: within a step what
    runs goes on, before what waits."""
    queue = np.searchsorted(np.asarray(THRESHOLDS) - TOLERANCE, view.attained_device_seconds, side="right")
    before = carry(view, (view.memory or {}).get("order"), queue=-1, place=np.inf)
    place = np.where(before["queue"] == queue, before["place"], np.inf)

    def after(devices: NDArray[np.float64]) -> tuple[float, Any]:
        following = place.copy()
        following[np.lexsort((place, devices <= 0, queue))] = np.arange(len(place))
        return crossing_seconds(view, devices, THRESHOLDS), {"jobs": view.active, "queue": queue, "place": following}

    return Order(np.lexsort((place, queue)), after)
