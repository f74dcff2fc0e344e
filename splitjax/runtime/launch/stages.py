"""Where the time goes between the start of a worker and its first step, by stages: each worker measures its own, and
the launcher reads them from the board.

What JAX and splitjax tell `jax.monitoring` goes in: traces, compilations, plans, restores. Seconds of each stage come
out, of which none is counted twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from splitjax.runtime.launch import variables
from splitjax.runtime.launch.ahead import imported_bits
from splitjax.runtime.launch.whereabouts import Board, StepRecorder

# What `jax.monitoring` is told by splitjax itself.
PLANNED_EVENT = "/splitjax/build_duration"
RESTORED_EVENT = "/splitjax/restore_duration"
LOOP_EVENT = "/splitjax/loop_begins"
FIRST_STEP_EVENT = "/splitjax/first_step_done"

# Where they are on a worker's page: behind its step times.
_STAGES_AT = 1024
# Variables that libraries read when they are imported: a script that sets them before it joins cannot be run by a
# process that has imported these libraries already.
_READ_AT_IMPORT = ("JAX_", "OMP_", "MKL_", "OPENBLAS_", "PYTHON")


class Stage(enum.IntEnum):
    """Says what a worker does until its first step is done, in the order in which it begins with it."""

    IMPORT = 0  # starts Python and imports libraries, or is forked from a process that has done so
    JOIN = 1  # connects to the coordination service
    PREPARE = 2  # data, model, devices: what the script does before its loop, less what has a stage of its own
    TRACE = 3  # traces, plans and lowers
    COMPILE = 4  # XLA, or reading what it compiled before
    RESTORE = 5  # looks for a checkpoint, and reads it
    STEP = 6  # the first step itself, with its data, and with waiting for the other processes

    @property
    def words(self) -> str:
        """Returns what the stage is called in the launcher's log."""
        return self.name.lower() if self is not Stage.STEP else "first step"


_STAGE_OF_EVENT = {
    "/jax/core/compile/jaxpr_trace_duration": Stage.TRACE,
    "/jax/core/compile/jaxpr_to_mlir_module_duration": Stage.TRACE,
    PLANNED_EVENT: Stage.TRACE,
    "/jax/core/compile/backend_compile_duration": Stage.COMPILE,
    RESTORED_EVENT: Stage.RESTORE,
}
# Of stages that are under way at once the first here counts: a plan is made while tracing, and compiles small programs.
_INNERMOST = (Stage.COMPILE, Stage.TRACE, Stage.RESTORE)
# Seconds of each stage, and of the processor; bits of what is imported, fit (1) or not, number of the step.
_PAGE = struct.Struct(f"={len(Stage) + 1}d3q")


@dataclasses.dataclass(frozen=True)
class StageTimes:
    """Holds how a worker came to its first step.

    - `seconds`: of each stage.
    - `imported`: which of `standby.AHEAD` it has imported, as bits.
    - `fit`: whether a process that has imported these already may run its script: the script set no variable that they
      read then.
    - `step`: the number of its first step.
    - `cpu_seconds`: processor time of its process until then; what it would take on a machine that does nothing else,
      but for waiting.
    """

    seconds: Mapping[Stage, float]
    imported: int
    fit: bool
    step: int
    cpu_seconds: float

    @property
    def total_seconds(self) -> float:
        """Returns the seconds of all stages."""
        return sum(self.seconds.values())

    @classmethod
    def read(cls, board: Board, rank: int) -> StageTimes | None:
        """Returns what worker `rank` wrote on the `board`; None before its first step is done."""
        *seconds, cpu_seconds, imported, fit, step = _PAGE.unpack(board.bytes_at(rank, _STAGES_AT, _PAGE.size))
        if not imported:
            return None
        return cls(dict(zip(Stage, seconds, strict=True)), imported, bool(fit), step, cpu_seconds)


class StageClock:
    """Measures the stages of this process from `joining` on; heard of by `jax.monitoring`, to which `on_event` and
    `on_duration` are to be registered.

    **Arguments:** `recorder`: on whose page the result is written when the first step is done.
    """

    def __init__(self, recorder: StepRecorder):
        self._recorder = recorder
        now = time.monotonic()
        started = float(os.environ.get(variables.LAUNCH_UNIX_SECONDS, time.time()))
        self._started = now - max(0.0, time.time() - started)
        self._joining = self._joined = self._loop = now
        self._spans: list[tuple[Stage, float, float]] = []
        self._is_over = False
        # One that was forked from a process started ahead runs a script of which this was found out before.
        self._fit = variables.FORKED in os.environ or is_fit(os.environ, initial_environment())

    def joined(self) -> None:
        """Notes that this process has joined the others."""
        self._joined = self._loop = time.monotonic()

    def on_event(self, event: str, **_: Any) -> None:
        """Takes an `event` without a duration: the beginning of the loop, and the end of its first step."""
        if event == LOOP_EVENT:
            self._loop = time.monotonic()
        elif event == FIRST_STEP_EVENT and not self._is_over:
            self._is_over = True
            self._write(time.monotonic())

    def on_duration(self, event: str, duration_secs: float, **_: Any) -> None:
        """Takes an `event` that took `duration_secs` and ends now."""
        stage = _STAGE_OF_EVENT.get(event)
        if stage is not None and not self._is_over:
            now = time.monotonic()
            self._spans.append((stage, now - duration_secs, now))

    def _write(self, now: float) -> None:
        seconds = shares(self._spans, self._joined, self._loop, now)
        seconds |= {Stage.IMPORT: self._joining - self._started, Stage.JOIN: self._joined - self._joining}
        facts = imported_bits(), self._fit, self._recorder.read().step
        data = _PAGE.pack(*(seconds[stage] for stage in Stage), time.process_time(), *facts)
        self._recorder.write_at(_STAGES_AT, data)
        self._spans = []


