"""Cuts a data set into the batches of an epoch: seeded, the same on every process and in every run.

Arrays go in, batches of their rows come out, without a copy of the whole.

A *split* is a mapping of arrays with one example dim in front, such as `{"image": uint8[N, H, W, C],
"label": int32[N]}`. Anything that has a `shape`, an `ndim` and gives the rows `array[indices]` as a numpy array will do
for an array, such as `splitjax.data.FileRows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias, TypeGuard

import numpy as np

from splitjax.errors import DataError


class ExampleArray(Protocol):
    """Holds examples [N, ...] along its first dim, as a numpy array or `splitjax.data.FileRows` does."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The dims, the number of examples first."""
        ...

    @property
    def ndim(self) -> int:
        """The number of dims."""
        ...

    def __getitem__(self, key: Any, /) -> Any: ...


Arrays: TypeAlias = Mapping[str, ExampleArray]
Batch: TypeAlias = dict[str, np.ndarray]
Transform: TypeAlias = Callable[[Batch], Batch]
# The rows of each batch that a process reads: the same of every array, some of each, or (None) all.
Rows: TypeAlias = np.ndarray | Mapping[str, np.ndarray] | None


def num_examples(arrays: Arrays, *, place: str = "a split") -> int:
    """Returns the common length of the arrays' example dim. Raises `DataError`, which names `place`, without any."""
    lengths = {name: _length(array) for name, array in arrays.items()}
    distinct = set(lengths.values())
    num = distinct.pop() if len(distinct) == 1 else None
    if num is None:
        raise DataError(
            "the arrays of a split must have the same number of examples, at least one array",
            value=lengths,
            place=place,
            remedy="give every array the same leading dim",
        )
    return num


def _length(array: ExampleArray) -> int | None:
    """Returns the number of examples of `array`, or None where it has no dim at all."""
    shape = np.shape(array)
    return int(shape[0]) if shape else None


def shuffled_indices(num: int, *, seed: int, epoch: int) -> np.ndarray:
    """Returns the order of `num` examples in an epoch, int64[num], a pure function of `seed` and `epoch`.

    The order is the same on every machine and with every version of numpy: `SeedSequence` and the legacy
    `RandomState` promise their streams for good (numpy NEP 19), which `Generator` does not. Raises `DataError` for a
    negative seed or epoch.
    """
    check_whole(seed=seed, epoch=epoch)
    bits = np.random.MT19937(np.random.SeedSequence([int(seed), int(epoch)]))
    return np.random.RandomState(bits).permutation(num)


def epoch_batches(
    arrays: Arrays,
    batch_size: int,
    *,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = True,
    transform: Transform | None = None,
) -> Iterator[Batch]:
    """Yields the full batches of an epoch.

    **Arguments:**

    - `arrays`: `{name: [N, ...]}`.
    - `batch_size`: B, at most N.
    - `seed`, `epoch`: decide the order; `shuffle=False` keeps that of the arrays.
    - `transform`: applied to each batch.

    **Returns:** an iterator of `N // B` batches `{name: [B, ...]}`; every example is in at most one of them.

    Raises `DataError`, at once and not at the first batch, if B is not a whole number from 1 to N.
    """
    num = num_examples(arrays)
    check_batch_size(batch_size, num)
    order = shuffled_indices(num, seed=seed, epoch=epoch) if shuffle else np.arange(num)
    return (
        take(arrays, order[start : start + batch_size], transform)
        for start in range(0, num - batch_size + 1, batch_size)
    )


