"""When does a program in flight only wait? On a processor the device is the process's own threads: if none of them runs or wants to run, what is left of a
step is its exchange.

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
    """Calls `notice`, once at most, from another thread, when the process has begun to compute and then has no thread left that computes or wants to."""
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
    has_computed, still = False, 0
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
            still = still + 1 if not _wants_to_run(me) else 0
            if still >= _STILL_LOOKS:
                notice()
                return


def _wants_to_run(me: int) -> bool:
    for name in os.listdir(_TASKS):
        if int(name) == me:
            continue
        try:
            stat = (_TASKS / name / "stat").read_text()
        except OSError:
            continue  # it has ended
        if stat.rpartition(")")[2].split()[0] in "RD":
            return True
    return False
