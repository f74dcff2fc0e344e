"""Loads CIFAR-10 from the official files, binary or for Python, in a folder or in the archive as downloaded.

A path goes in, a `Dataset` comes out.

Source: Krizhevsky 2009, https://www.cs.toronto.edu/~kriz/cifar.html. "Binary version": a file is a row of records of
3,073 bytes, one label byte (0 to 9), then 1,024 red, 1,024 green and 1,024 blue pixels, each plane row by row. "Python
version": a pickled dict of `data` uint8[N, 3072], in the same order, and `labels`. An official file has 10,000 images;
shorter ones, such as samples, are read alike.
"""

from __future__ import annotations

import os
import pathlib

import numpy as np

from splitjax.data._archive import check_sums, read_members
from splitjax.data._cifar_pickle import read_pickle
from splitjax.data.augment import Augmentation
from splitjax.data.dataset import Dataset
from splitjax.data.images import Standardise
from splitjax.data.rows import FileRows, Part
from splitjax.errors import DataError

URL: str = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
FOLDER: str = "cifar-10-batches-bin"  # what the official archives unpack to
PYTHON_FOLDER: str = "cifar-10-batches-py"
TRAIN_FILES: tuple[str, ...] = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILES: tuple[str, ...] = ("test_batch.bin",)
PYTHON_FILES: tuple[str, ...] = tuple(name.removesuffix(".bin") for name in TRAIN_FILES + TEST_FILES)
RECORD_BYTES: int = 1 + 3 * 32 * 32
CLASS_NAMES: tuple[str, ...] = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
# Of the 50,000 training images, by channel, in pixels scaled to [0, 1].
MEAN: tuple[float, ...] = (0.4914, 0.4822, 0.4465)
STD: tuple[float, ...] = (0.2470, 0.2435, 0.2616)

_UNPACK = (
    f"download {URL} (splitjax.data.fetch('cifar10', folder) does), and pass the path of the archive or of its folder"
    f" {FOLDER}"
)
_MAX_UNPACKED_BYTES = 1 << 30  # the official archives unpack to 184 and 186 million bytes


def load_cifar10(path: str | os.PathLike[str], *, verify: bool = True) -> Dataset:
    """Loads CIFAR-10 in either official format, whichever is there; the binary one where both are.

    **Arguments:**

    - `path`: the folder with `data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin`, or the same without `.bin`
      (Python version), or the folder around it; or an archive of them, `.tar` or `.tar.gz`, which is read without
      unpacking it to disk.
    - `verify`: compare the files of a folder with its `SHA256SUMS`, where `fetch` has written one. Several processes
      that share the folder may leave it to one.

    **Returns:** a `Dataset` of uint8[N, 32, 32, 3] images and int32[N] labels. Images in binary files stay there
    (`FileRows`), and are read batch by batch; those of the Python version and of archives are in memory.

    Raises `DataError` for missing files, naming them all, for changed ones if `verify`, what `open_records` raises, for
    a pickle that holds anything but arrays, naming what it asks for, and for an archive that is damaged or not to be
    trusted.
    """
    path = pathlib.Path(path)
    if path.is_file():
        train, test = _from_archive(path)
    else:
        folder, names = _find_files(path)
        if verify:
            check_sums(folder, names)
        read = open_records if names[0] == TRAIN_FILES[0] else _read_pickles
        train, test = read([folder / name for name in names[:-1]]), read([folder / names[-1]])
    return Dataset(
        "cifar10",
        {"image": train[0], "label": train[1]},
        {"image": test[0], "label": test[1]},
        CLASS_NAMES,
        transform=Standardise(MEAN, STD),
        augmentation=Augmentation(),
    )


def open_records(files: list[pathlib.Path]) -> tuple[FileRows, np.ndarray]:
    """Opens binary `files`: images uint8[N, 32, 32, 3], which stay in the files, and labels int32[N].

    The files are read through once, for their labels, which are checked. Raises `DataError` for a file that is missing,
    empty, or not a whole number of records (naming the byte at which the incomplete one starts), and for a label above
    9 (naming its record, counted from 0).
    """
    parts, labels = [], []
    for file in files:
        try:
            contents = np.fromfile(file, np.uint8)  # not kept: of each record one byte is
        except OSError as error:
            raise _unreadable(file, error) from error
        num_records = _num_records(contents.size, str(file))
        labels.append(_checked_labels(contents[::RECORD_BYTES], str(file), RECORD_BYTES))
        parts.append(Part(file, 0, num_records))
    images = FileRows(
        parts, row_bytes=RECORD_BYTES, row_shape=(32, 32, 3), decode=lambda records: _as_images(records[:, 1:])
    )
    return images, np.concatenate(labels)


def _read_pickles(files: list[pathlib.Path]) -> tuple[np.ndarray, np.ndarray]:
    contents = {}
    for file in files:
        try:
            contents[str(file)] = file.read_bytes()
        except OSError as error:
            raise _unreadable(file, error) from error
    return _joined([_decode_pickle(data, place) for place, data in contents.items()])


