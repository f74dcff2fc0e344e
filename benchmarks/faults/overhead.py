"""What recording where a process is costs it: processor time a step, beside the same loop without."""

from __future__ import annotations

import statistics
import time

from splitjax.runtime.launch.whereabouts import Place, StepRecorder

NUM_STEPS, NUM_ROUNDS = 5_000, 5
LIMIT_MICROSECONDS = 100.0


def microseconds_a_step() -> float:
    """Returns the processor time that the loop's records take in a step, in the median of five rounds: what
    `runtime.train` tells in a step with a request to stop to ask about."""
    from splitjax.runtime.training.ledger import Ledger
    from splitjax.runtime.training.tracking import Tracker

    rounds = []
    for _ in range(NUM_ROUNDS):
        tracker = Tracker(Ledger(None), StepRecorder())
        begin = time.process_time()
        for number in range(1, NUM_STEPS + 1):
            with tracker.during("input", number):
                pass
            with tracker.dispatching():
                pass
            with tracker.waiting(f"results of step {number}"):
                pass
            tracker.recorder.completed(number)
            tracker.times_row()
            with tracker.waiting("whether to stop"):
                pass
        rounds.append((time.process_time() - begin) / NUM_STEPS)
        assert tracker.recorder.place is Place.HOST
    return 1e6 * statistics.median(rounds)
