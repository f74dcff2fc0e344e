"""Streams training batches over epochs, with a position that a checkpoint can hold: resumed, it goes on exactly there.

Arrays and a seed go in; pairs of a position and a batch come out, in an order that depends on nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from splitjax.codec import Codec, Wording
from splitjax.data.augment import Augment, example_keys
from splitjax.data.batches import (
    Arrays,
    Batch,
    Rows,
    Transform,
    by_rows,
    check_batch_size,
    check_whole,
    num_examples,
    shuffled_indices,
    take,
)
from splitjax.errors import DataError

# The keys of examples, uint64[b] -> an array [b, ...] drawn for them
Draws: TypeAlias = Mapping[str, Callable[[np.ndarray], np.ndarray]]


@dataclasses.dataclass(frozen=True, order=True)
class Position:
    """Marks a place between two batches of a stream; positions compare by what comes first.

    **Attributes:**

    - `epoch`: number of the epoch, from 0.
    - `batch`: number of the epoch's batches that lie before it.

    Raises `DataError` for anything but whole numbers of at least 0.
    """

    epoch: int = 0
    batch: int = 0

    def __post_init__(self) -> None:
        check_whole(epoch=self.epoch, batch=self.batch)

    def to_json(self) -> dict[str, int]:
        """`{"epoch": int, "batch": int}`, for `json.dumps`."""
        return _JSON.values(_PositionEntry(self.epoch, self.batch))

    @classmethod
    def from_json(cls, value: Any) -> Position:
        """Returns the position that `to_json` wrote as `value`. Raises `DataError` for anything else."""
        entry = _JSON.read(value)
        return cls(entry.epoch, entry.batch)


@dataclasses.dataclass(frozen=True)
class _PositionEntry:
    """Holds what JSON has of a position: both numbers, always."""

    epoch: int
    batch: int


class _PositionWords(Wording):
    """Says of every value that has not the keys of a position that it is none."""

    def needs_object(self, kind: type) -> str:
        return "not a position in a data stream"

    unknown = missing = needs_object

    def wrong(self, name: str, words: str) -> str:
        return f"{name} must be {words}, 0 or more"


_JSON = Codec(
    _PositionEntry,
    DataError,
    _PositionWords("a position", 'give what to_json returned: {"epoch": 0, "batch": 0} is the start'),
)

START: Position = Position()


def stream(
    arrays: Arrays,
    batch_size: int,
    *,
    seed: int,
    start: Position = START,
    rows: Rows = None,
    num_epochs: int | None = None,
    shuffle: bool = True,
    transform: Transform | None = None,
    augment: Augment | None = None,
    draws: Draws | None = None,
) -> Iterator[tuple[Position, Batch]]:
    """Yields the full batches of epoch after epoch, each with the position behind it.

    Save the position with the state that the batch led to: `start` at that position goes on with the next batch, and
    none is repeated or skipped. Batch k of an epoch holds the same examples, changed alike, whatever the number of
    processes.

    **Arguments:**

    - `arrays`: `{name: [N, ...]}`.
    - `batch_size`: B, of the batch over all processes, at most N.
    - `seed`: decides the order of every epoch, and the changes by `augment`.
    - `start`: where to begin.
    - `rows`: int[b], the rows of each batch that this process reads, or `{name: int[b]}` where it needs other rows of
      some arrays; the other examples are never touched. None: all B.
    - `num_epochs`: end before this epoch, counted from 0 and not from `start`. None: never end.
    - `shuffle`: False keeps the order of the arrays.
    - `transform`, `augment`: applied to each batch, `augment` first, with the keys of the examples (`example_keys`);
      arrays with other rows go through them by themselves.
    - `draws`: `{name: draw}`, arrays that are not read but drawn: `draw(keys)` makes [b, ...] from the keys of the
      examples, uint64[b].

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
    draws = draws or {}
    parts = by_rows((*arrays, *draws), rows, batch_size)

    def batches() -> Iterator[tuple[Position, Batch]]:
        epoch, batch = start.epoch, start.batch
        while num_epochs is None or epoch < num_epochs:
            order = shuffled_indices(num, seed=seed, epoch=epoch) if shuffle else np.arange(num)
            for number in range(batch, num_batches):
                taken: Batch = {}
                for names, chosen in parts:
                    indices = order[number * batch_size + chosen]
                    part = take({name: arrays[name] for name in names if name in arrays}, indices)
                    drawn: Batch = {}
                    if augment or draws:
                        keys = example_keys(indices, seed=seed, epoch=epoch)
                        part = augment(part, keys) if augment else part
                        drawn = {name: draws[name](keys) for name in names if name in draws}
                    taken.update(transform(part) if transform else part)
                    taken.update(drawn)
                last = number + 1 == num_batches
                yield (Position(epoch + 1) if last else Position(epoch, number + 1)), taken
            epoch, batch = epoch + 1, 0

    return batches()
