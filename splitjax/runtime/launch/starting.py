"""Starts the workers of an attempt: each as a new process, or forked from one that was started ahead while the attempt
before was training."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from splitjax.runtime.launch import workers as processes
from splitjax.runtime.launch.ahead import modules_of
from splitjax.runtime.launch.compiled import DIRECTORY, drop_unfinished, kept_programs
from splitjax.runtime.launch.config import LaunchConfig
from splitjax.runtime.launch.kept_memory import kept_memory
from splitjax.runtime.launch.programs import python_program
from splitjax.runtime.launch.stages import StageTimes
from splitjax.runtime.launch.standby import Standby
from splitjax.runtime.launch.variables import FORKED, NETWORK_DEVICE, OF_WORKERS
from splitjax.runtime.launch.whereabouts import Board
from splitjax.runtime.launch.workers import Seat, Worker, WorkerFiles
from splitjax.runtime.network import DEVICE, Network

# How long a process that is started ahead, and still imports when it is needed, is waited for: it has a lead over new
# ones.
_READY_SECONDS = 60.0
_LOOK_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class AttemptStart:
    """Holds what all workers of an attempt are told.

    - `number`: of the attempt, from 0.
    - `coordinator`: host and port of the coordination service.
    - `failed_unix_seconds`: when the failure of the attempt before was noticed; None for the first.
    - `mesh`: variables that name the mesh to use in place of the script's, and why; empty for the script's.
    """

    number: int
    coordinator: str
    failed_unix_seconds: float | None
    mesh: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Starter:
    """Starts workers, attempt after attempt; to be used by one thread, with which they end.

    **Arguments:**

    - `config`: how they are started. `command`: the program and its arguments. `base`: the launcher's environment.
    - `network`: theirs, in runs with a bandwidth.
    - `guard`: is told of every process. `say`: takes a line for the launcher's log.
    """

    def __init__(
        self,
        config: LaunchConfig,
        command: Sequence[str],
        base: Mapping[str, str],
        *,
        network: Network | None,
        guard: processes.Guard,
        say: Callable[[str], None],
    ):
        self._config, self._command, self._network = config, tuple(command), network
        self._guard, self._say = guard, say
        programs = kept_programs(base, config.log_dir) if config.starts_again else {}
        self._base = {**base, **programs, **(kept_memory(base) if _keeps_memory(config, base) else {})}
        self._program = python_program(command, base) if config.standby and network is None else None
        self._standby: Standby | None = None
        self._given_up = self._program is None or not config.starts_again
        self._said_ready = False
        self.is_ahead: bool = False

    def begin(self, killed_unix_seconds: float | None, is_stopping: Callable[[], bool]) -> None:
        """Prepares the start of an attempt: removes what the one before left half written, at `killed_unix_seconds`
        (None for the first), and decides whether its workers are forked. A process that is started ahead and not ready
        is waited for, unless `is_stopping` says that the run is to end."""
        if killed_unix_seconds is not None and self._config.starts_again:
            drop_unfinished(pathlib.Path(self._base[DIRECTORY]), killed_unix_seconds)
        end = time.monotonic() + _READY_SECONDS
        self.is_ahead = False
        while self._standby is not None and not self._standby.is_over and time.monotonic() < end and not is_stopping():
            self.is_ahead = self._standby.wait_ready(_LOOK_SECONDS)
            if self.is_ahead:
                break

    def start(self, seat: Seat, attempt: AttemptStart, files: WorkerFiles) -> Worker:
        """Starts the worker of a `seat` of an `attempt`, which gets `files`. Raises `OSError` where that fails."""
        values = processes.environment(
            self._config,
            seat,
            coordinator=attempt.coordinator,
            attempt=attempt.number,
            failed_unix_seconds=attempt.failed_unix_seconds,
            files=files,
            base=self._base,
        )
        values |= attempt.mesh
        if self.is_ahead and self._standby is not None:
            worker = self._standby.fork(seat.rank, {**values, FORKED: "1"}, files)
            if worker is not None:
                self._guard.watch(worker.pid)
                return worker
            self._end_standby("it could not be forked")
        inside: dict[str, Any] = {}
        if self._network is not None:
            values[NETWORK_DEVICE] = DEVICE
            inside = {
                "enter": self._network.enter(seat.worker),
                "enter_files": [self._network.file(seat.worker)],
                "address": self._network.address(seat.worker),
            }
        worker = processes.spawn(seat.rank, self._command, values, files=files, **inside)
        self._guard.watch(worker.pid)
        return worker

    def look_ahead(self, board: Board, num_processes: int) -> None:
        """Starts a process ahead once all workers of the attempt have done a step, by its `board`; to be called now and
        then."""
        if self._standby is not None and self._standby.is_over:
            self._end_standby(self._standby.why_over())
        if self._standby is not None and self._standby.is_ready and not self._said_ready:
            self._said_ready = True
            self._say(
                f"process {self._standby.pid}, started ahead {self._standby.seconds_to_ready:.1f} s ago, is ready:"
                " workers of a restart are forked from it"
            )
        if self._given_up or self._standby is not None:
            return
        times = [StageTimes.read(board, rank) for rank in range(num_processes)]
        if any(one is None for one in times):
            return
        known = [one for one in times if one is not None]
        if not all(one.fit for one in known):
            self._given_up = True
            self._say(
                "no process is started ahead: the command changes variables that libraries read when they are imported"
            )
            return
        assert self._program is not None
        bits = known[0].imported
        for one in known:
            bits &= one.imported
        shown = processes.environment(
            self._config,
            Seat(0, 0, num_processes),
            coordinator="",
            attempt=0,
            failed_unix_seconds=None,
            files=WorkerFiles(0, 0, 0),
            base=self._base,
        )
        values = {name: value for name, value in shown.items() if name not in OF_WORKERS}
        self._standby = Standby(self._program, modules_of(bits), values)
        self._guard.watch(self._standby.pid)

    def close(self) -> None:
        """Ends the process that was started ahead."""
        if self._standby is not None:
            self._guard.forget(self._standby.pid)
            self._standby.close()
            self._standby = None

    def _end_standby(self, why: str) -> None:
        self._say(f"the process that was started ahead is gone ({why}): workers are started anew")
        self.is_ahead, self._given_up = False, True
        self.close()


def _keeps_memory(config: LaunchConfig, base: Mapping[str, str]) -> bool:
    """Tells whether workers keep the memory of their steps: they are to, and compute on CPUs alone. What a program
    reads for an accelerator would stay in the host's memory, too."""
    platforms = base.get("JAX_PLATFORMS") or None
    of_cpus = config.threads is not None or config.devices_per_process is not None
    elsewhere = config.gpus_per_process is not None or platforms not in (None, "cpu")
    return config.keep_memory and not elsewhere and (of_cpus or platforms == "cpu")
