"""Reads CIFAR-10's files for Python, which are pickles, without running anything that they ask for.

The bytes of a file go in, pixels and labels come out.

A pickle is a program; loading one from a stranger runs it. The official ones, written by Python 2 at protocol 2, need
four names from outside: those by which numpy stores an array, and `_codecs.encode`, by which Python 3 writes bytes at
that protocol. These names are given stand-ins that only take notes; every other name is refused, and numpy is not
called.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any

import numpy as np

from splitjax.errors import DataError

_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
_REMEDY = f"do not use this file: fetch the official archive, {_URL}"
_IMAGE_BYTES = 3 * 32 * 32


def read_pickle(contents: bytes, place: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads the pixels uint8[N, 3072], as planes, and labels int64[N] of a file of the Python version.

    **Arguments:**

    - `contents`: of the file.
    - `place`: what to call it in messages.

    Raises `DataError` for a pickle that refers to any other global than an array's, naming it, that is damaged or
    truncated (naming the byte where reading stopped), or that holds something else.
    """
    stream = io.BytesIO(contents)
    try:
        _check_memo(stream)
        stream.seek(0)
        value = _Reader(stream, place).load()
    except DataError:
        raise
    except Exception as error:  # damaged bytes can mean any operation on any values
        raise DataError(
            f"a damaged or truncated pickle: {type(error).__name__}: {error}",
            place=f"{place}, byte offset {stream.tell()} of {len(contents)}",
            remedy=_REMEDY,
        ) from error
    rest = len(contents) - stream.tell()
    if rest:
        raise DataError(
            f"{rest} bytes follow the pickle's end", place=f"{place}, byte offset {stream.tell()}", remedy=_REMEDY
        )
    if not isinstance(value, dict):
        raise _not_cifar(f"a {type(value).__name__} in place of a dict", place)
    pixels, labels = (value.get(key.encode(), value.get(key)) for key in ("data", "labels"))
    pixels, labels = (entry.values() if isinstance(entry, _Array) else entry for entry in (pixels, labels))
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != _IMAGE_BYTES or not len(pixels):
        raise _not_cifar(f"the entry 'data' is no array uint8[N, {_IMAGE_BYTES}]", place)
    if isinstance(labels, np.ndarray):
        labels = labels.tolist()
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise _not_cifar("the entry 'labels' is no list of whole numbers", place)
    if len(labels) != len(pixels):
        raise _not_cifar(f"{len(pixels)} images and {len(labels)} labels", place)
    try:
        return pixels, np.array(labels, np.int64)
    except OverflowError as error:
        raise _not_cifar("a label above 64 bits", place) from error


def _check_memo(stream: io.BytesIO) -> None:
    """Raises `ValueError` for a pickle that does not number its notes in turn: the reader makes room for every
    number below, and six damaged bytes would have it ask for 32 GB."""
    for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and isinstance(argument, int) and argument > count:
            raise ValueError(f"note {argument} where there are at most {count}")


def _not_cifar(reason: str, place: str) -> DataError:
    return DataError(f"not a file of CIFAR-10 for Python: {reason}", place=place, remedy=_REMEDY)


class _Dtype:
    """Stands for `numpy.dtype`: keeps the name, takes no other part of a dtype's state."""

    def __init__(self, name: Any, *_: Any):
        self.name = name.decode("ascii") if isinstance(name, bytes) else name

    def __setstate__(self, state: Any) -> None:
        pass  # byte order, fields, alignment: a dtype of one byte has none of them


class _Array:
    """Stands for an array under construction: `numpy.ndarray` with the state that a pickle gives it."""

    def __init__(self, *_: Any):
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def values(self) -> np.ndarray | None:
        """Returns the array, if its state is one of unsigned bytes, as many as its shape says; else None."""
        try:
            _, shape, dtype, is_fortran, contents = self.state
            if dtype.name not in ("u1", "|u1", "uint8"):
                return None
            return np.frombuffer(contents, np.uint8).reshape(shape, order="F" if is_fortran else "C")
        except (TypeError, ValueError, AttributeError):
            return None


def _latin1(text: Any, encoding: Any = "latin1", *_: Any) -> bytes:
    """Stands for `_codecs.encode`: turns a text back into bytes, in the encodings of one byte a character."""
    return str(text).encode({"latin1": "latin1", "latin-1": "latin1", "iso-8859-1": "latin1"}[str(encoding)])


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("_codecs", "encode"): _latin1,
}


class _Reader(pickle.Unpickler):
    """Loads a pickle whose globals are all among `_ALLOWED`."""

    def __init__(self, stream: io.BytesIO, place: str):
        # Python 2's texts are bytes: the pixels are one of them
        super().__init__(stream, fix_imports=False, encoding="bytes")
        self._stream, self._place = stream, place

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise DataError(
                f"a pickle that asks for {module}.{name}, which no file of CIFAR-10 needs; it was not run",
                value=f"{module}.{name}",
                place=f"{self._place}, byte offset {self._stream.tell()}",
                remedy=_REMEDY,
            ) from None
