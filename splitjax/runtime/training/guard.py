"""Watches the numbers of a run: losses and states that are not finite, losses that jump.

A non-finite gradient makes the state that the optimizer returns non-finite, so the state is looked at: that covers
every optimizer, and also what overflows in it. What is judged is the same in all processes (losses and the look at the
state are results of programs that all of them run), so all decide alike without a message; and a resumed run decides as
an undisturbed one, because what was seen goes into checkpoints.

Source of going back to a checkpoint and on past the batches in between: PaLM (Chowdhery et al. 2022), section 5.1.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from splitjax.errors import TrainingError

Action = Literal["stop", "skip", "rollback"]
WINDOW_STEPS, LEAST_STEPS = 32, 8
EXTRA = "numbers"  # under which checkpoints keep what was seen


@dataclasses.dataclass(frozen=True)
class NumberOptions:
    """Says what is to be done about numbers that go wrong.

    **Arguments:**

    - `action`: `"stop"` ends the run before such a state is saved. `"skip"` leaves the batch out: the state is what it
      was before, and the next step takes the next batch. `"rollback"` takes the state of the newest checkpoint and goes
      on with the next batch, past all those in between. Steps keep counting batches, so that data, metrics and resumed
      runs have their places.
    - `spike_factor`: a loss above so many times the median of the last 32 good ones counts as wrong, once 8 are known;
      not if not given.
    - `allow_nonfinite`: numbers that are not finite are not wrong.
    - `max_setbacks`: so many batches are skipped, or returns made, in the whole run; the next one stops it.

    Raises `TrainingError` for a value that cannot be used.
    """

    action: Action = "stop"
    spike_factor: float | None = None
    allow_nonfinite: bool = False
    max_setbacks: int = 10

    def __post_init__(self) -> None:
        self._require(self.action in get_args(Action), "action", "stop, skip or rollback")
        self._require(self.spike_factor is None or self.spike_factor > 1, "spike_factor", "a number above 1")
        self._require(self.max_setbacks >= 0, "max_setbacks", "0 or more")

    def _require(self, holds: bool, name: str, wanted: str) -> None:
        if not holds:
            raise TrainingError(
                f"{name} is not usable",
                value=getattr(self, name),
                place=f"NumberOptions.{name}",
                remedy=f"give {wanted}",
            )


class NumberGuard:
    """Judges the numbers of a run, step after step.

    **Arguments:** `options`: what is wrong, and what is done then. `seen`: `extra[guard.EXTRA]` of the checkpoint that
    is resumed from. Raises `TrainingError` for a `seen` that no guard wrote.
    """

    def __init__(self, options: NumberOptions | None = None, seen: Any = None):
        self.options: NumberOptions = options or NumberOptions()
        self._losses: collections.deque[float] = collections.deque(maxlen=WINDOW_STEPS)
        self._num_setbacks = 0
        # Leaves that are finite at first: some optimizers begin with infinities.
        self._watched: np.ndarray | None = None
        self._look = jax.jit(_finite_leaves)
        if seen is not None:
            self._resume(seen)

    @property
    def acts(self) -> bool:
        """Returns whether a run goes on after a wrong number: its loop then waits for each step's results."""
        return self.options.action != "stop"

    def begin(self, state: Any) -> None:
        """Notes what of the first `state` is finite."""
        if not self.options.allow_nonfinite:
            self._watched = np.asarray(self._look(_floats(state)))

    def is_finite(self, state: Any) -> bool:
        """Returns whether all of a `state` that was finite at first is."""
        if self._watched is None:
            return True
        return bool(np.all(np.asarray(self._look(_floats(state))) | ~self._watched))

    def problem(self, step: int, metrics: Mapping[str, float], state_is_finite: bool = True) -> str | None:
        """Returns what is wrong with step number `step`, as a sentence; None for a good one, whose loss is then known.
        `metrics`: with `loss`. `state_is_finite`: of the state that the step returned."""
        loss, options = metrics["loss"], self.options
        if not options.allow_nonfinite:
            if not math.isfinite(loss):
                return f"the loss of step {step} is {loss}"
            if not state_is_finite:
                return f"the gradients of step {step}, or what the optimizer made of them, are not finite"
        if options.spike_factor is not None and len(self._losses) >= LEAST_STEPS:
            usual = statistics.median(self._losses)
            if loss > options.spike_factor * usual > 0:
                times = f"more than {options.spike_factor:g} times {usual:g}, the median of the last"
                return f"the loss of step {step} is {loss:g}, {times}"
        if math.isfinite(loss):
            self._losses.append(loss)
        return None

    def set_back(self, step: int, problem: str) -> None:
        """Counts a setback in step number `step` because of a `problem`. Raises `TrainingError` where there were too
        many."""
        self._num_setbacks += 1
        if self._num_setbacks > self.options.max_setbacks:
            raise TrainingError(
                f"{problem}, after as many setbacks as are allowed",
                value=self.options.max_setbacks,
                place=f"step {step}",
                remedy="lower the learning rate, clip gradients, look at the data, or allow more (max_setbacks)",
            )

    def extra(self) -> dict[str, Any]:
        """Returns what was seen, for `extra` of checkpoints; empty where no decision hangs on it."""
        if not self.acts and self.options.spike_factor is None:
            return {}
        return {EXTRA: {"losses": list(self._losses), "setbacks": self._num_setbacks}}

    def _resume(self, seen: Any) -> None:
        try:
            losses, setbacks = [float(loss) for loss in seen["losses"]], int(seen["setbacks"])
        except (TypeError, KeyError, ValueError) as error:
            raise TrainingError(
                "the checkpoint does not say what losses were seen",
                value=seen,
                place=f"extra[{EXTRA!r}]",
                remedy="leave it out: the window of losses then begins anew",
            ) from error
        self._losses.extend(losses)
        self._num_setbacks = setbacks


def copy_of(state: Any) -> Any:
    """Returns a copy of a `state` (a pytree) whose arrays a step may not consume."""
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, state)


def _floats(state: Any) -> list[Any]:
    leaves = jax.tree.leaves(state)
    return [leaf for leaf in leaves if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)]


def _finite_leaves(leaves: list[Any]) -> jax.Array:
    """Tells of each leaf whether all of it is finite: bool[n]."""
    if not leaves:
        return jnp.ones(0, bool)
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves])
