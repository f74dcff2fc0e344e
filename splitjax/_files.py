"""Files that are whole or not there."""

from __future__ import annotations

import os
import pathlib
import uuid


def write_atomically(path: pathlib.Path, text: str, encoding: str = "utf-8") -> None:
    """Writes `text` to the file `path` in `encoding`, so that a reader, or a crash, meets either the old or the new
    one. Raises `OSError`."""
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(scratch, "x", encoding=encoding) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
