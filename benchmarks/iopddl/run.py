"""Solves one problem with two processes within its time, and has what they say judged."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.iopddl.contest import Invalid, judge

_ROOT = pathlib.Path(__file__).resolve().parents[2]
# What a process keeps of its time to end in: writing the last answer, and being late by a step of the search.
SLACK_SECONDS = 0.5
SLACK_SHARE = 0.03
# Seconds before the limit at which a process that has not ended by itself is ended.
LAST_SECONDS = 0.2
# Where processor time is counted, how many times the limit the clock on the wall may show.
PATIENCE = 200.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """How problems are solved. `processes`: for each, of one core; `solver`: of `splitjax.search.solving.SOLVERS`;
    `clock`: "wall", or "processor": what an idle machine's clock would show, for machines that others share; `share`:
    of the contest's time; `seed`: of the first process."""

    processes: int = 2
    solver: str = "auto"
    clock: str = "wall"
    share: float = 1.0
    seed: int = 0


def solve_file(path: pathlib.Path, limit_seconds: float, settings: Settings) -> dict[str, Any]:
    """Solves the problem in a file within `limit_seconds`; never raises for what is in the file.

    Returns `cost`, `bound`, `feasible`, `seconds`, `solution` (the strategy of every node; None: there is none), and
    what the page says beside them; `error` where nothing came out.
    """
    load = os.getloadavg()[0]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="iopddl-") as folder:
        answers = [pathlib.Path(folder) / f"{number}.json" for number in range(settings.processes)]
        processes = [_start(path, answer, limit_seconds, settings, k) for k, answer in enumerate(answers)]
        ended = [_end(process, begin, limit_seconds, settings) for process in processes]
        seconds = time.monotonic() - begin
        said = [_read(answer) for answer in answers]
    entry: dict[str, Any] = {"limit_seconds": limit_seconds, "seconds": seconds, "load": load}
    entry["processor_seconds"] = [answer.get("processor_seconds") for answer in said]
    found: dict[str, Any] = {"cost": None, "bound": None, "feasible": False, "solution": None}
    problems = [f"{e} in process {k}" for k, e in enumerate(ended) if e and not said[k]]
    bounds = [float(answer["bound"]) for answer in said if math.isfinite(answer.get("bound", math.nan))]
    for answer in said:
        if "error" in answer:
            entry["error"] = answer["error"]
        if "conflict" in answer:
            entry["conflict"] = answer["conflict"]
        if answer.get("solution") is None:
            continue
        try:
            verdict = judge(path, answer["solution"])
        except Invalid as problem:
            problems.append(f"wrong answer: {problem}")
            continue
        if (verdict.feasible, -verdict.cost) > (
            found["feasible"],
            -(math.inf if found["cost"] is None else found["cost"]),
        ):
            found = {"cost": verdict.cost, "feasible": verdict.feasible, "solution": answer["solution"]}
            entry |= {"solver": answer.get("solver"), "peak_bytes": verdict.peak_bytes}
    if bounds:
        found["bound"] = max(bounds)
    if found["solution"] is None and "error" not in entry:
        text = "; ".join(problems) or f"no assignment was found within {limit_seconds:g} s"
        entry["error"] = {"type": "NoAnswer", "message": text}
    if problems:
        entry["problems"] = problems
    if found["feasible"] and "bound" in found and found["bound"] > found["cost"]:
        entry["problems"] = [*problems, f"the bound {found['bound']} is above a cost that the judge finds"]
    return found | entry


def _start(
    path: pathlib.Path, answer: pathlib.Path, limit_seconds: float, settings: Settings, number: int
) -> subprocess.Popen[bytes]:
    seconds = limit_seconds - SLACK_SECONDS - SLACK_SHARE * limit_seconds
    command = [sys.executable, "-m", "benchmarks.iopddl.worker", str(path.resolve()), str(answer)]
    command += ["--seconds", str(max(0.1, seconds)), "--seed", str(settings.seed + number), "--solver", settings.solver]
    command += ["--clock", settings.clock, "--begin", str(time.monotonic())]
    if number:  # the first process proves bounds; the others rather look for assignments
        command += ["--pricing-share", "0.15"]
    return subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _end(process: subprocess.Popen[bytes], begin: float, limit_seconds: float, settings: Settings) -> str:
    """Waits for a process until its time is over; returns why it gave no answer, empty where it may have."""
    last = limit_seconds * PATIENCE if settings.clock == "processor" else limit_seconds - LAST_SECONDS
    try:
        status = process.wait(max(0.0, begin + last - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return "the time was over"
    return "" if status in (0, 1) else f"status {status}"


def _read(answer: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads(answer.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