@contextlib.contextmanager
def told_as(event: str) -> Iterator[None]:
    """Tells `jax.monitoring` how long a block took, as `event`; a decorator too."""
    began = time.monotonic()
    try:
        yield
    finally:
        jax.monitoring.record_event_duration_secs(event, time.monotonic() - began)


def shares(spans: Sequence[tuple[Stage, float, float]], joined: float, loop: float, end: float) -> dict[Stage, float]:
    """Returns the seconds of each stage between `joined` and `end`, each moment counted once.

    **Arguments:** `spans`: stage, begin, end; they may overlap. `loop`: when the training loop began. All times: of one
    clock, in seconds."""
    seconds = dict.fromkeys(Stage, 0.0)
    marks = sorted({joined, loop, end, *(mark for _, *both in spans for mark in both if joined < mark < end)})
    for begin, stop in zip(marks, marks[1:], strict=False):
        under_way = {stage for stage, first, last in spans if first < stop and last > begin}
        otherwise = Stage.PREPARE if stop <= loop else Stage.STEP
        seconds[next((stage for stage in _INNERMOST if stage in under_way), otherwise)] += stop - begin
    return seconds


def is_fit(now: Mapping[str, str], initial: Mapping[str, str] | None) -> bool:
    """Returns whether the variables that libraries read at their import are in the environment `now` what they were
    when the process started (`initial`; None where that is not known)."""
    if initial is None:
        return False
    of_imports = lambda values: {name: value for name, value in values.items() if name.startswith(_READ_AT_IMPORT)}
    return of_imports(now) == of_imports(initial)


def initial_environment() -> dict[str, str] | None:
    """Returns the environment with which this process was started; None where the system does not tell."""
    try:
        with open("/proc/self/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return None
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in (entry.partition(b"=") for entry in entries)}


@dataclasses.dataclass(frozen=True)
class Recovery:
    """Holds how long a run took from the moment at which a failure was noticed to its next step.

    - `step`: the number of that step.
    - `seconds`: from the notice to the moment at which the launcher saw the step.
    - `ending_seconds`: of them, until all processes of the attempt before had ended and the next ones were started.
    - `stages`: of the worker for which the others waited, in seconds; what is missing to `seconds` is the launcher's.
    - `rank`: of that worker.
    - `cpu_seconds`: most processor time that a worker has used until then.
    - `ahead`: whether the workers were forked from a process that was started ahead.
    """

    step: int
    seconds: float
    ending_seconds: float
    stages: Mapping[Stage, float]
    rank: int
    cpu_seconds: float
    ahead: bool

    def __str__(self) -> str:
        parts = [f"end {self.ending_seconds:.2f}"]
        parts += [f"{stage.words} {self.stages[stage]:.2f}" for stage in Stage]
        how = "forked from a process started ahead" if self.ahead else "started anew"
        return (
            f"back at step {self.step}, {self.seconds:.2f} s after the failure was noticed: {', '.join(parts)} s"
            f" (worker {self.rank}; processor {self.cpu_seconds:.2f} s; {how})"
        )


def recovery(
    board: Board, num_processes: int, *, failed_unix_seconds: float, started_unix_seconds: float, ahead: bool
) -> Recovery | None:
    """Returns how the workers of the attempt that runs came to their first step; None until all have.

    **Arguments:** `board`: of the attempt. `num_processes`: its workers. `failed_unix_seconds`: when the failure of the
    attempt before was noticed. `started_unix_seconds`: when this one was started. `ahead`: whether its workers were
    forked from a process that was started ahead.
    """
    times = [StageTimes.read(board, rank) for rank in range(num_processes)]
    known = [one for one in times if one is not None]
    if len(known) < num_processes:
        return None
    # The others wait for the last in their first step.
    rank = min(range(num_processes), key=lambda number: known[number].seconds[Stage.STEP])
    now = time.time()
    return Recovery(
        known[rank].step,
        now - failed_unix_seconds,
        max(0.0, started_unix_seconds - failed_unix_seconds),
        known[rank].seconds,
        rank,
        max(one.cpu_seconds for one in known),
        ahead,
    )
