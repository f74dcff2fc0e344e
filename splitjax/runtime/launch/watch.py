"""Watching the workers of one attempt: who ended first, who holds up the others, who is to be ended, and when."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from signal import SIGKILL, SIGTERM

from splitjax.runtime.launch import deadlines, stacks
from splitjax.runtime.launch.config import LaunchConfig
from splitjax.runtime.launch.outcome import LEFT_ON_SIGTERM, LaunchAttempt, WorkerExit
from splitjax.runtime.launch.output import Output
from splitjax.runtime.launch.variables import ALIVE
from splitjax.runtime.launch.whereabouts import Board, Whereabouts
from splitjax.runtime.launch.workers import Worker, is_running

# The launcher looks at its clock far more often than this, unless it was stopped itself.
_PAUSE_SECONDS = 1.0
# How often it asks whether a worker holds up the run.
_JUDGE_SECONDS = 0.25


@dataclasses.dataclass(frozen=True)
class Event:
    """Worker `rank` ended with `code` at the monotonic time `at`; or, without a code, is leaving: it announced so, or
    it is gone already and its files are closed. With `alive`, the id of its process that joined, it only gives a sign
    of life."""

    rank: int
    at: float
    code: int | None = None
    announced: bool = False
    alive: int | None = None

    @classmethod
    def noticed(cls, rank: int, said: str | None, at: float) -> Event:
        """Returns the event of worker `rank` that `said` (None: its end of the pipe was closed) at the monotonic time
        `at`."""
        word, _, pid = (said or "").partition(" ")
        return cls(rank, at, alive=int(pid)) if word == ALIVE else cls(rank, at, announced=said is not None)


class Watch:
    """Watches the workers of an attempt: `take` what happened, `tick` now and then, until nothing is running.

    **Arguments:** `config`: how long to wait for what. `output`: what the workers write. `board`: where they record
    what they do; closed by `close`.
    """

    def __init__(self, config: LaunchConfig, output: Output, board: Board | None = None):
        self._config, self._output, self._board = config, output, board
        self._began, self._began_unix = time.monotonic(), time.time()
        self._failed_unix: float | None = None
        self._workers: Sequence[Worker] = ()
        self._running: set[int] = set()
        # Ended while being stopped, but something that they started still writes, and may still save.
        self._lingering: set[int] = set()
        self._left: dict[int, tuple[float, bool]] = {}
        self._codes: dict[int, int] = {}
        self._killed: set[int] = set()
        # The last sign of life of each worker that has joined and not announced that it leaves, and whose it was.
        self._signs: dict[int, tuple[float, int]] = {}
        self._hung: set[int] = set()
        self._stuck: dict[int, str] = {}
        self._findings: list[str] = []
        self._last_seen: dict[int, Whereabouts] = {}
        self._judged = self._began
        self._ticked = self._began
        self._stood_still_until = self._began
        self._is_stopping = False
        self._deadline = float("inf")
        self._reason_of_deadline = self._reason = ""

    def start(self, workers: Sequence[Worker]) -> None:
        """Counts the `workers` as running from here on."""
        self._workers, self._running = workers, {worker.rank for worker in workers}

    @property
    def is_running(self) -> bool:
        """Returns whether a worker, or something that it started and that may still save, is running."""
        return bool(self._running or self._lingering)

    def take(self, event: Event) -> None:
        """Notes an `event`, and what is to be done because of it."""
        if event.alive is not None:
            self._signs[event.rank] = max(event.at, self._stood_still_until), event.alive
            return
        self._signs.pop(event.rank, None)
        # Not the ends decide who left first: taking down a process can last longer than it takes the others to fail
        # because of it. Of two in the same instant, one that left without a word was not brought down by an error.
        self._left.setdefault(event.rank, (event.at, event.announced))
        if event.code is None:
            return
        self._codes[event.rank] = event.code
        self._running.discard(event.rank)
        config, worker = self._config, self._workers[event.rank]
        if event.code == LEFT_ON_SIGTERM and not self._is_stopping:
            self._is_stopping = True
            self._end_by(config.stop_timeout_seconds, "to save and exit after a SIGTERM from outside")
        elif event.code == 0 and config.exit_timeout_seconds is not None and not self._is_stopping:
            self._end_by(config.exit_timeout_seconds, f"to end after worker {event.rank} had ended well")
        elif event.code not in (0, LEFT_ON_SIGTERM) and not self._is_stopping and event.rank not in self._killed:
            self._failed_unix = self._failed_unix or time.time()
            self._end_by(config.grace_seconds, "")
        if self._is_stopping and self._output.is_open(event.rank):
            self._lingering.add(event.rank)
            worker.signal_group(SIGTERM)
        else:
            worker.signal_group(SIGKILL)

    def tick(self, *, stop: bool, kill: bool) -> None:
        """Does what the clock, or a request to `stop` or to `kill`, asks for."""
        self._lingering = {rank for rank in self._lingering if self._output.is_open(rank)}
        if stop and not self._is_stopping:
            self._is_stopping = True
            self._deadline = float("inf")
            self._end_by(self._config.stop_timeout_seconds, "to save and exit")
            for rank in self._running:
                self._workers[rank].signal(SIGTERM)
        self._end_hung()
        self._end_stuck()
        if kill or time.monotonic() >= self._deadline:
            if self._running and not kill:
                self._reason = self._reason or self._reason_of_deadline
                if self._is_stopping:
                    self._say_where(self._running)
            self._killed |= self._running
            for rank in self._running | self._lingering:
                self._workers[rank].signal_group(SIGKILL)
            self._lingering, self._deadline = set(), float("inf")

    def _end_hung(self) -> None:
        """Kills workers that gave no sign of life for `heartbeat_seconds`: stopped, or stuck in the system or in a call
        that never lets Python run. The others wait for them, and nobody else would end it."""
        now = time.monotonic()
        paused, self._ticked = now - self._ticked, now
        # this process did not run either: what they wrote meanwhile is yet to be read, or yet to be taken
        if paused > _PAUSE_SECONDS:
            self._stood_still_until = now
            self._signs = {rank: (at + paused, pid) for rank, (at, pid) in self._signs.items()}
        if self._is_stopping or self._deadline < float("inf"):
            return
        for rank, (at, pid) in list(self._signs.items()):
            if rank in self._running and now - at > self._config.heartbeat_seconds:
                del self._signs[rank]
                if is_running(pid):
                    self._hung.add(rank)
                    self._say_where([rank])
                    self._workers[rank].signal_group(SIGKILL)

    def _end_stuck(self) -> None:
        """Kills the worker that holds up the run, having completed no step within its deadline, and keeps what is to be
        said about it. Nobody is judged while the run ends anyway."""
        now = time.monotonic()
        if self._board is None or now - self._judged < _JUDGE_SECONDS:
            return
        self._judged = now
        if self._is_stopping or self._deadline < float("inf"):
            return
        stood_still_until = round(1e9 * self._stood_still_until)
        found = deadlines.find_stuck(
            self._whereabouts(), self._config.deadlines, time.monotonic_ns(), stood_still_until
        )
        if found is None:
            return
        where = self._last_seen
        # Of several in the same place the one that is stopped holds up the others, which only wait.
        stopped = tuple(rank for rank in found.ranks if stacks.is_stopped(where[rank].pid))
        ranks = stopped or found.ranks
        self._say_where(ranks)
        for rank in ranks:
            self._stuck[rank] = (
                f"no step completed for {found.waited_seconds:.0f} s (its deadline: {found.allowed_seconds:g} s):"
                f" {where[rank].place.words} in step {where[rank].step}"
            )
            self._workers[rank].signal_group(SIGKILL)

    def give_up(self, rank: int, why: str) -> None:
        """Kills worker `rank`, which keeps the others waiting; `why`: for the report of its end."""
        if rank in self._running and not self._is_stopping and rank not in self._stuck:
            self._stuck[rank] = why
            self._workers[rank].signal_group(SIGKILL)

    def _whereabouts(self) -> dict[int, Whereabouts]:
        """Where the workers that run and have joined are, by rank."""
        if self._board is not None:
            pages = {rank: self._board.read(rank) for rank in self._running}
            self._last_seen |= {rank: where for rank, where in pages.items() if where.pid}
        return {rank: where for rank, where in self._last_seen.items() if rank in self._running}

    def _say_where(self, ranks: Iterable[int]) -> None:
        """Keeps what is to be said: where all workers are, and the stacks of `ranks`, which are to be killed."""
        run, now_ns = self._whereabouts(), time.monotonic_ns()
        if not run:
            return
        self._findings += [deadlines.describe(rank, where, now_ns) for rank, where in sorted(run.items())]
        for rank in sorted(set(ranks) & set(run)):
            where = run[rank]
            lines = stacks.take(where.pid, self._workers[rank].stacks_file, where.thread_ident)
            self._findings += [f"what worker {rank} is doing:", *(f"    {line}" for line in lines)]

    def close(self) -> None:
        """Looks for the last time where the workers are, and closes the board."""
        if self._board is not None:
            for rank in range(len(self._workers)):
                where = self._board.read(rank)
                if where.pid:
                    self._last_seen[rank] = where
            self._board.close()
            self._board = None

    def _end_by(self, seconds: float, what_for: str) -> None:
        deadline = time.monotonic() + seconds
        if deadline < self._deadline:
            self._deadline = deadline
            self._reason_of_deadline = (
                f"the {seconds:g} s {what_for} were over: the rest was killed" if what_for else ""
            )

    def attempt(self, number: int, *, stopped: bool) -> LaunchAttempt:
        """Returns what happened in attempt `number`, once nothing is running and all output is read. `stopped`: whether
        it was asked to stop."""
        exits = tuple(
            WorkerExit(
                rank,
                self._codes[rank],
                self._left[rank][0] - self._began,
                rank in self._killed and self._codes[rank] == -SIGKILL,
                self._output.last_lines(rank),
                self._config.heartbeat_seconds if rank in self._hung else None,
                self._stuck.get(rank, ""),
            )
            for rank in sorted(self._codes, key=self._left.__getitem__)
        )
        first = next((end for end in exits if end.code and not end.killed), None)
        failed = first if first is not None and first.is_failure and not stopped else None
        return LaunchAttempt(
            number,
            self._began_unix,
            self._failed_unix,
            exits,
            failed,
            self._reason,
            tuple(self._findings),
            deadlines.step_times_text(self._last_seen),
            max((where.completed for where in self._last_seen.values()), default=0),
        )