def padded_batches(
    arrays: Arrays, batch_size: int, *, transform: Transform | None = None, rows: Rows = None
) -> Iterator[Batch]:
    """Yields all examples in order, in batches of equal size.

    **Arguments:**

    - `arrays`, `batch_size`, `transform`: as of `epoch_batches`, except that B may exceed N.
    - `rows`: as of `stream`, and `"mask"` may be among them.

    **Returns:** an iterator of `ceil(N / B)` batches `{name: [B, ...], "mask": f32[B]}` (b rows of them). The last is
    padded with copies of the split's first example, mask 0: real values, so that no layer meets an input unlike its
    others. Every batch has the mask, so that one compiled step serves them all.

    Raises `DataError`, at once, if B is not a whole number above 0, or if the split has an array named `mask`.
    """
    num = num_examples(arrays)
    check_batch_size(batch_size)
    if "mask" in arrays:
        raise DataError(
            "the name 'mask' is taken by the padding",
            value=sorted(arrays),
            place="padded_batches, argument 'arrays'",
            remedy="give that array another name",
        )

    parts = by_rows((*arrays, "mask"), rows, batch_size)

    def batch(start: int) -> Batch:
        filled: Batch = {}
        for names, chosen in parts:
            indices = start + chosen
            mask = indices < num
            mine = {name: arrays[name] for name in names if name != "mask"}
            filled.update(take(mine, np.where(mask, indices, 0), transform))
            if "mask" in names:
                filled["mask"] = mask.astype(np.float32)
        return filled

    return (batch(start) for start in range(0, num, batch_size))


def by_rows(names: Iterable[str], rows: Rows, batch_size: int) -> list[tuple[tuple[str, ...], np.ndarray]]:
    """Groups arrays by the rows that are read of them: [(names of arrays, the rows of a batch, int[b])].

    `names` are those of the arrays, `rows` is as of `stream`, `batch_size` B. Raises `DataError` for rows that are not
    of the batch, and for an array that a mapping of rows leaves out.
    """
    groups: dict[bytes, tuple[list[str], np.ndarray]] = {}
    for name in names:
        if isinstance(rows, Mapping) and name not in rows:
            raise DataError(
                "an array has no rows to read",
                value=name,
                place="argument 'rows'",
                remedy=f"give the rows of {name!r} too",
            )
        chosen = checked_rows(rows[name] if isinstance(rows, Mapping) else rows, batch_size)
        groups.setdefault(chosen.tobytes(), ([], chosen))[0].append(name)
    return [(tuple(members), chosen) for members, chosen in groups.values()]


def checked_rows(rows: Any, batch_size: int) -> np.ndarray:
    """Returns `rows` of a global batch of `batch_size` examples as int[b], all of them where they are None. Raises
    `DataError` for anything but whole numbers inside the batch, at least one."""
    chosen = np.arange(batch_size) if rows is None else np.asarray(rows)
    is_whole = chosen.ndim == 1 and chosen.size and chosen.dtype.kind in "iu"
    if not is_whole or chosen.min() < 0 or chosen.max() >= batch_size:
        raise DataError(
            f"rows must be whole numbers from 0 to {batch_size - 1}, at least one",
            value=chosen,
            place="argument 'rows'",
            remedy="pass the rows of the batch over all processes that this process holds, or None for all",
        )
    return chosen


def take(arrays: Arrays, indices: np.ndarray, transform: Transform | None = None) -> Batch:
    """Copies the examples `indices`, int[b], of `arrays` into a batch, and applies `transform` to it."""
    batch = {name: array[indices] for name, array in arrays.items()}
    return transform(batch) if transform else batch


def check_batch_size(batch_size: object, num: int | None = None) -> None:
    """Raises `DataError` unless `batch_size` is a whole number above 0, and at most `num` if that is given."""
    if not is_whole(batch_size) or batch_size < 1:
        raise DataError(
            "batch_size must be a whole number above 0",
            value=batch_size,
            place="argument 'batch_size'",
            remedy="pass the number of examples of a batch over all devices",
        )
    if num is not None and batch_size > num:
        raise DataError(
            f"a split of {num} examples has no full batch of this size",
            value=batch_size,
            place="argument 'batch_size'",
            remedy=f"pass a batch_size of at most {num}",
        )


def check_whole(**arguments: object) -> None:
    """Raises `DataError` for the first of `arguments` that is not a whole number of at least 0."""
    for name, value in arguments.items():
        if not is_whole(value) or value < 0:
            raise DataError(
                f"{name} must be a whole number, 0 or more",
                value=value,
                place=f"argument {name!r}",
                remedy=f"pass {name}=0 for the first",
            )


def is_whole(value: object) -> TypeGuard[int]:
    """Tells whether `value` is a whole number, of Python or numpy, and no bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
