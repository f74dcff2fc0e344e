"""Takes the stacks of a process that is stuck: its Python's, or what the kernel says of it where that is dead.

A worker prepares itself when it joins (`answer`): from then on a signal makes it write the stacks of all its threads
into a file that the launcher holds, from C, whoever holds the interpreter's lock. A process that is stopped, or in the
kernel, does not answer; of it `/proc` tells state and system call.
"""

from __future__ import annotations

import faulthandler
import os
import pathlib
import re
import signal
import time

from splitjax.runtime.launch.variables import STACKS_FD

# Not one that scripts and clusters use themselves, where the system has more.
SIGNAL: int = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
NUM_FRAMES = 12  # of each thread that are shown
NUM_THREADS = 4  # that are shown beside the loop's
_ANSWER_SECONDS, _LOOK_SECONDS = 2.0, 0.02
_MAX_BYTES = 1 << 20
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+).*:$")


def answer() -> None:
    """Makes this process, which a launcher started, write its stacks on `SIGNAL`; does nothing in any other."""
    file = os.environ.get(STACKS_FD)
    if file is not None:
        try:
            faulthandler.register(SIGNAL, file=int(file), all_threads=True, chain=False)
        except (OSError, ValueError, RuntimeError):
            pass  # the file is closed: of this process only the kernel will tell


def take(pid: int, file: int, thread_ident: int = 0) -> list[str]:
    """Returns lines about what process `pid` is doing: its Python stacks, that of its loop first, or what the kernel
    says where it does not answer within 2 s.

    **Arguments:** `pid`: a process that called `answer`. `file`: where it writes; read from what is there now on.
    `thread_ident`: its loop's thread.
    """
    begin = os.fstat(file).st_size
    try:
        os.kill(pid, SIGNAL)
    except (ProcessLookupError, PermissionError):
        return [f"process {pid} is gone"]
    deadline, size = time.monotonic() + _ANSWER_SECONDS, begin
    while time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        before, size = size, os.fstat(file).st_size
        if size > begin and size == before:
            break
    if size == begin:
        return ["Python does not answer; what the kernel says:", *kernel_lines(pid)]
    return python_lines(os.pread(file, min(size - begin, _MAX_BYTES), begin).decode("utf-8", "replace"), thread_ident)


def python_lines(text: str, thread_ident: int = 0) -> list[str]:
    """Returns the lines of a `text` that `faulthandler` wrote: the thread `thread_ident` first (where it is not there,
    the last one, which is the main thread), then a few others, the frames of each cut to `NUM_FRAMES`."""
    threads: list[tuple[int, list[str]]] = []
    for line in text.splitlines():
        title = _THREAD.match(line)
        if title:
            threads.append((int(title[1], 16), [line]))
        elif line.strip() and threads:
            threads[-1][1].append(line)
    if not threads:
        return text.splitlines()[:NUM_FRAMES]
    first = next((lines for ident, lines in threads if ident == thread_ident), threads[-1][1])
    others = [lines for _, lines in threads if lines is not first]
    shown = [_cut(lines) for lines in (first, *others[:NUM_THREADS])]
    more = len(others) - NUM_THREADS
    return [line for lines in shown for line in lines] + ([f"... and {more} more threads"] if more > 0 else [])


def _cut(lines: list[str]) -> list[str]:
    title, *frames = lines
    left = len(frames) - NUM_FRAMES
    return [title, *frames[:NUM_FRAMES], *([f"  ... {left} more frames"] if left > 0 else [])]


def is_stopped(pid: int) -> bool:
    """Returns whether process `pid` is stopped, by a signal or a debugger; False where nothing tells."""
    return _text(pathlib.Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[:1] in (["T"], ["t"])


def kernel_lines(pid: int) -> list[str]:
    """Returns what `/proc` says of the main thread of process `pid`: its state, where it sleeps in the kernel, its
    system call, and, where one may read it, its kernel stack. Nothing where there is no `/proc`."""
    folder = pathlib.Path(f"/proc/{pid}")
    state = next((line for line in _text(folder / "status").splitlines() if line.startswith("State:")), "")
    lines = [state.replace("\t", " ")] if state else []
    for name, title in (("wchan", "sleeps in"), ("syscall", "system call"), ("stack", "kernel stack")):
        text = " / ".join(_text(folder / name).split("\n")).strip(" /")
        if text and text != "0":
            lines.append(f"{title}: {text[:300]}")
    return lines


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
