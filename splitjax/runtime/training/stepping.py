"""Steps of every frontend as the training loop calls them, and their states as checkpoints keep them.

To the loop a step is `(state, batch) -> (state, metrics)`. Each frontend takes and gives back states in its own way:
plain steps return a new state, steps over Equinox modules several, steps over NNX objects change theirs in place. What
else a step returns are its metrics.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from splitjax._filtered.step import FilteredStep
from splitjax._static import partition
from splitjax.errors import TrainingError
from splitjax.parallelize import ParallelStep
from splitjax.step.positions import ArgumentRoles

if TYPE_CHECKING:
    from splitjax.runtime.checkpoint.checkpoints import Checkpoints
    from splitjax.runtime.checkpoint.options import Restored

_NUMBERS = (jax.Array, np.ndarray, np.generic, int, float)


def as_loop_step(step: Callable[..., Any], state: Any) -> Callable[[Any, Any], tuple[Any, Mapping[str, Any]]]:
    """Calls a step as `(state, batch) -> (state, metrics)`.

    **Arguments:**

    - `step`: decorated by `splitjax.parallelize`, `splitjax.nnx.parallelize` or `splitjax.equinox.parallelize`, or any
      `step(state, batch) -> (state, metrics)`.
    - `state`: what `step.init` returned, or alike: one state, or a tuple of the step's states.

    **Returns** a function whose metrics are a mapping with `"loss"`; a step may return its loss alone.

    Raises `TrainingError` for states that are not the step's and for arguments that the loop has nothing to give for;
    the returned function does for a result that is no state and metrics.
    """
    call = _DecoratedStep(step, state) if isinstance(step, (ParallelStep, FilteredStep)) else _PlainStep(step)

    def loop_step(state: Any, batch: Any) -> tuple[Any, Mapping[str, Any]]:
        state, metrics = call(state, batch)
        return state, _checked_metrics(metrics)

    return loop_step


def stored_state(step: Any, state: Any) -> Any:
    """Returns what a checkpoint keeps of the `state` of a `step`: all of it, but of Equinox modules the arrays alone.
    The rest (functions, flags) is part of the program. Leaves that the step stores padded have the sizes that it
    knows."""
    state = _each_state(step, state, "logical")
    return partition(state)[0] if _has_static_halves(step) else state


def whole_state(step: Any, like: Any, stored: Any) -> Any:
    """Returns the state of a `step` of which a checkpoint keeps `stored`; what it does not keep is taken from `like`, a
    state or its shapes."""
    whole = partition(like)[1].combine(stored) if _has_static_halves(step) else stored
    return _each_state(step, whole, "stored")


def restore(
    checkpoints: Checkpoints,
    step: Any,
    make_fn: Callable,
    *make_args: Any,
    example: Sequence[Any],
    at: int | None = None,
) -> Restored:
    """Restores the newest good checkpoint that `train` saved, laid out as a step wants it, with what the step carried
    put back: training goes on from `restored.state`.

    **Arguments:**

    - `checkpoints`: the folder of the run.
    - `step`: decorated, of any frontend; its mesh and rules may be others than those of the save.
    - `make_fn`, `make_args`, `example`: as for `step.init`; nothing is computed.
    - `at`: the step number of the checkpoint; by default the newest good one.

    Raises `CheckpointError` as `Checkpoints.restore` does.
    """
    like = step.abstract_state(make_fn, *make_args, example=example)
    restored = checkpoints.restore(stored_state(step, like), at)
    restored = dataclasses.replace(restored, state=whole_state(step, like, restored.state))
    step.resume(restored.carried)
    return restored


def _each_state(step: Any, state: Any, method: str) -> Any:
    """Returns what a `method` of a decorated step makes of a state, or of each of a tuple of states."""
    if not isinstance(step, (ParallelStep, FilteredStep)):
        return state
    changed = getattr(step, method)(*((state,) if _is_single(step, state) else state))
    return type(state)(changed) if type(state) in (tuple, list) and type(changed) is tuple else changed


def _is_single(step: ParallelStep | FilteredStep, state: Any) -> bool:
    """Tells whether `state` is one state, and not a tuple of them; without numbers the frontend finds the states among
    a call's arguments."""
    numbers = step.options.state_argnums
    return len(numbers) == 1 if numbers else type(state) not in (tuple, list)


