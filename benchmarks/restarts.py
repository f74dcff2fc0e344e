"""How long a launched run takes from the death of a worker to its next step, and where that time goes.

    python -m benchmarks restarts              four kills of each way to start again, and its page (about ten minutes on
            a busy machine; Linux)
    python -m benchmarks restarts --kills 2 --rounds 1

The run is that of `python -m benchmarks faults`. A worker is killed while it trains, once the process that is started
ahead is ready where there is one; the ways take turns, so that other work on the machine meets all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence

from benchmarks import machine
from benchmarks._common import table, virtual_devices, write_page
from benchmarks.faults.run import Launched, Recipe

LIMIT_SECONDS = 400.0
MEDIAN_GOAL_SECONDS, WORST_GOAL_SECONDS = 8.0, 15.0
GRACE_SECONDS = 2.0
STAGES = ("end", "import", "join", "prepare", "trace", "compile", "restore", "first step")
_BACK = re.compile(
    r"back at step (\d+), ([\d.]+) s after the failure was noticed: (.*) s \(worker \d+; processor ([\d.]+)"
)
_READY = "is ready: workers of a restart are forked from it"


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to start again. `options`: of `splitjax launch`; `keeps`: whether compiled programs are kept."""

    name: str
    options: tuple[str, ...]
    keeps: bool


WAYS = (
    Way("started anew, compiled anew", ("--no-standby",), False),
    Way("started anew, programs kept", ("--no-standby",), True),
    Way("forked from a process started ahead, programs kept", (), True),
)


@dataclasses.dataclass(frozen=True)
class Restart:
    """A kill and what followed, in seconds.

    - `detect_seconds`: from the kill until the launcher noticed. `total_seconds`: from the kill to the next step.
    - `stages`: of `STAGES`, of the worker for which the other waited. `cpu_seconds`: of the processor,
      most of a worker.
    - `load`: processes that wanted a core, in the minute before.
    """

    way: str
    detect_seconds: float
    total_seconds: float
    stages: dict[str, float]
    cpu_seconds: float
    load: float


@dataclasses.dataclass(frozen=True)
class Uncached(Recipe):
    """The run without compiled programs that are kept."""

    def environment(self) -> dict[str, str]:
        return super().environment() | {"JAX_ENABLE_COMPILATION_CACHE": "false"}


