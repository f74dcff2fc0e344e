"""Where each process of a run is: in which step, in what, and since when; a page of memory for each that the launcher
reads.

A worker writes its page (`StepRecorder`), a few machine words at a time; nobody is sent anything. The launcher reads it
(`Board`) also when the worker is stopped, or stuck in a call that does not let Python run. Times are those of
`time.monotonic_ns`, which all processes of a machine share and which setting the clock does not move.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import mmap
import os
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence

from splitjax.runtime.launch import variables

NUM_TIMES = 64  # steps whose times a page holds

_PAGE_BYTES = 4096
# pid, ident of the loop's thread; step, completed step; place, since when; when the present stretch began; steps timed
_FACTS = struct.Struct("=8q")
_WAITS_FOR = struct.Struct("=q")  # 1 + the rank that is waited for, 0 for none
_TIMES = struct.Struct("=2f")  # of a step: seconds, and those of its own host
_DETAIL_BYTES = 64
_WAITS_AT = _FACTS.size
_DETAIL_AT = _WAITS_AT + _WAITS_FOR.size
_TIMES_AT = _DETAIL_AT + _DETAIL_BYTES


class Place(enum.IntEnum):
    """Says what a process does, in the order of a step: of two processes in the same step the one that has come less
    far holds up the other."""

    OUTSIDE = 0  # not in a training loop: before it, behind it, or in a script without
    DATA = 1  # waits for its batch
    COMPILE = 2  # traces, plans or compiles
    DISPATCH = 3  # gives the step to the devices; some run it before they return, and wait for the others in it
    HOST = 4  # Python between steps: metrics, observers
    EVALUATE = 5
    CHECKPOINT = 6  # saves
    COLLECTIVE = 7  # waits for the devices, and so for the other processes

    @property
    def words(self) -> str:
        """Returns the place as the end of a sentence."""
        return _WORDS[self]


_WORDS = {
    Place.OUTSIDE: "outside a training loop",
    Place.DATA: "waiting for data",
    Place.COMPILE: "compiling",
    Place.DISPATCH: "in the step itself",
    Place.HOST: "in host code between steps",
    Place.EVALUATE: "evaluating",
    Place.CHECKPOINT: "saving a checkpoint",
    Place.COLLECTIVE: "waiting for a collective",
}
# Times in these are no step's: a step that saves or compiles is no slow step.
APART = frozenset({Place.COMPILE, Place.EVALUATE, Place.CHECKPOINT})
# What of a step may be waiting for other processes.
_SHARED = frozenset({Place.DISPATCH, Place.COLLECTIVE})


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Holds the times of the last steps of a process, oldest first where there are fewer than `NUM_TIMES`.

    **Attributes:** `seconds`: of each step, without compiling, saving and evaluating. `own_seconds`: those of its
    own host, in data and Python code, without the step itself, in which processes wait for each other.
    """

    seconds: tuple[float, ...] = ()
    own_seconds: tuple[float, ...] = ()

    @property
    def median_seconds(self) -> float | None:
        """Returns the upper median of the steps' seconds; None before the first."""
        return statistics.median_high(self.seconds) if self.seconds else None

    def quantile(self, share: float) -> float:
        """Returns the seconds that a `share` (0 to 1) of the steps did not exceed. Raises `ValueError` without
        steps."""
        return _quantile(self.seconds, share)

    def own_quantile(self, share: float) -> float:
        """Returns the same of the own seconds. `share`: 0 to 1. Raises `ValueError` without steps."""
        return _quantile(self.own_seconds, share)


def _quantile(values: Sequence[float], share: float) -> float:
    if not values:
        raise ValueError("no step was timed")
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@dataclasses.dataclass(frozen=True)
class Whereabouts:
    """Holds what a page says.

    **Attributes:**

    - `pid`, `thread_ident`: the process that joined, 0 before, and the thread of its loop.
    - `step`: the step that is being done, from 1; `completed`: the last one whose results are there.
    - `place`, `place_since_ns`: where it is, and since when.
    - `since_ns`: when the present stretch began: by completing a step, or by entering or leaving something that has a
      deadline of its own.
    - `detail`: more about the place.
    - `waits_for`: the rank whose answer it waits for; None for none that is known.
    - `times`: of the last steps.
    """

    pid: int
    thread_ident: int
    step: int
    completed: int
    place: Place
    place_since_ns: int
    since_ns: int
    detail: str = ""
    waits_for: int | None = None
    times: StepTimes = StepTimes()


