"""Registers the policy `gang-themis`: finish-time fairness, as in Themis."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from splitjax.schedule.model.policy import Assignment, View, register
from splitjax.schedule.policies.gang import gang, runs_after
from splitjax.schedule.policies.memory import carry

_STEPS = 60  # of which each halves the interval at least


@register(
    "gang-themis",
    paper=(
        "Mahajan et al., Themis (NSDI'20, section 3); shares of time and their rounds as Narayanan et al., Gavel"
        " (OSDI'20, sections 4.2 and 5)"
    ),
)
def themis(view: View, *, consolidate: bool = False, isolated_in_iterations: bool = False) -> Assignment:
    """Shares of time that make the worst ratio of finish time, shared to isolated, least; most owed first.

    A job's isolated finish time is that with an equal share of the cluster (all devices over all jobs, no more than it
    wants) since it came. Jobs are served by share over rounds that they were served in, those never served first.

    **Arguments:**

    - `view`: what is known.
    - `consolidate`: as in `gang`.
    - `isolated_in_iterations`: isolated finish times are counted in iterations instead of seconds, as Muri's testbed
      did (Zhao et al., SIGCOMM'22, public code), which favours jobs of long iterations.
    """
    keep = carry(view, view.memory, isolated=0.0, remaining=-1.0, fraction=1.0, rounds=0.0)
    fraction = equal_share(view)
    remaining = view.remaining_seconds
    known = keep["remaining"] >= 0
    isolated = keep["isolated"] + np.where(known, (keep["remaining"] - remaining) / keep["fraction"], 0.0)
    alone = isolated + remaining / fraction
    if isolated_in_iterations:
        alone = alone / view.columns.iteration_seconds[view.active]
    shares = fair_shares(
        view.now_seconds - view.arrival_seconds, remaining, alone, view.num_workers, view.cluster.num_devices
    )
    owed = np.where(keep["rounds"] > 0, shares / np.maximum(keep["rounds"], 1), shares * 1e9)
    decision = gang(view, -owed, consolidate=consolidate)
    rounds = keep["rounds"] + runs_after(view, decision)
    memory = {"jobs": view.active, "isolated": isolated, "remaining": remaining, "fraction": fraction, "rounds": rounds}
    return dataclasses.replace(decision, memory=memory)


def equal_share(view: View) -> NDArray[np.float64]:
    """Gives the share of the time for which each job of `view` would run if all had equally many devices,
    f64[active]."""
    return (
        np.minimum(1.0, np.ceil(view.cluster.num_devices / len(view.active)) / view.num_workers)
        if len(view.active)
        else np.zeros(0)
    )


def fair_shares(
    waited: NDArray[np.float64],
    remaining: NDArray[np.float64],
    isolated: NDArray[np.float64],
    num_workers: NDArray[np.int64],
    num_devices: int,
) -> NDArray[np.float64]:
    """Gives the shares of time x, 0 to 1, with sum(x num_workers) <= num_devices, that make max((waited + remaining /
    x) / isolated) least; what jobs leave that cannot be helped by more is given to the next worst, and so on (times in
    seconds, f64[jobs])."""
    if num_workers.sum() <= num_devices:
        return np.ones(len(waited))
    # A job whose ratio exceeds the common one even at a share of 1 has that share: the others' common ratio is the root
    # of one equation.
    needed = lambda ratio: np.minimum(1.0, remaining / np.maximum(ratio * isolated - waited, 1e-12))
    excess = lambda ratio: float(needed(ratio) @ num_workers) - num_devices
    low, high = 0.0, float(np.max((waited + remaining) / isolated))
    above, below = float(num_workers.sum() - num_devices), excess(high)
    while below > 0:
        low, above, high = high, below, 2 * high
        below = excess(high)
    # Between the two: false position, a halving wherever it does not shrink the interval by half (it is flat where most
    # shares are 1).
    for _ in range(_STEPS):
        if high - low <= 1e-12 * high or below == 0:
            break
        width = high - low
        guess = high - below * width / (below - above)
        for ratio in (guess, None):
            ratio = (low + high) / 2 if ratio is None else ratio
            if not low < ratio < high:
                continue
            value = excess(ratio)
            low, above, high, below = (ratio, value, high, below) if value > 0 else (low, above, ratio, value)
            if high - low <= width / 2:
                break
    return needed(high)
