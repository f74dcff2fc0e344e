"""Loads Criteo's display advertising data: who clicked on an advertisement, with 13 numbers and 26 categories.

A file of lines, or of arrays that were made of them, goes in; a `Dataset` comes out, the usual one for click models.

Source: Criteo Labs, Display Advertising Challenge (Kaggle 2014) and Terabyte Click Logs, readme: a line is a label, 13
integers and 26 categories hashed to 32 bits (8 hexadecimal digits), separated by tabs; what is missing is empty; lines
are in order of time.
"""

from __future__ import annotations

import io
import math
import os
import pathlib
import zipfile

import numpy as np

from splitjax._files import unpacked_limit
from splitjax.data._criteo_text import NUM_FIELDS, NUM_VALUES, TEXT_SUFFIXES, read_text
from splitjax.data.batches import Batch, is_whole
from splitjax.data.dataset import Dataset
from splitjax.errors import DataError

CLASSES: tuple[str, ...] = ("no click", "click")
SUFFIXES: tuple[str, ...] = (".npz", *TEXT_SUFFIXES)
# Kinds of dtype, and width, of the arrays of a `.npz`.
ARRAYS: dict[str, tuple[str, int | None]] = {
    "ids": ("iu", NUM_FIELDS),
    "values": ("fiu", NUM_VALUES),
    "clicked": ("iub", None),
}
_MAX_HEADER_BYTES = 1000  # of an array: numpy writes 128
TEST_SHARE: int = 10  # the last of so many parts of the rows
_REMEDY = "copy or download the file again; a small part of it serves, cut between two lines"


def log_values(batch: Batch) -> Batch:
    """Takes log(x + 1) of the values float32[B, 13] of `batch`, those below 0 taken as 0; leaves a batch without any.

    As the authors of DLRM and DeepFM have it: the counts reach millions.
    """
    return (
        {**batch, "values": np.log1p(np.maximum(batch["values"], 0, dtype=np.float32))} if "values" in batch else batch
    )