class StepRecorder:
    """Records on a page where this process is. The methods cost about a microsecond each, and are called by the thread
    of the training loop.

    **Arguments:**

    - `page`: a board's memory (or any writable buffer of whole pages); memory of its own where the process is alone.
    - `rank`: whose page it is.
    """

    def __init__(self, page: mmap.mmap | bytearray | None = None, rank: int = 0):
        self._memory: mmap.mmap | bytearray = bytearray(_PAGE_BYTES) if page is None else page
        self._base = rank * _PAGE_BYTES
        self.rank: int = rank
        self.num_ranks: int = len(self._memory) // _PAGE_BYTES
        self._step = self._completed = self._num_times = 0
        self._place = Place.OUTSIDE
        now = time.monotonic_ns()
        self._place_since = self._since = self._completed_at = now
        self._waited_ns = self._apart_ns = 0

    @classmethod
    def open(cls) -> StepRecorder:
        """Returns a recorder on this process's page of the launcher's board, or on memory of its own in a process that
        no launcher started."""
        file, pid = os.environ.get(variables.BOARD_FD), os.environ.get(variables.JOINED_PID)
        if file is None or pid != str(os.getpid()):
            return cls()
        size = int(os.environ[variables.NUM_PROCESSES]) * _PAGE_BYTES
        try:
            memory = mmap.mmap(int(file), size)
        except (OSError, ValueError):  # somebody closed it; whoever watches sees a process outside a loop
            return cls()
        return cls(memory, int(os.environ[variables.PROCESS_ID]))

    @property
    def place(self) -> Place:
        """Returns where this process is, as it was last told."""
        return self._place

    def joined(self) -> None:
        """Writes the process id on the page, and forgets all else."""
        self._write()

    def at(self, place: Place, step: int | None = None, detail: str = "") -> None:
        """Notes that the process is in a `place`, of step number `step` (the same as before if not given); `detail`: at
        most 64 bytes of ASCII that say more."""
        now, before = time.monotonic_ns(), self._place
        if before in _SHARED:
            self._waited_ns += now - self._place_since
        elif before in APART:
            self._apart_ns += now - self._place_since
        if step is not None:
            self._step = step
        if place in APART or before in APART or before is Place.OUTSIDE:
            self._since = now
        self._place, self._place_since = place, now
        self._write()
        at = self._base + _DETAIL_AT
        if detail or self._memory[at]:
            text = detail.encode("ascii", "replace")[:_DETAIL_BYTES]
            self._memory[at : at + _DETAIL_BYTES] = text.ljust(_DETAIL_BYTES, b"\0")

    @contextlib.contextmanager
    def during(self, place: Place, detail: str = "") -> Iterator[None]:
        """Notes a `place` for a block, with `detail`, and the place before it behind it."""
        before = self._place
        self.at(place, detail=detail)
        try:
            yield
        finally:
            self.at(before)

    def completed(self, step: int) -> None:
        """Notes that the results of step number `step` are there."""
        now = time.monotonic_ns()
        if self._place in _SHARED:
            self._waited_ns += now - self._place_since
            self._place_since = now
        nanoseconds = now - self._completed_at - self._apart_ns
        offset = self._base + _TIMES_AT + self._num_times % NUM_TIMES * _TIMES.size
        _TIMES.pack_into(self._memory, offset, nanoseconds / 1e9, max(0, nanoseconds - self._waited_ns) / 1e9)
        self._num_times += 1
        self._completed, self._completed_at, self._since = step, now, now
        self._waited_ns = self._apart_ns = 0
        self._write()

    def begin(self) -> None:
        """Notes that a training loop begins: the next step's time counts from here."""
        self._completed_at = time.monotonic_ns()
        self._waited_ns = self._apart_ns = 0

    def waits_for(self, rank: int | None) -> None:
        """Notes that an answer of process `rank` is waited for; None: no longer."""
        _WAITS_FOR.pack_into(self._memory, self._base + _WAITS_AT, 0 if rank is None else rank + 1)

    def write_at(self, offset: int, data: bytes) -> None:
        """Writes `data` at an `offset` of this process's page, behind what this class keeps there; the offset counts
        bytes, below 4,096."""
        self._memory[self._base + offset : self._base + offset + len(data)] = data

    def read(self, rank: int | None = None) -> Whereabouts:
        """Returns what the page of process `rank` says, this one's if not given."""
        return read_page(self._memory, self.rank if rank is None else rank)

    def _write(self) -> None:
        _FACTS.pack_into(
            self._memory,
            self._base,
            os.getpid(),
            threading.get_ident(),
            self._step,
            self._completed,
            self._place,
            self._place_since,
            self._since,
            self._num_times,
        )


def read_page(memory: mmap.mmap | bytearray, rank: int) -> Whereabouts:
    """Returns what the page of process `rank` in the `memory` of a board says."""
    base = rank * _PAGE_BYTES
    pid, ident, step, completed, place, place_since, since, num_times = _FACTS.unpack_from(memory, base)
    (waits_for,) = _WAITS_FOR.unpack_from(memory, base + _WAITS_AT)
    detail = (
        bytes(memory[base + _DETAIL_AT : base + _DETAIL_AT + _DETAIL_BYTES]).rstrip(b"\0").decode("ascii", "replace")
    )
    count = min(num_times, NUM_TIMES)
    pairs = list(_TIMES.iter_unpack(memory[base + _TIMES_AT : base + _TIMES_AT + count * _TIMES.size]))
    times = StepTimes(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))
    return Whereabouts(
        pid,
        ident,
        step,
        completed,
        Place(place),
        place_since,
        since,
        detail,
        waits_for - 1 if waits_for else None,
        times,
    )


class Board:
    """Holds the pages of all workers of an attempt, in the launcher.

    **Arguments:** `num_processes`: how many workers.

    `file` is the descriptor that workers inherit.
    """

    def __init__(self, num_processes: int):
        self.file: int = shared_file("splitjax-board")
        # Written, not only made longer: a full disk shows here, and not as a signal in a worker.
        os.write(self.file, bytes(num_processes * _PAGE_BYTES))
        self._memory = mmap.mmap(self.file, num_processes * _PAGE_BYTES)

    def read(self, rank: int) -> Whereabouts:
        """Returns what the page of worker `rank` says."""
        return read_page(self._memory, rank)

    def bytes_at(self, rank: int, offset: int, count: int) -> bytes:
        """Returns `count` bytes at an `offset` of the page of worker `rank`, as it wrote them with
        `StepRecorder.write_at`."""
        begin = rank * _PAGE_BYTES + offset
        return bytes(self._memory[begin : begin + count])

    def close(self) -> None:
        """Lets go of the memory; workers keep theirs."""
        self._memory.close()
        os.close(self.file)


def shared_file(name: str) -> int:
    """Returns the descriptor of a new file without a path: in memory where the system has such files, with a `name` for
    whoever lists them."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
