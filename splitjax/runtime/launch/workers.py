"""Starts the processes of a run: makes their environment, sends their signals, and keeps the guard that outlives the
launcher to kill them."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Protocol

from splitjax import _compat
from splitjax.errors import LaunchError
from splitjax.runtime.launch import variables
from splitjax.runtime.launch.config import LaunchConfig

HERE: pathlib.Path = pathlib.Path(__file__).parent
# Python without the user's site, path or start files: it starts in 20 ms and cannot pick up a module from the working
# directory.
PYTHON: tuple[str, ...] = (sys.executable, "-I", "-S")
_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
_DEVICE_COUNT_FLAG = re.compile(r"--xla_force_host_platform_device_count=\S*")


@dataclasses.dataclass(frozen=True)
class WorkerFiles:
    """Holds the descriptors that a worker inherits.

    - `exit_pipe`: on which it gives signs of life and announces that it leaves.
    - `board`: the pages on which workers record where they are (`whereabouts.Board`).
    - `stacks`: where it writes its stacks when it is asked to (`stacks.take`).
    """

    exit_pipe: int
    board: int
    stacks: int

    def names(self) -> tuple[str, str, str]:
        """Returns the variables that tell a worker the numbers of these files, in their order."""
        return variables.EXIT_FD, variables.BOARD_FD, variables.STACKS_FD


@dataclasses.dataclass(frozen=True)
class Seat:
    """Holds the place of a worker in an attempt.

    - `rank`: its process id in the attempt.
    - `worker`: its number among those that the run began with; another than the rank once a worker before it was given
      up.
    - `num_processes`: workers of the attempt.
    """

    rank: int
    worker: int
    num_processes: int


class Process(Protocol):
    """Names what a worker's process can do, in the words of `subprocess.Popen`."""

    pid: int
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def wait(self) -> int:
        """Blocks until it ends, and returns its exit code, negative for a signal."""
        ...


class Worker:
    """Holds a process of the run, in a session of its own.

    - `rank`: its process id in the run.
    - `pid`: the operating system's.
    - `stacks_file`: the descriptor of what it writes its stacks to.
    """

    def __init__(self, rank: int, process: Process, stacks_file: int):
        self.rank: int = rank
        self.stacks_file: int = stacks_file
        self.pid: int = process.pid
        self._process = process

    @property
    def out(self) -> IO[bytes]:
        """Returns the pipe of its standard output."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def err(self) -> IO[bytes]:
        """Returns the pipe of its standard error."""
        assert self._process.stderr is not None
        return self._process.stderr

    def wait(self) -> int:
        """Blocks until the process ends, and returns its exit code, negative for a signal."""
        return self._process.wait()

    def signal(self, number: int) -> None:
        """Sends signal `number` to the process alone. The children of a training script (readers of data) are its own
        to end."""
        _send(os.kill, self.pid, number)

    def signal_group(self, number: int) -> None:
        """Sends signal `number` to every process that the worker started and that stayed in its group."""
        _send(os.killpg, self.pid, number)

    def close(self) -> None:
        """Closes the launcher's files of a worker that has ended."""
        os.close(self.stacks_file)


def is_running(pid: int) -> bool:
    """Returns whether there is a process `pid`, ended ones that nobody waited for included."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _send(send: Callable[[int, int], None], pid: int, number: int) -> None:
    try:
        send(pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # gone, or (macOS) a zombie


def environment(
    config: LaunchConfig,
    seat: Seat,
    *,
    coordinator: str,
    attempt: int,
    failed_unix_seconds: float | None,
    files: WorkerFiles,
    base: Mapping[str, str],
) -> dict[str, str]:
    """Returns the environment of a worker.

    **Arguments:**

    - `config`: threads, devices and patience of the workers.
    - `seat`: the worker's place in the attempt.
    - `coordinator`: host and port of the coordination service.
    - `attempt`: the number of the attempt, from 0.
    - `failed_unix_seconds`: when the attempt before failed; None for the first.
    - `files`: what the worker writes to beside its output.
    - `base`: the environment of the launcher.
    """
    values = {key: value for key, value in base.items() if key not in variables.OF_ONE_WORKER}
    values |= {
        variables.COORDINATOR: coordinator,
        variables.NUM_PROCESSES: str(seat.num_processes),
        variables.PROCESS_ID: str(seat.rank),
        variables.WORKER: str(seat.worker),
        variables.HEARTBEAT_SECONDS: str(config.heartbeat_seconds),
        variables.ATTEMPT: str(attempt),
        variables.LAUNCH_UNIX_SECONDS: f"{time.time():.3f}",
        variables.EXIT_FD: str(files.exit_pipe),
        variables.BOARD_FD: str(files.board),
        variables.STACKS_FD: str(files.stacks),
    }
    # Into a pipe Python writes whole blocks, and the last words of a killed worker would be lost with the block.
    values.setdefault("PYTHONUNBUFFERED", "1")
    if failed_unix_seconds is not None:
        values[variables.FAILED_UNIX_SECONDS] = f"{failed_unix_seconds:.3f}"
    flags = values.get("XLA_FLAGS", "")
    if config.threads is not None:
        # The size of XLA's thread pools. The flags alone no longer bound products of matrices (measured with jax
        # 0.10.2).
        values["NPROC"] = str(config.threads)
        if config.threads == 1:
            flags = f"{flags} {_ONE_THREAD}".strip()
    if config.devices_per_process is not None:
        values["JAX_NUM_CPU_DEVICES"] = str(config.devices_per_process)
        flags = _DEVICE_COUNT_FLAG.sub("", flags).strip()  # JAX refuses both
    if flags:
        values["XLA_FLAGS"] = flags
    if config.gpus_per_process is not None:
        first = seat.worker * config.gpus_per_process
        values[variables.LOCAL_DEVICE_IDS] = ",".join(map(str, range(first, first + config.gpus_per_process)))
    return values


def one_core_variables(base: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables in which a process with one processor core and one device differs from `base`."""
    flags = _DEVICE_COUNT_FLAG.sub("", base.get("XLA_FLAGS", "")).replace(_ONE_THREAD, "").split()
    return {"NPROC": "1", "JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": " ".join([*flags, _ONE_THREAD])}


