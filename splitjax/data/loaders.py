"""Feeds a run from loaders of other packages, with positions that a checkpoint can hold.

Three ways, by what the loader can do. Grain's iterators say where they are: `resumable` gives pairs of that and a
batch. A data set that gives example number i when asked for it: `RowsOfBatches` is the part of it that this process
reads. A loader that is told which examples to read (PyTorch's, by `batch_sampler=`): `BatchSampler` tells it.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np

from splitjax.data.batches import check_batch_size, check_whole, checked_rows, shuffled_indices
from splitjax.data.streams import START, Position
from splitjax.errors import DataError

Example = TypeVar("Example", covariant=True)


@runtime_checkable
class StatefulIterator(Protocol):
    """Iterates over batches and says where it is, as iterators of grain do (`grain.DatasetIterator`,
    `grain.DataLoaderIterator`)."""

    def __next__(self) -> Any: ...

    def get_state(self) -> Any:
        """Returns where the iterator is, behind the last batch: JSON values, or bytes."""
        ...

    def set_state(self, state: Any, /) -> None:
        """Goes to where an iterator over the same data was when its `get_state` returned `state`."""
        ...


@dataclasses.dataclass(frozen=True)
class LoaderPosition:
    """Marks a place between two batches of a loader, by the state of its iterator.

    - `state`: JSON values or bytes, as the iterator's `get_state` returned it.
    - `per_process`: the loader of each process has a place of its own, which checkpoints keep for each process.
    """

    state: Any
    per_process: bool = True

    def to_json(self) -> dict[str, Any]:
        """Returns the position for `json.dumps`: `{"loader": state}`; a state of bytes is text in it where it is UTF-8,
        base64 otherwise."""
        if not isinstance(self.state, bytes):
            return {"loader": self.state}
        try:
            return {"loader_text": self.state.decode("utf-8")}
        except UnicodeDecodeError:
            return {"loader_base64": base64.b64encode(self.state).decode("ascii")}

    @classmethod
    def from_json(cls, value: Any) -> LoaderPosition:
        """Returns the position that `to_json` wrote as `value`. Raises `DataError` for anything else."""
        if isinstance(value, dict) and len(value) == 1:
            ((kind, state),) = value.items()
            if kind == "loader":
                return cls(state)
            if kind == "loader_text" and isinstance(state, str):
                return cls(state.encode("utf-8"))
            if kind == "loader_base64" and isinstance(state, str):
                try:
                    return cls(base64.b64decode(state, validate=True))
                except ValueError:
                    pass
        raise DataError(
            "this is not the position of a loader",
            value=value,
            place="LoaderPosition.from_json",
            remedy="give what to_json returned; a run that read its data another way cannot go on with this loader",
        )


def resumable(loader: Iterable[Any], start: Any = None) -> Iterator[tuple[LoaderPosition, Any]]:
    """Yields the batches of a loader, each with the position behind it.

    Save the position with the state that the batch led to: a loader over the same data that starts there goes on with
    the next batch. `splitjax.runtime.train` does, with the position of every process.

    **Arguments:**

    - `loader`: gives a `StatefulIterator` for `iter(loader)`, or is one: grain's `DataLoader`, `MapDataset` and
      `IterDataset`.
    - `start`: where to begin: a `LoaderPosition`, or its JSON, such as `restored.position`. None: at the beginning.

    **Returns:** an iterator of `(LoaderPosition, batch)`.

    Raises `DataError`, at once and not at the first batch, for a loader whose iterator does not say where it is, for a
    start that is no position of a loader, and for one that this loader refuses, such as that of another data set.
    """
    iterator = iter(loader)
    if not isinstance(iterator, StatefulIterator):
        raise DataError(
            "the iterator of this loader does not say where it is (get_state, set_state)",
            value=type(iterator).__name__,
            place="resumable, argument 'loader'",
            remedy="give a loader of grain; of others give plain batches to runtime.train, which counts them, or read "
            "by splitjax.data.BatchSampler",
        )
    if start is not None:
        position = start if isinstance(start, LoaderPosition) else LoaderPosition.from_json(start)
        try:
            iterator.set_state(position.state)
        except Exception as error:  # grain's iterators raise whatever their parts do
            raise DataError(
                f"the loader does not go on where the position says: {error}",
                value=position.state,
                place="resumable, argument 'start'",
                remedy="make the loader as the run that saved the position did: data, seed, batch size, workers",
            ) from error
    return _positioned(iterator)


def _positioned(iterator: StatefulIterator) -> Iterator[tuple[LoaderPosition, Any]]:
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        state = iterator.get_state()
        # The state may be the iterator's own object, which the next batch changes.
        yield LoaderPosition(state if isinstance(state, bytes) else json.loads(json.dumps(state))), batch


class Examples(Protocol[Example]):
    """Gives the example with a number, as `grain.MapDataset`, PyTorch's map-style data sets and lists do."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: Any, /) -> Example: ...


