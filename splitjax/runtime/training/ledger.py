"""Goodput: which share of the time of a run, over all its starts, went into steps that were kept.

Source of the word and of its parts: Google's ML Goodput (2024), "runtime goodput": time lost to starting, compiling,
waiting for input, saving and doing steps again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

from splitjax._files import write_atomically
from splitjax.codec import Codec, Wording
from splitjax.errors import DataError

# What an attempt's seconds go to. "step" is what the rest leaves.
PARTS = ("start", "compile", "input", "checkpoint", "evaluate")
FLUSH_SECONDS = 10.0


@dataclasses.dataclass
class RecordedAttempt:
    """Holds the times of a start of a run.

    - `begin_unix_seconds`, `end_unix_seconds`: when it began, and when it was last heard of.
    - `first_step`, `last_step`: the numbers of its steps, from 1; `last_step` is `first_step - 1` if it did none.
    - `seconds`: of each of `PARTS`.
    """

    begin_unix_seconds: float
    end_unix_seconds: float
    first_step: int  # the first one it did
    last_step: int  # the last one it did; first_step - 1 if none
    seconds: dict[str, float]


def steady_clock() -> Callable[[], float]:
    """Returns a clock that shows Unix seconds now, and goes on with the time that passes, whatever the machine's clock
    is set to."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


class Ledger:
    """Keeps the times of one attempt, and writes them beside those of earlier ones.

    **Arguments:**

    - `file`: JSON; None keeps nothing. An unreadable one is begun anew: it is a log, not part of the run.
    - `begin_unix_seconds`: when this attempt's process started, if earlier than now.
    - `clock`: Unix seconds; `steady_clock()` if not given.
    """

    def __init__(
        self,
        file: pathlib.Path | None,
        begin_unix_seconds: float | None = None,
        clock: Callable[[], float] | None = None,
    ):
        clock = clock or steady_clock()
        self._file, self._clock = file, clock
        begin = clock() if begin_unix_seconds is None else begin_unix_seconds
        self._earlier = _read(file)
        self._now = RecordedAttempt(begin, clock(), 0, -1, dict.fromkeys(PARTS, 0.0))
        self._flushed = begin

    def started(self, first_step: int) -> None:
        """Notes that step `first_step` is about to be done: everything so far was starting."""
        self._now.first_step, self._now.last_step = first_step, first_step - 1
        self._now.seconds["start"] = max(0.0, self._clock() - self._now.begin_unix_seconds)

    @contextlib.contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Counts the time of a block as `part`."""
        begin = self._clock()
        try:
            yield
        finally:
            self._now.seconds[part] += self._clock() - begin

    def step_done(self, step: int) -> None:
        """Notes that step number `step` is done, and writes the file now and then."""
        self._now.last_step = step
        if self._clock() - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Writes the file. A full disk is no reason to stop training: what cannot be written now may be later."""
        self._now.end_unix_seconds = self._flushed = self._clock()
        if self._file is not None:
            with contextlib.suppress(OSError):
                write_atomically(self._file, _JSON.text(_Attempts((*self._earlier, self._now))))

    def summary(self) -> Summary:
        """Returns what this attempt and the earlier ones add up to."""
        self._now.end_unix_seconds = self._clock()
        return summarise((*self._earlier, self._now))


@dataclasses.dataclass(frozen=True)
class Summary:
    """Holds the seconds of a whole run by what they went to. `parts`: PARTS, `"step"` (kept steps), `"repeated"` (steps
    whose work was lost), `"restart"` (between the end of an attempt and the start of the next)."""

    total_seconds: float
    parts: dict[str, float]
    num_attempts: int
    repeated_steps: int

    @property
    def goodput(self) -> float:
        """Returns the share of time in steps that were kept, 0 to 1."""
        return self.parts["step"] / self.total_seconds if self.total_seconds > 0 else 0.0

    def __str__(self) -> str:
        shown = [
            (name, seconds)
            for name, seconds in self.parts.items()
            if name != "step" and seconds >= 0.0005 * self.total_seconds
        ]
        rest = ", ".join(
            f"{name} {seconds / self.total_seconds:.1%}" for name, seconds in sorted(shown, key=lambda item: -item[1])
        )
        tries = (
            f" in {self.num_attempts} attempts, {self.repeated_steps} steps done again" if self.num_attempts > 1 else ""
        )
        return f"goodput {self.goodput:.1%} of {self.total_seconds:.0f} s{tries}" + (f"; {rest}" if rest else "")


def summarise(attempts: Sequence[RecordedAttempt]) -> Summary:
    """Adds up the `attempts` of a run, in order."""
    parts: dict[str, float] = dict.fromkeys(("step", *PARTS, "repeated", "restart"), 0.0)
    repeated_steps = 0
    for number, attempt in enumerate(attempts):
        for name, seconds in attempt.seconds.items():
            parts[name] = parts.get(name, 0.0) + seconds
        length = attempt.end_unix_seconds - attempt.begin_unix_seconds
        in_steps = max(0.0, length - sum(attempt.seconds.values()))
        done = attempt.last_step - attempt.first_step + 1
        # Steps that a later attempt did again were in vain.
        resumed = min(
            (later.first_step for later in attempts[number + 1 :] if later.last_step >= later.first_step), default=None
        )
        lost = 0 if resumed is None else min(done, max(0, attempt.last_step - resumed + 1))
        vain = in_steps * (lost / done) if done else 0.0  # a share first: a product of long numbers is no float
        repeated_steps += lost
        parts["repeated"] += vain
        parts["step"] += in_steps - vain if done else 0.0
        if not done:
            parts["start"] += in_steps
        if number:
            parts["restart"] += max(0.0, attempt.begin_unix_seconds - attempts[number - 1].end_unix_seconds)
    return Summary(sum(parts.values()), parts, len(attempts), repeated_steps)


@dataclasses.dataclass(frozen=True)
class _Attempts:
    """Holds what the file of a ledger says."""

    attempts: tuple[RecordedAttempt, ...]


_JSON = Codec(_Attempts, DataError, Wording("a ledger", "leave it out: a new one is begun"))


def _read(file: pathlib.Path | None) -> tuple[RecordedAttempt, ...]:
    if file is None or not file.exists():
        return ()
    try:
        return _JSON.load(file).attempts
    except DataError:
        return ()
