"""Reads a file of text, plain or gzip: a path goes in, the text comes out."""

from __future__ import annotations

import pathlib
import zlib

from splitjax._files import unpack
from splitjax.errors import TraceFileError


def read_text(path: pathlib.Path) -> str:
    """Returns the text of the file at `path`. Raises `TraceFileError`, which names it, for what cannot be read,
    and for a small file that unpacks to a huge one."""
    try:
        data = path.read_bytes()
        return (unpack(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    except OSError as error:
        raise TraceFileError(
            f"the file cannot be read: {error.strerror or error}",
            place=str(path),
            remedy="give the path of a file that exists and may be read",
        ) from error
    except (EOFError, zlib.error) as error:
        raise TraceFileError(
            f"the file is gzip, and is cut short or damaged: {error}",
            place=str(path),
            remedy="fetch it anew, or unpack it first",
        ) from error
    except UnicodeDecodeError as error:
        raise TraceFileError(
            f"the file is no text: {error.reason}", place=str(path), remedy="give a text in UTF-8, plain or gzip"
        ) from error
