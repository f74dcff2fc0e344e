"""When does a program in flight only wait? On a processor the device is the process's own threads: if none of them runs
or wants to run, what is left of a step is its exchange.

Linux only (`/proc`): elsewhere nothing is noticed, and a step keeps its device until it returns.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_TASKS = Path("/proc/self/task")
_LOOK_SECONDS = 0.002
_STILL_SHARE = 0.1  # of the time between two looks that the process has computed, at most
_STILL_LOOKS = 2  # so many in a row


@contextlib.contextmanager
def noticing_idle(notice: Callable[[], None]) -> Iterator[None]:
    """Calls `notice`, once at most, from another thread, when the process has begun to compute and then has no thread
    left that computes or wants to."""
    if not _TASKS.is_dir():
        yield
        return
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(over, notice), name="splitjax-idle", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _watch(over: threading.Event, notice: Callable[[], None]) -> None:
    me = threading.get_native_id()
    has_computed, still, known = False, 0, ""
    others = lambda: time.process_time() - time.thread_time()  # looking costs time too
    wall, computed = time.perf_counter(), others()
    while not over.wait(_LOOK_SECONDS):
        now, until = time.perf_counter(), others()
        rests = until - computed < _STILL_SHARE * (now - wall)
        wall, computed = now, until
        if not rests:
            has_computed, still = True, 0
        elif has_computed:
            # The clock stands still for a process too that others keep from running: its threads then want to.
            known = _that_wants_to_run(str(me), known)
            still = still + 1 if not known else 0
            if still >= _STILL_LOOKS:
                notice()
                return


def _that_wants_to_run(me: str, first: str) -> str:
    """A thread other than `me` that does; empty where there is none. `first`: one to ask first, as there can be a
    hundred, and each costs time to ask."""
    if first and _wants_to_run(first):
        return first
    return next((name for name in os.listdir(_TASKS) if name != me and _wants_to_run(name)), "")


def _wants_to_run(name: str) -> bool:
    try:
        stat = (_TASKS / name / "stat").read_bytes()
    except OSError:
        return False  # it has ended
    return stat.rpartition(b")")[2].split(maxsplit=1)[0] in (b"R", b"D")
