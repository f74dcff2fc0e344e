"""Undisturbed runs beside heavy load: how often the launcher restarts what is no fault, or names a straggler that is
none."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import pathlib
import re
import statistics
import sys
import tempfile
import threading
import time

from benchmarks import machine
from benchmarks.faults.run import Launched, Recipe

# The deadlines of each run in turn: the defaults, and short ones.
DEADLINES = ((), ("--step-timeout-seconds", "20", "--heartbeat-seconds", "20"))
NUM_STEPS, PACE_SECONDS, CHECKPOINT_EVERY = 1500, 0.2, 100
RECORDS = "faults-false_alarms.jsonl"
_RUN_LIMIT_SECONDS = 3600.0
_P99 = re.compile(r"p99 ([0-9.e+-]+) (ms|s)\b")


@dataclasses.dataclass(frozen=True)
class QuietRun:
    """One run that nothing was done to.

    - `deadlines`: options of the launcher; none for the defaults.
    - `restarts`: attempts that the launcher ended. `stragglers`: lines that name one.
    - `num_saves`: complete checkpoints.
    - `worst_p99_seconds`: of its processes' steps, the last 64 of each.
    - `load`: least, median and most of the machine's runnable processes in the meantime, those of the run included
      (the first field of /proc/loadavg, every 10 s).
    - `num_cores`: of the machine.
    - `series`: which of the series that ran side by side it belongs to.
    """

    commit: str
    date: str
    deadlines: tuple[str, ...]
    seconds: float
    status: int
    restarts: int
    stragglers: int
    num_steps: int
    num_saves: int
    worst_p99_seconds: float
    load: tuple[float, float, float]
    num_cores: int
    series: int = 0


def measure(hours: float, output: pathlib.Path, series: int = 0) -> list[QuietRun]:
    """Runs one after another until `hours` have passed, appending each to its file in `output`, which several
    series may share; returns all that the file has."""
    records = output / RECORDS
    until = time.monotonic() + 3600 * hours
    while time.monotonic() < until:
        number = sum(run.series == series for run in read(records))
        with tempfile.TemporaryDirectory(prefix="splitjax-quiet-") as folder:
            run = quiet_run(pathlib.Path(folder), DEADLINES[number % len(DEADLINES)], until - time.monotonic())
        output.mkdir(parents=True, exist_ok=True)
        with open(records, "a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(dataclasses.replace(run, series=series))) + "\n")
        print(run, flush=True)
    return read(records)


def quiet_run(folder: pathlib.Path, deadlines: tuple[str, ...], seconds: float) -> QuietRun:
    """One run in a new `folder`, no longer than about so many `seconds`."""
    num_steps = max(CHECKPOINT_EVERY, min(NUM_STEPS, int(seconds / PACE_SECONDS)))
    recipe = Recipe(
        folder,
        folder / "compiled",
        num_steps=num_steps,
        checkpoint_every=CHECKPOINT_EVERY,
        program=(
            *(sys.executable, "-m", "benchmarks.faults.worker", str(folder)),
            *("--steps", str(num_steps), "--checkpoint-every", str(CHECKPOINT_EVERY), "--pace", str(PACE_SECONDS)),
        ),
    )
    loads: list[float] = []
    over = threading.Event()
    watcher = threading.Thread(target=_watch_load, args=(loads, over), daemon=True)
    watcher.start()
    with Launched(recipe, restarts=1000, options=deadlines) as run:
        status = run.end(_RUN_LIMIT_SECONDS)
        took = time.monotonic() - run.began
        text, saves = run.text, len(run.complete())
    over.set()
    watcher.join()
    return QuietRun(
        machine.this_commit(),
        datetime.datetime.now(datetime.UTC).date().isoformat(),
        deadlines,
        took,
        status,
        text.count("starting all workers again"),
        text.count("holds up the others"),
        recipe.num_steps,
        saves,
        max((float(m[1]) / (1000 if m[2] == "ms" else 1) for m in _P99.finditer(text)), default=0.0),
        (min(loads), statistics.median(loads), max(loads)),
        len(os.sched_getaffinity(0)),
    )


def _watch_load(loads: list[float], over: threading.Event) -> None:
    while True:
        loads.append(os.getloadavg()[0])
        if over.wait(10):
            return


def read(records: pathlib.Path) -> list[QuietRun]:
    """What was measured so far."""
    if not records.exists():
        return []
    rows = map(json.loads, records.read_text(encoding="utf-8").splitlines())
    return [QuietRun(**{**row, "deadlines": tuple(row["deadlines"]), "load": tuple(row["load"])}) for row in rows]
