"""When a run has the numbers of one device, and when its loss curve stays within the spread of one-device runs: pure
functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

# A loss is the mean of a batch, rounded at the end: two of them may differ by this many units in the last place before
# anything was summed differently.
ROUNDINGS = 4
# A sum rounds to one value or to its neighbour, and which sums do first is chance: a run may part from one-device runs
# this many steps before these part from each other.
AHEAD = 5
# Further apart than this, relative where the loss is larger than 1, two runs in float32 differ by more than rounding.
PARTED = 1e-5
EPS = float(np.finfo(np.float32).eps)  # losses are float32 under float32 and bf16 alike


@dataclasses.dataclass(frozen=True)
class Equality:
    """How far a run is from one device's: absolute differences, divided by the value where that is larger than 1."""

    loss: float
    state: float
    worst: str  # path of the parameter that differs most

    def within(self, tolerance: float) -> bool:
        # Written so that a NaN is no pass.
        return self.loss <= tolerance and self.state <= tolerance


@dataclasses.dataclass(frozen=True)
class Within:
    """How a loss curve lies to the one-device runs.

    **Attributes:**

    - `ratio`: the largest distance to the nearest one-device run at any step, as a multiple of the spread there; within
      it up to 1.
    - `step`: where that is, from 0.
    - `distance`, `spread`: in nats, there.
    - `first_outside`: the first step outside the spread; None if there is none.
    """

    ratio: float
    step: int
    distance: float
    spread: float
    first_outside: int | None

    @property
    def ok(self) -> bool:
        return self.first_outside is None


def difference(got: np.ndarray, want: np.ndarray) -> float:
    """The largest absolute difference, relative where the wanted value is larger than 1; infinite where a value is no
    number."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if not (np.isfinite(got).all() and np.isfinite(want).all()):
        return float("inf")
    return float(np.max(np.abs(got - want) / np.maximum(1.0, np.abs(want)), initial=0.0))


def equality(
    losses: np.ndarray,
    arrays: Mapping[str, np.ndarray],
    wanted_losses: np.ndarray,
    wanted_arrays: Mapping[str, np.ndarray],
) -> Equality:
    """Compares every loss and every array. Raises `ValueError` where the runs have not the same steps and arrays."""
    if losses.shape != wanted_losses.shape or arrays.keys() != wanted_arrays.keys():
        apart = sorted(arrays.keys() ^ wanted_arrays.keys())
        raise ValueError(f"runs of {losses.shape} and {wanted_losses.shape} losses; one of them alone has {apart}")
    differences = {path: difference(arrays[path], value) for path, value in wanted_arrays.items()}
    worst = max(differences, key=differences.__getitem__)
    return Equality(difference(losses, wanted_losses), differences[worst], worst)


def spread(controls: np.ndarray) -> np.ndarray:
    """[runs, steps] losses of one-device runs -> [steps]: how far the two furthest ones have been apart at any step up
    to this one and the next `AHEAD`, and at least `ROUNDINGS` units in the last place of the loss."""
    apart = np.maximum.accumulate(controls.max(0) - controls.min(0))
    later = np.minimum(np.arange(len(apart)) + AHEAD, len(apart) - 1)
    return np.maximum(apart[later], np.maximum.accumulate(ROUNDINGS * EPS * np.abs(controls).max(0)))


def parts_at(controls: np.ndarray) -> int:
    """The step at which one-device runs, [runs, steps], first are further apart than `PARTED`; their number of steps if
    they never are."""
    apart = np.flatnonzero(controls.max(0) - controls.min(0) > PARTED * np.maximum(1, np.abs(controls).max(0)))
    return int(apart[0]) if len(apart) else controls.shape[1]


def distance(losses: np.ndarray, controls: np.ndarray) -> np.ndarray:
    """[steps], [runs, steps] -> [steps]: to the nearest one-device run of each step."""
    return np.abs(losses[None] - controls).min(0)


def within(losses: np.ndarray, controls: np.ndarray) -> Within:
    """Whether a loss curve, [steps], stays within the spread of one-device runs, [runs, steps]: at every step no
    further from the nearest of them than the `spread`."""
    apart, allowed = distance(losses, controls), spread(controls)
    ratios = np.where(np.isfinite(apart), apart / allowed, np.inf)
    step = int(np.argmax(ratios))
    outside = np.flatnonzero(~(ratios <= 1))
    return Within(
        float(ratios[step]), step, float(apart[step]), float(allowed[step]), int(outside[0]) if len(outside) else None
    )


def worst(results: Sequence[Within]) -> Within:
    """The one that comes nearest to leaving the spread, or is furthest outside."""
    return max(results, key=lambda result: result.ratio)