def _has_static_halves(step: Any) -> bool:
    """Tells whether states hold more than arrays, as Equinox modules do."""
    return isinstance(step, FilteredStep) and not step.changes_states


class _PlainStep:
    """A function of the user's own."""

    def __init__(self, step: Callable[[Any, Any], Any]):
        self._step, self._name = step, getattr(step, "__name__", type(step).__name__)

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        result = self._step(state, batch)
        if type(result) not in (tuple, list) or len(result) != 2:
            raise TrainingError(
                "a step returns its new state and its metrics",
                value=_outline(result),
                place=f"result of {self._name}",
                remedy="return (state, metrics); decorate a step that changes NNX objects in place with "
                "splitjax.nnx.parallelize",
            )
        return result[0], result[1]


class _DecoratedStep:
    """A parallel step: its states go to their arguments, and are found again among its results."""

    def __init__(self, step: ParallelStep | FilteredStep, state: Any):
        options = step.options
        self._step, self._options, self._name = step, options, getattr(step, "__name__", "step")
        self._changes_states = isinstance(step, FilteredStep) and step.changes_states
        numbers = options.state_argnums
        self._is_single = _is_single(step, state)
        states = self._split_states(state)
        self._state_numbers = numbers or tuple(range(len(states)))
        taken = {*self._state_numbers, *options.static_argnums}
        self._batch_numbers = options.batch_argnums or (next(n for n in range(len(taken) + 1) if n not in taken),)
        self._parameters = _checked_parameters(step, options, {*self._state_numbers, *self._batch_numbers}, self._name)
        # State -> where it is among the results, of those that the step returns; known from the first call on.
        self._positions: dict[int, int] | None = None

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        states = self._split_states(state)
        values = dict(zip(self._state_numbers, states, strict=True))
        values |= zip(self._batch_numbers, self._split_batch(batch), strict=True)
        # An argument that is left at its default: what follows it goes by name.
        first_gap = next(n for n in range(len(values) + 1) if n not in values)
        by_name = {self._parameters[n]: value for n, value in values.items() if n > first_gap}
        result = self._step(*(values[n] for n in range(first_gap)), **by_name)
        if self._positions is None:
            self._positions = self._find(states, result)
        if not self._positions:
            return state, result
        (rest,) = (output for place, output in enumerate(result) if place not in self._positions.values())
        new = tuple(result[self._positions[k]] if k in self._positions else old for k, old in enumerate(states))
        return (new[0] if self._is_single else new), rest

    def _split_states(self, state: Any) -> Sequence[Any]:
        if self._is_single:
            return (state,)
        count = len(self._options.state_argnums) or len(state)
        if type(state) not in (tuple, list) or len(state) != count:
            raise TrainingError(
                f"the step has {count} states",
                value=_outline(state),
                place="train(..., state)",
                remedy="give what step.init returned: a tuple of the states, in state_argnums order",
            )
        return state

    def _split_batch(self, batch: Any) -> Sequence[Any]:
        count = len(self._batch_numbers)
        if count == 1:
            return (batch,)
        if type(batch) not in (tuple, list) or len(batch) != count:
            raise TrainingError(
                f"the step has {count} batch arguments",
                value=_outline(batch),
                place=f"a batch for {self._name}",
                remedy="give a tuple with one entry for each of them, in batch_argnums order",
            )
        return batch

    def _find(self, states: Sequence[Any], result: Any) -> dict[int, int]:
        """State -> its position among the results: as `state_outnums` says, else by structure, shapes and dtypes. NNX
        objects change in place, and a pytree of them does where it does not come back."""
        objects = {k: self._changes_states and _is_object(state) for k, state in enumerate(states)}
        wanted = [k for k in range(len(states)) if not objects[k]]
        results = result if type(result) in (tuple, list) else (result,)
        kinds, positions = [_kind(output) for output in results], {}
        if self._options.state_outnums is not None:
            positions = dict(zip(wanted, self._options.state_outnums, strict=True))
        else:
            for k in wanted:
                kind = _kind(states[k])
                free = (
                    place for place, offered in enumerate(kinds) if offered == kind and place not in positions.values()
                )
                place = next(free, None)
                if place is not None:
                    positions[k] = place
        missing = [k for k in wanted if k not in positions and not (self._changes_states and _holds_objects(states[k]))]
        if missing or (positions and len(results) != len(positions) + 1):
            names = ", ".join(self._parameters.get(self._state_numbers[k], f"state {k}") for k in wanted)
            raise TrainingError(
                f"a step returns its new states ({names}) and its metrics, and nothing else",
                value=_outline(result),
                place=f"result of {self._name}",
                remedy="return a tuple of the states and one mapping of metrics, or the loss; steps made by like() "
                "return no state",
            )
        return positions


