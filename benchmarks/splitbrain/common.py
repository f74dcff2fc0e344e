"""What the sections of the benchmark of SplitBrain share: goals, planned steps, compiled bytes, times taken in
turns."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

import splitjax
from splitjax.models import ModelSpec, make_step

NUM_DEVICES = 8
MEMORY_SCHEDULER = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


@dataclasses.dataclass(frozen=True)
class Goal:
    """A figure beside what it should be."""

    what: str
    value: float
    limit: float
    at_most: bool
    form: str = ".3f"  # of value and limit

    @property
    def ok(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit

    def __str__(self) -> str:
        value, limit = (format(number, self.form) for number in (self.value, self.limit))
        return (
            f"{'pass' if self.ok else 'MISS'} {self.what}: {value} (goal: at {'most' if self.at_most else 'least'}"
            f" {limit})"
        )


@dataclasses.dataclass(frozen=True)
class Section:
    """What a section of the page says."""

    title: str
    lines: list[str]
    goals: list[Goal]


class Runner:
    """A step with its state, called without arguments. `step(state, batch)` returns the new state and metrics."""

    def __init__(self, step: Any, state: Any, batch: Any) -> None:
        self.step, self.state, self.batch = step, state, batch

    def __call__(self) -> Any:
        self.state, metrics = self.step(self.state, self.batch)
        return metrics


def less(value: float, whole: float) -> float:
    """The share that `value` is below `whole`."""
    return 1 - value / whole


def planned(
    spec: ModelSpec, mesh: Any, num_examples: int, rules: str = "splitbrain", **options: Any
) -> tuple[Any, Any, Any, Callable]:
    """A step of SGD with momentum, its state and batch as shapes, and the function that makes a state."""
    init, step, _ = make_step(spec, optax.sgd(0.01, momentum=0.9), value_and_grad=splitjax.value_and_grad)
    step = splitjax.parallelize(step, mesh=mesh, rules=rules, **options)
    batch = spec.example(num_examples)
    return step, step.abstract_state(init, jax.random.key(0), example=(batch,)), batch, init


def compiled_bytes(compiled: Any) -> int:
    """One device's memory of a step: arguments, temporaries, and the results that are not written over arguments."""
    sizes = compiled.memory_analysis()
    return (
        sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    )


def have_tpu_compiler() -> bool:
    return importlib.util.find_spec("libtpu") is not None


def take_turns(calls: Mapping[str, Callable[[], Any]], rounds: int, warm: int = 1) -> dict[str, list[float]]:
    """Seconds of each call, `rounds` times each: all of them once a round, who begins changing from round to round."""
    names, seconds = list(calls), {name: [] for name in calls}
    for number in range(rounds + warm):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            started = time.perf_counter()
            jax.block_until_ready(calls[name]())
            if number >= warm:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def ratio_of_medians(first: Sequence[float], second: Sequence[float]) -> float:
    return statistics.median(first) / statistics.median(second)


def quartiles_of_ratios(first: Sequence[float], second: Sequence[float]) -> str:
    """The noise of a ratio: quartiles over the rounds."""
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return f"{low:.2f} to {high:.2f}"


def busy() -> str:
    """The load of this machine, for those who read times."""
    return f"load average {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores"


def mib(count: float) -> str:
    return f"{count / 2**20:.1f}"