def load_criteo(path: str | os.PathLike[str], *, rows: int = 32_768) -> Dataset:
    """Loads Criteo's lines from text, or rows that have been made of them, from `.npz`.

    **Arguments:**

    - `path`: a file, or a folder with one named `train` with a suffix (the archive's `test.txt` has no labels and is
      not read), or with a single one. Text may be packed by gzip, whatever the name. A `.npz` holds `ids` int[N, 26],
      `values` float[N, 13] and `clicked` int[N].
    - `rows`: of text, how many ids each field has: 0 for a missing category, 1 + c mod (rows - 1) for the category c, a
      number of 32 bits (categories that meet share an id, as in DLRM). Ids of a `.npz` stay, and a field has as many as
      its largest needs.

    **Returns:** a `Dataset` of `{"ids": int32[N, 26], "values": float32[N, 13], "label": int32[N]}`, the last tenth of
    the rows, so the latest, for testing; `field_sizes` says how many ids each field has. A missing number is 0; batches
    hold `log_values`. All is in memory, 160 bytes a row; text is read twice, by parts: once to count its lines.

    Raises `DataError` for a file that is missing, damaged or of another kind: of text naming the line, of a `.npz`
    array and row.
    """
    if not is_whole(rows) or not 2 <= rows <= 1 << 31:
        raise DataError(
            "a field has at least two rows, one for missing categories",
            value=rows,
            place="argument 'rows'",
            remedy="pass rows=32768",
        )
    file = _find(pathlib.Path(path))
    archived = _starts_with(file, b"PK")
    arrays = _read_archive(file) if archived else read_text(file, rows)
    num = len(arrays["label"])
    if num < 2:
        raise DataError("too few rows to train on some and test on others", value=num, place=str(file), remedy=_REMEDY)
    sizes = tuple(int(size) + 1 for size in arrays["ids"].max(axis=0)) if archived else (rows,) * NUM_FIELDS
    num_train = num - max(1, num // TEST_SHARE)
    return Dataset(
        name="criteo",
        train={name: array[:num_train] for name, array in arrays.items()},
        test={name: array[num_train:] for name, array in arrays.items()},
        class_names=CLASSES,
        transform=log_values,
        field_sizes=sizes,
    )


def _find(path: pathlib.Path) -> pathlib.Path:
    """Returns the file to read: `path`, or the file of training rows of the folder `path`."""
    if not path.is_dir():
        return path
    files = sorted(
        file for file in path.iterdir() if file.is_file() and file.name.removesuffix(".gz").endswith(SUFFIXES)
    )
    train = [file for file in files if file.name.split(".")[0] == "train"]
    chosen = train or files
    if len(chosen) != 1:
        raise DataError(
            f"{'several files' if chosen else 'no file'} of Criteo's data",
            value=[file.name for file in chosen][:20],
            place=str(path),
            remedy="name one of them train.txt or train.npz, or give the path of one file in place of the folder",
        )
    return chosen[0]


def _starts_with(file: pathlib.Path, magic: bytes) -> bool:
    try:
        with open(file, "rb") as opened:
            return opened.read(len(magic)) == magic
    except OSError as error:
        raise DataError(
            f"the file cannot be read: {error.strerror or error}",
            place=str(file),
            remedy="give a file of Criteo's lines, or the folder with train.txt",
        ) from error


def _read_archive(file: pathlib.Path) -> Batch:
    """Reads and checks the arrays of a `.npz`: the ids, values and label of `load_criteo`."""
    try:
        with open(file, "rb") as opened, zipfile.ZipFile(opened) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            missing = [name for name in ARRAYS if name not in members]
            if missing:
                raise DataError(
                    f"the file has no array {missing[0]!r}",
                    value=list(members)[:20],
                    place=str(file),
                    remedy="give a file with the arrays ids int32[N, 26], values float32[N, 13] and clicked int8[N]",
                )
            _check_sizes([members[name] for name in ARRAYS], file)
            read = {name: _array(archive.read(members[name])) for name in ARRAYS}
    except DataError:
        raise
    except (
        Exception
    ) as error:  # damaged bytes can mean anything to zipfile, and to Python, which reads an array's header
        raise DataError(f"a damaged archive of arrays: {error}", place=str(file), remedy=_REMEDY) from error
    num = len(read["clicked"]) if read["clicked"].ndim else 0
    for name, (kinds, width) in ARRAYS.items():
        wanted = (num,) if width is None else (num, width)
        if read[name].dtype.kind not in kinds or read[name].shape != wanted:
            raise DataError(
                f"{name} has another shape or type than {num} rows of Criteo's data",
                value=f"{read[name].dtype}{list(read[name].shape)}",
                place=f"{file}, array {name!r}",
                remedy=f"give {list(wanted)} of {'real' if 'f' in kinds else 'whole'} numbers",
            )
    ids, values, clicked = read["ids"], read["values"], read["clicked"]
    _check_rows(
        (ids < 0) | (ids >= np.iinfo(np.int32).max),
        ids,
        f"{file}, array 'ids'",
        "ids are numbered from 0 and fit an int32",
    )
    _check_rows(~np.isfinite(values), values, f"{file}, array 'values'", "a missing number is written as 0")
    _check_rows((clicked != 0) & (clicked != 1), clicked, f"{file}, array 'clicked'", "1 is a click, 0 is none")
    as_read = (ids.astype(np.int32, copy=False), values.astype(np.float32, copy=False), clicked.astype(np.int32))
    return dict(zip(("ids", "values", "label"), as_read, strict=True))


def _check_sizes(members: list[zipfile.ZipInfo], file: pathlib.Path) -> None:
    """Raises `DataError` for members that are packed in a way that numpy does not, are said to be longer than the file,
    or unpack to what is not trusted."""
    length = file.stat().st_size
    num_bytes, limit = sum(member.file_size for member in members), unpacked_limit(length)
    longest = max(member.compress_size for member in members)
    if longest > length:  # as much memory as is said there is set aside before any of it is read
        raise DataError(
            f"an array is said to take {longest} bytes of a file of {length}",
            value=longest,
            place=str(file),
            remedy=_REMEDY,
        )
    if num_bytes > limit:
        raise DataError(
            f"the arrays unpack to {num_bytes} bytes, and a file of this size is trusted with {limit}",
            value=num_bytes,
            place=str(file),
            remedy="write them with numpy.savez, unpacked",
        )
    if any(member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for member in members):
        raise DataError(
            "the arrays are packed in a way that numpy does not pack them in",
            value=[member.compress_type for member in members],
            place=str(file),
            remedy="write them with numpy.savez or numpy.savez_compressed",
        )


def _array(contents: bytes) -> np.ndarray:
    """Returns the array of the contents of a `.npy`, read-only. What its header says is compared with what is there
    before anything is made of it; numpy's own reader would set the memory aside. Raises `ValueError` and whatever
    evaluating the header does."""
    stream = io.BytesIO(contents)
    major, _ = np.lib.format.read_magic(stream)
    read_header = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read_header(stream, max_header_size=_MAX_HEADER_BYTES)
    if dtype.kind not in "fiub" or len(shape) > 2:
        raise ValueError(f"an array of {len(shape)} dims and the type {str(dtype)[:40]}")
    expected, there = math.prod(shape) * dtype.itemsize, len(contents) - stream.tell()
    if expected != there or min(shape, default=0) < 0:
        raise ValueError(f"an array of {expected} bytes has {there}")
    values = np.frombuffer(contents, dtype, offset=stream.tell()) if there else np.empty(0, dtype)
    return values.reshape(shape, order="F" if is_fortran else "C")


def _check_rows(wrong: np.ndarray, array: np.ndarray, place: str, what: str) -> None:
    """Raises `DataError` for the first entry of `array` that is `wrong`, bool of its shape, and says how many are."""
    places = np.argwhere(wrong)
    if len(places):
        where = tuple(int(index) for index in places[0])
        row, columns = where[0], where[1:]
        column = f", column {columns[0]}" if columns else ""
        raise DataError(
            f"{what}: {len(places)} of {array.size} are not so",
            value=array[where].item(),
            place=f"{place}, row {row}{column} (counted from 0)",
            remedy=_REMEDY,
        )
