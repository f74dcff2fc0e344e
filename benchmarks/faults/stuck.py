"""Workers that live and do no work: stuck in Python, in the loader, in a collective, while compiling, in a save; slow
ones; ones that are only stopped for a while."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import random
import re
import signal
import sys
import time

from benchmarks.faults.checks import Fault, compare, lost, with_problems
from benchmarks.faults.kills import KILLED_WITHIN_SECONDS, SLACK_SECONDS, START_SECONDS, ended, settle
from benchmarks.faults.run import Launched, Overdue, Recipe

NUM_STEPS, CHECKPOINT_EVERY = 100, 20
STEP_TIMEOUT_SECONDS, SAVE_TIMEOUT_SECONDS, COMPILE_TIMEOUT_SECONDS = 10, 15, 60
# What the launcher has to say of each: where the worker is, and which of its functions its stack names.
SAYS = {
    "python": ("in host code between steps", "stuck_in_python"),
    "loader": ("waiting for data", "stuck_in_loader"),
    "collective": ("in host code between steps", "stuck_in_a_collective"),
    "trace": ("outside a training loop", "stuck_in_trace"),  # where the state is made, before the loop
    "compile": ("compiling", "stuck_in_compile"),
    "save": ("saving a checkpoint", "stuck_in_save"),
}
NAMES = {
    "python": "stuck in Python",
    "loader": "stuck in the loader",
    "collective": "stuck in a collective",
    "trace": "stuck before its loop, in a trace",
    "compile": "stuck in a compilation",
    "save": "stuck in a save",
}
_TIMEOUTS = {"trace": COMPILE_TIMEOUT_SECONDS, "compile": COMPILE_TIMEOUT_SECONDS, "save": SAVE_TIMEOUT_SECONDS}
_EARLY = ("trace", "compile")  # before the first step
_STACKS_SECONDS = 2.0 + SLACK_SECONDS  # that a worker has to write its stacks


def program(folder: pathlib.Path, *options: str) -> tuple[str, ...]:
    """The script of one's own, in place of `splitjax train`."""
    sizes = ("--steps", str(NUM_STEPS), "--checkpoint-every", str(CHECKPOINT_EVERY))
    return (sys.executable, "-m", "benchmarks.faults.worker", str(folder), *sizes, *options)


def script(folder: pathlib.Path, cache: pathlib.Path, *options: str) -> Recipe:
    """A run of it in `folder`."""
    return Recipe(folder, cache, NUM_STEPS, CHECKPOINT_EVERY, program=program(folder, *options))


