"""A batch that is not finite: the run stops, leaves it out, or goes back; also where a worker is killed behind it."""

from __future__ import annotations

import dataclasses
import random
import signal

from benchmarks.faults import kills
from benchmarks.faults.checks import Fault, arrays, curve, differences, with_problems
from benchmarks.faults.kills import GRACE_SECONDS, KILLED_WITHIN_SECONDS, START_SECONDS
from benchmarks.faults.run import Launched, Overdue, Recipe
from benchmarks.faults.stuck import CHECKPOINT_EVERY, NUM_STEPS, script

BAD_STEP = 47
_PACE = ("--pace", "0.1")


def by_hand(recipe: Recipe, action: str) -> Recipe:
    """Runs the same without splitjax's loop: a loop that knows which batch is bad. Returns it."""
    options = ("--by-hand", "--bad-step", str(BAD_STEP), "--bad-numbers", action)
    recipe = script(recipe.folder, recipe.cache, *options)
    kills.undisturbed(recipe)
    return recipe


def not_finite(recipe: Recipe, expected: Recipe, action: str, kill: bool, rng: random.Random) -> Fault:
    """One batch makes the loss NaN. With `kill` a worker is killed some steps behind it, and the next attempt has to
    decide alike. For `stop` the same command goes on with `--bad-numbers skip`. `expected`: what `by_hand` did."""
    options = ("--bad-step", str(BAD_STEP), *_PACE)
    recipe = script(recipe.folder, recipe.cache, *options, "--bad-numbers", action)
    kind = f"loss NaN, {action}" + (", and a worker killed" if kill else "")
    fault = Fault(kind, f"step {BAD_STEP}", CHECKPOINT_EVERY)
    problems: list[str] = []
    try:
        with Launched(recipe, restarts=1 if kill else 0, options=["--grace-seconds", str(GRACE_SECONDS)]) as run:
            if kill:
                wanted = rng.randrange(BAD_STEP + 2, BAD_STEP + 20)
                run.until(f"step {wanted}", lambda: run.last_step() >= wanted, START_SECONDS)
                struck = [kills.strike(run, rng.randrange(2), signal.SIGKILL, KILLED_WITHIN_SECONDS)]
                [fault] = kills.settle(run, struck)
                fault = dataclasses.replace(fault, kind=kind)
            status = run.end(START_SECONDS)
            before, text = run.complete(), run.text
        if action == "stop":
            problems += [] if status == 2 else [f"exit status {status}"]
            problems += [] if f"step {BAD_STEP}" in text and "nan" in text else [f"it was not named: {text[-800:]}"]
            problems += [] if max(before) < BAD_STEP else [f"it saved {before}"]
            recipe = dataclasses.replace(
                recipe, program=script(recipe.folder, recipe.cache, *options, "--bad-numbers", "skip").program
            )
            with Launched(recipe) as run:
                begun = run.began
                again = run.until("a step", run.has_stepped, START_SECONDS)
                fault = dataclasses.replace(
                    fault,
                    last_step=BAD_STEP - 1,
                    resumed_step=run.resumed_step(),
                    again_seconds=again - begun,
                    note="exit status 2, naming the step; the same command with `--bad-numbers skip` went on",
                )
                status = run.end(START_SECONDS)
        problems += [f"exit status {status}: {run.text[-800:]}"] if status else _compare(recipe, expected)
    except Overdue as error:
        problems.append(str(error))
    return with_problems(fault, problems)


def _compare(recipe: Recipe, expected: Recipe) -> list[str]:
    """Every step has its line, the bad one a setback; the last state is that of the loop by hand."""
    rows = curve(recipe.metrics)
    problems = [] if [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1)) else ["lines are missing or twice"]
    setbacks = [row["step"] for row in rows if row.get("setback")]
    problems += [] if setbacks == [BAD_STEP] else [f"setbacks in steps {setbacks}"]
    ours, theirs = (arrays(one.checkpoints / str(NUM_STEPS)) for one in (recipe, expected))
    return problems + differences(ours, theirs)
