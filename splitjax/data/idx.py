"""Loads images and labels in IDX files, the format of MNIST and of the many sets made like it.

A folder goes in, a `Dataset` comes out.

Source: LeCun, Cortes and Burges, "The MNIST database of handwritten digits", http://yann.lecun.com/exdb/mnist/, "File
formats": two bytes 0, a byte for the type of the values, a byte for the number of dims, each dim as four bytes, then
the values; all of it big-endian.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import pathlib
import struct
import zlib
from typing import TypeAlias

import numpy as np

from splitjax._files import unpacked_limit
from splitjax.data._archive import Readable, check_sums
from splitjax.data.augment import Augmentation
from splitjax.data.dataset import Dataset
from splitjax.data.images import Standardise, fit_images
from splitjax.data.rows import FileRows, Part
from splitjax.errors import DataError

TYPES: dict[int, str] = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
# The official names; others have a text before these, such as emnist-letters-, or a dot in place of the last dash.
SPLITS: dict[str, str] = {"train": "train", "test": "t10k"}
FOLDER: str = "mnist"  # where `fetch` puts the official files
_MAX_DIMS = 32  # numpy has 64 from version 2 on
_SAMPLE = 10_000  # images that mean and std are taken of
_UNPACK = (
    "give a folder with train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and"
    " t10k-labels-idx1-ubyte, or the same with .gz (splitjax.data.fetch('mnist', folder) downloads MNIST)"
)
_DAMAGED = "copy or download the file again"
_File: TypeAlias = gzip.GzipFile | io.BufferedReader


def load_idx(
    path: str | os.PathLike[str],
    *,
    image_size: int | None = None,
    channels: int | None = None,
    num_classes: int = 10,
    verify: bool = True,
) -> Dataset:
    """Loads images and labels from a folder of IDX files, named as those of MNIST.

    **Arguments:**

    - `path`: the folder with `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`, `t10k-images-idx3-ubyte` and
      `t10k-labels-idx1-ubyte`, each as it is or with `.gz`, or the folder around it if it is named `mnist`.
    - `image_size`, `channels`: as of `fit_images`: 32 and 3 for models of CIFAR's images. None: as in the files, with
      one channel.
    - `num_classes`: labels are 0 to one less.
    - `verify`: compare the files with the folder's `SHA256SUMS`, where `fetch` has written one. Several processes that
      share the folder may leave it to one.

    **Returns:** a `Dataset` of uint8[N, H, W, C] images and int32[N] labels. The images of files without `.gz` stay
    there (`FileRows`), and are read batch by batch; the others are in memory. Mean and std are those of the first
    10,000 training images, as they are in the file.

    Raises `DataError` for missing files, naming them all; for changed ones if `verify`; for a wrong magic number, type
    or number of dims; for a file that is shorter or longer than its dims say (naming the byte where it ends); for
    numbers of images and labels that differ; for a label that is no class (naming its place); and what `fit_images`
    raises.
    """
    folder = pathlib.Path(path)
    if (folder / FOLDER).is_dir():
        folder = folder / FOLDER
    files = _find_files(folder)
    if verify:
        check_sums(folder, [file.name for file in files.values()])
    splits: dict[str, dict[str, np.ndarray | FileRows]] = {}
    for split in SPLITS:
        images_file, labels_file = files[split, "images"], files[split, "labels"]
        images, labels = _open_images(images_file, image_size, channels), _read_labels(labels_file, num_classes)
        if len(images) != len(labels):
            raise DataError(
                f"{len(images)} images and {len(labels)} labels do not belong together",
                value=(len(images), len(labels)),
                place=f"{images_file}, {labels_file}",
                remedy="give the two files of one set",
            )
        splits[split] = {"image": images, "label": labels}
    mean, std = _moments(_open_images(files["train", "images"], None, None)[:_SAMPLE])
    side, num_channels = splits["train"]["image"].shape[-2:]
    return Dataset(
        name=folder.resolve().name,
        train=splits["train"],
        test=splits["test"],
        class_names=tuple(map(str, range(num_classes))),
        transform=Standardise((mean,) * num_channels, (std,) * num_channels),
        augmentation=Augmentation(crop_padding=max(1, side // 8), flip=False),
    )


def read_idx(file: str | os.PathLike[str]) -> np.ndarray:
    """Reads the array of an IDX `file` of any type and number of dims, in this machine's byte order.

    `.gz` is unpacked on the way.

    Raises `DataError` for a wrong magic number, and for a file that is shorter or longer than its dims say, naming the
    byte at which it ends.
    """
    file = pathlib.Path(file)
    with _Opened(file) as contents:
        dtype, shape, header_bytes = _read_header(contents, file)
        size = dtype.itemsize * math.prod(shape)
        limit = unpacked_limit(file.stat().st_size)
        if size > limit and file.suffix == ".gz":
            raise DataError(
                f"the packed file is said to unpack to {size} bytes, too many to be trusted",
                value=shape,
                place=str(file),
                remedy="unpack it with gzip -d, and give the unpacked file",
            )
        chunks, left = [], size + 1  # one more than there should be
        # by chunks: what a damaged header promises is not set aside
        while left and (chunk := contents.read(min(left, 1 << 20))):
            chunks.append(chunk)
            left -= len(chunk)
        data = b"".join(chunks)
    _check_size(len(data), size, header_bytes, shape, file)
    values = np.frombuffer(data, dtype).reshape(shape)
    return values.astype(dtype.newbyteorder("="), copy=False)


def _open_images(file: pathlib.Path, image_size: int | None, channels: int | None) -> np.ndarray | FileRows:
    if file.suffix == ".gz":
        images = read_idx(file)
        _check_images(images.dtype, images.shape, file)
        return fit_images(images[..., None], image_size, channels)
    with _Opened(file) as contents:
        dtype, shape, header_bytes = _read_header(contents, file)
    _check_images(dtype, shape, file)
    num, height, width = shape
    _check_size(file.stat().st_size - header_bytes, math.prod(shape), header_bytes, shape, file)

    def decode(rows: np.ndarray) -> np.ndarray:
        return fit_images(rows.reshape(-1, height, width, 1), image_size, channels)

    row_shape = decode(np.zeros((1, height * width), np.uint8)).shape[1:]
    return FileRows([Part(file, header_bytes, num)], row_bytes=height * width, row_shape=row_shape, decode=decode)


def _read_labels(file: pathlib.Path, num_classes: int) -> np.ndarray:
    labels = read_idx(file)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(
            "labels are whole numbers in one dim",
            value=(labels.dtype.name, labels.shape),
            place=str(file),
            remedy=_UNPACK,
        )
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if wrong.size:
        raise DataError(
            f"label {labels[wrong[0]]} is none of the {num_classes} classes ({wrong.size} of {len(labels)} labels are"
            " not)",
            value=int(labels[wrong[0]]),
            place=f"{file}, label {wrong[0]} (counted from 0), byte offset {8 + wrong[0] * labels.dtype.itemsize}",
            remedy=f"pass num_classes={int(labels.max()) + 1} if the set has so many; {_DAMAGED} if not",
        )
    return labels.astype(np.int32)


def _check_images(dtype: np.dtype, shape: tuple[int, ...], file: pathlib.Path) -> None:
    if dtype != np.uint8 or len(shape) != 3 or not all(shape):
        raise DataError(
            "images are unsigned bytes in three dims, none of them 0",
            value=(dtype.name, shape),
            place=str(file),
            remedy=_UNPACK,
        )


class _Opened:
    """Opens an IDX file for reading, unpacked if it is a .gz, and turns errors into `DataError`s that name it."""

    def __init__(self, file: pathlib.Path):
        self._file = file

    def __enter__(self) -> _File:
        try:
            packed = self._file.suffix == ".gz"
            self._contents: _File = gzip.open(self._file) if packed else open(self._file, "rb")
        except OSError as error:
            raise self._unreadable(error) from error
        return self._contents

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        place = (
            f"{self._file}, after {self._contents.tell()} bytes unpacked"
            if self._file.suffix == ".gz"
            else str(self._file)
        )
        self._contents.close()
        if isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile)):
            raise DataError(f"a damaged .gz file: {error}", place=place, remedy=_DAMAGED) from error
        if isinstance(error, OSError):
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> DataError:
        return DataError(
            f"the IDX file cannot be read: {error.strerror or error}", place=str(self._file), remedy=_UNPACK
        )


def _read_header(contents: Readable, file: pathlib.Path) -> tuple[np.dtype, tuple[int, ...], int]:
    """Reads type, dims, and the header's length in bytes."""
    magic = contents.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in TYPES or not magic[3]:
        raise DataError(
            "not an IDX file: it starts with two bytes 0, a known type, and the number of dims",
            value=magic.hex(" "),
            place=f"{file}, byte offset 0",
            remedy=f"{_DAMAGED}; a packed file has to keep its name's .gz" if magic[:2] == b"\x1f\x8b" else _DAMAGED,
        )
    num_dims = magic[3]
    dims = contents.read(4 * num_dims)
    if num_dims > _MAX_DIMS:
        raise DataError(
            f"an IDX file of more than {_MAX_DIMS} dims",
            value=num_dims,
            place=f"{file}, byte offset 3",
            remedy=_DAMAGED,
        )
    if len(dims) < 4 * num_dims:
        raise DataError(
            f"truncated IDX file: its {num_dims} dims are not all there",
            value=4 + len(dims),
            place=f"{file}, byte offset {4 + len(dims)}",
            remedy=_DAMAGED,
        )
    shape = struct.unpack(f">{num_dims}I", dims)
    if (
        math.prod(size for size in shape if size) >= 1 << 59
    ):  # numpy has no such array, even where a dim of 0 empties it
        raise DataError(
            "the dims of the IDX file are those of no array",
            value=shape,
            place=f"{file}, byte offset 4",
            remedy=_DAMAGED,
        )
    return np.dtype(TYPES[magic[2]]), shape, 4 + len(dims)


