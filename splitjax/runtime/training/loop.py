"""The training loop: steps in order, metrics of each, checkpoints, evaluation, and a clean end when somebody asks for
one.

```python
with Checkpoints(options) as checkpoints, StopRequest() as stop:
    options = LoopOptions(num_steps=1000, checkpoint_every=100)
    outcome = train(step, state, batches, options, checkpoints=checkpoints, stop=stop)
```

A step is given to the devices while the one before it still runs: its metrics are read one step late, and nothing waits
for the host.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax

from splitjax.errors import TrainingError
from splitjax.runtime.training.feeding import Feed, own_position, position_json
from splitjax.runtime.training.guard import NumberGuard, NumberOptions, copy_of
from splitjax.runtime.training.ledger import Ledger
from splitjax.runtime.training.mesh_choice import chosen_mesh_row, note_layout
from splitjax.runtime.training.metrics import StepObserver
from splitjax.runtime.training.profiling import Profile
from splitjax.runtime.training.stepping import as_loop_step, stored_state, whole_state
from splitjax.runtime.training.stopping import StopRequest
from splitjax.runtime.training.tracking import Tracker

logger: logging.Logger = logging.getLogger("splitjax")


class Saves(Protocol):
    """Saves states, and for `NumberOptions(action="rollback")` restores them: what the loop needs of
    `runtime.checkpoint.Checkpoints`."""

    def save(
        self,
        step: int,
        state: Any,
        extra: Mapping[str, Any],
        metrics: Mapping[str, float],
        *,
        carried: Any = None,
        own: Any = None,
        wait: bool = False,
    ) -> bool:
        """Saves the `state` after step number `step`, with `extra`, `metrics`, what the step `carried` and what this
        process has for its `own`, and returns whether it is being saved; with `wait` once it is."""
        ...

    def restore(self, like: Any) -> Any:
        """Returns the newest good checkpoint, with `step`, `state` laid out as `like`, and `carried`."""
        ...


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """Says how far to train, and what to do on the way.

    **Arguments:**

    - `num_steps`: the number of the last step, counted from 1 over all starts of the run.
    - `batch_size`: examples of the global batch, for the rate.
    - `checkpoint_every`, `evaluate_every`: steps between; None for only at the end.
    - `steps_per_epoch`: for the epoch in the metrics.
    - `allow_nonfinite`: go on when the loss is not a finite number.
    """

    num_steps: int
    batch_size: int
    checkpoint_every: int | None = None
    evaluate_every: int | None = None
    steps_per_epoch: int | None = None
    allow_nonfinite: bool = False


@dataclasses.dataclass(frozen=True)
class TrainingOutcome:
    """Holds how training ended.

    - `state`: the last state.
    - `last_step`: the number of the last step.
    - `stopped`: whether it was asked to stop before the end.
    - `row`: the last step's metrics.
    """

    state: Any
    last_step: int
    stopped: bool
    row: Mapping[str, Any]


def train(
    step: Callable[..., Any],
    state: Any,
    batches: Iterable[Any],
    options: LoopOptions,
    *,
    first_step: int = 1,
    checkpoints: Saves | None = None,
    extra: Mapping[str, Any] | None = None,
    evaluate: Callable[[Any], Mapping[str, float]] | None = None,
    learning_rates: Sequence[float] | None = None,
    observers: Sequence[StepObserver] = (),
    stop: StopRequest | None = None,
    ledger: Ledger | None = None,
    profile: Profile | None = None,
    guard: NumberGuard | None = None,
) -> TrainingOutcome:
    """Trains to `options.num_steps`.

    **Arguments:**

    - `step`: decorated by `splitjax.parallelize`, `splitjax.equinox.parallelize` or `splitjax.nnx.parallelize`, or a
      plain `step(state, batch) -> (state, metrics)`. Beside its states it returns its metrics, `{"loss": f32[], ...}`,
      all of them scalars, or its loss alone. A step with several batch arguments gets tuples for batches.
    - `state`: as `step.init` or a restore gave it, a tuple where the step has several states. It is donated; NNX
      objects are changed in place.
    - `batches`: pairs `(position, batch)`, from the first batch on that this start has to do; a position is JSON or has
      `to_json()`, and is where the data go on behind the batch. Or plain batches, from the first one of the run on:
      their position is how many the run has taken, and a start with `first_step` n reads n - 1 of them and drops them.
      `runtime.training.feeding` says how the two are told apart. A batch is a pytree of arrays, of the host or of the
      devices.
    - `first_step`: the number of the first step to do.
    - `checkpoints`: where the state is saved (of Equinox modules the arrays; `runtime.restore` reads it back), with
      what the step carries (`ParallelStep.carried`), `extra`, the position, and the metrics (`loss`: the mean since the
      last save; those of `evaluate` under `eval_`).
    - `learning_rates`: of every step from 1 on, for the metrics.
    - `observers`: told about every step; on process 0 alone, or wherever they are given.
    - `guard`: what is done about numbers that go wrong; one that stops the run if not given. Its `seen` is
      `restored.extra["numbers"]` of a run that is resumed.
    - `stop`, `ledger`, `profile`: see their modules.

    **Returns** an `TrainingOutcome`. A run that is asked to stop has saved when this returns.

    Raises `TrainingError` for a state, batch, position or result of the step that is none of these, when the loss or
    the state are not finite (before that state is saved), when there were too many setbacks, when the batches end
    early, and what `step` and `checkpoints` raise.
    """
    tracker = Tracker(ledger or Ledger(None))
    guard = guard or NumberGuard(NumberOptions(allow_nonfinite=options.allow_nonfinite))
    loop = _Loop(step, options, (checkpoints, dict(extra or {})), observers, tracker, learning_rates, guard)
    loop_step, feed = as_loop_step(step, state), Feed(batches, first_step - 1)
    profile = profile or Profile()
    number, stopped, position = first_step - 1, False, None
    tracker.ledger.started(first_step)
    note_layout(step, state, options.batch_size, tracker.recorder)
    try:
        with tracker:
            if guard.acts or checkpoints is not None:
                guard.begin(state)
            while number < options.num_steps and not stopped:
                with tracker.during("input", number + 1):
                    position, batch = _next(feed, number, options)
                number += 1
                compiling = number == first_step
                before = loop.kept(state)
                with profile.step(number), tracker.during("compile") if compiling else tracker.dispatching():
                    state, metrics = loop_step(state, batch)
                    if compiling:
                        with tracker.waiting(f"results of step {number}"):
                            jax.block_until_ready(metrics)
                        tracker.first_step_done()
                profile.step_done(metrics)
                state = loop.settled(number, metrics, state, before)
                if stop is not None:
                    with tracker.waiting("whether to stop"):
                        stopped = stop.after(number)
                last = stopped or number == options.num_steps
                if evaluate is not None and _due(number, options.evaluate_every, number == options.num_steps):
                    loop.evaluated(evaluate, state)
                if checkpoints is not None and _due(number, options.checkpoint_every, last):
                    loop.save(number, state, position, wait=last)
                tracker.ledger.step_done(number)
            loop.drain()
    finally:
        profile.close()
        tracker.ledger.flush()
    return TrainingOutcome(state, number, stopped and number < options.num_steps, loop.row)


def _due(number: int, every: int | None, last: bool) -> bool:
    return last or (every is not None and number % every == 0)


def _next(feed: Feed, number: int, options: LoopOptions) -> tuple[Any, Any]:
    try:
        return feed.next()
    except StopIteration:
        raise TrainingError(
            f"the batches ended after step {number}",
            value=options.num_steps,
            place="num_steps",
            remedy="give batches without end, or as many as there are steps",
        ) from None


class _Loop:
    """Keeps what the loop has beside the state: metrics on their way from the devices, and the mean loss since the last
    save."""

    def __init__(
        self,
        step: Callable[..., Any],
        options: LoopOptions,
        saving: tuple[Saves | None, dict[str, Any]],
        observers: Sequence[StepObserver],
        tracker: Tracker,
        learning_rates: Sequence[float] | None,
        guard: NumberGuard,
    ):
        self.guard = guard
        self.step, self.options, self.observers = step, options, observers
        self.checkpoints, self.extra = saving  # where states are saved, and what is saved with them
        self.tracker, self.learning_rates = tracker, learning_rates
        self.row: dict[str, Any] = {}
        self._pending: tuple[int, Mapping[str, jax.Array]] | None = None
        self._evaluation: dict[str, float] = {}
        # since the last save; no list, which a run without saves would grow for ever
        self._loss_sum, self._num_losses = 0.0, 0
        self._told = time.perf_counter()
        self.first_row = chosen_mesh_row()

    def kept(self, state: Any) -> tuple[Any, Any] | None:
        """What a batch that is skipped leaves as it was: a copy of the state and of what the step carries. None where
        nothing is skipped."""
        if self.guard.options.action != "skip":
            return None
        carries = self._carried()
        residuals = copy_of(dict(carries.residuals)) if carries else None
        return copy_of(state), dataclasses.replace(carries, residuals=residuals) if carries else None

    def settled(self, number: int, metrics: Mapping[str, jax.Array], state: Any, before: tuple[Any, Any] | None) -> Any:
        """Returns the state to go on with. A step is on its way: the one before it is told, or, where the run goes on
        after a wrong number, this one, and what to do about it done. `before`: what `kept` returned."""
        if not self.guard.acts:
            pending, self._pending = self._pending, (number, metrics)
            if pending is not None:
                self._tell(*pending)
            return state
        with self.tracker.waiting(f"results of step {number}"):
            is_finite = self.guard.is_finite(state)
        problem = self._tell(number, metrics, is_finite)
        if problem is None:
            return state
        self.guard.set_back(number, problem)
        if before is not None:
            logger.warning("splitjax: %s: its batch is skipped", problem)
            state, carries = before
        else:
            state, carries, saved = self._rolled_back(problem, state)
            logger.warning(
                "splitjax: %s: going on with the state of the checkpoint of step %d and the next batch", problem, saved
            )
        if carries is not None and (resume := getattr(self.step, "resume", None)) is not None:
            resume(carries)
        return state

    def _rolled_back(self, problem: str, state: Any) -> tuple[Any, Any, int]:
        """The state of the newest checkpoint, what the step carried there, and its step."""
        if self.checkpoints is None:
            raise TrainingError(
                f"{problem}, and no checkpoints are kept to go back to",
                place="NumberOptions(action='rollback')",
                remedy="keep checkpoints (--checkpoint-dir), or skip such batches",
            )
        with self.tracker.during("checkpoint"):
            restored = self.checkpoints.restore(stored_state(self.step, state))
        return whole_state(self.step, state, restored.state), restored.carried, restored.step

    def _carried(self) -> Any:
        carried = getattr(self.step, "carried", None)  # plain functions carry nothing
        return None if carried is None else carried() or None

    def drain(self) -> None:
        """Waits for the step that is on its way, and tells it."""
        if self._pending is not None:
            before, self._pending = self._pending, None
            self._tell(*before)

    def evaluated(self, evaluate: Callable[[Any], Mapping[str, float]], state: Any) -> None:
        if self._pending is not None:
            with self.tracker.waiting(f"results of step {self._pending[0]}"):
                jax.block_until_ready(self._pending[1])  # so that its time is not counted as the evaluation's
        with self.tracker.during("evaluate"):
            self._evaluation = {f"eval_{name}": float(value) for name, value in evaluate(state).items()}

    def save(self, number: int, state: Any, position: Any, wait: bool) -> None:
        evaluation = dict(self._evaluation)
        self.drain()
        if not self.guard.acts and not self.guard.is_finite(state):
            raise _went_wrong(number, f"the state after step {number} is not finite")
        carries = self._carried()
        own = own_position(position)
        more = {**({"carried": carries} if carries else {}), **({} if own is None else {"own": own})}
        metrics = {
            **evaluation,
            **({"loss": self._loss_sum / self._num_losses} if self._num_losses else {}),
            **{k: v for k, v in self.row.items() if k == "accuracy"},
        }
        assert self.checkpoints is not None
        with self.tracker.during("checkpoint"):
            self.checkpoints.save(
                number,
                stored_state(self.step, state),
                {**self.extra, "position": position_json(position), **self.guard.extra()},
                metrics,
                wait=wait,
                **more,
            )
        self._loss_sum, self._num_losses = 0.0, 0

    def _tell(self, number: int, metrics: Mapping[str, jax.Array], state_is_finite: bool = True) -> str | None:
        """Tells the observers of a step, and returns what is wrong with it. Raises `TrainingError` where the run stops
        because of that."""
        with self.tracker.waiting(f"results of step {number}"):
            values = {name: float(value) for name, value in metrics.items()}
        self.tracker.recorder.completed(number)
        now = time.perf_counter()
        seconds, self._told = now - self._told, now
        problem = self.guard.problem(number, values, state_is_finite)
        if problem is not None and not self.guard.acts:
            raise _went_wrong(number, problem, values["loss"])
        if problem is None:
            self._loss_sum, self._num_losses = self._loss_sum + values["loss"], self._num_losses + 1
        epoch = None if self.options.steps_per_epoch is None else (number - 1) // self.options.steps_per_epoch
        rate = None if self.learning_rates is None else float(self.learning_rates[number - 1])
        loss = values.pop("loss")
        self.row = {
            "step": number,
            "epoch": epoch,
            "loss": loss,
            **values,
            "learning_rate": rate,
            **self._evaluation,
            "seconds": seconds,
            "examples_per_second": self.options.batch_size / seconds,
            **({} if problem is None else {"setback": 1}),
            **self.tracker.times_row(),
            **self.first_row,
        }
        self.first_row = {}
        self._evaluation = {}
        for observer in self.observers:
            observer.step(self.row)
        return problem


def _went_wrong(number: int, problem: str, loss: float | None = None) -> TrainingError:
    return TrainingError(
        problem,
        value=loss,
        place=f"step {number}",
        remedy="lower the learning rate, clip gradients or compute in float32; what was saved before is finite."
        " NumberOptions(action=...) goes on past such a batch (--bad-numbers skip, or rollback)",
    )
