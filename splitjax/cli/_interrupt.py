"""Ends a command on Ctrl-C, SIGTERM and SIGHUP, at whatever moment: a line, the exit status that shells have for it, no
traceback, no crash.

An exception (`KeyboardInterrupt`) would have to pass through whatever runs: callbacks of XLA's compiler, which it can
crash, destructors, which swallow it, a library's import; and none is raised while the compiler runs for minutes. So a
thread hears of the signal, from the interpreter's C handler through a pipe, and ends the process itself. What was saved
stays: files get their names when they are complete. Commands that save on request (`train`, `launch`) take the signals
over while they can, and this thread leaves them alone then.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from splitjax import _compat

SIGNALS: tuple[int, ...] = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
_SHOW_CURSOR = b"\x1b[?25h"  # a live bar hides it
_OVER = b"\0"  # no signal's number


def end_cleanly(*, second_ends: bool = True, exit_process: Callable[[int], None] = os._exit) -> Callable[[], None]:
    """Makes signals end this process cleanly from here on; called by its main thread. What is ignored (`nohup`) stays
    so.

    **Arguments:**

    - `second_ends`: whether a second Ctrl-C ends it even while somebody else has taken signals over.
    - `exit_process`: called with the exit status, 128 and the signal's number; for tests.

    **Returns** a function that puts back what was there before.
    """
    # In a run of several processes SIGTERM is JAX's: all of them save after the same step.
    numbers = (signal.SIGINT,) if _compat.coordination_client() is not None else SIGNALS
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    with _held_back(numbers):
        # Without a handler of Python's the pipe would not be told. It does nothing: the thread does.
        before = {
            number: signal.signal(number, _noted)
            for number in numbers
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        pipe_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    # It holds both ends: they live as long as the process.
    listener = threading.Thread(
        target=_listen, args=(reader, writer, second_ends, exit_process), name="splitjax-signals", daemon=True
    )
    listener.start()

    def restore() -> None:
        signal.set_wakeup_fd(pipe_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        writer.send(_OVER)
        listener.join()

    return restore


def ignore_when_done() -> None:
    """Makes a Ctrl-C change nothing any more: the command has done its work and is taken down. Python takes its
    handlers away before it takes down modules, and the signal would then kill the process without a word. SIGTERM still
    does, so that nothing can get stuck there."""
    if signal.getsignal(signal.SIGINT) is _noted:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def _held_back(numbers: Sequence[int]) -> Iterator[None]:
    """Holds signals back for a block, where the system can: one between a new handler and its pipe would be lost."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _noted(number: int, frame: FrameType | None) -> None:
    """Stands for the default handlers."""


def _listen(
    reader: socket.socket, writer: socket.socket, second_ends: bool, exit_process: Callable[[int], None]
) -> None:
    interrupts = 0
    with reader, writer:
        while (told := reader.recv(64)) and _OVER not in told:
            for number in told:
                interrupts += number == signal.SIGINT
                # Somebody else took the signal over, and saves first.
                is_ours = signal.getsignal(number) is _noted
                if is_ours or (second_ends and number == signal.SIGINT and interrupts > 1):
                    _say("interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}")
                    exit_process(128 + number)
                elif second_ends and number == signal.SIGINT:
                    _say("stopping after this step; Ctrl-C again ends it at once")


def _say(words: str) -> None:
    """Writes a line past Python's buffers, which the main thread may just hold."""
    cursor = _SHOW_CURSOR if os.isatty(2) else b""
    with contextlib.suppress(OSError):
        os.write(2, cursor + f"{words}\n".encode())
