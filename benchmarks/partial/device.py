"""A device of the benchmark of partial backpropagation: a share of a core for the processes that stand for it, and a
second job on it.

Workers of one machine that outnumber its cores would otherwise hide what is measured: one that waits leaves its core to
the others, as no device of a cluster can. Each therefore has a share of a core of its own, by a control group (Linux,
root), which a second job's process shares.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing.connection as connection
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

PERIOD_MICROSECONDS = 4000  # of the quota: well below a step
_GROUPS = pathlib.Path("/sys/fs/cgroup")
_FOR_THE_SYSTEM = 0.2  # of all cores: the network's queues


def core_share(num_devices: int) -> float:
    """Of a core, for each of so many devices on this machine."""
    return min(1.0, (1 - _FOR_THE_SYSTEM) * (os.cpu_count() or 1) / num_devices)


@contextlib.contextmanager
def groups() -> Iterator[str | None]:
    """A folder for the control groups of a run's devices; None where there can be none."""
    is_second = (_GROUPS / "cgroup.controllers").is_file()
    folder = (_GROUPS if is_second else _GROUPS / "cpu") / f"benchmark-{os.getpid()}"
    try:
        folder.mkdir()
        if is_second:
            (folder / "cgroup.subtree_control").write_text("+cpu")
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        yield None
        return
    try:
        yield str(folder)
    finally:
        for one in (*folder.glob("device*"), folder):
            with contextlib.suppress(OSError):  # a process that was killed may still be in it
                one.rmdir()


class Device:
    """What a process and those that it starts run on. `folder`: as `groups` gives it."""

    def __init__(self, folder: str | None, rank: int) -> None:
        self._folder = None if folder is None else pathlib.Path(folder) / f"device{rank}"
        if self._folder is not None:
            self._folder.mkdir()
            (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def hold(self, share: float) -> None:
        """From here on it has this share of a core."""
        if self._folder is None:
            return
        quota = round(share * PERIOD_MICROSECONDS)
        if (self._folder / "cpu.max").is_file():
            (self._folder / "cpu.max").write_text(f"{quota} {PERIOD_MICROSECONDS}")
        else:
            (self._folder / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
            (self._folder / "cpu.cfs_quota_us").write_text(str(quota))


class SecondJob:
    """A process of a second job beside this one, on the same device and behind the same link; the processes of that job
    form a run of their own.

    `python -m MODULE SETTINGS` in it has the key `joins` in its settings (`join`) and answers commands (`commands`)."""

    def __init__(self, module: str, settings: dict[str, Any], team: Any) -> None:
        address = team.decide(_free_address)
        mine, theirs = connection.Pipe()
        # What the launcher told this process is not for that one, save which network device it is behind.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SPLITJAX_")}
        joins = {"address": address, "rank": team.rank, "count": team.count, "commands": theirs.fileno()}
        command = [sys.executable, "-m", module, json.dumps({**settings, "joins": joins})]
        self._process = subprocess.Popen(command, env=environment, pass_fds=(theirs.fileno(),))
        theirs.close()
        self._commands = mine
        (team.folder / f"pid{team.rank}").write_text(str(self._process.pid))
        self._answer()

    def begin(self, *what: Any) -> None:
        """Has it do something, and returns at once."""
        self._commands.send(what)

    def wait(self) -> None:
        """Until it has done it."""
        self._answer()

    def close(self) -> None:
        self._commands.send(None)
        self._process.wait(60)

    def _answer(self) -> None:
        try:
            self._commands.recv()
        except EOFError:
            raise RuntimeError(f"the second job ended with exit status {self._process.wait(10)}") from None


def join(joins: dict[str, Any]) -> connection.Connection:
    """In a process that `SecondJob` started: joins its run, and returns where commands come from. Before anything
    touches a device."""
    import jax

    jax.distributed.initialize(joins["address"], joins["count"], joins["rank"], cluster_detection_method="deactivate")
    return connection.Connection(joins["commands"])


def commands(pipe: connection.Connection) -> Iterator[tuple[Any, ...]]:
    """What the process is to do, until it is to end. Each is answered when the next is asked for; the first time: it is
    ready."""
    while True:
        pipe.send("done")
        what = pipe.recv()
        if what is None:
            return
        yield what


def _free_address() -> str:
    """Of this process, as the others of the run see it, with a port that is free."""
    from splitjax.runtime.launch.variables import COORDINATOR

    host, _, port = os.environ[COORDINATOR].rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        own = probe.getsockname()[0]
    with socket.socket() as probe:
        probe.bind((own, 0))
        return f"{own}:{probe.getsockname()[1]}"