def stuck(recipe: Recipe, reference: Recipe, what: str, rank: int, rng: random.Random) -> Fault:
    """Worker `rank` is stuck for ever: the launcher names it and where it is, ends the attempt, and the next one goes
    on."""
    at = rng.randrange(CHECKPOINT_EVERY + 5, 3 * CHECKPOINT_EVERY)
    timeout = _TIMEOUTS.get(what, STEP_TIMEOUT_SECONDS)
    if what == "save":  # the next one that is due
        struck = -(-at // CHECKPOINT_EVERY) * CHECKPOINT_EVERY
    else:
        struck = at
    recipe = script(recipe.folder, recipe.cache, "--fault", what, "--rank", str(rank), "--at", str(at))
    options = ["--step-timeout-seconds", str(STEP_TIMEOUT_SECONDS), "--save-timeout-seconds", str(SAVE_TIMEOUT_SECONDS)]
    options += ["--compile-timeout-seconds", str(COMPILE_TIMEOUT_SECONDS)] if what in _EARLY else []
    kind = NAMES[what]
    fault = Fault(kind, f"step {struck}" if what not in _EARLY else what, CHECKPOINT_EVERY)
    problems: list[str] = []
    with Launched(recipe, restarts=1, options=options) as run:
        try:
            if what in _EARLY:
                run.until("both workers", lambda: len(run.workers()) == 2, START_SECONDS)
                limit = START_SECONDS  # its deadline begins when it begins to compile, which no outsider sees
            else:
                # Steps are told one late.
                run.until(f"step {struck - 2}", lambda: run.last_step() >= struck - 2, START_SECONDS)
                limit = timeout + KILLED_WITHIN_SECONDS + _STACKS_SECONDS
            sight = run.sight()
            one = ended(run, dataclasses.replace(sight, phase="step"), kind, limit)
            text = run.text
            [fault] = settle(run, [one])
            status = run.end(START_SECONDS)
            problems += unclear(text, what, rank)
            problems += [f"exit status {status}: {run.text[-800:]}"] if status else compare(recipe, reference)
            problems += lost(recipe, sight.complete)
            fault = dataclasses.replace(
                fault,
                moment=what if what in _EARLY else f"step {struck}",
                last_step=None if what in _EARLY else fault.last_step,
                limit_seconds=None if what in _EARLY else limit,
                note=f"{_first_words(text)}; deadline {timeout} s",
            )
        except Overdue as error:
            problems.append(str(error))
        problems += ["processes were left running"] if run.process.poll() is not None and run.left_running() else []
    return with_problems(fault, problems)


def unclear(text: str, what: str, rank: int) -> list[str]:
    """What a launcher's words do not say of a worker that was stuck: who, where, since which collective, doing what,
    and who waits for it."""
    place, function = SAYS[what]
    said = [line.removeprefix("[launch] ") for line in text.splitlines() if line.startswith("[launch]")]
    found = []
    if not any(re.match(rf"worker {rank} failed after .*: killed by the launcher: no step completed", s) for s in said):
        found.append(f"worker {rank} was not said to have failed")
    if any(re.match(rf"worker {1 - rank} failed", line) for line in said):
        found.append(f"worker {1 - rank} was said to have failed")
    of = {r: [s for s in said if s.startswith(f"worker {r}: ")] for r in (rank, 1 - rank)}
    if not any(place in line for line in of[rank]):
        found.append(f"it was not said to be {place!r}: {of[rank]}")
    if what not in _EARLY and not any("last collective completed: that of step" in line for line in of[rank]):
        found.append("its last collective is not told")
    if not of[1 - rank]:
        found.append("who waits for it is not told")
    elif not any(
        word in line for line in of[1 - rank] for word in (f"waits for worker {rank}", "collective", "itself")
    ):
        found.append(f"who waits for it is not told: {of[1 - rank]}")
    title = f"what worker {rank} is doing:"
    if title not in said:
        found.append("its stacks are not told")
    else:
        stacks = [line for line in said[said.index(title) + 1 :] if line.startswith("    ")]
        if not any(line.rstrip().endswith(f"in {function}") for line in stacks):
            found.append(f"{function} is not in its stacks: {stacks[:6]}")
    return found


def _first_words(text: str) -> str:
    """Who was killed, and why, as the launcher said."""
    found = re.search(r"\[launch\] (worker \d failed) after [0-9.]+ s: killed by the launcher: (.*)", text)
    return f'"{found[1]}: {found[2]}"' if found else "nothing was said"


def slow(recipe: Recipe, reference: Recipe, rank: int) -> Fault:
    """Worker `rank` takes longer than the other for every step: it is named, in the metrics and at the end, and nothing
    is ended."""
    recipe = script(recipe.folder, recipe.cache, "--fault", "slow", "--rank", str(rank))
    problems: list[str] = []
    note = ""
    with Launched(recipe, restarts=1) as run:
        try:
            status = run.end(START_SECONDS)
            said = [line for _, line in run.lines if "step times:" in line]
            note = said[-1].removeprefix("[launch] ") if said else "nothing was said"
            problems += [f"exit status {status}: {run.text[-800:]}"] if status else compare(recipe, reference)
            problems += ["an attempt was ended"] if "starting all workers again" in run.text else []
            if not note.endswith(f"; worker {rank} holds up the others"):
                problems.append("it was not named at the end")
            named = re.findall(r'"slowest_rank": (\d)', recipe.metrics.read_text())
            if not named or named[-1] != str(rank):
                problems.append(f"the metrics name as slowest {named}")
        except Overdue as error:
            problems.append(str(error))
        problems += ["processes were left running"] if run.process.poll() is not None and run.left_running() else []
    return with_problems(Fault("slow rank", "every step", CHECKPOINT_EVERY, note=note), problems)


def stopped_for_a_while(recipe: Recipe, reference: Recipe, rank: int, seconds: float, rng: random.Random) -> Fault:
    """A worker's process stands still for less than its deadlines: nobody is ended, and it goes on."""
    problems: list[str] = []
    fault = Fault(f"SIGSTOP for {seconds:g} s", "step", recipe.checkpoint_every)
    wanted = rng.randrange(recipe.checkpoint_every, 4 * recipe.checkpoint_every)
    with Launched(recipe, restarts=1, options=["--step-timeout-seconds", "30", "--heartbeat-seconds", "30"]) as run:
        try:
            run.until(f"step {wanted}", lambda: run.last_step() >= wanted, START_SECONDS)
            sight, pid = run.sight(), run.workers()[rank]
            os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            held = run.last_step()
            os.kill(pid, signal.SIGCONT)
            again = run.until("a step", lambda: run.last_step() > held, START_SECONDS)
            status = run.end(START_SECONDS)
            problems += ["an attempt was ended"] if "starting all workers again" in run.text else []
            problems += [f"exit status {status}: {run.text[-800:]}"] if status else compare(recipe, reference)
            problems += lost(recipe, sight.complete)
            fault = dataclasses.replace(
                fault,
                moment=sight.phase,
                last_step=sight.last_step,
                again_seconds=again - sight.at,
                note=f"worker {rank}; nobody was ended (deadlines 30 s)",
            )
        except Overdue as error:
            problems.append(str(error))
        problems += ["processes were left running"] if run.process.poll() is not None and run.left_running() else []
    return with_problems(fault, problems)
