"""A worker process of the benchmark of where partial backpropagation pays, which starts it: steps of its rivals, in turns, alone and two jobs at once."""

from __future__ import annotations

import json
import sys
from typing import Any


def _work(settings: dict[str, Any]) -> None:
    import jax
    import numpy as np

    from benchmarks import _partial_quality as quality
    from benchmarks._sparse_launch import Team

    team = Team(settings)
    random = np.random.RandomState(0)
    images = random.randn(quality.BATCH, *settings["image"]).astype(np.float32)
    labels = random.randint(0, 10, quality.BATCH).astype(np.int32)
    task = quality.Task("", (images, labels), (images, labels), tuple(settings["widths"]), 10, 0)
    rivals = {quality.SMALLER: (None, settings["smaller"]), "spatial, count": (quality.variants()["spatial, count"], quality.BATCH)}
    jobs = {}
    for name, (backprop, batch) in rivals.items():
        jobs[name] = [_Job(quality.Trainer(task, "sgd", backprop, batch), quality.start(task, number), number) for number in range(2)]
        for one in jobs[name]:
            one.steps(5)  # compiles, and meets every depth
        team.say(f"{name}: compiled")
    runs = {}
    for name, (first, second) in jobs.items():
        runs[name, "alone"] = lambda number, first=first: first.steps(1)
        runs[name, "two jobs"] = lambda number, pair=(first, second): [one.dispatch() for one in pair] and [one.wait() for one in pair]
    team.begin()
    turns: dict[Any, list[Any]] = {key: [] for key in runs}
    for number in range(settings["rounds"]):
        order = list(runs)[number % len(runs) :] + list(runs)[: number % len(runs)]
        for key in order:
            turns[key].append(team.turn(runs[key], settings["steps"]))
    jax.effects_barrier()
    team.finish({"turns": {", ".join(key): found for key, found in turns.items()}})


class _Job:
    """A training job. A second one begins half the turns later, so that it is shallow where the other is deep."""

    def __init__(self, trainer: Any, params: Any, number: int) -> None:
        from splitjax.lower.carried import Carried

        self.step, self.state = trainer.step, trainer.state(params, 0.01)
        self.batch = trainer._batch(0, list(range(trainer.batch)))
        self.step.resume(Carried(num_steps=2 * number))

    def dispatch(self) -> bool:
        self.state, self.loss = self.step(self.state, self.batch)
        return True

    def wait(self) -> None:
        import jax

        jax.block_until_ready(self.loss)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.dispatch()
            self.wait()


if __name__ == "__main__":
    import splitjax

    splitjax.initialize()
    _work(json.loads(sys.argv[1]))
