"""Finish-time fairness: Themis."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from splitjax.schedule.gang import gang
from splitjax.schedule.memory import carry
from splitjax.schedule.policy import Assignment, View, register

_HALVINGS = 60


@register(
    "gang-themis",
    paper="Mahajan et al., Themis (NSDI'20, section 3); shares of time and their rounds as Narayanan et al., Gavel (OSDI'20, sections 4.2 and 5)",
)
def themis(view: View, *, consolidate: bool = False) -> Assignment:
    """Shares of time that make the worst ratio of finish time, shared to isolated, least; most owed first.

    A job's isolated finish time is that with an equal share of the cluster (all devices over all jobs, no more than it wants) since it came. Jobs
    are served by share over rounds that they were served in, those never served first.
    """
    keep = carry(view, view.memory, isolated=0.0, remaining=-1.0, fraction=1.0, rounds=0.0)
    fraction = equal_share(view)
    remaining = view.remaining_seconds
    known = keep["remaining"] >= 0
    isolated = keep["isolated"] + np.where(known, (keep["remaining"] - remaining) / keep["fraction"], 0.0)
    shares = fair_shares(view.now_seconds - view.arrival_seconds, remaining, isolated + remaining / fraction, view.num_workers, view.cluster.num_devices)
    owed = np.where(keep["rounds"] > 0, shares / np.maximum(keep["rounds"], 1), shares * 1e9)
    decision = gang(view, -owed, consolidate=consolidate)
    served = view.group_of >= 0
    served &= ~np.isin(view.group_of, decision.stop)
    served |= np.isin(view.active, [member.job for group in decision.start for member in group.members])
    memory = {"jobs": view.active, "isolated": isolated, "remaining": remaining, "fraction": fraction, "rounds": keep["rounds"] + served}
    return Assignment(decision.stop, decision.start, decision.wake_seconds, memory)


def equal_share(view: View) -> NDArray[np.float64]:
    """f64[active], share of the time for which a job would run if all had equally many devices."""
    return np.minimum(1.0, np.ceil(view.cluster.num_devices / len(view.active)) / view.num_workers) if len(view.active) else np.zeros(0)


def fair_shares(
    waited: NDArray[np.float64], remaining: NDArray[np.float64], isolated: NDArray[np.float64], num_workers: NDArray[np.int64], num_devices: int
) -> NDArray[np.float64]:
    """Shares of time x, 0 to 1, with sum(x num_workers) <= num_devices, that make max((waited + remaining / x) / isolated) least; what the worst
    job leaves is given to the next worst, and so on (times in seconds, f64[jobs])."""
    shares, open_, left = np.zeros(len(waited)), np.ones(len(waited), bool), float(num_devices)
    while open_.any():
        w, r, i, n = waited[open_], remaining[open_], isolated[open_], num_workers[open_]
        lowest = float(np.max((w + r) / i))  # with a share of 1 nobody does better
        needed = lambda ratio, w=w, r=r, i=i: np.minimum(1.0, r / np.maximum(ratio * i - w, 1e-12))
        if float(needed(lowest) @ n) <= left:
            worst = np.flatnonzero(open_)[(w + r) / i >= lowest * (1 - 1e-12)]
            shares[worst], left = 1.0, max(0.0, left - float(num_workers[worst].sum()))
            open_[worst] = False
            continue
        low, high = lowest, 2 * lowest
        while float(needed(high) @ n) > left and high < 1e30:
            low, high = high, 2 * high
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if float(needed(middle) @ n) <= left else (middle, high)
        shares[open_] = needed(high)
        break
    return shares
