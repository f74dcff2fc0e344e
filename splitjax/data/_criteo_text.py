"""Parses Criteo's lines of text into arrays: part by part, with numpy, and the line's number in every error.

A file of lines goes in; ids, values and labels come out. The files have up to hundreds of millions of lines, so nothing
here loops over values in Python.
"""

from __future__ import annotations

import contextlib
import gzip
import pathlib
import zlib
from collections.abc import Iterator

import numpy as np

from splitjax.data._archive import Readable
from splitjax.data.batches import Batch
from splitjax.errors import DataError

NUM_VALUES: int = 13
NUM_FIELDS: int = 26
NUM_COLUMNS: int = 1 + NUM_VALUES + NUM_FIELDS
TEXT_SUFFIXES: tuple[str, ...] = (".txt", ".tsv", ".csv")
PART_BYTES: int = 1 << 22
_MAX_LINE_BYTES = 4096  # the official ones have about 250
_MAX_CATEGORY_DIGITS = 8  # 32 bits
_REMEDY = "copy or download the file again; a small part of it serves, cut between two lines"
_GZIP = b"\x1f\x8b"
# Value of a hexadecimal digit by its byte; 255 is no digit. (The byte 0 is what numpy fills shorter texts up with.)
_DIGITS = np.full(256, 255, np.uint8)
_DIGITS[0] = 0
for _value, _digit in enumerate(b"0123456789abcdef"):
    _DIGITS[[_digit, ord(chr(_digit).upper())]] = _value


def read_text(file: pathlib.Path, rows: int) -> Batch:
    """Reads `{"ids": int32[N, 26], "values": float32[N, 13], "label": int32[N]}` from a `file` of lines.

    `rows`, how many ids each field has, and what is raised are those of `load_criteo`.
    """
    num = num_tabs = 0
    for _, part in _parts(file):
        num += part.count(b"\n")
        num_tabs += part.count(b"\t")
    if num_tabs != num * (NUM_COLUMNS - 1):  # some line is wrong, and is named before a row is set aside for each
        for start, part in _parts(file):
            _fields(part, start, file)
    arrays = {
        "ids": np.empty((num, NUM_FIELDS), np.int32),
        "values": np.empty((num, NUM_VALUES), np.float32),
        "label": np.empty(num, np.int32),
    }
    for start, part in _parts(file):
        fields = _fields(part, start, file)
        end = start + len(fields)
        arrays["label"][start:end] = _labels(fields[:, 0], start, file)
        arrays["values"][start:end] = _values(fields[:, 1 : 1 + NUM_VALUES], start, file)
        categories = _categories(fields[:, 1 + NUM_VALUES :], start, file)
        present = fields[:, 1 + NUM_VALUES :] != b""
        arrays["ids"][start:end] = np.where(present, 1 + categories % np.uint32(rows - 1), 0)
    return arrays


@contextlib.contextmanager
def _opened(file: pathlib.Path) -> Iterator[Readable]:
    """Opens a file, unpacked if it is packed by gzip, and turns its errors into `DataError`s that name it."""
    try:
        with open(file, "rb") as opened:
            packed = opened.read(2) == _GZIP
            opened.seek(0)
            with gzip.GzipFile(fileobj=opened) if packed else opened as contents:
                yield contents
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"a damaged gzip file: {error}", place=str(file), remedy=_REMEDY) from error
    except OSError as error:
        raise DataError(
            f"the file cannot be read: {error.strerror or error}",
            place=str(file),
            remedy="check the path, its permissions and the disk",
        ) from error


def _parts(file: pathlib.Path) -> Iterator[tuple[int, bytes]]:
    """Yields (number of lines before it, whole lines with their ends) for every part of the file."""
    rest, num_lines = b"", 0
    with _opened(file) as contents:
        while read := contents.read(PART_BYTES):
            whole, end, rest = (rest + read).rpartition(b"\n")
            if end:
                yield num_lines, whole + end
                num_lines += whole.count(b"\n") + 1
            if len(rest) > _MAX_LINE_BYTES:
                raise _foreign(rest[:50], num_lines, file, f"a line is longer than {_MAX_LINE_BYTES} bytes")
    if rest:
        yield num_lines, rest + b"\n"


