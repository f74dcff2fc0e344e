"""Reads what the workers write: streams it line by line with the rank in front, keeps the last lines for the report of
a failure, and writes files.

The workers' pipes go in, lines on the launcher's own streams come out.
"""

from __future__ import annotations

import collections
import os
import pathlib
import selectors
import threading
import time
from collections.abc import Callable
from typing import IO, TextIO

from splitjax.errors import LaunchError

NUM_LAST_LINES = 20
# A line longer than this is shown in pieces.
_MAX_LINE_BYTES = 1 << 16
_COLOURS = (36, 33, 32, 35, 34, 31)


class Console:
    """Writes lines to two streams.

    **Arguments:** `out`, `err`: where output and errors go, such as `sys.stdout` and `sys.stderr`; None for nowhere.
    """

    def __init__(self, out: TextIO | None, err: TextIO | None):
        self._streams = (out, err)
        self._lock = threading.Lock()

    def line(self, which: int, rank: int | None, text: str) -> None:
        """Writes the line `text` of worker `rank`, or the launcher's own (None), to stream `which`: 0 (output) or 1
        (error)."""
        stream = self._streams[which]
        if stream is None:
            return
        mark = "[launch]" if rank is None else f"[{rank}]"
        if stream.isatty() and not os.environ.get("NO_COLOR"):
            mark = f"\x1b[{1 if rank is None else _COLOURS[rank % len(_COLOURS)]}m{mark}\x1b[0m"
        encoding = getattr(stream, "encoding", None) or "utf-8"
        with self._lock:
            try:
                stream.write(f"{mark} {text}\n".encode(encoding, "replace").decode(encoding))
                stream.flush()
            except (OSError, ValueError):  # nobody reads any more; the run goes on
                self._streams = tuple(None if kept is stream else kept for kept in self._streams)

    def say(self, text: str) -> None:
        """Writes `text`, the launcher's own words, to standard error."""
        for line in text.split("\n"):
            self.line(1, None, line)


class Output:
    """Reads the workers' pipes in one thread, so that their lines come in the order in which they were written.

    **Arguments:**

    - `console`: where the lines go.
    - `log_dir`: a folder for a file per worker; None for no files.
    - `attempt`: the number of the attempt, for the files' names.
    """

    def __init__(self, console: Console, log_dir: pathlib.Path | None, attempt: int):
        self._console, self._log_dir, self._attempt = console, log_dir, attempt
        self._selector = selectors.DefaultSelector()
        self._partial: dict[int, bytearray] = {}
        self._tails: dict[int, collections.deque[str]] = {}
        self._open: collections.Counter[int] = collections.Counter()
        self._logs: dict[int, IO[bytes]] = {}
        self._thread = threading.Thread(target=self._read, name="splitjax-launch-output", daemon=True)
        self._ended = threading.Event()
        self._now = 0.0

    def add(self, rank: int, out: IO[bytes], err: IO[bytes]) -> None:
        """Takes over the two pipes `out` and `err` of worker `rank`. All of them, before `start`."""
        self._tails[rank] = collections.deque(maxlen=NUM_LAST_LINES)
        if self._log_dir is not None:
            path = self._log_dir / f"worker-{rank}.attempt-{self._attempt}.log"
            self._logs[rank] = open(path, "wb", buffering=0)
        for which, pipe in enumerate((out, err)):
            self._open[rank] += 1
            self._partial[pipe.fileno()] = bytearray()
            self._selector.register(pipe, selectors.EVENT_READ, self._taker(rank, which))

    def add_notices(self, file: int, notice: Callable[[str | None, float], None]) -> None:
        """Takes over the pipe `file` (a descriptor) that tells how a worker is: `notice(line, now)` for what it says,
        `notice(None, now)` when its end of the pipe is closed, which is when the other workers lose it. `now`:
        monotonic, the same for what was seen at once."""
        pipe = os.fdopen(file, "rb", buffering=0)
        self._partial[pipe.fileno()] = bytearray()
        self._selector.register(
            pipe, selectors.EVENT_READ, lambda line: notice(None if line is None else line.decode(), self._now)
        )

    def start(self) -> None:
        """Begins to read."""
        self._thread.start()

    def is_open(self, rank: int) -> bool:
        """Returns whether some process of worker `rank` may still write."""
        return self._open[rank] > 0

    def last_lines(self, rank: int) -> tuple[str, ...]:
        """Returns the last lines that worker `rank` wrote, at most `NUM_LAST_LINES`."""
        return tuple(self._tails.get(rank, ()))

    def finish(self, timeout_seconds: float) -> None:
        """Waits for the end of all pipes, at most `timeout_seconds`; what hides from its process group can keep them
        open, hence the timeout."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        if not self._thread.is_alive():
            self._selector.close()
            for log in self._logs.values():
                log.close()

    def _taker(self, rank: int, which: int) -> Callable[[bytes | None], None]:
        def take(line: bytes | None) -> None:
            if line is None:
                self._open[rank] -= 1
                return
            text = line.decode("utf-8", "replace").rstrip("\r")
            self._tails[rank].append(text)
            if rank in self._logs:
                try:
                    self._logs[rank].write(line + b"\n")
                except OSError as error:  # a full disk must not stop what is training
                    self._console.say(f"the log of worker {rank} ends here: {error.strerror}")
                    self._logs.pop(rank).close()
            self._console.line(which, rank, text)

        return take

    def _read(self) -> None:
        while self._selector.get_map() and not (self._ended.is_set() and not any(self._open.values())):
            ready = self._selector.select(0.1)
            self._now = time.monotonic()
            for key, _ in ready:
                self._read_from(key)
        for key in list(self._selector.get_map().values()):
            self._drop(key)

    def _read_from(self, key: selectors.SelectorKey) -> None:
        data = os.read(key.fd, _MAX_LINE_BYTES)
        partial = self._partial[key.fd]
        partial += data
        *lines, rest = partial.split(b"\n")
        if len(rest) >= _MAX_LINE_BYTES or (not data and rest):
            lines, rest = [*lines, rest], bytearray()
        self._partial[key.fd] = rest
        for line in lines:
            key.data(bytes(line))
        if not data:
            key.data(None)
            self._drop(key)

    def _drop(self, key: selectors.SelectorKey) -> None:
        self._selector.unregister(key.fileobj)
        key.fileobj.close()  # type: ignore[union-attr]  # pipes are registered, no descriptors


def make_log_dir(path: pathlib.Path) -> pathlib.Path:
    """Makes the folder `path` where it does not exist, and returns it. Raises `LaunchError` where it cannot be written
    to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(13, "it may not be written to")
    except OSError as error:
        raise LaunchError(
            f"the folder for the workers' logs cannot be used: {error.strerror or error}",
            value=str(path),
            place="--log-dir",
            remedy="give a folder that may be written to",
        ) from error
    return path
