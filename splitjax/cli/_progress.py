"""How training goes, while it goes: a live bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

AVERAGED_STEPS = 20  # single batches jump too much to read
LOG_SECONDS = 10.0


class TrainingProgress:
    """Shows loss, accuracy, examples a second and the time left. Use as a context manager.

    **Arguments:**

    - `console`: where to.
    - `num_steps`: how many steps there will be.
    - `batch_size`: examples a step.
    - `clock`: seconds; for tests.
    """

    def __init__(self, console: Console, num_steps: int, batch_size: int, clock: Callable[[], float] = time.monotonic):
        self._console, self._num_steps, self._batch_size, self._clock = console, num_steps, batch_size, clock
        self._recent: collections.deque[tuple[float, float]] = collections.deque(maxlen=AVERAGED_STEPS)
        self._num_done = 0
        self._start = self._last_line = clock()
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                # Narrow enough for 80 columns.
                BarColumn(bar_width=12), TextColumn("{task.completed:.0f}/{task.total:.0f}"), TextColumn("{task.fields[shown]}"),
                TimeRemainingColumn(compact=True), TextColumn("left"), console=console,
            )
            self._task = self._bar.add_task("training", total=num_steps, shown="compiling the step")

    def __enter__(self) -> TrainingProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, loss: float, accuracy: float) -> None:
        """One more step is done. The first one's time is that of compiling and counts in no rate."""
        self._num_done += 1
        self._recent.append((loss, accuracy))
        now = self._clock()
        if self._num_done == 1:
            self._start = now
        if self._bar is not None:
            self._bar.update(self._task, advance=1, shown=self.text())
        elif self._num_done in (1, self._num_steps) or now - self._last_line >= LOG_SECONDS:
            self._last_line = now
            left = self.seconds_left
            self._console.print(
                f"step {self._num_done}/{self._num_steps}  {self.text()}" + (f"  {left:.0f} s left" if left else ""),
                highlight=False, soft_wrap=True,
            )

    def text(self) -> str:
        losses, accuracies = zip(*self._recent, strict=True)
        rate = f"  {self.examples_per_second:.0f} examples/s" if self.examples_per_second else ""
        return f"loss {sum(losses) / len(losses):.4f}  accuracy {sum(accuracies) / len(accuracies):.1%}{rate}"

    @property
    def examples_per_second(self) -> float | None:
        """Of all steps after the first; None before there is a second."""
        seconds = self._clock() - self._start
        return (self._num_done - 1) * self._batch_size / seconds if self._num_done > 1 and seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        rate = self.examples_per_second
        return (self._num_steps - self._num_done) * self._batch_size / rate if rate else None
