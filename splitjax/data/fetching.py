"""Downloads official archives once: checked before anything reads them, unpacked without trust, put in place whole.

The name of a data set and a folder go in; the folder with its files comes out, which a loader then reads.

Sources: https://www.cs.toronto.edu/~kriz/cifar.html (CIFAR-10, with its MD5 sums); http://yann.lecun.com/exdb/mnist/
(MNIST), from the mirror that PyTorch's torchvision keeps. The SHA-256 sums are those that Keras and TensorFlow Datasets
publish for the same files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import gzip
import hashlib
import http.client
import os
import pathlib
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

from splitjax.data import cifar10, idx
from splitjax.data._archive import CHUNK_BYTES, SUMS, check_sums, read_members, read_sums, write_sums
from splitjax.errors import DataError

# (name of the file, bytes so far, bytes in all)
Progress: TypeAlias = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Download:
    """Describes an official file and what it holds.

    **Attributes:**

    - `url`: `https:`, `http:` or `file:`.
    - `size_bytes`, `sha256`: of the file as it is downloaded.
    - `files`: {name of a file to keep: its size in bytes, unpacked}: one file packed by gzip, or members of a tar
      archive, by their last name, which may be smaller.
    - `member_folder`: the folder of the members in the archive; None: the file is no archive, only packed.
    """

    url: str
    size_bytes: int
    sha256: str
    files: dict[str, int]
    member_folder: str | None = None

    @property
    def file_name(self) -> str:
        """The last part of the address."""
        return pathlib.PurePosixPath(urllib.parse.urlsplit(self.url).path).name


@dataclasses.dataclass(frozen=True)
class Source:
    """Describes a data set: the name of the `folder` that its files go to, and the `downloads` they come from."""

    folder: str
    downloads: tuple[Download, ...]

    @property
    def files(self) -> dict[str, int]:
        """{name of a file to keep: its size in bytes} over all downloads."""
        return {name: size for download in self.downloads for name, size in download.files.items()}


def _mnist(name: str, packed_bytes: int, sha256: str, unpacked_bytes: int) -> Download:
    return Download(
        f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}.gz", packed_bytes, sha256, {name: unpacked_bytes}
    )


_CIFAR10_PYTHON_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
SOURCES: dict[str, Source] = {
    "cifar10": Source(
        cifar10.FOLDER,
        (
            Download(
                cifar10.URL,
                170_052_171,
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                dict.fromkeys(cifar10.TRAIN_FILES + cifar10.TEST_FILES, 10_000 * cifar10.RECORD_BYTES),
                cifar10.FOLDER,
            ),
        ),
    ),
    "cifar10-python": Source(
        cifar10.PYTHON_FOLDER,
        (
            Download(
                _CIFAR10_PYTHON_URL,
                170_498_071,
                "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
                dict.fromkeys(cifar10.PYTHON_FILES, 32 << 20),
                cifar10.PYTHON_FOLDER,
            ),
        ),
    ),
    "mnist": Source(
        idx.FOLDER,
        (
            _mnist(
                "train-images-idx3-ubyte",
                9_912_422,
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                47_040_016,
            ),
            _mnist(
                "train-labels-idx1-ubyte",
                28_881,
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                60_008,
            ),
            _mnist(
                "t10k-images-idx3-ubyte",
                1_648_877,
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                7_840_016,
            ),
            _mnist(
                "t10k-labels-idx1-ubyte",
                4_542,
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
                10_008,
            ),
        ),
    ),
}


def fetch(
    name: str, folder: str | os.PathLike[str], *, progress: Progress | None = None, timeout_seconds: float = 30.0
) -> pathlib.Path:
    """Downloads a data set's official files, unless they are there.

    **Arguments:**

    - `name`: `"cifar10"` (binary version, 170 MB), `"cifar10-python"` (170 MB) or `"mnist"` (12 MB).
    - `folder`: where the set's own folder goes (`cifar-10-batches-bin`, `cifar-10-batches-py`, `mnist`); made if need
      be.
    - `progress`: called with the file's name, the bytes that have come, and all there are, about once a MiB.
    - `timeout_seconds`: how long the server may be silent.

    **Returns:** the path of the set's folder, for `load_cifar10` or `load_idx`. Beside the files lies `SHA256SUMS`,
    which the loaders check them against.

    A file is put in place only when it is whole and its checksum is the official one: whatever interrupts a download,
    there is nothing half done, and a file that is there is never overwritten. Of several processes of one machine one
    fetches, and the others wait for it.

    Raises `DataError` for an unknown name, where there is no network, for a download that is not the official file or
    does not unpack to what it should, for a folder that cannot be written to, and for files that are there but have
    changed since they were unpacked.
    """
    if name not in SOURCES:
        known = ", ".join(SOURCES)
        raise DataError(
            "no such data set to fetch", value=name, place="fetch, argument 'name'", remedy=f"choose one of {known}"
        )
    return fetch_source(SOURCES[name], pathlib.Path(folder), progress=progress, timeout_seconds=timeout_seconds)


def fetch_source(
    source: Source, folder: pathlib.Path, *, progress: Progress | None = None, timeout_seconds: float = 30.0
) -> pathlib.Path:
    """Downloads the files of any `source`, unless they are there, and returns their folder.

    `folder`, `progress`, `timeout_seconds` and what is raised are those of `fetch`, which calls it with a known source.
    """
    target = folder / source.folder
    if not _is_there(source, target):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder):
                if not _is_there(source, target):  # another process may have fetched it while this one waited
                    _fetch_into(source, folder, target, progress, timeout_seconds)
                    return target
        except OSError as error:
            raise DataError(
                f"the files cannot be written: {error.strerror or error}",
                place=str(folder),
                remedy="give a folder with room that may be written to",
            ) from error
    check_sums(target, source.files)
    return target


def _is_there(source: Source, target: pathlib.Path) -> bool:
    return all((target / name).is_file() for name in source.files)


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
    """Keeps other processes of this machine from fetching into the folder: all workers of a run start at once, and one
    download serves them all. The kernel lets go of the lock with the process."""
    opened = os.open(folder, os.O_RDONLY)  # the folder itself: nothing is left behind
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _fetch_into(
    source: Source, folder: pathlib.Path, target: pathlib.Path, progress: Progress | None, timeout_seconds: float
) -> None:
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as made:
        unpacked = pathlib.Path(made, source.folder)
        unpacked.mkdir()
        for download in source.downloads:
            if all((target / name).is_file() for name in download.files):
                continue
            packed = pathlib.Path(made, download.file_name)
            _download(download, packed, progress, timeout_seconds)
            _unpack(download, packed, unpacked)
            packed.unlink()
        _put_in_place(unpacked, target)


def _download(download: Download, file: pathlib.Path, progress: Progress | None, timeout_seconds: float) -> None:
    digest, num_bytes = hashlib.sha256(), 0
    with open(file, "wb") as out:
        for chunk in _chunks(download, timeout_seconds):
            num_bytes += len(chunk)
            if num_bytes > download.size_bytes:
                break
            digest.update(chunk)
            out.write(chunk)
            if progress:
                progress(download.file_name, num_bytes, download.size_bytes)
    wrong = None
    if num_bytes != download.size_bytes:
        wrong = (
            f"it has {'more than' if num_bytes > download.size_bytes else f'{num_bytes} of'} {download.size_bytes}"
            " bytes"
        )
    elif digest.hexdigest() != download.sha256:
        wrong = f"its SHA-256 is {digest.hexdigest()}"
    if wrong:
        raise DataError(
            f"the download is not the official file: {wrong}",
            place=download.url,
            remedy=(
                "try again: it may have been cut short, or a proxy has answered; the official SHA-256 is"
                f" {download.sha256}"
            ),
        )


def _chunks(download: Download, timeout_seconds: float) -> Iterator[bytes]:
    """Yields the bytes of a download as they come."""
    try:
        # ValueError: what urllib says of an address that is none
        with urllib.request.urlopen(download.url, timeout=timeout_seconds) as response:
            while chunk := response.read(CHUNK_BYTES):
                yield chunk
    except (OSError, http.client.HTTPException, ValueError) as error:  # URLError and time-outs are OSErrors
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it is the response
            reason = error
        else:
            reason = getattr(error, "reason", error)
        raise DataError(
            f"the download failed: {reason}",
            place=download.url,
            remedy=(
                "check the network and try again, or get the file elsewhere, unpack it, and give its folder:"
                f" --data-dir {download.member_folder or 'FOLDER'}"
            ),
        ) from error


def _unpack(download: Download, packed: pathlib.Path, folder: pathlib.Path) -> None:
    if download.member_folder is None:
        ((name, size),) = download.files.items()
        try:
            with gzip.open(packed) as contents, open(folder / name, "wb") as out:
                left = size
                while chunk := contents.read(min(CHUNK_BYTES, left + 1)):
                    left -= len(chunk)
                    if left < 0:
                        break
                    out.write(chunk)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise _not_expected(download, f"damaged: {error}") from error
        if left:
            raise _not_expected(download, f"{name} is not of {size} bytes")
        return
    wanted = {f"{download.member_folder}/{name}": name for name in download.files}
    # room for the archive's other members, such as the names of the classes
    for member, data in read_members(packed, wanted, max_bytes=sum(download.files.values()) + (4 << 20)):
        if len(data) > download.files[wanted[member]]:
            raise _not_expected(download, f"{wanted[member]} has {len(data)} bytes")
        (folder / wanted[member]).write_bytes(data)
    missing = [name for name in download.files if not (folder / name).is_file()]
    if missing:
        raise _not_expected(download, f"it lacks {', '.join(missing)}")


def _not_expected(download: Download, reason: str) -> DataError:
    return DataError(
        f"the archive does not unpack to what it should: {reason}",
        place=download.url,
        remedy="do not use it; report it if it is the official one",
    )


def _put_in_place(unpacked: pathlib.Path, target: pathlib.Path) -> None:
    """Moves the new files to their folder. What is there stays: a file of the user's own, or what another process was
    quicker with."""
    if not target.exists():
        write_sums(unpacked, [file.name for file in unpacked.iterdir()])
        try:
            os.rename(unpacked, target)
            return
        except OSError:
            if not target.is_dir():
                raise
            (unpacked / SUMS).unlink()
    new = [file.name for file in unpacked.iterdir() if not (target / file.name).exists()]
    known = {name: digest for name, digest in read_sums(target).items() if name not in new}
    write_sums(unpacked, new, known)
    for name in (*new, SUMS):
        os.replace(unpacked / name, target / name)
