"""Workers that cannot be reached, and requests to stop: a cut network, a stopped process, SIGTERM, Ctrl-C, a launcher
that dies."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import sys
import time

from benchmarks.faults.checks import Fault, compare, lost, with_problems
from benchmarks.faults.kills import GRACE_SECONDS, KILLED_WITHIN_SECONDS, SLACK_SECONDS, START_SECONDS, ended, settle
from benchmarks.faults.run import Launched, Overdue, Recipe

HEARTBEAT_SECONDS = 10
# A worker that fell silent is missed by the launcher after that time. One that is cut off notices it by a heartbeat
# that is not answered for that time, and sends one twice as often: at the latest after one and a half times of it.
MISSED_WITHIN_SECONDS = {
    "stop": HEARTBEAT_SECONDS + KILLED_WITHIN_SECONDS, "cut": 1.5 * HEARTBEAT_SECONDS + KILLED_WITHIN_SECONDS,
}  # fmt: skip
STOP_SECONDS = 60.0  # `--stop-timeout-seconds`
CUTTER = (sys.executable, "-m", "benchmarks.faults.cut")


def _reach(run: Launched, rng: random.Random) -> None:
    wanted = rng.randrange(run.recipe.checkpoint_every, 4 * run.recipe.checkpoint_every)
    run.until(f"step {wanted}", lambda: run.last_step() >= wanted, START_SECONDS)


def short_cut(recipe: Recipe, reference: Recipe, seconds: float, rng: random.Random) -> Fault:
    """The link of a worker is cut for less than the heartbeat's timeout: the run waits, and goes on by itself."""
    problems: list[str] = []
    fault = Fault(f"network cut for {seconds:g} s", "step", recipe.checkpoint_every)
    rank = rng.randrange(2)
    with Launched(recipe, launcher=CUTTER, options=["--heartbeat-seconds", str(HEARTBEAT_SECONDS)]) as run:
        try:
            _reach(run, rng)
            sight = run.sight()
            _tell(run, f"cut {rank}")
            time.sleep(seconds)
            held = run.last_step()
            _tell(run, f"join {rank}")
            joined = time.monotonic()
            again = run.until("a step", lambda: run.last_step() > held, START_SECONDS)
            status = run.end(START_SECONDS)
            fault = dataclasses.replace(
                fault,
                moment=sight.phase,
                last_step=sight.last_step,
                again_seconds=again - sight.at,
                note=(
                    f"worker {rank}; no attempt ended, {held - sight.last_step} steps until it was joined, the next one"
                    f" {again - joined:.1f} s after"
                ),
            )
            problems += (
                [f"exit status {status}: {run.text[-800:]}"]
                if status
                else compare(recipe, reference) + lost(recipe, sight.complete)
            )
        except Overdue as error:
            problems.append(str(error))
        problems += ["processes were left running"] if run.process.poll() is not None and run.left_running() else []
    return with_problems(fault, problems)


def unreachable(recipe: Recipe, reference: Recipe, how: str, rng: random.Random) -> Fault:
    """A worker is cut off for longer than the heartbeat's timeout (`cut`), or its process stands still (`stop`): the
    attempt ends by itself, and the next one goes on."""
    problems: list[str] = []
    rank = rng.randrange(2)
    kind = f"network of worker {rank} cut" if how == "cut" else f"SIGSTOP to worker {rank}"
    fault = Fault(kind, "step", recipe.checkpoint_every)
    options = ["--heartbeat-seconds", str(HEARTBEAT_SECONDS), "--grace-seconds", str(GRACE_SECONDS)]
    with Launched(recipe, restarts=1, options=options, launcher=CUTTER if how == "cut" else None) as run:
        try:
            _reach(run, rng)
            sight = run.sight()
            if how == "cut":
                _tell(run, f"cut {rank}")
            else:
                os.kill(run.workers()[rank], signal.SIGSTOP)
            one = ended(run, sight, kind, MISSED_WITHIN_SECONDS[how])
            if how == "cut":
                _tell(run, f"join {rank}")
            [fault] = settle(run, [one])
            fault = dataclasses.replace(fault, note=f"heartbeat {HEARTBEAT_SECONDS} s")
            status = run.end(START_SECONDS)
            problems += (
                [f"exit status {status}: {run.text[-800:]}"]
                if status
                else compare(recipe, reference) + lost(recipe, sight.complete)
            )
        except Overdue as error:
            problems.append(str(error))
        problems += ["processes were left running"] if run.process.poll() is not None and run.left_running() else []
    return with_problems(fault, problems)


def asked(recipe: Recipe, reference: Recipe, how: str, rng: random.Random) -> Fault:
    """The run is asked to end (`worker`: SIGTERM to one worker; `ctrl-c`: to the launcher), or its launcher is killed
    (`kill`). Nothing is left running, and the same command goes on."""
    problems: list[str] = []
    rank = rng.randrange(2)
    kinds = {
        "worker": f"SIGTERM to worker {rank}",
        "ctrl-c": "Ctrl-C to the launcher",
        "kill": "SIGKILL to the launcher",
    }
    wanted_status = {"worker": 128 + signal.SIGTERM, "ctrl-c": 128 + signal.SIGINT, "kill": -signal.SIGKILL}[how]
    # Of a killed launcher's workers the kernel takes care at once; two saves may be in progress where a state is saved
    # first.
    limit = SLACK_SECONDS if how == "kill" else STOP_SECONDS
    fault = Fault(kinds[how], "step", recipe.checkpoint_every)
    try:
        with Launched(recipe, restarts=1, options=["--stop-timeout-seconds", str(STOP_SECONDS)]) as run:
            _reach(run, rng)
            sight = run.sight()
            pid = run.workers()[rank] if how == "worker" else run.process.pid
            os.kill(pid, {"worker": signal.SIGTERM, "ctrl-c": signal.SIGINT, "kill": signal.SIGKILL}[how])
            run.process.wait(3 * limit)
            over = time.monotonic()
            while run.left_running() and time.monotonic() < over + 3 * limit:
                time.sleep(0.02)
                over = time.monotonic() if run.left_running() else over
            problems += ["processes were left running"] if run.left_running() else []
            status, last, before = run.end(10), run.last_step(), run.complete()
        if status != wanted_status:
            problems.append(f"exit status {status}, not {wanted_status}: {run.text[-800:]}")
        with Launched(recipe) as run:
            begun = run.began
            again = run.until("a step", run.has_stepped, START_SECONDS)
            resumed = run.resumed_step()
            second = run.end(START_SECONDS)
        if how != "kill" and resumed != last:
            problems.append(f"it stopped after step {last}, but went on from {resumed}")
        problems += [f"exit status {second}: {run.text[-800:]}"] if second else compare(recipe, reference)
        problems += lost(recipe, {*sight.complete, *before})
        fault = dataclasses.replace(
            fault,
            moment=sight.phase,
            last_step=last,
            saving_step=sight.saving,
            resumed_step=resumed or 0,
            end_seconds=over - sight.at,
            limit_seconds=limit,
            again_seconds=again - begun,
            note=f"exit status {status}; started again by hand",
        )
    except Overdue as error:
        problems.append(str(error))
    return with_problems(fault, problems)


def _tell(run: Launched, line: str) -> None:
    run.tell(line)
    run.until(line, lambda: any(text.endswith(f"done: {line}") for _, text in run.lines), 10)
