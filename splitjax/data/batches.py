"""Data sets as numpy arrays, and the batches of an epoch: seeded, the same on every process and in every run.

A *split* is a mapping of arrays with one example dim in front, such as `{"image": uint8[N, H, W, C],
"label": int32[N]}`. Images stay uint8 in memory, a quarter of float32, and are standardised a batch at a time.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from splitjax.errors import DataError

Arrays = Mapping[str, np.ndarray]
Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)  # neither compares nor prints whole arrays
class Dataset:
    """Images and labels, split for training and testing. The arrays are read-only.

    **Attributes:**

    - `name`: for messages and reports.
    - `train`, `test`: `{"image": uint8[N, H, W, C], "label": int32[N]}`.
    - `class_names`: one per class.
    - `mean`, `std`: of each channel, of pixels scaled to [0, 1]; what batches are standardised with.

    Raises `DataError` if the arrays of a split differ in length.
    """

    name: str
    train: Arrays
    test: Arrays
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self):
        for split in ("train", "test"):
            arrays = getattr(self, split)
            num_examples(arrays, place=f"data set {self.name!r}, split {split!r}")
            object.__setattr__(self, split, types.MappingProxyType({k: _read_only(v) for k, v in arrays.items()}))

    def __repr__(self) -> str:
        train, test = num_examples(self.train), num_examples(self.test)
        return f"Dataset({self.name!r}, {train} train, {test} test, {self.num_classes} classes)"

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def train_batches(self, batch_size: int, *, seed: int = 0, epoch: int = 0) -> Iterator[Batch]:
        """The full batches of one epoch, shuffled by `(seed, epoch)`: `{"image": f32[B, H, W, C], "label": i32[B]}`.

        The examples left over by the last full batch are dropped, others in each epoch. Raises `DataError` as
        `epoch_batches`.
        """
        return epoch_batches(self.train, batch_size, seed=seed, epoch=epoch, transform=self.standardise)

    def test_batches(self, batch_size: int) -> Iterator[Batch]:
        """All test examples in order, with `"mask"` f32[B], 0 on the padding of the last batch.

        Raises `DataError` as `padded_batches`.
        """
        return padded_batches(self.test, batch_size, transform=self.standardise)

    def standardise(self, batch: Batch) -> Batch:
        """The batch with its uint8 images as float32, `(image / 255 - mean) / std` in each channel."""
        return {**batch, "image": standardise(batch["image"], self.mean, self.std)}


def standardise(images: np.ndarray, mean: tuple[float, ...], std: tuple[float, ...]) -> np.ndarray:
    """uint8[..., C] -> float32[..., C]: `(images / 255 - mean) / std`, with one mean and one std per channel."""
    scale = np.asarray([1 / (255 * s) for s in std], np.float32)
    shift = np.asarray([m / s for m, s in zip(mean, std, strict=True)], np.float32)
    return images.astype(np.float32) * scale - shift


def num_examples(arrays: Arrays, *, place: str = "a split") -> int:
    """The common length of the arrays' example dim. Raises `DataError` if there is none."""
    lengths = {name: np.shape(array)[0] if np.ndim(array) else None for name, array in arrays.items()}
    if len(set(lengths.values())) != 1 or None in lengths.values():
        raise DataError(
            "the arrays of a split must have the same number of examples, at least one array",
            value=lengths,
            place=place,
            remedy="give every array the same leading dim",
        )
    return next(iter(lengths.values()))


def shuffled_indices(num: int, *, seed: int, epoch: int) -> np.ndarray:
    """int64[num]: the order of the examples in an epoch, a pure function of its arguments.

    The order is the same on every machine and with every version of numpy: `SeedSequence` and the legacy
    `RandomState` promise their streams for good (numpy NEP 19), which `Generator` does not. Raises `DataError` for a
    negative seed or epoch.
    """
    for name, value in (("seed", seed), ("epoch", epoch)):
        if not _is_whole(value) or value < 0:
            raise DataError(
                f"{name} must be a whole number, 0 or more",
                value=value,
                place=f"shuffled_indices, argument {name!r}",
                remedy=f"pass {name}=0 for the first",
            )
    bits = np.random.MT19937(np.random.SeedSequence([int(seed), int(epoch)]))
    return np.random.RandomState(bits).permutation(num)


def epoch_batches(
    arrays: Arrays,
    batch_size: int,
    *,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = True,
    transform: Callable[[Batch], Batch] | None = None,
) -> Iterator[Batch]:
    """The full batches of one epoch.

    **Arguments:**

    - `arrays`: `{name: [N, ...]}`.
    - `batch_size`: B, at most N.
    - `seed`, `epoch`: decide the order; `shuffle=False` keeps that of the arrays.
    - `transform`: applied to each batch.

    **Returns:** an iterator of `N // B` batches `{name: [B, ...]}`; every example is in at most one of them.

    Raises `DataError`, at once and not at the first batch, if B is not a whole number from 1 to N.
    """
    num = num_examples(arrays)
    _check_batch_size(batch_size)
    if batch_size > num:
        raise DataError(
            f"a split of {num} examples has no full batch of this size",
            value=batch_size,
            place="argument 'batch_size'",
            remedy=f"pass a batch_size of at most {num}",
        )
    order = shuffled_indices(num, seed=seed, epoch=epoch) if shuffle else np.arange(num)
    return (_batch(arrays, order[start : start + batch_size], transform) for start in range(0, num - batch_size + 1, batch_size))


def padded_batches(arrays: Arrays, batch_size: int, *, transform: Callable[[Batch], Batch] | None = None) -> Iterator[Batch]:
    """All examples in order, in batches of one size.

    **Arguments:** as of `epoch_batches`, except that B may exceed N.

    **Returns:** an iterator of `ceil(N / B)` batches `{name: [B, ...], "mask": f32[B]}`. The last is padded with
    copies of the split's first example, mask 0: real values, so that no layer meets an input unlike its others. Every
    batch has the mask, so that one compiled step serves them all.

    Raises `DataError`, at once, if B is not a whole number above 0, or if the split has an array named `mask`.
    """
    num = num_examples(arrays)
    _check_batch_size(batch_size)
    if "mask" in arrays:
        raise DataError(
            "the name 'mask' is taken by the padding",
            value=sorted(arrays),
            place="padded_batches, argument 'arrays'",
            remedy="give that array another name",
        )

    def batch(start):
        indices = np.arange(start, start + batch_size)
        mask = indices < num
        filled = _batch(arrays, np.where(mask, indices, 0), transform)
        return {**filled, "mask": mask.astype(np.float32)}

    return (batch(start) for start in range(0, num, batch_size))


def _batch(arrays: Arrays, indices: np.ndarray, transform: Callable[[Batch], Batch] | None) -> Batch:
    batch = {name: array[indices] for name, array in arrays.items()}
    return transform(batch) if transform else batch


def _check_batch_size(batch_size: Any) -> None:
    if not _is_whole(batch_size) or batch_size < 1:
        raise DataError(
            "batch_size must be a whole number above 0",
            value=batch_size,
            place="argument 'batch_size'",
            remedy="pass the number of examples of a batch over all devices",
        )


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _read_only(array: np.ndarray) -> np.ndarray:
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view
