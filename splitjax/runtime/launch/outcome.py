"""Holds how a launched run went, every worker's end, every attempt, the exit status, and finds the words for them."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence
from typing import Any

from splitjax.runtime.launch.stages import Recovery

SIGNAL_STATUS = 128  # what shells add to the number of a signal
LEFT_ON_SIGTERM = SIGNAL_STATUS + signal.SIGTERM
# From how much on a clock was set back, and not only slowed down by what keeps it right.
CLOCK_SET_BACK_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class WorkerExit:
    """Holds how a worker ended.

    - `rank`: its process id in the run.
    - `code`: its exit code; for a signal the signal's number, negative.
    - `seconds`: after the start of its attempt.
    - `killed`: whether the launcher killed it.
    - `last_lines`: the last of what it wrote, standard output and standard error together.
    - `silent_seconds`: how long it had given no sign of life when the launcher therefore killed it; None for any other
      end.
    - `stuck`: why the launcher killed it as the one that held up the run; empty for any other end.
    """

    rank: int
    code: int
    seconds: float
    killed: bool
    last_lines: tuple[str, ...] = ()
    silent_seconds: float | None = None
    stuck: str = ""

    @property
    def status(self) -> int:
        """Returns the code as shells have it: 128 and the number of the signal."""
        return self.code if self.code >= 0 else SIGNAL_STATUS - self.code

    @property
    def is_failure(self) -> bool:
        """Returns whether the worker ended by itself, and neither well nor because it was asked to."""
        return not self.killed and self.code not in (0, LEFT_ON_SIGTERM)

    def __str__(self) -> str:
        if self.silent_seconds is not None:
            return f"killed by the launcher: no sign of life for {self.silent_seconds:g} s"
        if self.stuck:
            return f"killed by the launcher: {self.stuck}"
        if self.killed:
            return "killed by the launcher"
        if self.code >= 0:
            return f"exit code {self.code}"
        name = signal_name(-self.code)
        return f"killed by {name}" + (" (by hand, or by the system when memory runs out)" if name == "SIGKILL" else "")


@dataclasses.dataclass(frozen=True)
class LaunchAttempt:
    """Holds a start of all workers, until the last of them ended.

    - `number`: from 0.
    - `started_unix_seconds`: when all workers had been started.
    - `failed_unix_seconds`: when the first failure was noticed; None if none was.
    - `exits`: the workers in the order in which they left.
    - `failed`: the worker whose failure ended the attempt; None if none failed.
    - `reason`: why the launcher ended the attempt; empty if it did not have to.
    - `findings`: lines about a worker that held up the run: where all workers were, its stacks.
    - `step_times`: a line about the workers' step times; empty where none were recorded.
    - `completed_step`: the last step that the workers completed in this attempt; 0 for none.
    - `workers`: by rank, the numbers of the workers among those that the run began with.
    - `recovery`: how long it took from the failure of the attempt before to this one's first step, and what; None where
      that is not known.
    - `clock_set_back_seconds`: by how much this machine's clock was set back while the attempt ran; 0 if it was not.
    """

    number: int
    started_unix_seconds: float
    failed_unix_seconds: float | None
    exits: tuple[WorkerExit, ...]
    failed: WorkerExit | None
    reason: str = ""
    findings: tuple[str, ...] = ()
    step_times: str = ""
    completed_step: int = 0
    workers: tuple[int, ...] = ()
    recovery: Recovery | None = None
    clock_set_back_seconds: float = 0.0

    @property
    def ended_by_clock(self) -> bool:
        """Returns whether JAX ended the workers because the clock was set back, and no worker is at fault.

        The coordination service subtracts times of that clock as unsigned numbers: a clock that is set back looks like
        a silence of half a million years, longer than any that it can be told to bear. It then aborts all workers."""
        aborted = self.failed is not None and self.failed.code == -signal.SIGABRT
        return aborted and self.clock_set_back_seconds >= CLOCK_SET_BACK_SECONDS

    @property
    def left_on_sigterm(self) -> WorkerExit | None:
        """Returns the first worker that says by its exit code that it stopped because of a SIGTERM."""
        return next((end for end in self.exits if end.code == LEFT_ON_SIGTERM), None)

    @property
    def status(self) -> int:
        """Returns the exit status of the attempt, had nobody asked it to stop."""
        if self.failed is not None:
            return self.failed.status
        if self.left_on_sigterm is not None:
            return LEFT_ON_SIGTERM
        return next((end.status for end in self.exits if end.code), 0)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Holds what a worker's network device really carried over all attempts.

    - `rank`: the worker's process id in the run.
    - `sent_bytes`, `received_bytes`: both ways.
    """

    rank: int
    sent_bytes: int
    received_bytes: int


@dataclasses.dataclass(frozen=True)
class LaunchOutcome:
    """Holds how a launched run went.

    - `attempts`: every start of the workers.
    - `stop_signal`: the signal that the launcher was asked to stop with, if any.
    - `traffic`: bytes per worker, in runs with a network of their own.
    """

    attempts: tuple[LaunchAttempt, ...]
    stop_signal: int | None = None
    traffic: tuple[Traffic, ...] = ()

    @property
    def status(self) -> int:
        """Returns the launcher's exit status: 0, the failed worker's, or 128 and the number of the signal that stopped
        the run."""
        if self.stop_signal is not None:
            return SIGNAL_STATUS + self.stop_signal
        return self.attempts[-1].status


def signal_name(number: int) -> str:
    """Returns the name of the signal of a `number`: `SIGKILL` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def failure_text(attempt: LaunchAttempt) -> str:
    """Returns what the launcher says about an `attempt` that failed: the worker, its last lines, and the others in
    brief."""
    failed: Any = attempt.failed
    before = [end for end in attempt.exits[: attempt.exits.index(failed)] if end.code == 0]
    lines = [f"worker {failed.rank} failed after {failed.seconds:.1f} s: {failed}"]
    if attempt.ended_by_clock:
        lines += [
            f"no worker is at fault: this machine's clock was set back by {attempt.clock_set_back_seconds:.0f} s, and"
            " JAX's coordination service, which measures silence by it, ended them"
        ]
    lines += attempt.findings
    if failed.last_lines:
        lines += ["its last lines:", *(f"    {line}" for line in failed.last_lines)]
    lines += [
        f"worker {end.rank} had left with exit code 0 {failed.seconds - end.seconds:.1f} s before" for end in before
    ]
    lines += [
        f"after it: {line}"
        for line in _in_brief([end for end in attempt.exits if end is not failed and end not in before])
    ]
    return "\n".join(lines)


def unusual_text(attempt: LaunchAttempt) -> list[str]:
    """Returns a line for each group of workers of an `attempt` that were asked to stop and did not simply do so."""
    return _in_brief([end for end in attempt.exits if end.code not in (0, LEFT_ON_SIGTERM, -signal.SIGTERM)])


def _in_brief(exits: Sequence[WorkerExit]) -> list[str]:
    ranks: dict[str, list[int]] = {}
    for end in exits:
        ranks.setdefault(str(end), []).append(end.rank)
    return [
        f"worker{'s' if len(some) > 1 else ''} {', '.join(map(str, sorted(some)))}: {how}"
        for how, some in ranks.items()
    ]