def _from_archive(archive: pathlib.Path) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    wanted = {f"{folder}/{name}": name for folder, names in _FORMATS for name in names}
    decoded: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for member, data in read_members(archive, wanted, max_bytes=_MAX_UNPACKED_BYTES):
        decode = _decode_records if member.endswith(".bin") else _decode_pickle
        decoded[wanted[member]] = decode(data, f"{archive}, member {member}")
    for _, names in _FORMATS:
        if decoded.keys() >= set(names):
            return _joined([decoded[name] for name in names[:-1]]), decoded[names[-1]]
    missing = [
        name
        for name in (PYTHON_FILES if decoded.keys() & set(PYTHON_FILES) else TRAIN_FILES + TEST_FILES)
        if name not in decoded
    ]
    raise _missing(missing, str(archive))


def _decode_records(contents: bytes, place: str) -> tuple[np.ndarray, np.ndarray]:
    records = np.frombuffer(contents, np.uint8).reshape(_num_records(len(contents), place), RECORD_BYTES)
    return _as_images(records[:, 1:]), _checked_labels(records[:, 0], place, RECORD_BYTES)


def _decode_pickle(contents: bytes, place: str) -> tuple[np.ndarray, np.ndarray]:
    pixels, labels = read_pickle(contents, place)
    return _as_images(pixels), _checked_labels(labels, place, None)


def _joined(files: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    images, labels = zip(*files, strict=True)
    return np.concatenate(images), np.concatenate(labels)


def _as_images(planes: np.ndarray) -> np.ndarray:
    """Turns planes of rows into rows of pixels: uint8[n, 3072] -> uint8[n, 32, 32, 3]."""
    images = np.empty((len(planes), 1024, 3), np.uint8)
    for channel in range(3):  # twice as fast as one transposed copy, whose inner loop has 3 values
        images[..., channel] = planes[:, 1024 * channel : 1024 * (channel + 1)]
    return images.reshape(-1, 32, 32, 3)


def _num_records(size: int, place: str) -> int:
    """Returns the number of records in `size` bytes, or raises `DataError` where the last is incomplete."""
    num_records, rest = divmod(size, RECORD_BYTES)
    if rest or not num_records:
        offset = num_records * RECORD_BYTES
        raise DataError(
            f"truncated CIFAR-10 file: {size} bytes are no whole number of records of {RECORD_BYTES}; the "
            f"record at byte offset {offset} has {rest} bytes",
            value=size,
            place=f"{place}, byte offset {offset}",
            remedy=f"copy or unpack the file again; the official archive is {URL}",
        )
    return num_records


def _checked_labels(labels: np.ndarray, place: str, record_bytes: int | None) -> np.ndarray:
    """Returns the labels as int32[N], or raises `DataError` for the first that is no class."""
    wrong = np.flatnonzero((labels < 0) | (labels >= len(CLASS_NAMES)))
    if wrong.size:
        record = int(wrong[0])
        where = "" if record_bytes is None else f", byte offset {record * record_bytes}"
        raise DataError(
            f"record {record} of the CIFAR-10 file has label {labels[record]}; labels are 0 to 9 "
            f"({wrong.size} of {len(labels)} records are wrong)",
            value=int(labels[record]),
            place=f"{place}, record {record} (counted from 0){where}",
            remedy=f"check that this is CIFAR-10, not CIFAR-100, and undamaged; the official archive is {URL}",
        )
    return labels.astype(np.int32)


_FORMATS: tuple[tuple[str, tuple[str, ...]], ...] = ((FOLDER, TRAIN_FILES + TEST_FILES), (PYTHON_FOLDER, PYTHON_FILES))


def _find_files(path: pathlib.Path) -> tuple[pathlib.Path, tuple[str, ...]]:
    """Returns the folder that holds one of the formats, and the names of its files, the test file last."""
    if not path.is_dir():
        raise DataError("no such folder or archive of CIFAR-10 files", value=str(path), place=str(path), remedy=_UNPACK)
    places = [(folder, names) for inner, names in _FORMATS for folder in (path / inner, path)]
    missing = {place: [name for name in place[1] if not (place[0] / name).is_file()] for place in places}
    best = min(places, key=lambda place: len(missing[place]))  # the first of equals: binary, and the official folder
    if not missing[best]:
        return best
    raise _missing(missing[best], str(best[0] if best[0].is_dir() else path))


def _unreadable(file: pathlib.Path, error: OSError) -> DataError:
    return DataError(f"the CIFAR-10 file cannot be read: {error.strerror or error}", place=str(file), remedy=_UNPACK)


def _missing(names: list[str], place: str) -> DataError:
    return DataError(f"CIFAR-10 files are missing: {', '.join(names)}", value=names, place=place, remedy=_UNPACK)
