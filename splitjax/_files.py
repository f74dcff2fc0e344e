"""Files that are whole or not there, and packed ones that stay within bounds."""

from __future__ import annotations

import gzip
import io
import os
import pathlib
import uuid
from collections.abc import Callable

_SMALL_BYTES = 4 << 20
_LARGEST_RATIO = 200
_PART_BYTES = 1 << 18


def unpacked_limit(packed_bytes: int) -> int:
    """Returns how many bytes a file of `packed_bytes` may unpack to: 4 MiB, and 200 times its size.

    Text and tables pack to a tenth or less often to a hundredth; what gzip at its best makes a thousandth of is empty
    repetition, and harmless as long as it is small."""
    return _SMALL_BYTES + _LARGEST_RATIO * packed_bytes


def unpack(data: bytes) -> bytes:
    """Returns what gzip packed as `data`. Raises what `gzip` raises (`EOFError`, `OSError`, `zlib.error`), and
    `OSError` for what unpacks to more than `unpacked_limit`, before it takes the memory."""
    limit = unpacked_limit(len(data))
    parts, left = [], limit
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        while part := file.read(_PART_BYTES):  # which sets aside what is asked for
            parts.append(part)
            left -= len(part)
            if left < 0:
                raise OSError(f"{len(data)} bytes unpack to more than {limit}, too many to be trusted")
    return b"".join(parts)


def write_atomically(path: pathlib.Path, text: str, encoding: str = "utf-8") -> None:
    """Writes `text` to the file `path` in `encoding`, so that a reader, or a crash, meets either the old or the new
    one. Raises `OSError`."""

    def write(scratch: pathlib.Path) -> None:
        with open(scratch, "w", encoding=encoding) as file:
            file.write(text)

    replace_atomically(path, write)


def replace_atomically(path: pathlib.Path, write: Callable[[pathlib.Path], object]) -> None:
    """Makes the file `path` what `write` writes to the path that it is called with, which ends as `path` does.

    A reader, or a crash, meets either the old or the new one. What a link leads to is replaced, not the link; what is
    no file, such as `/dev/stdout`, is written to as it is. Raises `OSError`, and what `write` raises.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        write(path)
        return
    scratch = path.with_name(f".{path.stem}.{uuid.uuid4().hex[:8]}.tmp{path.suffix}")
    try:
        write(scratch)
        with open(scratch, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