def main(argv: list[str] | None = None) -> int:
    """Kills workers, and writes the page; returns 1 where the goals are missed."""
    virtual_devices(1)
    parser = argparse.ArgumentParser(
        "restarts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=2, help="of each way in a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one kill of each way: tries the code, not the goals")
    parser.add_argument("--output", type=pathlib.Path, default=None, help="folder of the page")
    options = parser.parse_args(argv)
    kills, rounds = (1, 1) if options.quick else (options.kills, options.rounds)
    found: list[Restart] = []
    with tempfile.TemporaryDirectory(prefix="splitjax-restarts-") as folder:
        for number in range(rounds):
            for way in WAYS:
                for restart in measure(way, pathlib.Path(folder) / f"{number}-{WAYS.index(way)}", kills):
                    found.append(restart)
                    print(f"{way.name}: {restart.total_seconds:.1f} s, load {restart.load:.0f}", flush=True)
    print("wrote", write_page("restarts", page(found), options.output))
    if options.quick:
        return 0
    totals = [one.total_seconds for one in found if one.way == WAYS[-1].name]
    return 0 if statistics.median(totals) <= MEDIAN_GOAL_SECONDS and max(totals) <= WORST_GOAL_SECONDS else 1


def measure(way: Way, folder: pathlib.Path, kills: int) -> list[Restart]:
    """Kills a worker of a run so often, each time another. Raises `Overdue` where it does not go on."""
    kind = Recipe if way.keeps else Uncached
    recipe = kind(folder, folder.parent / "compiled", num_steps=100_000)
    found = []
    with Launched(recipe, restarts=kills, options=("--grace-seconds", str(GRACE_SECONDS), *way.options)) as run:
        for number in range(kills):
            run.until("a step", run.has_stepped, LIMIT_SECONDS)
            if not way.options:
                run.until("a process ahead", lambda: _READY in run.text, LIMIT_SECONDS)
            begin = run.last_step()
            run.until("steps", lambda begin=begin: run.last_step() > begin + 2 * recipe.checkpoint_every, LIMIT_SECONDS)
            victim = run.workers()[number % 2]
            run.new_attempt()
            seen, killed = len(run.lines), time.monotonic()
            os.kill(victim, signal.SIGKILL)
            run.until("the next step", lambda: run.said("back at step"), LIMIT_SECONDS)
            at, line = next((at, line) for at, line in run.lines[seen:] if "back at step" in line)
            found.append(read(way, line, at - killed))
    return found


def read(way: Way, line: str, total_seconds: float) -> Restart:
    """Reads what the launcher said, `total_seconds` after the kill. Raises `ValueError` for another line."""
    match = _BACK.search(line)
    if match is None:
        raise ValueError(line)
    stages = {name: float(seconds) for name, _, seconds in (part.rpartition(" ") for part in match[3].split(", "))}
    if tuple(stages) != STAGES:
        raise ValueError(line)
    detect = total_seconds - float(match[2])
    return Restart(way.name, detect, total_seconds, stages, float(match[4]), os.getloadavg()[0])


def page(found: Sequence[Restart]) -> list[str]:
    """The page of all restarts."""
    by_way = {way.name: [one for one in found if one.way == way.name] for way in WAYS}
    median = lambda way: statistics.median(one.total_seconds for one in by_way[way.name])
    ahead = by_way[WAYS[-1].name]
    worst = max(one.total_seconds for one in ahead)
    cpu = {way.name: statistics.median(one.cpu_seconds for one in by_way[way.name]) for way in WAYS}
    loads = [one.load for one in found]
    lines = [
        "# Restarts: from the death of a worker to the next step",
        "",
        f"**With workers forked from a process started ahead and programs kept: {median(WAYS[-1]):.1f} s in the median,"
        f" {worst:.1f} s at worst (goals: {MEDIAN_GOAL_SECONDS:.0f} and {WORST_GOAL_SECONDS:.0f} s), beside"
        f" {median(WAYS[0]):.1f} s for a start anew that compiles and {median(WAYS[1]):.1f} s for one that does not, on"
        f" a machine of {os.cpu_count()} cores on which {min(loads):.0f} to {max(loads):.0f} processes wanted to"
        " run.**",
        "",
        machine.header(
            machine.this_machine((*machine.PACKAGES, "orbax-checkpoint")), "python -m benchmarks restarts"
        ).rstrip(),
        "",
        "Runs: those of `python -m benchmarks faults`, two processes (gloo) of one thread each. A worker is killed by"
        " SIGKILL while it trains, in turn worker 0 and worker 1. `detect`: until the launcher notices; `end`: until"
        f" all processes of the attempt have ended, of which `--grace-seconds` {GRACE_SECONDS:g} are for the last words"
        " of the other worker, which waits in a collective; the next columns are the stages of the worker for which the"
        " other waited, and `rest` is what is missing to the total. `processor`: what the worker that computed most"
        " needed of its core until the step; on a machine that does nothing else the total is about the grace and this"
        f" ({GRACE_SECONDS + cpu[WAYS[0].name]:.1f}, {GRACE_SECONDS + cpu[WAYS[1].name]:.1f} and"
        f" {GRACE_SECONDS + cpu[WAYS[2].name]:.1f} s). `load`: Linux's load average of the last minute. Seconds"
        " everywhere.",
        "",
    ]
    for way in WAYS:
        rows = by_way[way.name]
        lines += [
            f"## {way.name[0].upper()}{way.name[1:]}",
            "",
            *table(
                ("", "total", "detect", *STAGES, "rest", "processor", "load"),
                [
                    *(_cells(f"{number + 1}", [one]) for number, one in enumerate(rows)),
                    _cells("median", rows),
                ],
            ),
            "",
        ]
    return lines


def _cells(name: str, rows: Sequence[Restart]) -> list[str]:
    middle = lambda of: f"{statistics.median(map(of, rows)):.2f}"
    rest = lambda one: one.total_seconds - one.detect_seconds - sum(one.stages.values())
    return [
        name,
        middle(lambda one: one.total_seconds),
        middle(lambda one: one.detect_seconds),
        *(middle(lambda one, stage=stage: one.stages[stage]) for stage in STAGES),
        middle(rest),
        middle(lambda one: one.cpu_seconds),
        f"{statistics.median(one.load for one in rows):.0f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
