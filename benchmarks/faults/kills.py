"""`kill -9` of a worker at random moments: in steps, in saves, while a start after an earlier kill looks for a
checkpoint and reads it."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import time
from collections.abc import Sequence

from benchmarks.faults.checks import Fault, compare, lost, with_problems
from benchmarks.faults.run import Launched, Overdue, Recipe, Sight

# `--grace-seconds` that the others have, and what the launcher takes at most to read their last words; then a busy
# machine's.
GRACE_SECONDS, DRAIN_SECONDS, SLACK_SECONDS = 2.0, 2.0, 3.0
KILLED_WITHIN_SECONDS = GRACE_SECONDS + DRAIN_SECONDS + SLACK_SECONDS
# JAX's own for joining a run, `jax.distributed.initialize(initialization_timeout=300)`: a start is never waited for
# longer.
START_SECONDS = 300.0
AIMS = ("step", "save", "restore", "step", "start")


def undisturbed(recipe: Recipe) -> float:
    """Runs it without any fault, for the others to be compared with; returns how long it took. Raises `Overdue` if it
    fails."""
    with Launched(recipe) as run:
        status = run.end(START_SECONDS)
        if status:
            raise Overdue(f"the undisturbed run ended with {status}: {run.text[-1500:]}")
        return time.monotonic() - run.began


@dataclasses.dataclass(frozen=True)
class Struck:
    """A fault that ended an attempt; the run has not done a step since."""

    kind: str
    sight: Sight  # just before
    last_step: int
    ended: float  # when the launcher had ended the attempt (time.monotonic())
    limit_seconds: float
    problems: tuple[str, ...]


def kill_workers(recipe: Recipe, reference: Recipe, aims: Sequence[str], rng: random.Random) -> list[Fault]:
    """One run whose workers are killed once for each of `aims`; as many faults as met it before it was complete."""
    faults: list[Fault] = []
    struck: list[Struck] = []
    problems: list[str] = []
    before: set[int] = set()
    with Launched(recipe, restarts=len(aims), options=["--grace-seconds", str(GRACE_SECONDS)]) as run:
        try:
            for aim in aims:
                if aim in ("step", "save"):
                    faults += settle(run, struck)
                    struck = []
                if not await_moment(run, aim, rng):
                    break
                struck.append(strike(run, rng.randrange(2), signal.SIGKILL, KILLED_WITHIN_SECONDS))
                before |= set(run.complete())
            faults += settle(run, struck)
            struck = []
            if status := run.end(START_SECONDS):
                problems.append(f"exit status {status}")
        except Overdue as error:
            problems.append(str(error))
            faults += [_fault(run, one, None) for one in struck]
        if run.left_running():
            problems.append("processes were left running")
    if not problems:
        problems += compare(recipe, reference)
        # Of those that are not all kept the older ones were due to go; that the newest was not lost, `settle` sees to.
        problems += lost(recipe, before) if recipe.keep_last >= recipe.num_steps else []
    return [with_problems(fault, problems) for fault in faults]


def await_moment(run: Launched, aim: str, rng: random.Random) -> bool:
    """Waits for a random moment of a kind; False if the run was complete before."""
    over = lambda: run.process.poll() is not None or run.last_step() == run.recipe.num_steps
    if aim == "start":
        run.until("workers", lambda: len(run.workers()) == 2, START_SECONDS)
        time.sleep(rng.uniform(0.0, 5.0))
    elif aim == "restore":
        run.until("a worker that looks for checkpoints", lambda: run.has_opened_folder() or over(), START_SECONDS)
        time.sleep(rng.uniform(0.0, 0.3))
    else:
        run.until("the first step", lambda: run.has_stepped() or over(), START_SECONDS)
        wanted = run.last_step() + rng.randrange(2, 3 * run.recipe.checkpoint_every)
        run.until(f"step {wanted}", lambda: run.last_step() >= wanted or over(), START_SECONDS)
        if aim == "save":
            run.until("a save", lambda: run.saving() is not None or over(), START_SECONDS)
            time.sleep(rng.uniform(0.0, 0.1))
        else:
            time.sleep(rng.uniform(0.0, 0.02))
    return not over()


def strike(run: Launched, rank: int, number: int, limit_seconds: float) -> Struck:
    """Sends a signal to a worker, and waits until the launcher has ended the attempt."""
    worker = run.workers().get(rank)
    sight = run.sight()
    if worker is None:
        raise Overdue(f"worker {rank} does not run; {run.text[-1500:]}")
    os.kill(worker, number)
    return ended(run, sight, f"{signal.Signals(number).name} to worker {rank}", limit_seconds)


def ended(run: Launched, sight: Sight, kind: str, limit_seconds: float) -> Struck:
    """Waits until the launcher has ended the attempt and starts another one. Raises `Overdue` long after the limit."""
    seen = len(run.lines)
    restarted = lambda: next((at for at, line in run.lines[seen:] if "starting all workers again" in line), None)
    run.until("the end of the attempt", restarted, 3 * limit_seconds + SLACK_SECONDS)
    last = max(sight.last_step, run.last_step())
    run.new_attempt()
    gone = set(sight.complete) - set(run.complete()) if run.recipe.keep_last >= run.recipe.num_steps else ()
    problems = tuple(f"the checkpoint of step {step} went with the attempt" for step in sorted(gone))
    return Struck(kind, sight, last, restarted() or time.monotonic(), limit_seconds, problems)


def settle(run: Launched, struck: Sequence[Struck]) -> list[Fault]:
    """Waits for the first step of this attempt: then what struck before it is over."""
    again = run.until("a step", run.has_stepped, START_SECONDS)
    return [_fault(run, one, again) for one in struck]


def _fault(run: Launched, one: Struck, again: float | None) -> Fault:
    sight, resumed, problems = one.sight, run.resumed_step() or 0, list(one.problems)
    if again is not None and resumed < max(sight.complete, default=0):
        problems.append(f"went on from step {resumed}, but {max(sight.complete)} was complete")
    # An attempt that had done no step lost none; what its predecessor lost is that one's.
    in_steps = sight.phase in ("step", "save")
    return Fault(
        one.kind,
        sight.phase,
        run.recipe.checkpoint_every,
        one.last_step if in_steps else None,
        sight.saving if in_steps else None,
        resumed,
        one.ended - sight.at,
        one.limit_seconds,
        None if again is None else again - sight.at,
        note="" if again is None else run.stages(),
        problems=tuple(problems),
    )
