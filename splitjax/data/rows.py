"""Gives arrays whose rows stay in their files: a process reads the examples of its batches, and nothing else.

Files of rows of equal length go in; an array-like comes out that reads the rows that are asked for.

Not `numpy.memmap`: where a mapped file gets shorter, or its disk fails, the process dies of a signal. A read that comes
back short is an error that names the file.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from splitjax.errors import DataError


@dataclasses.dataclass(frozen=True)
class Part:
    """Describes rows of equal length in `file`: `num_rows` of them, back to back from byte `offset_bytes` on."""

    file: pathlib.Path
    offset_bytes: int
    num_rows: int


class FileRows:
    """Presents the rows of files as a single read-only array [N, ...]; the files stay open as long as it lives.

    It has `shape`, `dtype`, `ndim` and `len`, and gives rows as a numpy array of their own: `rows[5]`, `rows[2:7]`,
    `rows[indices]`. `np.asarray(rows)` reads them all. Threads may share it.

    **Arguments:**

    - `parts`: where the rows are, in order.
    - `row_bytes`: length of a row in its file.
    - `row_shape`: of a decoded row.
    - `decode`: uint8[n, row_bytes] -> uint8[n, *row_shape].

    Raises `DataError` for a file that cannot be opened, and for a row that cannot be read any more.
    """

    dtype: np.dtype[np.uint8] = np.dtype(np.uint8)

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        row_bytes: int,
        row_shape: tuple[int, ...],
        decode: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        self._parts, self._row_bytes, self._decode = tuple(parts), row_bytes, decode
        self._ends = np.cumsum([part.num_rows for part in self._parts])
        self.shape: tuple[int, ...] = (int(self._ends[-1]), *row_shape)
        self._descriptors: list[int] = []
        weakref.finalize(self, _close, self._descriptors)
        for part in self._parts:
            try:
                self._descriptors.append(os.open(part.file, os.O_RDONLY | getattr(os, "O_BINARY", 0)))
            except OSError as error:
                raise _unreadable(part.file, error) from error

    @property
    def ndim(self) -> int:
        """The number of dims, the rows' included."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of all rows, decoded, in bytes."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"FileRows(uint8{list(self.shape)}, {len(self._parts)} file(s) from {self._parts[0].file})"

    def __getitem__(self, key: Any) -> np.ndarray:
        if isinstance(key, tuple):
            raise IndexError(
                f"only whole rows can be picked from files, not {key!r}: write np.asarray(rows)[...] to read all of"
                " them"
            )
        # numpy's meaning of slices, masks, negative numbers and what is out of range
        indices = np.arange(len(self))[key]
        return self._decode(self._read(indices.ravel()))[0 if indices.ndim == 0 else slice(None)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("the rows are in files: they cannot be had without a copy")
        rows = self[:]
        return rows if dtype is None else rows.astype(dtype, copy=False)

    def _read(self, indices: np.ndarray) -> np.ndarray:
        """Reads rows as they are in the files: int[n] -> uint8[n, row_bytes]."""
        parts = np.searchsorted(self._ends, indices, side="right")
        starts = np.array([part.offset_bytes for part in self._parts]) - self._row_bytes * np.r_[0, self._ends[:-1]]
        offsets = starts[parts] + self._row_bytes * indices
        return np.frombuffer(b"".join(map(self._row, parts.tolist(), offsets.tolist())), np.uint8).reshape(
            -1, self._row_bytes
        )

    def _row(self, part: int, offset: int) -> bytes:
        file = self._parts[part].file
        try:
            row = os.pread(self._descriptors[part], self._row_bytes, offset)
        except OSError as error:
            raise _unreadable(file, error) from error
        if len(row) != self._row_bytes:
            raise DataError(
                "the file has become shorter since it was opened",
                value=len(row),
                place=f"{file}, byte offset {offset}: {self._row_bytes} bytes wanted",
                remedy="put the whole file back, and resume from the last checkpoint",
            )
        return row


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _unreadable(file: pathlib.Path, error: OSError) -> DataError:
    return DataError(
        f"the file cannot be read: {error.strerror or error}",
        place=str(file),
        remedy="check the path, its permissions and the disk",
    )