def _check_size(
    num_bytes: int, expected_bytes: int, header_bytes: int, shape: tuple[int, ...], file: pathlib.Path
) -> None:
    """Raises `DataError` unless as many bytes follow the header as its dims say."""
    if num_bytes != expected_bytes:
        is_short = num_bytes < expected_bytes
        ends = f"truncated: it ends at byte {header_bytes + num_bytes}" if is_short else "too long: it goes on"
        raise DataError(
            f"the IDX file is {ends}, where its dims {shape} end at byte {header_bytes + expected_bytes}",
            value=header_bytes + num_bytes if is_short else None,
            place=f"{file}, byte offset {header_bytes + min(num_bytes, expected_bytes)}",
            remedy=_DAMAGED,
        )


def _moments(images: np.ndarray) -> tuple[float, float]:
    """Computes mean and standard deviation of the pixels, scaled to [0, 1]; from counts, so that they are the same
    everywhere."""
    counts = [int(count) for count in np.bincount(images.ravel(), minlength=256)]
    total = sum(counts)
    mean = sum(value * count for value, count in enumerate(counts)) / total
    square = sum(value * value * count for value, count in enumerate(counts)) / total
    return mean / 255, math.sqrt(max(square - mean * mean, 1.0)) / 255  # images of one colour would be divided by 0


