"""A stream of training batches over epochs, with a position that a checkpoint can hold: resumed, it goes on exactly there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from splitjax.data.augment import Augment, example_keys
from splitjax.data.batches import Arrays, Batch, Transform, check_batch_size, check_whole, num_examples, shuffled_indices, take
from splitjax.errors import DataError


@dataclasses.dataclass(frozen=True, order=True)
class Position:
    """A place between two batches of a stream; positions compare by what comes first.

    **Attributes:**

    - `epoch`: number of the epoch, from 0.
    - `batch`: number of the epoch's batches that lie before it.

    Raises `DataError` for anything but whole numbers of at least 0.
    """

    epoch: int = 0
    batch: int = 0

    def __post_init__(self):
        check_whole(epoch=self.epoch, batch=self.batch)

    def to_json(self) -> dict[str, int]:
        """`{"epoch": int, "batch": int}`, for `json.dumps`."""
        return {"epoch": int(self.epoch), "batch": int(self.batch)}

    @classmethod
    def from_json(cls, value: Any) -> Position:
        """The position that `to_json` wrote. Raises `DataError` for anything else."""
        if not isinstance(value, dict) or value.keys() != {"epoch", "batch"}:
            raise DataError(
                "not a position in a data stream",
                value=value,
                place="Position.from_json",
                remedy='give what to_json returned: {"epoch": 0, "batch": 0} is the start',
            )
        return cls(**value)


START = Position()


def stream(
    arrays: Arrays,
    batch_size: int,
    *,
    seed: int,
    start: Position = START,
    rows: np.ndarray | None = None,
    num_epochs: int | None = None,
    shuffle: bool = True,
    transform: Transform | None = None,
    augment: Augment | None = None,
) -> Iterator[tuple[Position, Batch]]:
    """The full batches of epoch after epoch, each with the position behind it.

    Save the position with the state that the batch led to: `start` at that position goes on with the next batch, and none
    is repeated or skipped. Batch k of an epoch holds the same examples, changed alike, whatever the number of processes.

    **Arguments:**

    - `arrays`: `{name: [N, ...]}`.
    - `batch_size`: B, of the batch over all processes, at most N.
    - `seed`: decides the order of every epoch, and the changes by `augment`.
    - `start`: where to begin.
    - `rows`: int[b], the rows of each batch that this process reads; the other examples are never touched. None: all B.
    - `num_epochs`: end before this epoch, counted from 0 and not from `start`. None: never end.
    - `shuffle`: False keeps the order of the arrays.
    - `transform`, `augment`: applied to each batch, `augment` first, with the keys of the examples (`example_keys`).

    **Returns:** an iterator of `(Position, {name: [b, ...]})`.

    Raises `DataError`, at once and not at the first batch, for a batch size as in `epoch_batches`, for rows outside the
    batch, and for a start behind the epoch's last batch.
    """
    num = num_examples(arrays)
    check_batch_size(batch_size, num)
    check_whole(seed=seed, num_epochs=0 if num_epochs is None else num_epochs)
    num_batches = num // batch_size
    if start.batch > num_batches:
        raise DataError(
            f"an epoch of {num} examples has {num_batches} batches of {batch_size}: there is no such place in it",
            value=start,
            place="stream, argument 'start'",
            remedy="use the batch size and the data that the position was saved with, or start a new epoch",
        )
    rows = np.arange(batch_size) if rows is None else _checked_rows(rows, batch_size)

    def batches():
        epoch, batch = start.epoch, start.batch
        while num_epochs is None or epoch < num_epochs:
            order = shuffled_indices(num, seed=seed, epoch=epoch) if shuffle else np.arange(num)
            for number in range(batch, num_batches):
                indices = order[number * batch_size + rows]
                taken = take(arrays, indices)
                if augment:
                    taken = augment(taken, example_keys(indices, seed=seed, epoch=epoch))
                if transform:
                    taken = transform(taken)
                last = number + 1 == num_batches
                yield (Position(epoch + 1) if last else Position(epoch, number + 1)), taken
            epoch, batch = epoch + 1, 0

    return batches()


def _checked_rows(rows: np.ndarray, batch_size: int) -> np.ndarray:
    array = np.asarray(rows)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= batch_size:
        raise DataError(
            f"rows must be whole numbers from 0 to {batch_size - 1}, at least one",
            value=rows,
            place="stream, argument 'rows'",
            remedy="pass the rows of the batch over all processes that this process holds, or None for all",
        )
    return array