class RowsOfBatches(Sequence[Any], Generic[Example]):
    """The examples of a data set that this process reads, in order: its rows of every global batch.

    Batch k of the run holds examples k B to (k + 1) B - 1, whatever the number of processes, and a position that counts
    batches means the same in every process. So the number of processes may change when a run is resumed. Shuffle,
    repeat and map before; batch behind it, by `len(rows)`:

    ```python
    examples = grain.MapDataset.source(source).shuffle(seed=0).repeat()
    mine = RowsOfBatches(examples, 256, batch_layout(step, state, example).common_rows)
    loader = grain.MapDataset.source(mine).batch(len(mine.rows)).to_iter_dataset()
    ```

    **Arguments:**

    - `examples`: all of them. A rest that makes no whole batch is left out.
    - `batch_size`: B, of the global batch.
    - `rows`: i64[b], the rows of each global batch that this process holds; None for all B.

    Raises `DataError` for a batch size that is no whole number from 1 to the number of examples, and for rows outside.
    """

    def __init__(self, examples: Examples[Example], batch_size: int, rows: np.ndarray | None = None):
        check_batch_size(batch_size, len(examples))
        self.rows: np.ndarray = checked_rows(rows, batch_size)
        self._examples = examples
        self._batch_size = int(batch_size)

    def __len__(self) -> int:
        return len(self._examples) // self._batch_size * len(self.rows)

    def __repr__(self) -> str:
        # grain's DataLoader compares this with what it was when a position was saved: no address of an object, no rows
        return f"RowsOfBatches({len(self._examples)} examples, batch_size={self._batch_size})"

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[k] for k in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        batch, row = divmod(int(number) % len(self), len(self.rows))
        return self._examples[batch * self._batch_size + int(self.rows[row])]


class BatchSampler:
    """Says which examples this process reads for every batch, in the order of `splitjax.data.stream`: shuffled anew in
    each epoch, the same in any number of processes.

    Iterating gives a list of b example numbers for each batch, without end or to the last epoch: PyTorch's
    `DataLoader(dataset, batch_sampler=BatchSampler(...))` reads them, ahead and in workers as it likes. `positions`
    gives, batch for batch, the place behind each.

    **Arguments:**

    - `num_examples`: N, of the data set.
    - `batch_size`: B, of the global batch, at most N.
    - `seed`: decides the order of every epoch.
    - `start`: where to begin.
    - `rows`: i64[b], the rows of each global batch that this process holds; None for all B.
    - `num_epochs`: end before this epoch, counted from 0. None: never end.

    Raises `DataError` for numbers that are none of these, and for a start behind the epoch's last batch.
    """

    def __init__(
        self,
        num_examples: int,
        batch_size: int,
        *,
        seed: int,
        start: Position = START,
        rows: np.ndarray | None = None,
        num_epochs: int | None = None,
    ):
        check_whole(num_examples=num_examples, seed=seed, num_epochs=0 if num_epochs is None else num_epochs)
        check_batch_size(batch_size, num_examples)
        self._num, self._batch_size, self._seed = int(num_examples), int(batch_size), seed
        self._rows, self._start, self._num_epochs = checked_rows(rows, batch_size), start, num_epochs
        self._num_batches = num_examples // batch_size
        if start.batch > self._num_batches:
            raise DataError(
                f"an epoch of {num_examples} examples has {self._num_batches} batches of {batch_size}",
                value=start,
                place="BatchSampler, argument 'start'",
                remedy="use the batch size and the data that the position was saved with, or start a new epoch",
            )

    def __iter__(self) -> Iterator[list[int]]:
        order, epoch = np.empty(0, np.int64), None
        for place in self._places():
            if place.epoch != epoch:
                epoch = place.epoch
                order = shuffled_indices(self._num, seed=self._seed, epoch=epoch)
            yield order[place.batch * self._batch_size + self._rows].tolist()

    def positions(self) -> Iterator[Position]:
        """Yields the position behind each batch, in order: `zip(sampler.positions(), loader)` are the pairs that
        `splitjax.runtime.train` takes."""
        for place in self._places():
            last = place.batch + 1 == self._num_batches
            yield Position(place.epoch + 1) if last else Position(place.epoch, place.batch + 1)

    def _places(self) -> Iterator[Position]:
        epoch, batch = self._start.epoch, self._start.batch
        while self._num_epochs is None or epoch < self._num_epochs:
            for number in range(batch, self._num_batches):
                yield Position(epoch, number)
            epoch, batch = epoch + 1, 0