def _fields(part: bytes, start: int, file: pathlib.Path) -> np.ndarray:
    """Splits a part into columns, bytes[lines, 40]; `start` is the number of lines before it."""
    lines = part.split(b"\n")[:-1]
    for number, line in enumerate(lines):
        if line.count(b"\t") != NUM_COLUMNS - 1:
            num = line.count(b"\t") + 1
            what = f"a line has {num} columns in place of {NUM_COLUMNS}"
            raise _foreign(
                line[:50], start + number, file, f"{what}: it has no label" if num == NUM_COLUMNS - 1 else what
            )
        if b"\0" in line:
            raise _foreign(line[:50], start + number, file, "it holds the byte 0")
    fields = part.replace(b"\n", b"\t").split(b"\t")[:-1]
    widest = max(map(len, fields))
    if widest > 20:  # before an array as wide as the widest field is made of them all
        number = next(number for number, field in enumerate(fields) if len(field) == widest)
        raise _wrong(fields[number][:50], start + number // NUM_COLUMNS, number % NUM_COLUMNS, file)
    return np.array(fields, dtype=f"S{max(1, widest)}").reshape(-1, NUM_COLUMNS)


def _labels(column: np.ndarray, start: int, file: pathlib.Path) -> np.ndarray:
    _check(((column != b"0") & (column != b"1"))[:, None], column[:, None], start, 0, file)
    return column == b"1"


def _values(columns: np.ndarray, start: int, file: pathlib.Path) -> np.ndarray:
    written = np.where(columns == b"", b"0", columns)
    try:
        values = written.astype(np.float32)
    except ValueError:
        _check(np.vectorize(lambda text: not _is_number(text), otypes=[bool])(written), columns, start, 1, file)
        raise
    _check(~np.isfinite(values), columns, start, 1, file)
    return values


def _is_number(text: bytes) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _categories(columns: np.ndarray, start: int, file: pathlib.Path) -> np.ndarray:
    """Parses hexadecimal categories, bytes[lines, 26] -> uint32[lines, 26], 0 where a category is missing."""
    digits = np.ascontiguousarray(columns).view(np.uint8).reshape(*columns.shape, -1)
    values = np.zeros(columns.shape, np.uint32)
    for place in range(min(digits.shape[-1], _MAX_CATEGORY_DIGITS)):
        digit = digits[..., place]
        values = np.where(digit != 0, values * np.uint32(16) + _DIGITS[digit], values)
    too_long = (digits[..., _MAX_CATEGORY_DIGITS:] != 0).any(-1)
    _check((_DIGITS[digits] == 255).any(-1) | too_long, columns, start, 1 + NUM_VALUES, file)
    return values


def _check(wrong: np.ndarray, columns: np.ndarray, start: int, first_column: int, file: pathlib.Path) -> None:
    """Raises `DataError` for the first entry of `columns` that is `wrong`, bool of its shape."""
    places = np.argwhere(wrong)
    if len(places):
        line, column = int(places[0, 0]), int(places[0, 1])
        raise _wrong(bytes(columns[line, column]), start + line, first_column + column, file)


def _wrong(value: bytes, line: int, column: int, file: pathlib.Path) -> DataError:
    if column == 0:
        what = "the label, 0 or 1"
    else:
        what = (
            "a number, or nothing" if column <= NUM_VALUES else "a category of up to 8 hexadecimal digits, or nothing"
        )
    return _foreign(value, line, file, f"column {column + 1} is {what}")


def _foreign(value: bytes, line: int, file: pathlib.Path, what: str) -> DataError:
    return DataError(
        f"not a line of Criteo's data: {what}",
        value=value,
        place=f"{file}, line {line + 1}",
        remedy=(
            f"give lines of a label, {NUM_VALUES} numbers and {NUM_FIELDS} categories, separated by tabs (the archive's"
            " train.txt); if they were, copy or download the file again"
        ),
    )
