"""`splitjax launch`: start the processes of a run on this machine, and watch them."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Annotated, Any

from rich.console import Console

from splitjax.cli._options import CommandOptions
from splitjax.cli._output import print_value, write_file, write_json
from splitjax.cli.line.fields import Place, Shown
from splitjax.codec import Codec, Wording
from splitjax.display.document import Document, Section, Table
from splitjax.errors import LaunchError
from splitjax.runtime.launch import launch
from splitjax.runtime.launch import output as launch_output
from splitjax.runtime.launch.outcome import LaunchOutcome, Traffic

_TICK_SECONDS = 0.2
# A terminal that closes (SIGHUP) counts too, except under nohup.
_STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


@dataclasses.dataclass(frozen=True)
class Launch(CommandOptions):
    """Start a program as several processes that train together, and watch them.

    splitjax launch -n 4 -- python train.py

    Every process that imports splitjax joins the run by itself, and then sees the devices of all. If a worker fails,
    the others are ended too, and with --restarts all are started again. Ctrl-C or SIGTERM asks the workers to save a
    checkpoint and exit; a second Ctrl-C kills them.

    The command exits with 0 if all workers ended well; with the exit status of the worker that failed first, or 128
    plus the number of the signal that killed it; with 130 after Ctrl-C, and with 143 after SIGTERM.
    """

    command: Annotated[tuple[str, ...], Shown(metavar="-- COMMAND [ARGUMENT ...]", place=Place.REST)] = ()
    """What to start, behind two dashes."""
    num_processes: Annotated[int, Shown(short="-n")] = 1
    """How many worker processes to start."""
    restarts: int = 0
    """How often to start all workers again after a failure."""
    threads: int | None = None
    """Threads of each worker's XLA on CPU; as many as there are cores if not given."""
    devices_per_process: int | None = None
    """Virtual CPU devices of each worker."""
    gpus_per_process: int | None = None
    """GPUs of each worker: with 2, worker 0 sees GPUs 0 and 1, worker 1 sees GPUs 2 and 3. Every worker sees all GPUs
    if not given."""
    log_dir: pathlib.Path | None = None
    """Write what each worker prints into a file here too, one per worker and attempt."""
    grace_seconds: float = 2.0
    """How long the others may go on after a worker has failed."""
    stop_timeout_seconds: float = 120.0
    """How long workers may take to save and exit after Ctrl-C or SIGTERM, before they are killed."""
    exit_timeout_seconds: float | None = None
    """How long workers may go on after the first has ended well; for ever if not given."""
    step_timeout_seconds: float | None = None
    """How long a worker of splitjax's training loop may go without completing a step, before the run ends or restarts
    and says which worker is stuck where: ten times the median step, at least 60 s, if not given; inf for no limit."""
    compile_timeout_seconds: float = 3600.0
    """The same for a first step, any compilation, and a test."""
    save_timeout_seconds: float = 1200.0
    """The same for what a checkpoint holds up."""
    heartbeat_seconds: int = 100
    """A worker that cannot reach the coordinator for so long ends itself; one that gives no sign of life for so long is
    killed."""
    rejoin_timeout_seconds: float | None = None
    """How long a worker that failed may take to complete a step again, while all are started again and again
    (--restarts counts its first failure alone); then the run goes on without it, with the same batch on a smaller mesh.
    For ever if not given; 0 to go on at once."""
    least_processes: int = 1
    """Fewest workers with which the run goes on."""
    standby: bool = True
    """Do not start a process ahead, which imports what the workers import, and from which the workers of a restart are
    forked."""
    keep_memory: bool = True
    """Let workers on CPUs (--threads, --devices-per-process, JAX_PLATFORMS=cpu) give the memory of each step back to
    the system, which has to clear the next step's."""
    bandwidth: Annotated[str | None, Shown(metavar="RATE")] = None
    """Put each worker into a network of its own behind a link of this rate, such as 200mbit or 1gbit (Linux, root), and
    report the bytes that it really sent."""
    network_json: pathlib.Path | None = None
    """Write the bytes that each worker sent and received to this file too."""

    def run(self, console: Console) -> int:
        """Runs the command until all workers have ended, and returns the exit status. What workers print goes to the
        standard streams as it comes, not to the `console`. Raises `LaunchError` for options that cannot be."""
        if self.network_json is not None and self.bandwidth is None:
            raise LaunchError(
                "without --bandwidth workers talk over the loopback, and nothing is counted",
                value=str(self.network_json),
                place="--network-json",
                remedy="add --bandwidth, or leave --network-json out",
            )
        signals: list[int] = []
        with _noted(signals):
            options = {field.name: getattr(self, field.name) for field in dataclasses.fields(launch.LaunchConfig)}
            out = launch_output.Console(sys.stdout, sys.stderr)
            run = launch.start(launch.LaunchConfig(**options), self.command, console=out)
            num_seen = 0
            while (outcome := run.wait(_TICK_SECONDS)) is None:
                if num_seen < len(signals):
                    _pass_on(run, signals, out)
                    num_seen = len(signals)
            if run.network is not None:
                self._report(outcome.traffic, run.network.bits_per_second)
            write_json(self.json, outcome_json(outcome), console)
            return outcome.status

    def _report(self, traffic: tuple[Traffic, ...], bits_per_second: int) -> None:
        title = f"network, {self.bandwidth} a link"
        print_value(traffic_document(title, traffic), Console(stderr=True))
        if self.network_json is not None:
            write_file(self.network_json, _JSON.text(_NetworkTraffic(bits_per_second, traffic)), "--network-json")


