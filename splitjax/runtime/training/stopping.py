"""Ends training on Ctrl-C and SIGTERM after a step, with its state saved, in all processes after the same step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TypeAlias

from jax.experimental import multihost_utils

from splitjax import _compat

SIGNALS = (signal.SIGINT, signal.SIGTERM)

# What `signal.signal` takes and returns: a function of the signal's number and the frame, or SIG_DFL or SIG_IGN; None
# for a handler that was not set from Python.
SignalHandler: TypeAlias = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class StopRequest:
    """Tells whether somebody wants the run to end. A context manager: signals are taken over inside it, and given back.

    In a run of several processes SIGTERM is JAX's: its coordination service tells all processes, and picks the step
    after which all of them stop. Ctrl-C is turned into one. Alone, a second Ctrl-C interrupts at once.
    """

    def __init__(self) -> None:
        self._signal: int | None = None
        self._before: dict[int, SignalHandler] = {}
        self._many = _compat.coordination_client() is not None

    def __enter__(self) -> StopRequest:
        # Only the main thread may handle signals; a loop in another one is stopped by its owner.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT,) if self._many else SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None and number == signal.SIGINT:
            # It goes to whoever was there before: an exception in a script, the end of the process in a command.
            signal.signal(number, self._before[number] or signal.SIG_DFL)
            signal.raise_signal(number)
            return
        self._signal = number
        if self._many:
            signal.raise_signal(signal.SIGTERM)

    def after(self, step: int) -> bool:
        """Returns whether to save and stop now, after step number `step`. To be asked once after every step, in every
        process."""
        if self._many:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._signal is not None

    @property
    def exit_status(self) -> int:
        """Returns 128 plus the signal's number, as shells have it."""
        return 128 + (self._signal or signal.SIGTERM)