def _checked_parameters(step: Any, options: ArgumentRoles, given: set[int], name: str) -> dict[int, str]:
    """Position -> name of the step's parameters.

    Raises `TrainingError` for one that has no default and that the loop has nothing to give for."""
    parameters = inspect.signature(step).parameters
    defaults = {number for number, _ in options.static_defaults}
    for number, parameter in enumerate(options.names):
        if number not in given and number not in defaults and parameters[parameter].default is inspect.Parameter.empty:
            raise TrainingError(
                f"the loop has nothing to give for the argument {parameter!r}",
                value=parameter,
                place=f"train({name}, ...)",
                remedy="keep it in the state (a random key, a step number), put it into the batch, or give it a "
                "default",
            )
    return dict(enumerate(options.names))


def _is_object(state: Any) -> bool:
    from splitjax._nnx_graph import is_object  # only where Flax is there anyway

    return is_object(state)


def _holds_objects(state: Any) -> bool:
    return any(map(_is_object, jax.tree.leaves(state, is_leaf=_is_object)))


def _kind(value: Any) -> Any:
    """Structure, and shape and dtype of every array; these are known of consumed arrays too."""
    leaves, tree = jax.tree.flatten(value)
    return tree, [(leaf.shape, str(leaf.dtype)) if hasattr(leaf, "dtype") else None for leaf in leaves]


def _checked_metrics(metrics: Any) -> Mapping[str, Any]:
    if isinstance(metrics, _NUMBERS) and np.shape(metrics) == ():
        return {"loss": metrics}
    if not isinstance(metrics, Mapping) or "loss" not in metrics:
        raise TrainingError(
            "the step's metrics have no loss",
            place="the step's metrics",
            value=sorted(metrics) if isinstance(metrics, Mapping) else _outline(metrics),
            remedy='return a mapping with a scalar "loss", or the loss alone, beside the state',
        )
    for name, value in metrics.items():
        if not isinstance(value, _NUMBERS) or np.shape(value) != ():
            raise TrainingError(
                f"the metric {name!r} is no single number",
                value=_outline(value),
                place="the step's metrics",
                remedy="reduce it to a scalar in the step, or leave it out",
            )
    return metrics


def _outline(value: Any) -> str:
    """Types and shapes, to the first level."""
    if type(value) in (tuple, list):
        inner = (type(part).__name__ if type(part) in (tuple, list) else _outline(part) for part in value)
        return f"{type(value).__name__} of {', '.join(inner) or 'nothing'}"
    is_array = hasattr(value, "dtype") and hasattr(value, "shape")
    return f"{value.dtype}{list(value.shape)}" if is_array else type(value).__name__