@dataclasses.dataclass(frozen=True)
class _NetworkTraffic:
    """Holds what `--network-json` writes: the rate of a link, and what went over each."""

    bits_per_second: int
    workers: tuple[Traffic, ...]


_JSON = Codec(_NetworkTraffic, LaunchError, Wording("a count of traffic", "run with --network-json"), end="")


def traffic_document(title: str, traffic: Sequence[Traffic]) -> Document:
    """Makes the document of the bytes that each worker sent and received (`traffic`), under a `title`."""
    rows = tuple((str(worker.rank), f"{worker.sent_bytes:,}", f"{worker.received_bytes:,}") for worker in traffic)
    table = Table.of(("worker", "sent (bytes)", "received (bytes)"), rows, range(3))
    return Document("", (Section(title, (table,)),))


def outcome_json(outcome: LaunchOutcome) -> dict[str, Any]:
    """Returns how a run went (`outcome`) as `--json` writes it: its exit status, and of every attempt its steps, its
    reason to end and how each worker ended."""
    return {
        "status": outcome.status,
        "attempts": [
            {
                "number": attempt.number,
                "started_unix_seconds": attempt.started_unix_seconds,
                "completed_step": attempt.completed_step,
                "failed_worker": None if attempt.failed is None else attempt.failed.rank,
                "reason": attempt.reason,
                "workers": [
                    {"rank": end.rank, "code": end.code, "seconds": end.seconds, "end": str(end)}
                    for end in sorted(attempt.exits, key=lambda end: end.rank)
                ],
            }
            for attempt in outcome.attempts
        ],
        "traffic": [dataclasses.asdict(worker) for worker in outcome.traffic],
    }


@contextlib.contextmanager
def _noted(signals: list[int]) -> Iterator[None]:
    """Notes the stop signals that come during a block in the list `signals`, and puts the handlers that were there
    before back."""

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    numbers = [getattr(signal, name) for name in _STOP_SIGNALS if hasattr(signal, name)]
    hang_up = getattr(signal, "SIGHUP", None)
    before = {
        number: signal.signal(number, note)
        for number in numbers
        if not (number == hang_up and signal.getsignal(number) == signal.SIG_IGN)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _pass_on(run: launch.Run, signals: list[int], out: launch_output.Console) -> None:
    if signals.count(signal.SIGINT) > 1:
        out.say("killing all workers")
        run.kill()
    else:
        out.say(
            f"asking all workers to save and exit (up to {run.config.stop_timeout_seconds:g} s; Ctrl-C again kills"
            " them)"
        )
        run.stop(signals[0])
