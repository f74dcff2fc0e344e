"""Defines a data set: named arrays for training and testing, with what is to be done to a batch of them.

A loader puts arrays in; batches for a training step come out. What a model reads of stored examples belongs to the data
and not to the step, so it stands here.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator

import numpy as np

from splitjax.data.augment import Augment
from splitjax.data.batches import Arrays, Batch, ExampleArray, Rows, Transform, num_examples, padded_batches
from splitjax.data.streams import START, Draws, Position, stream
from splitjax.data.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True, eq=False, repr=False)  # neither compares nor prints whole arrays
class Dataset:
    """Holds examples, split for training and testing. The arrays are read-only.

    **Attributes:**

    - `name`: for messages and reports.
    - `train`, `test`: `{name: [N, ...]}`: images `{"image": uint8[N, H, W, C], "label": int32[N]}`, text
      `{"tokens": int32[N, T + 1]}`, clicks `{"ids": int32[N, F], "values": float32[N, D], "label": int32[N]}`. An array
      may stay in its file (`FileRows`).
    - `class_names`: what a model chooses from: one per class of images, one per word of a vocabulary, no click and a
      click.
    - `transform`: makes of a batch of stored examples what a model reads (images: `Standardise`); None for as stored.
    - `augmentation`: random changes that suit training on these examples (images: `Augmentation`); None where there are
      none.
    - `vocabulary`: of text; None elsewhere.
    - `field_sizes`: of clicks, how many ids each categorical field has; empty elsewhere.
    - `draws`: arrays that training batches have beside those of `train`, drawn anew in each epoch (`stream`), such as
      `Negatives`.

    Raises `DataError` if the arrays of a split differ in length.
    """

    name: str
    train: Arrays
    test: Arrays
    class_names: tuple[str, ...]
    transform: Transform | None = None
    augmentation: Augment | None = None
    vocabulary: Vocabulary | None = None
    field_sizes: tuple[int, ...] = ()
    draws: Draws = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for split in ("train", "test"):
            arrays = getattr(self, split)
            num_examples(arrays, place=f"data set {self.name!r}, split {split!r}")
            object.__setattr__(
                self, split, types.MappingProxyType({key: _read_only(array) for key, array in arrays.items()})
            )

    def __repr__(self) -> str:
        return f"Dataset({self.name!r}, {self.num_train} train, {self.num_test} test, {self.num_classes} classes)"

    @property
    def num_classes(self) -> int:
        """The number of `class_names`."""
        return len(self.class_names)

    @property
    def num_train(self) -> int:
        """The number of training examples."""
        return num_examples(self.train)

    @property
    def num_test(self) -> int:
        """The number of test examples."""
        return num_examples(self.test)

    def train_batches(self, batch_size: int, *, seed: int = 0, epoch: int = 0) -> Iterator[Batch]:
        """Yields the full batches of an epoch, of `batch_size` examples, with what is drawn for them.

        They are shuffled by `(seed, epoch)`, transformed, not augmented. The examples left over by the last full batch
        are dropped, different ones in each epoch. Raises what `epoch_batches` raises.
        """
        batches = self.train_stream(batch_size, seed=seed, start=Position(epoch), num_epochs=epoch + 1)
        return (batch for _, batch in batches)

    def train_stream(
        self,
        batch_size: int,
        *,
        seed: int = 0,
        start: Position = START,
        rows: Rows = None,
        num_epochs: int | None = None,
        augment: bool = False,
    ) -> Iterator[tuple[Position, Batch]]:
        """Streams the training examples, transformed, and augmented if `augment`, with the position behind each batch.

        The batches of an epoch are those of `train_batches`. `batch_size`, `seed`, `start`, `rows`, `num_epochs` and
        what is raised are those of `splitjax.data.stream`.
        """
        changes = self.augmentation if augment else None
        return stream(
            self.train,
            batch_size,
            seed=seed,
            start=start,
            rows=rows,
            num_epochs=num_epochs,
            transform=self.transform,
            augment=changes,
            draws=self.draws,
        )

    def test_batches(self, batch_size: int, *, rows: Rows = None) -> Iterator[Batch]:
        """Yields all test examples in order, transformed, with `"mask"` f32[B], 0 on the padding of the last batch.

        `batch_size`, `rows` and what is raised are those of `splitjax.data.padded_batches`.
        """
        return padded_batches(self.test, batch_size, transform=self.transform, rows=rows)


def _read_only(array: ExampleArray) -> ExampleArray:
    """Returns a view of a numpy array that cannot be written to; what stays in files is read-only already."""
    if not isinstance(array, np.ndarray):
        return array
    view = array.view()
    view.flags.writeable = False
    return view
