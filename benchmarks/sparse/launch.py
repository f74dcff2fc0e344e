"""Worker processes of the benchmark of sparse synchronisation: started behind links, begun together, measured in
turns."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_WAIT_SECONDS = 1800
# a process of one thread gains nothing from compiling a program in 32 pieces
_WHOLE = "--xla_cpu_parallel_codegen_split_count=1"


@dataclasses.dataclass(frozen=True)
class Answers:
    """What the workers of a run wrote, by rank, and how many cores others kept busy meanwhile (None: not known)."""

    workers: tuple[dict[str, Any], ...]
    others: float | None


def run_workers(
    module: str,
    settings: Mapping[str, Any],
    num_workers: int,
    bandwidth: str | None,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
) -> Answers:
    """Runs `python -m benchmarks.MODULE SETTINGS` in that many processes of one XLA thread, each behind a link of this
    rate.

    Raises `RuntimeError` where there can be no such network, or a worker failed. A worker that starts a process leaves
    its id in a file `pid*` of the folder, so that it does not count among others."""
    from benchmarks.training.common import Meter
    from splitjax.errors import LaunchError
    from splitjax.runtime.launch import launch

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        command = [python, "-m", f"benchmarks.{module}", json.dumps({**settings, "folder": name})]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": _WHOLE, **(environment or {})}
        try:
            run = launch.start(
                launch.LaunchConfig(num_workers, threads=1, bandwidth=bandwidth), command, environment=environment
            )
        except LaunchError as error:
            raise RuntimeError(error.message) from error
        meter, others = None, None
        while (outcome := run.wait(0.1)) is None:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # of a worker that failed
                if meter is None and (folder / "begin").exists():
                    meter = Meter(
                        *(worker.pid for worker in run.workers),
                        *(int(file.read_text()) for file in folder.glob("pid*")),
                    )
                if meter is not None and others is None and (folder / "end").exists():
                    others = meter.others()
        if outcome.status:
            raise RuntimeError(f"the run of {module} ended with exit status {outcome.status}")
        return Answers(
            tuple(json.loads((folder / f"worker{rank}.json").read_text()) for rank in range(num_workers)), others
        )


@dataclasses.dataclass
class Team:
    """The processes of a run, as one of them sees the others."""

    settings: dict[str, Any]

    def __post_init__(self) -> None:
        from splitjax.runtime.launch.peers import Peers

        self._peers, self.folder = Peers("benchmark"), pathlib.Path(self.settings["folder"])
        self.rank, self.count = self._peers.rank, self._peers.count

    def together(self) -> None:
        """Returns when all are here. By messages: who waits sleeps."""
        self._peers.agree(self._peers.new_topic(), None, _WAIT_SECONDS)

    def decide(self, make: Callable[[], Any]) -> Any:
        """What `make` returns in the first worker (a JSON value), in all."""
        return self._peers.decide(self._peers.new_topic(), make, _WAIT_SECONDS)

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def begin(self) -> None:
        """All is compiled: from here on it counts how busy others are."""
        self.together()
        if self.rank == 0:
            (self.folder / "begin").touch()

    def finish(self, answer: Any) -> None:
        self.together()
        if self.rank == 0:
            (self.folder / "end").touch()
        time.sleep(0.5)  # whoever looks at this process's time has to find it alive
        (self.folder / f"worker{self.rank}.json").write_text(json.dumps(answer))
        self.together()

    def turn(self, run: Callable[[int], Any], steps: int) -> dict[str, Any]:
        """Seconds of one of `steps` steps begun together, its processor time, and the bytes that left this worker
        meanwhile.

        Bytes are read when all have what was sent to them: until then some may wait in a queue."""
        from splitjax.runtime.network import bytes_sent

        self.together()
        before, cpu, started = bytes_sent(), time.process_time(), time.perf_counter()
        for number in range(steps):
            run(number)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        self.together()
        after = bytes_sent()
        sent = None if before is None or after is None else (after[0] - before[0]) / steps
        return {"seconds": seconds / steps, "cpu": cpu / steps, "sent": sent}


@dataclasses.dataclass(frozen=True)
class Measured:
    """One way over all workers: seconds of the slowest worker and their quartiles over the turns; processor seconds of
    a worker; bytes that the busiest worker sent, as the formulas say (None on the loopback)."""

    seconds: float
    low: float
    high: float
    cpu: float
    sent: float | None


def over_workers(turns: Sequence[Sequence[Mapping[str, Any]]]) -> Measured:
    """`turns`: [worker][turn], as `Team.turn` gives them."""
    slowest = [max(one["seconds"] for one in turn) for turn in zip(*turns, strict=True)]
    low, middle, high = statistics.quantiles(slowest, n=4, method="inclusive") if len(slowest) > 1 else slowest * 3
    cpu = statistics.median(one["cpu"] for worker in turns for one in worker)
    by_worker = [[one["sent"] for one in worker] for worker in turns]
    known = all(sent is not None for worker in by_worker for sent in worker)
    return Measured(middle, low, high, cpu, max(statistics.median(worker) for worker in by_worker) if known else None)


def others_text(others: float | None) -> str:
    from benchmarks.training.common import MOST_OTHERS

    if others is None:
        return "How busy others were is not known."
    text = f"Others kept {others:.2f} cores busy meanwhile."
    return text if others <= MOST_OTHERS else f"**{text} Run this on an idle machine.**"
