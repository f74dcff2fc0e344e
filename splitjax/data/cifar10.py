"""CIFAR-10 from the official binary files.

Source: Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html, "Binary version": a file is a row of records of
3,073 bytes, one label byte (0 to 9), then 1,024 red, 1,024 green and 1,024 blue pixels, each plane row by row. An
official file has 10,000 records; shorter ones, such as samples, are read alike.
"""

from __future__ import annotations

import os
import pathlib

import numpy as np

from splitjax.data.batches import Dataset
from splitjax.errors import DataError

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
FOLDER = "cifar-10-batches-bin"  # what the official archive unpacks to
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILES = ("test_batch.bin",)
RECORD_BYTES = 1 + 3 * 32 * 32
CLASS_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# Of the 50,000 training images, by channel, in pixels scaled to [0, 1].
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)

_UNPACK = f"download {URL}, unpack it, and pass the path of its folder {FOLDER}"


def load_cifar10(path: str | os.PathLike) -> Dataset:
    """CIFAR-10 from a folder of its binary files.

    **Arguments:**

    - `path`: the folder with `data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin`, or the folder around it.

    **Returns:** a `Dataset` of uint8[N, 32, 32, 3] images and int32[N] labels.

    Raises `DataError` for missing files, naming them all, and as `read_records`.
    """
    folder = pathlib.Path(path)
    if (folder / FOLDER).is_dir():
        folder = folder / FOLDER
    _check_files(folder)

    def read(names):
        images, labels = zip(*(read_records(folder / name) for name in names), strict=True)
        return {"image": np.concatenate(images), "label": np.concatenate(labels)}

    return Dataset("cifar10", read(TRAIN_FILES), read(TEST_FILES), CLASS_NAMES, MEAN, STD)


def read_records(file: str | os.PathLike) -> tuple[np.ndarray, np.ndarray]:
    """The images uint8[N, 32, 32, 3] and labels int32[N] of one binary file of N records.

    Raises `DataError` for a file that is missing, empty, or not a whole number of records (naming the byte at which
    the incomplete one starts), and for a label above 9 (naming its record, counted from 0).
    """
    file = pathlib.Path(file)
    try:
        values = np.fromfile(file, np.uint8)
    except OSError as error:
        raise DataError(f"the CIFAR-10 file cannot be read: {error.strerror or error}", place=str(file), remedy=_UNPACK) from error
    num_records, rest = divmod(values.size, RECORD_BYTES)
    if rest or not num_records:
        offset = num_records * RECORD_BYTES
        raise DataError(
            f"truncated CIFAR-10 file: {values.size} bytes are no whole number of records of {RECORD_BYTES}; the "
            f"record at byte offset {offset} has {rest} bytes",
            value=values.size,
            place=f"{file}, byte offset {offset}",
            remedy=f"copy or unpack the file again; the official archive is {URL}",
        )
    records = values.reshape(num_records, RECORD_BYTES)
    labels = records[:, 0]
    wrong = np.flatnonzero(labels >= len(CLASS_NAMES))
    if wrong.size:
        record = int(wrong[0])
        raise DataError(
            f"record {record} of the CIFAR-10 file has label {labels[record]}; labels are 0 to 9 "
            f"({wrong.size} of {num_records} records are wrong)",
            value=int(labels[record]),
            place=f"{file}, record {record} (counted from 0), byte offset {record * RECORD_BYTES}",
            remedy=f"check that this is CIFAR-10's binary version, not CIFAR-100's; the official archive is {URL}",
        )
    # Planes of rows to rows of pixels, in a copy that does not keep the file's bytes alive.
    images = np.ascontiguousarray(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return images, labels.astype(np.int32)


def _check_files(folder: pathlib.Path) -> None:
    if not folder.is_dir():
        raise DataError("no such folder of CIFAR-10 files", value=str(folder), place=str(folder), remedy=_UNPACK)
    missing = [name for name in TRAIN_FILES + TEST_FILES if not (folder / name).is_file()]
    if missing:
        # The archive for Python has the same names without the suffix, and is the commonest mistake.
        pickled = all((folder / name.removesuffix(".bin")).is_file() for name in missing)
        raise DataError(
            f"CIFAR-10 files are missing: {', '.join(missing)}",
            value=missing,
            place=str(folder),
            remedy=f"these are the files of the Python version; {_UNPACK}" if pickled else _UNPACK,
        )
