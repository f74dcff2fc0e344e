"""Feeds the training loop: batches with the position behind each, or plain batches, which the loop counts.

An item is a pair `(position, batch)` if it is a tuple of two whose first has `to_json()` (`splitjax.data.Position`) or
is a JSON value: None, a boolean, a number, a string, a list of such, or a dict of such by strings. Everything else that
holds an array is a plain batch: a dict, an array, a tuple `(images, labels)`. No batch can be taken for a pair, for
what holds an array is not JSON; and what is neither is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from splitjax.errors import TrainingError
from splitjax.runtime.checkpoint.description import not_json

_ARRAYS = (jax.Array, np.ndarray)


class Feed:
    """The items of a run, one for each step.

    **Arguments:**

    - `batches`: pairs from the first batch on that this start has to do, or plain batches from the first of the run on.
    - `num_done`: steps that earlier starts of the run did: so many plain batches are read and dropped.

    Raises `TrainingError` for what cannot be iterated, or is one batch.
    """

    def __init__(self, batches: Iterable[Any], num_done: int):
        is_one_batch = isinstance(batches, (Mapping, str, bytes, *_ARRAYS))
        if is_one_batch or not (hasattr(batches, "__iter__") or hasattr(batches, "__next__")):
            raise TrainingError(
                "the batches are none that follow each other",
                value=type(batches).__name__,
                place="train(..., batches)",
                remedy="give an iterator of batches, such as splitjax.data.prefetch(...) or a generator; "
                "itertools.repeat(batch) gives one batch again and again",
            )
        self._items = iter(batches)
        self._num_done = num_done
        self._count = 0  # of items so far
        self._has_positions: bool | None = None

    def next(self) -> tuple[Any, Any]:
        """The next position and batch; of plain batches the position is how many of them the run has taken.

        Raises `StopIteration` at the end, `TrainingError` for an item that is neither."""
        item = self._take()
        if self._has_positions is False and self._count == 1:
            for _ in range(self._num_done):
                item = self._take()
        return item if self._has_positions else (self._count, item)

    def _take(self) -> Any:
        item = next(self._items)
        self._count += 1
        place = f"item {self._count} of the batches"
        is_pair = _is_pair(item, place)
        if self._has_positions is None:
            self._has_positions = is_pair
        elif is_pair != self._has_positions:
            raise TrainingError(
                "some batches come with a position and others without",
                value=type(item).__name__,
                place=place,
                remedy="give (position, batch) every time, or plain batches every time",
            )
        return item


@runtime_checkable
class ProcessPosition(Protocol):
    """Marks a place in the data of a process, such as `splitjax.data.LoaderPosition`; those of others may differ."""

    @property
    def per_process(self) -> bool:
        """Returns whether every process has a place of its own."""
        ...

    def to_json(self) -> Any:
        """Returns the place as a JSON value."""
        ...


def own_position(position: Any) -> Any:
    """Returns `position` as it is saved for this process alone; None where all processes are at the same place."""
    return position.to_json() if isinstance(position, ProcessPosition) and position.per_process else None


def position_json(position: Any) -> Any:
    """Returns `position` as it is saved."""
    return position.to_json() if hasattr(position, "to_json") else position


def _is_pair(item: Any, place: str) -> bool:
    if type(item) is tuple and len(item) == 2:
        position = item[0]
        if hasattr(position, "to_json") or not_json(position, "position") is None:
            return True
        if isinstance(position, np.generic) or not _has_arrays(position):
            raise TrainingError(
                "a tuple of two is (position, batch), and this position is not JSON",
                value=position,
                place=place,
                remedy="give a number (int(position)), a string, None, a list or a dict by strings of such, or an "
                "object with to_json(); a batch of two has an array first",
            )
        return False
    if not _has_arrays(item):
        raise TrainingError(
            "what comes as a batch holds no array",
            value=item,
            place=place,
            remedy="give batches, pytrees of arrays, or pairs (position, batch)",
        )
    return False


def _has_arrays(value: Any) -> bool:
    return any(isinstance(leaf, (*_ARRAYS, np.generic)) for leaf in jax.tree.leaves(value))
