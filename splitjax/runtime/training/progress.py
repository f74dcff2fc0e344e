"""Shows how training goes, while it goes: a live bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import collections
import contextlib
import pathlib
import time
from collections.abc import Callable
from types import TracebackType

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from splitjax._compat import telling_programs
from splitjax.runtime.training.metrics import Row

AVERAGED_STEPS = 20  # single batches jump too much to read
LOG_SECONDS = 10.0


def memory_bytes() -> int | None:
    """The most that one of this process's devices held so far; on a CPU what the process holds now, None where nothing
    tells."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    if all(stats):
        return max(entry.get("peak_bytes_in_use", entry["bytes_in_use"]) for entry in stats)
    try:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * 4096


class TrainingProgress:
    """Shows loss, accuracy, examples a second, memory and the time left. Use as a context manager, or as an observer of
    the training loop (`start`, `step`, `close`).

    **Arguments:**

    - `console`: where to.
    - `num_steps`: how many steps there will be.
    - `batch_size`: examples a step.
    - `clock`: seconds; for tests.
    - `num_done`: steps that an earlier start of the run did.
    - `memory`: bytes to show, if it tells any.
    - `live`: where the live bar goes, if that is a terminal; `console` if None. Where there is a bar, and `console` is
      a terminal too, it gets no lines.
    """

    def __init__(
        self,
        console: Console,
        num_steps: int,
        batch_size: int,
        clock: Callable[[], float] = time.monotonic,
        num_done: int = 0,
        memory: Callable[[], int | None] = lambda: None,
        live: Console | None = None,
    ):
        self._console, self._num_steps, self._batch_size, self._clock = console, num_steps, batch_size, clock
        self._memory = memory
        self._recent: collections.deque[tuple[float, float | None]] = collections.deque(maxlen=AVERAGED_STEPS)
        self._num_done = self._first = num_done
        self._start = self._last_line = clock()
        self._bar: Progress | None = None
        self._naming = contextlib.ExitStack()
        live = console if live is None else live
        if live.is_terminal:
            self._bar = Progress(
                # Narrow enough for 80 columns.
                BarColumn(bar_width=12),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TextColumn("{task.fields[shown]}"),
                TimeRemainingColumn(compact=True),
                TextColumn("left"),
                console=live,
                # What is printed belongs above the bar, unless it goes elsewhere.
                redirect_stdout=console.is_terminal,
            )
            self._task = self._bar.add_task("training", total=num_steps, completed=num_done, shown="compiling the step")

    def __enter__(self) -> TrainingProgress:
        if self._bar is not None:
            self._bar.start()
            self._naming.enter_context(telling_programs(self._compiles))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the live bar."""
        self._naming.close()
        if self._bar is not None:
            self._bar.stop()

    def _compiles(self, program: str) -> None:
        """Shows which program is being compiled: the first step's, an evaluation's, and any that comes later."""
        if self._bar is not None and program:
            self._bar.update(self._task, shown=f"compiling {program}")

    def step(self, row: Row) -> None:
        """Shows the `row` of a step that is done."""
        self.update(row["loss"], row.get("accuracy"))

    def update(self, loss: float, accuracy: float | None) -> None:
        """Notes that one more step is done, with its `loss` and `accuracy` (None: it has none). The first one's time is
        that of compiling and counts in no rate."""
        self._num_done += 1
        self._recent.append((loss, accuracy))
        now = self._clock()
        first = self._num_done == self._first + 1
        if first:
            self._start = now
        if self._bar is not None:
            self._bar.update(self._task, advance=1, shown=self.text())
        if self._bar is not None and self._console.is_terminal:
            return
        if first or self._num_done == self._num_steps or now - self._last_line >= LOG_SECONDS:
            self._last_line = now
            left = self.seconds_left
            self._console.print(
                f"step {self._num_done}/{self._num_steps}  {self.text()}"
                + (f"  {_duration(left)} left" if left else ""),
                highlight=False,
                soft_wrap=True,
            )

    def text(self) -> str:
        """Returns the means of the last steps, the rate and the memory as a line."""
        losses, accuracies = zip(*self._recent, strict=True)
        known = [accuracy for accuracy in accuracies if accuracy is not None]
        parts = [f"loss {sum(losses) / len(losses):.4f}"]
        parts += [f"accuracy {sum(known) / len(known):.1%}"] if known else []
        parts += [f"{self.examples_per_second:.0f} examples/s"] if self.examples_per_second else []
        held = self._memory()
        parts += [f"{held / 2**20:.0f} MiB"] if held is not None else []
        return "  ".join(parts)

    @property
    def examples_per_second(self) -> float | None:
        """Returns the rate of all steps after the first; None before there is a second."""
        seconds = self._clock() - self._start
        timed = self._num_done - self._first - 1
        return timed * self._batch_size / seconds if timed > 0 and seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """Returns the seconds that the rest will take at this rate; None before there is a rate."""
        rate = self.examples_per_second
        return (self._num_steps - self._num_done) * self._batch_size / rate if rate else None


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
