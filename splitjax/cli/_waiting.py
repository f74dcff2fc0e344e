"""Says what a command is busy with, for who waits longer than two seconds: a live line on the standard error, with the
seconds that have gone by. While JAX compiles, it names the program. Where that is no terminal nothing is shown."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from splitjax._compat import telling_programs

PATIENCE_SECONDS = 2.0


class Say(Protocol):
    """Changes what is shown."""

    def __call__(self, text: str, done: int = 0, total: int | None = None) -> None:
        """Shows `text`: what is being done; `done` of `total` parts, where there are parts."""
        ...


@contextlib.contextmanager
def waiting(text: str, console: Console | None = None, patience_seconds: float = PATIENCE_SECONDS) -> Iterator[Say]:
    """Shows `text` on a line of its own while a block runs, once it has run for `patience_seconds`, and in
    its place the name of the program that is being compiled, if one is.

    **Arguments:** `text`: what is being done, such as "compiling the step of vgg11". `console`: where to; the standard
    error if None.

    **Yields** what changes the text.
    """
    console = Console(stderr=True) if console is None else console
    if not console.is_terminal:
        yield lambda text, done=0, total=None: None
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        # The standard output may be a file, into which what is printed belongs.
        redirect_stdout=False,
        redirect_stderr=False,
    )
    task = bar.add_task(text, total=None)
    # Another thread's: this one is in XLA's compiler, or in whatever takes long.
    timer = threading.Timer(patience_seconds, bar.start)
    timer.daemon = True
    timer.start()

    shown = text

    def say(text: str, done: int = 0, total: int | None = None) -> None:
        nonlocal shown
        shown = text
        bar.update(task, description=text, completed=done, total=total)

    def name(program: str) -> None:
        bar.update(task, description=f"compiling {program}" if program else shown)

    try:
        with telling_programs(name):
            yield say
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
