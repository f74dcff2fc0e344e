"""A launched training run under observation: its processes, its checkpoints and metrics as they appear, its end within
a limit."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from splitjax.runtime.checkpoint.folder import checkpoint_folders

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
TAG = "SPLITJAX_FAULTS_RUN"
_LOOK_SECONDS = 0.004
_SAVING = re.compile(r"([0-9]+)\.saving-[0-9a-f]+")
_FORKED = re.compile(r"splitjax-([0-9]+)")  # the name of a worker that was forked from a process started ahead
_BACK = re.compile(r"back at step [0-9]+, [0-9.]+ s after the failure was noticed: (.* s) \(")
_RESUMED = re.compile(r"resumed from the checkpoint of step ([0-9]+)")
# Dropout, augmentation, a schedule with a warm-up, tests between: all that a resume has to find again. Both workers are
# needed for every step: the dense layers are split between them.
TRAINING = (
    "--model mlp --features 32 16 --mesh data=1,model=2 --platform cpu --batch-size 32 --dropout 0.2 --augment"
    " --warmup-steps 20 --weight-decay 0.01"
).split()


class Overdue(Exception):
    """Something was not there when its time was over."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is run, and where. `folder` holds everything of it: `ck`, `m.jsonl`.

    - `num_steps`, `checkpoint_every`, `keep_last`: steps; checkpoints.
    - `num_processes`: of the two devices' one each, or one with both.
    - `training`: options of `splitjax train` beside these.
    - `cache`: folder of compiled programs, which runs share.
    - `program`: another command in place of `splitjax train`, which keeps its files in `folder` too.
    - `variables`: of the environment, beside those that all runs have.
    """

    folder: pathlib.Path
    cache: pathlib.Path
    num_steps: int = 400
    checkpoint_every: int = 25
    keep_last: int = 1000
    training: tuple[str, ...] = (*TRAINING, "--data", "digits", "--evaluate-every", "100")
    num_processes: int = 2
    metrics_name: str = "m.jsonl"
    checkpoints_name: str = "ck"
    program: tuple[str, ...] | None = None
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def checkpoints(self) -> pathlib.Path:
        return self.folder / self.checkpoints_name

    @property
    def metrics(self) -> pathlib.Path:
        return self.folder / self.metrics_name

    def command(self) -> list[str]:
        """`splitjax train ...`, or the `program`."""
        if self.program is not None:
            return list(self.program)
        return [
            sys.executable,
            "-m",
            "splitjax.cli",
            "train",
            *self.training,
            "--steps",
            str(self.num_steps),
            "--checkpoint-dir",
            str(self.checkpoints),
            "--checkpoint-every",
            str(self.checkpoint_every),
            "--keep-last",
            str(self.keep_last),
            "--metrics",
            str(self.metrics),
        ]

    def environment(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "NPROC")
        }
        path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {
            **kept,
            "PYTHONPATH": path,
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self.cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            **dict(self.variables),
        }


@dataclasses.dataclass(frozen=True)
class Sight:
    """What is to be seen from outside at one moment.

    - `phase`: of the attempt: start, restore, compile, step or save.
    - `last_step`: the last one in the metrics; 0 if none.
    - `complete`: steps of the checkpoints that have their names.
    - `saving`: the step of the one that is being written.
    """

    at: float  # time.monotonic()
    phase: str
    last_step: int
    complete: tuple[int, ...]
    saving: int | None


class Launched:
    """A run that `splitjax launch` started. Use it as a context manager: nothing of it is left running afterwards."""

    def __init__(
        self, recipe: Recipe, *, restarts: int = 0, options: Sequence[str] = (), launcher: Sequence[str] | None = None
    ):
        recipe.folder.mkdir(parents=True, exist_ok=True)
        self.recipe, self.began = recipe, time.monotonic()
        self._tag = secrets.token_hex(8)
        self.lines: list[tuple[float, str]] = []
        # Devices that share the threads of one process need more than one.
        threads = ["--threads", "1"] if recipe.num_processes == 2 else []
        launcher = launcher or [
            sys.executable,
            "-m",
            "splitjax.cli",
            "launch",
            "-n",
            str(recipe.num_processes),
            *threads,
        ]
        self.process = subprocess.Popen(
            [*launcher, "--restarts", str(restarts), *options, "--", *recipe.command()],
            cwd=recipe.folder,
            text=True,
            errors="replace",
            env={**recipe.environment(), TAG: self._tag},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._workers: dict[int, int] = {}
        self._attempt_line = 0  # of the output, from which on it is this attempt's
        self._file_before, self._complete_before = self._file(), self.complete()

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *error: object) -> None:
        for pid in self.left_running():
            _kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()

    # What is there.

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def left_running(self) -> list[int]:
        """Every process that carries this run's mark, the launcher included."""
        return tagged(self._tag)

    def workers(self) -> dict[int, int]:
        """rank -> process id, of the workers that run now."""
        found = {}
        for pid in self.left_running():
            forked = _FORKED.fullmatch(_name(pid))
            if forked is not None:
                found[int(forked[1])] = pid
            values = dict(entry.partition(b"=")[::2] for entry in _environment(pid))
            if pid != self.process.pid and b"SPLITJAX_PROCESS_ID" in values and _is_leader(pid):
                found[int(values[b"SPLITJAX_PROCESS_ID"])] = pid
        return found

    def last_step(self) -> int:
        return last_step(self.recipe.metrics)

    def complete(self) -> tuple[int, ...]:
        return checkpoints(self.recipe)

    def saving(self) -> int | None:
        """The step of the checkpoint that is being written."""
        return saving(self.recipe)

    def new_attempt(self) -> None:
        """From here on, what the workers say and write is that of the next attempt."""
        self._workers = {}
        self._attempt_line, self._file_before, self._complete_before = len(self.lines), self._file(), self.complete()

    def resumed_step(self) -> int | None:
        """Where this attempt went on from, once it says so; None until then."""
        found = [m for _, line in self.lines[self._attempt_line :] if (m := _RESUMED.search(line))]
        return int(found[0][1]) if found else None

    def has_stepped(self) -> bool:
        """Whether this attempt has written a step. It may write over what an earlier one wrote: into a new file
        then."""
        file, step = self._file_before
        now, last = self._file()
        begin = self.resumed_step()
        if begin is None:
            # Its word of where it went on from can come after the rows that it keeps of earlier attempts. One that
            # begins anew, and should not, is seen once it is past all of those.
            begin = max(self._complete_before) + self.recipe.checkpoint_every if self._complete_before else 0
        return last > begin and (now != file or last > step)

    def sight(self) -> Sight:
        at, saving, last = time.monotonic(), self.saving(), self.last_step()
        if self.has_stepped():
            phase = "step" if saving is None else "save"
        elif self.resumed_step() is not None:
            phase = "compile"
        else:
            phase = "restore" if self.has_opened_folder() else "start"
        return Sight(at, phase, last, self.complete(), saving)

    def has_opened_folder(self) -> bool:
        """Whether a worker holds the folder of the checkpoints open, as it does from looking for one to resume from
        on."""
        if len(self._workers) < self.recipe.num_processes:
            self._workers = self.workers()
            time.sleep(5 * _LOOK_SECONDS)  # looking through all processes takes a while, and takes it from the workers
        wanted = str(self.recipe.checkpoints)
        return any(wanted in _open_files(pid) for pid in self._workers.values())

    # Waiting, never without an end.

    def until(self, what: str, happened: Callable[[], object], limit_seconds: float) -> float:
        """Waits until something happens and returns when it was seen (`time.monotonic()`). Raises `Overdue` at the
        limit, and when the run ends first."""
        deadline = time.monotonic() + limit_seconds
        while not happened():
            now = time.monotonic()
            if now > deadline:
                raise Overdue(f"{what}: not within {limit_seconds:g} s; the output ends {self.text[-1500:]!r}")
            if self.process.poll() is not None and not happened():
                raise Overdue(
                    f"{what}: the run ended before, with exit status {self.process.poll()}; {self.text[-1500:]!r}"
                )
            time.sleep(_LOOK_SECONDS)
        return time.monotonic()

    def stages(self) -> str:
        """Where the time from the notice of the last failure to this attempt's first step went, as the launcher says;
        empty where it has not said so yet."""
        found = [m for _, line in self.lines[self._attempt_line :] if (m := _BACK.search(line))]
        return found[-1][1] if found else ""

    def said(self, text: str) -> bool:
        """Whether this attempt's output has it."""
        return any(text in line for _, line in self.lines[self._attempt_line :])

    def end(self, limit_seconds: float) -> int:
        """The exit status. Raises `Overdue` at the limit."""
        try:
            status = self.process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            raise Overdue(
                f"the run did not end within {limit_seconds:g} s; the output ends {self.text[-1500:]!r}"
            ) from None
        self._reader.join(10)
        return status

    def tell(self, line: str) -> None:
        """Writes a line to the launcher's standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def _file(self) -> tuple[int, int]:
        """(inode, last step) of the metrics."""
        with contextlib.suppress(OSError):
            return self.recipe.metrics.stat().st_ino, self.last_step()
        return 0, 0


def tagged(tag: str) -> list[int]:
    """Every process that carries a run's mark."""
    mark = f"{TAG}={tag}".encode()
    return [pid for pid in _pids() if mark in _environment(pid)]


def checkpoints(recipe: Recipe) -> tuple[int, ...]:
    """The steps of the complete ones."""
    with contextlib.suppress(OSError):
        return tuple(checkpoint_folders(recipe.checkpoints))
    return ()


def saving(recipe: Recipe) -> int | None:
    """The step of the checkpoint that is being written."""
    with contextlib.suppress(OSError):
        return next((int(m[1]) for m in map(_SAVING.fullmatch, os.listdir(recipe.checkpoints)) if m), None)
    return None


def last_step(metrics: pathlib.Path) -> int:
    """The step of the last whole line; 0 without one."""
    with contextlib.suppress(OSError, ValueError, KeyError), open(metrics, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2000))
        lines = file.read().split(b"\n")[:-1]
        return json.loads(lines[-1])["step"] if lines else 0
    return 0


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def _environment(pid: int) -> list[bytes]:
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _is_leader(pid: int) -> bool:
    """A worker leads a session of its own; what it starts does not."""
    with contextlib.suppress(OSError):
        return os.getsid(pid) == pid
    return False


def _open_files(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found
