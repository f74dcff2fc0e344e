"""Reads archives without trust in their names, kinds or sizes, and checks files against `SHA256SUMS`.

The path of an archive goes in, the contents of the wanted members come out. What is downloaded may be anything, so each
thing that an archive can do beyond holding plain files is refused here, for all loaders alike.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import pathlib
import tarfile
import types
import zlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

from splitjax._files import unpacked_limit
from splitjax.errors import DataError

# Written beside what was unpacked, as sha256sum writes it: `sha256sum -c SHA256SUMS` checks it too.
SUMS: str = "SHA256SUMS"
CHUNK_BYTES: int = 1 << 20
_MAX_MEMBERS = 1000
# Of what stands before a member (long names, extended attributes), each time and in all: tarfile looks through it in
# time that grows with the square of its length.
_MAX_EXTENDED_BYTES, _MAX_ALL_EXTENDED_BYTES = 8 << 10, 128 << 10
_EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_MAX_EMPTY = 8  # reads behind the end of an archive
_REMEDY = "do not use this archive: fetch the official one again, and check its checksum"


class Readable(Protocol):
    """Reads bytes, as a file opened in binary mode or by gzip does."""

    def read(self, size: int = -1, /) -> bytes:
        """Returns the next bytes, at most `size` of them unless it is -1; none at the end."""
        ...


def read_members(archive: pathlib.Path, wanted: Collection[str], *, max_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Yields the wanted members of a .tar or .tar.gz as (name, contents), in the order of the archive.

    Nothing is written.

    **Arguments:**

    - `archive`: read from front to back, to its end, so that gzip's own checksum is checked.
    - `wanted`: names of regular files; others are passed over.
    - `max_bytes`: of all that the archive unpacks to, wanted or not.

    Raises `DataError` for an archive that is damaged or ends early, that unpacks to more than `max_bytes` or to more
    than an archive of its size can be trusted with (`_files.unpacked_limit`), or that
    holds a link, a device, a sparse file, or a name that leads out of its folder, wanted or not; the offending member
    is named.
    """
    place = str(archive)
    try:
        with open(archive, "rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            if zipped:
                max_bytes = min(max_bytes, unpacked_limit(os.fstat(file.fileno()).st_size))
            with gzip.GzipFile(fileobj=file) if zipped else file as contents:
                bounded = _Bounded(contents, max_bytes, archive)
                stream: Any = bounded  # of a stream that it reads tarfile asks for `read` alone; its stubs ask for more
                with tarfile.open(fileobj=stream, mode="r|", tarinfo=_headers(str(archive))) as tar:
                    for count, member in enumerate(tar):
                        place = f"{archive}, member {member.name!r}"
                        _check_member(member, count, place)
                        if member.isreg() and member.name in wanted:
                            contained = tar.extractfile(member)
                            assert contained is not None, "a regular file has contents"
                            data = contained.read()
                            if len(data) != member.size:
                                raise tarfile.ReadError(f"{len(data)} of its {member.size} bytes are there")
                            yield member.name, data
                place = str(archive)
                while bounded.read(CHUNK_BYTES):
                    pass
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, RecursionError, ArithmeticError) as error:
        raise DataError(f"a damaged archive: {error}", place=place, remedy=_REMEDY) from error
    except ValueError as error:  # what tarfile says of numbers and names in extended headers
        if isinstance(error, DataError):
            raise
        raise DataError(f"a damaged archive: {error}", place=place, remedy=_REMEDY) from error
    except OSError as error:
        raise DataError(
            f"the archive cannot be read: {error.strerror or error}",
            place=place,
            remedy="check the path, its permissions and the disk",
        ) from error


class _Bounded:
    """Reads a file up to a number of bytes: a small archive can unpack to more than any disk holds."""

    def __init__(self, contents: Readable, max_bytes: int, archive: pathlib.Path):
        self._contents, self._left, self._archive, self._max = contents, max_bytes, archive, max_bytes
        self._num_empty = 0

    def read(self, size: int) -> bytes:
        data = self._contents.read(size)
        self._num_empty += not data
        if self._num_empty > _MAX_EMPTY:  # tarfile goes on to where a header of a few bytes says that the next is
            raise EOFError("it ends before its members do")
        self._left -= len(data)
        if self._left < 0:
            raise DataError(
                f"the archive unpacks to more than {self._max} bytes", place=str(self._archive), remedy=_REMEDY
            )
        return data


