"""Tries one input: whether its parser ends as it may, in time and within its memory.

An input goes in; nothing comes out, or the `Defect` that it shows. Time is that of the processor, so that a busy
machine is no defect; memory is the peak of what Python's allocators and numpy were asked for while the input was read.
"""

from __future__ import annotations

import dataclasses
import pathlib
import resource
import signal
import time
import traceback
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from benchmarks.fuzz.parser import SECONDS, Parser

_ENDLESS_SECONDS = 8  # of processor time, after which an input is given up
_MEASURED = 4  # of so many inputs, by their bytes, one has its memory measured
_PACKAGE = str(pathlib.Path(__file__).resolve().parents[2] / "splitjax")


@dataclasses.dataclass(frozen=True)
class Defect:
    """Describes what went wrong.

    **Attributes:**

    - `parser`: its name. `kind`: `"error"`, `"time"` or `"memory"`.
    - `what`: the error, the seconds or the bytes, in words.
    - `place`: of an error, the innermost line of the package: two defects of one kind, error and place are the same.
    - `data`: the input.
    """

    parser: str
    kind: str
    what: str
    place: str
    data: bytes

    @property
    def key(self) -> str:
        """What tells it from other defects."""
        return f"{self.parser}: {self.kind}: {self.place}"


class EndlessError(BaseException):
    """Ends the reading of an input that takes too long; no `Exception`, so that no parser catches it."""


def try_input(
    parser: Parser, data: bytes, folder: pathlib.Path, *, measured: bool | None = None, again: bool = False
) -> Defect | None:
    """Gives `data` to the `parser` as a file in `folder`. `measured`: whether its memory is measured; None: by chance,
    that of its bytes. What takes too much is tried `again`: what Python took for itself once, for an import or a table
    of its own that grew, is no defect. Returns the defect of the input, or None."""
    if measured is None:
        measured = zlib.crc32(data) % _MEASURED == 0
    path = folder / parser.file_name
    path.write_bytes(data)
    if measured:
        tracemalloc.start(1)
        before = tracemalloc.get_traced_memory()[0]
    began = time.process_time()
    defect = None
    try:
        with _no_longer_than(_ENDLESS_SECONDS):
            parser.read(path)
    except parser.error as error:
        defect = _unprintable(parser, error, data)
    except EndlessError:
        defect = Defect(parser.name, "time", f"more than {_ENDLESS_SECONDS} s", "", data)
    except Exception as error:
        frame = _innermost(error)
        defect = Defect(
            parser.name,
            "error",
            f"{type(error).__name__}: {str(error)[:200]}",
            f"{type(error).__name__} at {frame}",
            data,
        )
    seconds = time.process_time() - began
    peak = 0
    if measured:
        peak = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
    if defect is None and seconds > SECONDS:
        if measured:  # which slows down
            return try_input(parser, data, folder, measured=False)
        defect = Defect(parser.name, "time", f"{seconds:.1f} s", "", data)
    if defect is None and not parser.allows(peak, data):
        if not again:
            return try_input(parser, data, folder, measured=True, again=True)
        defect = Defect(parser.name, "memory", f"{peak} bytes for an input of {len(data)}", "", data)
    return defect


def limit_memory(more_bytes: int) -> None:
    """Keeps this process from taking `more_bytes` above what it has: what asks for more gets a `MemoryError`, which is
    a defect, and not the machine's memory."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _unprintable(parser: Parser, error: Exception, data: bytes) -> Defect | None:
    """Returns a defect for a typed error whose message cannot be printed."""
    try:
        str(error).encode("utf-8")
    except UnicodeEncodeError as unprintable:
        return Defect(parser.name, "error", str(unprintable), f"unprintable message at {_innermost(error)}", data)
    return None


def _innermost(error: Exception) -> str:
    lines = [frame for frame in traceback.extract_tb(error.__traceback__)[-200:] if frame.filename.startswith(_PACKAGE)]
    if not lines:
        return "?"
    return f"{pathlib.Path(lines[-1].filename).relative_to(_PACKAGE)}, {lines[-1].name}"


@contextmanager
def _no_longer_than(seconds: float) -> Iterator[None]:
    def end(signum: int, frame: FrameType | None) -> None:
        raise EndlessError

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
