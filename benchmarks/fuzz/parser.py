"""What a parser is to the fuzzer: what reads bytes, what it may raise, and how much memory it may take."""

from __future__ import annotations

import dataclasses
import gzip
import io
import pathlib
import zlib
from collections.abc import Callable, Sequence

from splitjax._files import unpacked_limit

SECONDS: float = 1.0  # of processor time, for one input


@dataclasses.dataclass(frozen=True)
class Parser:
    """Describes a parser.

    **Attributes:**

    - `name`: what the command line and the page call it.
    - `error`: what it raises for what it cannot read; anything else is a defect.
    - `read`: (the path of a file with the input) -> nothing. What was read is also used: printed, written, read again.
    - `seeds`: returns valid inputs, from which the search begins.
    - `mutations`: names of `strategies.STRATEGIES` that know the format.
    - `multiple`, `floor_bytes`: an input of n bytes may take `floor_bytes + multiple * n` bytes at its peak; a packed
      one by what it unpacks to, which `_files.unpacked_limit` bounds.
    - `max_bytes`: the longest input that is tried.
    - `file_name`: of the file, where the name says what it is.
    """

    name: str
    error: type[Exception]
    read: Callable[[pathlib.Path], object]
    seeds: Callable[[], Sequence[bytes]]
    mutations: tuple[str, ...]
    multiple: int
    floor_bytes: int = 2 << 20
    max_bytes: int = 1 << 15
    file_name: str = "input"

    def allows(self, num_bytes: int, data: bytes) -> bool:
        """Tells whether the input `data` may take `num_bytes` of memory."""
        size = len(data)
        if num_bytes <= self.floor_bytes + self.multiple * size:
            return True
        if data[:2] == b"\x1f\x8b":
            size = _unpacked_size(data, unpacked_limit(size))
        elif data[:2] == b"PK":
            size = unpacked_limit(size)
        return num_bytes <= self.floor_bytes + self.multiple * size


def _unpacked_size(data: bytes, limit: int) -> int:
    """Returns how much of `data` Python's gzip unpacks, as parsers read it: several members, and header flags that zlib
    refuses."""
    size = 0
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as reader:
        try:
            while size < limit and (chunk := reader.read(1 << 16)):
                size += len(chunk)
        except (OSError, EOFError, zlib.error):  # as far as it goes
            pass
    return size