def _headers(place: str) -> type[tarfile.TarInfo]:
    """Returns the type of the headers of one archive, which refuses extended ones that are long; `place`: its path."""
    total = 0

    class Header(tarfile.TarInfo):
        @classmethod
        def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Header:
            nonlocal total
            header = super().frombuf(buf, encoding, errors)
            if header.type in _EXTENDED:
                total += header.size
                if header.size > _MAX_EXTENDED_BYTES or total > _MAX_ALL_EXTENDED_BYTES:
                    raise DataError(
                        "the archive says more about its members than members need",
                        value=f"{header.size} bytes",
                        place=place,
                        remedy=_REMEDY,
                    )
            return header

    return Header


def _check_member(member: tarfile.TarInfo, count: int, place: str) -> None:
    """Raises `DataError` for a member that is no plain file or folder inside the archive's own folder."""
    if count >= _MAX_MEMBERS:
        raise DataError(f"the archive has more than {_MAX_MEMBERS} members", place=place, remedy=_REMEDY)
    if not (member.isreg() or member.isdir()):
        raise DataError(
            "the archive holds a link or a device", value=member.linkname or None, place=place, remedy=_REMEDY
        )
    if member.issparse():  # its holes are in no archive, and fill any memory
        raise DataError("the archive holds a sparse file", value=member.size, place=place, remedy=_REMEDY)
    try:
        tarfile.data_filter(member, os.curdir)
    except tarfile.FilterError as error:
        raise DataError(
            f"the archive holds a name that leads out of its folder: {error}", place=place, remedy=_REMEDY
        ) from error


def file_digest(file: pathlib.Path, algorithm: str = "sha256") -> str:
    """Computes the digest of `file` by a hashlib `algorithm`, in hex. Raises `DataError` for an unreadable file."""
    try:
        with open(file, "rb") as contents:
            return hashlib.file_digest(contents, algorithm).hexdigest()
    except OSError as error:
        raise DataError(
            f"the file cannot be read: {error.strerror or error}",
            place=str(file),
            remedy="check the path, its permissions and the disk",
        ) from error


def write_sums(
    folder: pathlib.Path, names: Collection[str], known: Mapping[str, str] = types.MappingProxyType({})
) -> None:
    """Writes `SHA256SUMS` of the files `names` of `folder`, with the `known` sums, {file name: hex}, of further ones.

    Raises `DataError` for a file that cannot be read.
    """
    sums = {name: file_digest(folder / name) for name in names} | dict(known)
    lines = [f"{digest}  {name}\n" for name, digest in sorted(sums.items())]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def read_sums(folder: pathlib.Path) -> dict[str, str]:
    """Reads {file name: SHA-256 in hex} from the `SHA256SUMS` of `folder`; empty where there is none.

    Raises `DataError` for a malformed one.
    """
    file = folder / SUMS
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise _bad_sums(file, str(error)) from error
    sums = {}
    for number, line in enumerate(text.splitlines(), start=1):
        digest, separator, name = line.partition("  ")
        if not separator or not name or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise _bad_sums(file, f"line {number} is no checksum with a name: {line!r}")
        sums[name] = digest
    return sums


def check_sums(folder: pathlib.Path, names: Collection[str]) -> None:
    """Compares the files `names` of `folder` with its `SHA256SUMS`, as far as that is there and lists them.

    Raises `DataError` naming the first file that has changed, and what `read_sums` raises.
    """
    for name, digest in read_sums(folder).items():
        if name in names and file_digest(folder / name) != digest:
            raise DataError(
                f"a damaged data file: {name} is not what was unpacked",
                place=str(folder / name),
                remedy=(
                    f"delete the folder {folder} and fetch it again; if the file was changed on purpose, delete {SUMS}"
                ),
            )


def _bad_sums(file: pathlib.Path, reason: str) -> DataError:
    return DataError(
        f"damaged checksums: {reason}", place=str(file), remedy=f"delete the folder {file.parent} and fetch it again"
    )
