"""A worker process of the benchmark of where partial backpropagation pays, which starts it: steps of its rivals in
turns, or the bytes that they send."""

from __future__ import annotations

import json
import sys
from typing import Any

RIVAL = "spatial, count"
ALONE, SHARED = "alone", "two jobs"
_WARM_STEPS = 4  # meets every depth


def _steps(settings: dict[str, Any]) -> None:
    """Both rivals, alone and with a second job on the devices. Both jobs go on by themselves: none waits for the
    other."""
    from benchmarks.partial.device import Device, SecondJob
    from benchmarks.sparse.launch import Team

    team = Team(settings)
    device = Device(settings["group"], team.rank)
    jobs = _rivals(settings, 0)
    for name, job in jobs.items():
        job.steps(_WARM_STEPS)
        team.say(f"{name}: compiled")
    second = SecondJob("benchmarks.partial.worker", settings, team)
    team.say("second job: compiled")

    def shared(name: str, count: int) -> None:
        second.begin(name, count)
        jobs[name].steps(count)
        second.wait()

    runs = {(name, ALONE): lambda count, name=name: jobs[name].steps(count) for name in jobs}
    runs |= {(name, SHARED): lambda count, name=name: shared(name, count) for name in jobs}
    turns: dict[Any, list[Any]] = {key: [] for key in runs}
    device.hold(settings["share"])
    for key in runs:
        runs[key](_WARM_STEPS)
    team.begin()
    for number in range(settings["rounds"]):
        for key in _rotated(list(runs), number):
            one = team.turn(lambda _, key=key: runs[key](settings["steps"]), 1)
            turns[key].append(
                {name: None if value is None else value / settings["steps"] for name, value in one.items()}
            )
    team.finish({"turns": {", ".join(key): found for key, found in turns.items()}})
    second.close()


def _second(settings: dict[str, Any]) -> None:
    """The second job, half the turns later than the first: its shallow workers are where that one has its deep ones."""
    from benchmarks.partial.device import commands, join

    pipe = join(settings["joins"])
    jobs = _rivals(settings, 2)
    for job in jobs.values():
        job.steps(_WARM_STEPS)
    for name, count in commands(pipe):
        jobs[name].steps(count)


def _bytes(settings: dict[str, Any]) -> None:
    """What leaves a worker in a step, beside what the plan says, for every way to exchange gradients."""
    import splitjax
    from benchmarks.partial import quality
    from benchmarks.sparse.launch import Team

    team = Team(settings)
    ways = {
        "full": None, "branch": splitjax.PartialBackprop(), "program": splitjax.PartialBackprop(execution="program"),
        "temporal": splitjax.PartialBackprop(assignment="temporal"),
    }  # fmt: skip
    found = {}
    for name, backprop in ways.items():
        job = _Job(settings, backprop, quality.BATCH, 0)
        job.steps(_WARM_STEPS)
        team.say(f"{name}: compiled")
        found[name] = {
            "turns": [team.turn(lambda _, job=job: job.steps(1), settings["steps"]) for _ in range(settings["rounds"])],
            **job.planned(),
        }
    team.finish({"ways": found})


def _rivals(settings: dict[str, Any], turn: int) -> dict[str, _Job]:
    from benchmarks.partial import quality

    return {
        quality.SMALLER: _Job(settings, None, settings["smaller"], turn),
        RIVAL: _Job(settings, quality.variants()[RIVAL], quality.BATCH, turn),
    }


def _rotated(keys: list[Any], by: int) -> list[Any]:
    return keys[by % len(keys) :] + keys[: by % len(keys)]


class _Job:
    """A training job of made-up images. `turn`: the number of the step with which its depths begin."""

    def __init__(self, settings: dict[str, Any], backprop: Any, batch: int, turn: int) -> None:
        import numpy as np

        from benchmarks.partial import quality
        from splitjax.planning.carried import Carried

        random = np.random.RandomState(0)
        images = random.randn(batch, *settings["image"]).astype(np.float32)
        data = images, random.randint(0, 10, batch).astype(np.int32)
        task = quality.Task("", data, data, tuple(settings["widths"]), 10, 0)
        trainer = quality.Trainer(task, "sgd", backprop, batch)
        self.step, self.state = trainer.step, trainer.state(quality.start(task, 0), 0.01)
        self.batch = {"image": data[0], "label": data[1]}
        self.step.resume(Carried(num_steps=turn))

    def steps(self, count: int) -> None:
        import jax

        for _ in range(count):
            self.state, loss = self.step(self.state, self.batch)
            jax.block_until_ready(loss)
        jax.block_until_ready(self.state)

    def planned(self) -> dict[str, Any]:
        """Bytes of a mean worker by the plan; of every segment its contributors and its size."""
        from splitjax.plan import DENSE_GRADIENTS

        plan = self.step.plan(self.state, self.batch)
        sent = sum(one.bytes for one in plan.collectives if one.purpose.kind in DENSE_GRADIENTS)
        segments = [] if plan.partial is None else [[one.contributors, one.num_bytes] for one in plan.partial.segments]
        return {
            "planned": sent,
            "segments": segments,
            "whole": sum(leaf.bytes_per_device for leaf in plan.leaves if leaf.role == "param"),
        }


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if "joins" in given:
        _second(given)
    else:
        import splitjax

        splitjax.initialize()
        {"steps": _steps, "bytes": _bytes}[given["what"]](given)