def _find_files(folder: pathlib.Path) -> dict[tuple[str, str], pathlib.Path]:
    """Returns the file of each (split, `"images"` or `"labels"`), or raises `DataError` that names the missing ones."""
    if not folder.is_dir():
        raise DataError("no such folder of IDX files", value=str(folder), place=str(folder), remedy=_UNPACK)
    files_by_role: dict[tuple[str, str], pathlib.Path] = {}
    missing: list[str] = []
    for split, prefix in SPLITS.items():
        for kind, num_dims in (("images", 3), ("labels", 1)):
            name = f"*{prefix}-{kind}[-.]idx{num_dims}-ubyte"
            # where a file is there in both forms, the one that needs no unpacking
            files = sorted(folder.glob(name)) or sorted(folder.glob(f"{name}.gz"))
            if len(files) > 1:
                raise DataError(
                    f"several files of {split} {kind}",
                    value=[file.name for file in files],
                    place=str(folder),
                    remedy="leave one of them in the folder",
                )
            if files:
                files_by_role[split, kind] = files[0]
            else:
                missing.append(f"{prefix}-{kind}-idx{num_dims}-ubyte")
    if missing:
        raise DataError(
            f"IDX files are missing: {', '.join(missing)}", value=missing, place=str(folder), remedy=_UNPACK
        )
    return files_by_role
