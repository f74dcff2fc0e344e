"""What recording where a process is costs it: processor time a step, beside the same loop without."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import statistics
import time

from benchmarks import machine

NUM_STEPS, NUM_PAIRS = 400, 41
LIMIT_MICROSECONDS = 100.0
RECORDS = "faults-tracking.json"


@dataclasses.dataclass(frozen=True)
class Overhead:
    """Processor time of all threads of a process, in microseconds a step: the median of the pairs' differences, and
    half of them lie between `low` and `high`; `without`: the median of the loop without."""

    microseconds: float
    low: float
    high: float
    without: float
    commit: str


def overhead(num_steps: int = NUM_STEPS, num_pairs: int = NUM_PAIRS) -> Overhead:
    """Returns what the records of `runtime.train`'s loop take: blocks of steps with and without them, in pairs, one
    behind the other, each pair in the other order than the one before. A step runs a small compiled program, and is
    recorded as the loop does it in a run that asks after each step whether to stop."""
    import jax
    import jax.numpy as jnp

    from splitjax.runtime.launch.whereabouts import StepRecorder
    from splitjax.runtime.training.ledger import Ledger
    from splitjax.runtime.training.tracking import Tracker

    tracker, step = Tracker(Ledger(None), StepRecorder()), jax.jit(lambda x: x * 1.0001)

    def block(is_recorded: bool) -> float:
        state = step(jnp.ones(256)).block_until_ready()
        with tracker if is_recorded else contextlib.nullcontext():
            begin = time.process_time()
            for number in range(1, num_steps + 1):
                if is_recorded:
                    with tracker.during("input", number):
                        pass
                    with tracker.dispatching():
                        state = step(state)
                    with tracker.waiting(f"results of step {number}"):
                        state.block_until_ready()
                    tracker.recorder.completed(number)
                    tracker.times_row()
                    with tracker.waiting("whether to stop"):
                        pass
                else:
                    state = step(state)
                    state.block_until_ready()
            return 1e6 * (time.process_time() - begin) / num_steps

    block(True), block(False)
    pairs = []
    for number in range(num_pairs):
        order = (True, False) if number % 2 else (False, True)
        found = {is_recorded: block(is_recorded) for is_recorded in order}
        pairs.append((found[True] - found[False], found[False]))
    low, median, high = statistics.quantiles([pair[0] for pair in pairs], n=4)
    return Overhead(median, low, high, statistics.median(pair[1] for pair in pairs), machine.this_commit())


def measure(folder: pathlib.Path) -> Overhead:
    """Measures it, and stores it in `folder`."""
    found = overhead()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORDS).write_text(json.dumps(dataclasses.asdict(found), indent=1) + "\n")
    return found


def lines(folder: pathlib.Path) -> list[str]:
    """What the page says of it; nothing where it was not measured."""
    if not (folder / RECORDS).exists():
        return []
    found = Overhead(**json.loads((folder / RECORDS).read_text()))
    return [
        f"**Recording where a process is takes {found.microseconds:.0f} microseconds of processor time a step** (limit"
        f" {LIMIT_MICROSECONDS:.0f}; `--only tracking`, commit {found.commit}: {NUM_PAIRS} pairs of {NUM_STEPS} steps"
        f" with and without it, half of the differences between {found.low:.0f} and {found.high:.0f}; a step of the"
        f" loop without takes {found.without:.0f}).",
        "",
    ]