def spawn(
    rank: int,
    command: Sequence[str],
    values: Mapping[str, str],
    *,
    files: WorkerFiles,
    enter: Sequence[str] = (),
    address: str = "-",
    enter_files: Sequence[int] = (),
) -> Worker:
    """Starts a worker. The kernel kills it when the *thread* that calls this ends.

    **Arguments:**

    - `rank`: its process id in the run.
    - `command`: the program and its arguments.
    - `values`: its environment.
    - `files`: what it writes to beside its output.
    - `enter`, `enter_files`: a command that enters a network namespace, and the files that it reads; `address`: the
      worker's there.
    """
    shim = [*enter, *PYTHON, str(HERE / "_shim.py"), str(os.getpid()), address, *command]
    process = subprocess.Popen(
        shim,
        env=dict(values),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        pass_fds=[*dataclasses.astuple(files), *enter_files],
    )
    return Worker(rank, process, files.stacks)


class Guard:
    """Guards the workers: kills their process groups if this process dies, even of SIGKILL: it sees its standard input
    end."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [*PYTHON, str(HERE / "_guard.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, pid: int) -> None:
        """Counts the group of process `pid` among those to be killed."""
        self._tell(f"+{pid}\n")

    def forget(self, pid: int) -> None:
        """Leaves the group of process `pid`, which has ended, alone from now on."""
        self._tell(f"-{pid}\n")

    def close(self) -> None:
        """Ends the guard, which kills the workers that it has not been told to forget."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # killed by hand: the workers still die with the launcher, only what they started does not


# The longest silence that the service can be told to bear, 68 years.
NEVER_SECONDS = 2**31 - 1


class Coordinator:
    """Holds JAX's coordination service in the launcher: it does not end with a worker, so that every worker can end
    when it has to.

    Held by worker 0, as JAX has it by default, each process that ends waits up to five minutes for all others: one that
    fails by an exception would hang, and the rest in their collectives with it.
    """

    def __init__(self, host: str, num_processes: int, heartbeat_seconds: int):
        # XLA shares its port with whoever asks to share (SO_REUSEPORT). This socket never listens; as long as it is
        # bound nobody else is given the same port.
        self._held = socket.socket()
        if hasattr(socket, "SO_REUSEPORT"):
            self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            self._held.bind((host, 0))
            self.address: str = f"{host}:{self._held.getsockname()[1]}"
            self._service = _compat.coordination_service(self.address, num_processes, heartbeat_seconds)
        except (OSError, RuntimeError) as error:
            self._held.close()
            raise LaunchError(
                f"the coordinator cannot listen on {host}: {error}", remedy="see whether the loopback device is up"
            ) from error

    def close(self) -> None:
        """Ends the service."""
        self._service.shutdown()
        self._held.close()


def check_command(command: Sequence[str], base: Mapping[str, str]) -> None:
    """Raises `LaunchError` for a `command` that cannot be started with the PATH of the environment `base`."""
    if not command:
        raise LaunchError(
            "no command to start", remedy="write it behind two dashes: splitjax launch -n 4 -- python train.py"
        )
    name = command[0]
    if os.sep in name:
        candidates = [name]
    else:
        candidates = [os.path.join(folder or ".", name) for folder in base.get("PATH", os.defpath).split(os.pathsep)]
    files = [path for path in candidates if os.path.isfile(path)]
    if not files:
        raise LaunchError(
            "the command does not exist",
            value=name,
            place="the command",
            remedy="give a program of the PATH, or a path; a Python script is started as `python script.py`",
        )
    if not any(os.access(path, os.X_OK) for path in files):
        raise LaunchError(
            "the command is not executable",
            value=files[0],
            place="the command",
            remedy=f"start it with its interpreter, as in `python {name}`, or make it executable: chmod +x {files[0]}",
        )
