"""A process that is started ahead, from which the workers of a later attempt are forked: Python and its libraries are
imported once, while the run trains, and not by each worker while everybody waits.

It is the launcher's side of `_standby.py`. Only Python programs that were seen to complete a step are started this way;
whatever goes wrong with it, workers are started as usual.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from signal import SIGKILL
from typing import IO, Any

from splitjax.runtime.launch.programs import PythonProgram
from splitjax.runtime.launch.whereabouts import shared_file
from splitjax.runtime.launch.workers import HERE, PYTHON, Worker, WorkerFiles

MAX_MESSAGE_BYTES = 1 << 16
# How long a fork may take; a machine that is busy takes a hundredth of it.
FORK_SECONDS = 10.0


class Standby:
    """Holds a process that was started ahead, and forks workers from it.

    **Arguments:**

    - `program`: what the workers run.
    - `modules`: what is imported ahead.
    - `values`: its environment: that of a worker without what makes it one.
    """

    def __init__(self, program: PythonProgram, modules: Sequence[str], values: Mapping[str, str]):
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = shared_file("splitjax-standby")
        command = [
            *program.interpreter,
            str(HERE / "_standby.py"),
            str(theirs.fileno()),
            program.kind,
            program.target,
            ",".join(modules),
            "--",
            *program.arguments,
        ]
        self._process = subprocess.Popen(
            [*PYTHON, str(HERE / "_shim.py"), str(os.getpid()), "-", *command],
            env=dict(values),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._changed = threading.Condition()
        self._is_ready = self._is_over = False
        self._forked: list[int] = []
        self._codes: dict[int, int] = {}
        self._began = time.monotonic()
        self.seconds_to_ready: float = 0.0
        self._thread = threading.Thread(target=self._hear, name="splitjax-launch-standby", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Returns its process id."""
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        """Returns whether it has imported everything, and waits for orders."""
        with self._changed:
            return self._is_ready and not self._is_over

    @property
    def is_over(self) -> bool:
        """Returns whether it has ended, or refused."""
        with self._changed:
            return self._is_over

    def why_over(self) -> str:
        """Returns the last line that it wrote before it ended."""
        size = os.fstat(self._errors).st_size
        lines = os.pread(self._errors, 2000, max(0, size - 2000)).decode("utf-8", "replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

    def wait_ready(self, timeout_seconds: float) -> bool:
        """Waits until it is ready, at most `timeout_seconds`, and returns whether it is."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_ready or self._is_over, timeout_seconds)
            return self._is_ready and not self._is_over

    def fork(self, rank: int, values: Mapping[str, str], files: WorkerFiles) -> Worker | None:
        """Returns worker `rank`, forked from it, with the environment `values` and the `files` of a worker; None where
        that did not work."""
        (out, out_theirs), (err, err_theirs) = os.pipe(), os.pipe()
        order = {"values": dict(values), "files": list(files.names()), "rank": rank}
        given = [out_theirs, err_theirs, files.exit_pipe, files.board, files.stacks]
        try:
            with self._changed:
                before = len(self._forked)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", given))]
            self._link.sendmsg([json.dumps(order).encode()], rights)
            with self._changed:
                self._changed.wait_for(lambda: len(self._forked) > before or self._is_over, FORK_SECONDS)
                pid = self._forked[before] if len(self._forked) > before else None
        except OSError:
            pid = None
        finally:
            os.close(out_theirs)
            os.close(err_theirs)
        if pid is None:
            os.close(out)
            os.close(err)
            self.close()
            return None
        return Worker(rank, Forked(self, pid, os.fdopen(out, "rb", 0), os.fdopen(err, "rb", 0)), files.stacks)

    def wait_end(self, pid: int) -> int:
        """Blocks until the forked process `pid` has ended, and returns its exit code, negative for a signal. Those of a
        process that was started ahead die with it, of SIGKILL."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self._codes or self._is_over)
            return self._codes.get(pid, -SIGKILL)

    def close(self) -> None:
        """Ends it, and with it what was forked from it. Can be called again."""
        if self._errors < 0:
            return
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, SIGKILL)
        self._process.wait()
        self._thread.join()
        os.close(self._errors)
        self._errors = -1
        self._link.close()

    def _hear(self) -> None:
        while True:
            try:
                select.select([self._link], [], [])
                data = self._link.recv(MAX_MESSAGE_BYTES)
            except OSError:
                data = b""
            message: dict[str, Any] = json.loads(data) if data else {"refuses": "it has ended"}
            with self._changed:
                if "ready" in message:
                    self._is_ready, self.seconds_to_ready = True, time.monotonic() - self._began
                elif "forked" in message:
                    self._forked.append(message["forked"])
                elif "ended" in message:
                    self._codes[message["ended"]] = message["code"]
                else:
                    self._is_over = True
                self._changed.notify_all()
            if not data or "refuses" in message:
                return


class Forked:
    """Holds a worker that was forked from a process that was started ahead, as `subprocess.Popen` holds another.

    - `pid`: its process id.
    - `stdout`, `stderr`: the pipes of its output.
    """

    def __init__(self, standby: Standby, pid: int, stdout: IO[bytes], stderr: IO[bytes]):
        self.pid: int = pid
        self.stdout: IO[bytes] | None = stdout
        self.stderr: IO[bytes] | None = stderr
        self._standby = standby

    def wait(self) -> int:
        """Blocks until it ends, and returns its exit code, negative for a signal."""
        return self._standby.wait_end(self.pid)
