"""Checks what a user asks for: `PartialBackprop`, the options of partial backpropagation, and `Measured`, what they may
rest on.

Values go in, and come out as they are or raise `PartialError`: whoever holds a request need not check it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from splitjax.errors import PartialError

LINEAR, OPTIMAL = "linear", "optimal"
SPATIAL, TEMPORAL = "spatial", "temporal"
COUNT, MEAN = "count", "mean"
BRANCH, PROGRAM = "branch", "program"
GLOBAL, LOCAL = "global", "local"
_PLACE = "PartialBackprop"


@dataclasses.dataclass(frozen=True)
class Measured:
    """Holds what `step.advise` measured of every layer, in the order of the cuts, input side first.

    - `layers`: their names.
    - `backward_seconds`: by layer, what going back through it adds on one worker, for its share of the batch.
    - `forward_seconds`: time of the whole forward pass.
    - `noise`: per layer the variance of one worker's gradient around the mean over workers, summed over its elements.
    """

    layers: tuple[str, ...]
    backward_seconds: tuple[float, ...]
    forward_seconds: float
    noise: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class PartialBackprop:
    """Asks for partial backpropagation: says how far back each of N workers differentiates.

    It changes the numbers: layers near the input learn from fewer examples.

    **Arguments:**

    - `depths`: `"linear"`: worker i covers the last (i+1)/N of the time of the backward pass; `"optimal"`: contributors
      per layer by the square-root rule under `budget`, from `measured`; or a fraction of that time for every worker,
      each in (0, 1]. Fractions are rounded up to the next cut.
    - `assignment`: `"spatial"`: each worker has its own depth; `"temporal"`: all share one, and depths take turns from
      step to step. Then a layer that is skipped keeps parameters and optimizer state, and its gradient is divided by
      the share of steps that compute it.
    - `estimator`: `"count"` divides each layer's gradient by its contributors, which is unbiased on shards drawn alike;
      `"mean"` divides by all workers, as the published prototype can.
    - `rotate`: depths move on by one worker every step.
    - `warmup_steps`: this many first steps differentiate everything on all workers.
    - `execution`: `"branch"`: one program, in which each worker takes the branch of its depth: saves time and
      communication; `"program"`: one program per depth, dispatched per worker: saves memory too.
    - `rebalance`: workers with shallow depths take more examples, so that all finish together.
    - `budget`: of `"optimal"`: time of all workers over that of full backpropagation; None: that of `"linear"`.
    - `measured`: times and noise of the layers, as `step.advise` finds them; without it, cuts are placed by predicted
      times.
    - `statistics`: `"global"` refuses a spatial assignment where the loss mixes examples (batch norm), whose derivative
      would need workers that do not take part; `"local"`: each worker then has the loss and the statistics of its own
      examples, and running statistics are averaged.

    Source: Kumar et al., arXiv 2111.10672. Raises `PartialError` for other values.
    """

    depths: str | tuple[float, ...] = LINEAR
    assignment: str = SPATIAL
    estimator: str = COUNT
    rotate: bool = True
    warmup_steps: int = 0
    execution: str = BRANCH
    rebalance: bool = False
    budget: float | None = None
    measured: Measured | None = None
    statistics: str = GLOBAL

    def __post_init__(self) -> None:
        for name, allowed in (
            ("assignment", (SPATIAL, TEMPORAL)),
            ("estimator", (COUNT, MEAN)),
            ("execution", (BRANCH, PROGRAM)),
            ("statistics", (GLOBAL, LOCAL)),
        ):
            _one_of(name, getattr(self, name), allowed)
        for name in ("rotate", "rebalance"):
            if not isinstance(getattr(self, name), bool):
                _fail(f"{name} is true or false", getattr(self, name), name, "pass True or False")
        if (
            isinstance(self.warmup_steps, bool)
            or not isinstance(self.warmup_steps, (int, np.integer))
            or self.warmup_steps < 0
        ):
            _fail(
                "warmup_steps counts steps",
                self.warmup_steps,
                "warmup_steps",
                "pass a whole number that is not negative",
            )
        if isinstance(self.depths, str):
            _one_of("depths", self.depths, (LINEAR, OPTIMAL), " or a fraction for every worker")
        else:
            object.__setattr__(self, "depths", _fractions(self.depths))
        if self.budget is not None and (
            isinstance(self.budget, bool) or not isinstance(self.budget, (int, float)) or not 0 < self.budget <= 1
        ):
            _fail(
                "budget is a share of the time of full backpropagation",
                self.budget,
                "budget",
                "pass a number above 0 and at most 1, or None",
            )
        if self.budget is not None and self.depths != OPTIMAL:
            _fail(
                'budget belongs to depths="optimal"', self.budget, "budget", 'leave it None, or pass depths="optimal"'
            )
        if self.measured is not None and not isinstance(self.measured, Measured):
            _fail(
                "measured is what step.advise found",
                type(self.measured).__name__,
                "measured",
                "pass step.advise(...).measured",
            )
        if self.depths == OPTIMAL and self.measured is None:
            _fail(
                "optimal depths need the noise of the layers' gradients",
                None,
                "measured",
                "pass measured=step.advise(state, batches, backprop).measured",
            )
        if self.rebalance and self.assignment == TEMPORAL:
            _fail(
                "a temporal assignment gives all workers one depth, so there is nothing to balance",
                True,
                "rebalance",
                "leave it False",
            )


def _fractions(given: object) -> tuple[float, ...]:
    if not isinstance(given, Sequence) or isinstance(given, (bytes, str)) or not given:
        _fail("depths has no such value", given, "depths", 'pass "linear", "optimal", or a fraction for every worker')
    for share in given:
        if isinstance(share, bool) or not isinstance(share, (int, float, np.number)) or not 0 < share <= 1:
            _fail("a depth is a share of the backward pass", share, "depths", "pass numbers above 0 and at most 1")
    return tuple(float(share) for share in given)


def _one_of(name: str, value: object, allowed: tuple[str, ...], alternative: str = "") -> None:
    if not isinstance(value, str) or value not in allowed:
        _fail(f"{name} has no such value", value, name, f"use one of {', '.join(allowed)}{alternative}")


def _fail(message: str, value: object, option: str, remedy: str) -> NoReturn:
    raise PartialError(message, value=value, place=f"{_PLACE}, {option}", remedy=remedy)
