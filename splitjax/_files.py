"""Files that are whole or not there."""

from __future__ import annotations

import os
import pathlib
import uuid
from collections.abc import Callable


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
