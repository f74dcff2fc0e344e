"""Compares what partial backpropagation would save and cost on a step with a smaller batch of equal cost.

Measured numbers go in (`measure.advising` measures), an `Advice` comes out: a row per way to train, and a
recommendation. What a way to train costs is compared by the variance of its gradient. With sigma_j^2 the variance of
one worker's gradient of layer j, of N workers that differentiate everything the mean has sum_j sigma_j^2 / N; where n_j
workers differentiate layer j, sum_j sigma_j^2 / n_j; with a fraction f of the batch, sum_j sigma_j^2 / (N f). Steps
that noise keeps from being longer are needed in proportion to it: time x variance is the time to the same progress. A
smaller batch costs f and has 1 / f of the variance, whatever f is: partial backpropagation is worth its compute where
its product is below 1.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from splitjax.display import registry
from splitjax.errors import PartialError
from splitjax.partial.depths import Depths
from splitjax.partial.request import PROGRAM, Measured

FORMAT = 1
FULL, SMALLER, SPATIAL_ROW, OPTIMAL_ROW, TEMPORAL_ROW = "full", "smaller batch", "spatial", "optimal", "temporal"
# Gradients are estimated from few batches: a difference of this share is none.
_MARGIN = 0.02


@dataclasses.dataclass(frozen=True)
class StageAdvice:
    """Says what was measured of a layer, or of what stands between two cuts that were compared.

    - `name`: of the layer.
    - `num_bytes`: of its gradient.
    - `noise`: sigma_j^2, the variance of one worker's gradient around the mean over workers, summed over its elements.
    - `squared_norm`: of the whole gradient, without what noise adds to it (not below 0).
    - `backward_seconds`: what going back through it adds for one worker's share of the batch. `is_measured`: whether
      both its ends were timed; else it has its predicted part of the time between the cuts around it.
    - `memory_bytes`: temporaries and results of a worker that differentiates from here on, as compiled; of the next
      deeper cut that was compiled.
    """

    name: str
    num_bytes: int
    noise: float
    squared_norm: float
    backward_seconds: float
    is_measured: bool
    memory_bytes: int


@dataclasses.dataclass(frozen=True)
class AdviceRow:
    """Says what a way to train saves and costs.

    - `name`: `full`, `smaller batch` (of the cost of what was asked for), `spatial`, `optimal` (under the same budget)
      or `temporal`.
    - `what`: the same in words.
    - `device_time`: compute of all workers over that of full backpropagation.
    - `compute_seconds`: of a worker, mean over workers and over the steps of a cycle.
    - `busiest_seconds`: of the worker that computes most, for which the others wait.
    - `sent_bytes`: gradients and sums that a worker sends in a step, mean.
    - `communication_seconds`: predicted from the link: what the worker that sends most sends, and messages that wait
      for each other.
    - `mean_memory_bytes`, `max_memory_bytes`: temporaries and results of a worker's program, over workers.
    - `variance`: of the gradient; None where some layer never has one.
    - `cuts`: by worker in the first step the layer at which its backward pass ends; none for all of it.
    """

    name: str
    what: str
    device_time: float
    compute_seconds: float
    busiest_seconds: float
    sent_bytes: float
    communication_seconds: float
    mean_memory_bytes: float
    max_memory_bytes: float
    variance: float | None
    cuts: tuple[str, ...] = ()

    @property
    def step_seconds(self) -> float:
        """The seconds of a step of a job that has its workers for itself: they wait for the busiest, then for the
        exchange."""
        return self.busiest_seconds + self.communication_seconds


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """Says what to do.

    It prints as paragraphs: what is recommended, under which aim something else would be, what else differs.

    - `option`: the `AdviceRow.name` that is recommended: it costs least compute for the same progress.
    - `fastest`: the `AdviceRow.name` whose steps take least time for it where the job has workers and link for itself.
    - `reasons`: for `option`, sentences.
    - `wins`: in which respects partial backpropagation does better than the smaller batch of equal cost, sentences.
    - `unless`: the aim under which `fastest` is the better choice, where that is another; else empty.
    """

    option: str
    fastest: str
    reasons: tuple[str, ...]
    wins: tuple[str, ...]
    unless: str = ""

    def __str__(self) -> str:
        return "\n".join(
            filter(None, (f"Recommended: {self.option}. {' '.join(self.reasons)}", self.unless, " ".join(self.wins)))
        )


@dataclasses.dataclass(frozen=True)
class Advice:
    """Says what partial backpropagation would save and cost on a model and its links. Print it, show it in a notebook,
    keep it with `to_json`.

    **Attributes:**

    - `step`: the step's name.
    - `num_workers`: the workers along the data axes.
    - `num_examples`: the examples of a worker's share of the batch.
    - `num_batches`: the batches that were measured.
    - `platform`: of the device that was timed.
    - `latency_seconds`, `bytes_per_second`: of the link.
    - `forward_seconds`: of a worker's forward pass.
    - `stages`: all layers, input side first.
    - `rows`: the ways to train, full backpropagation first.
    - `is_uniform`: whether the square-root rule, were it free to leave workers out of the forward pass too, would give
      all layers the same contributors: a smaller batch, that is.
    - `recommendation`: see `Recommendation`.
    - `notes`: what to know about how it was measured.
    """

    step: str
    num_workers: int
    num_examples: int
    num_batches: int
    platform: str
    latency_seconds: float
    bytes_per_second: float
    forward_seconds: float
    stages: tuple[StageAdvice, ...]
    rows: tuple[AdviceRow, ...]
    is_uniform: bool
    recommendation: Recommendation
    notes: tuple[str, ...] = ()

    @property
    def measured(self) -> Measured:
        """The measurements, for `PartialBackprop(measured=...)`: cuts by measured times, and `depths="optimal"`."""
        return Measured(
            tuple(stage.name for stage in self.stages),
            tuple(stage.backward_seconds for stage in self.stages),
            self.forward_seconds,
            tuple(stage.noise for stage in self.stages),
        )

    def row(self, name: str) -> AdviceRow:
        """Gives the row called `name`. Raises `PartialError` for a row that is not there."""
        for row in self.rows:
            if row.name == name:
                return row
        raise PartialError(
            "the advice has no such row",
            value=name,
            place="Advice.row",
            remedy=f"give one of {', '.join(row.name for row in self.rows)}",
        )

    def compute(self, row: AdviceRow) -> float | None:
        """Gives the device time that the way of `row` takes to the progress of a full step, over that of full
        backpropagation: time x variance. None where it never gets there."""
        return compute_to_progress(row, self.rows[0])

    def alone(self, row: AdviceRow) -> float | None:
        """Gives the time that the steps of `row` take to the progress of a full step, exchange included, over that of
        full backpropagation, for a job that has its workers to itself. None where it never gets there."""
        return time_to_progress(row, self.rows[0])

    def to_json(self) -> str:
        """Writes the advice as JSON text (ASCII), which `Advice.from_json` reads back."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Advice:
        """Reads the `text` that `to_json` wrote. Raises `PartialError` for anything else."""
        try:
            data = json.loads(text)
            if data.pop("format") != FORMAT:
                raise ValueError("another format")
            lists = {"stages": StageAdvice, "rows": AdviceRow}
            made = {name: tuple(kind(**_tuples(entry)) for entry in data.pop(name)) for name, kind in lists.items()}
            said = Recommendation(**_tuples(data.pop("recommendation")))
            return cls(**made, recommendation=said, **_tuples(data))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PartialError(
                f"this is not the JSON of an advice: {error}",
                place="Advice.from_json",
                remedy="pass what `advice.to_json()` returned",
            ) from error

    def __str__(self) -> str:
        return registry.show(self)

    def __repr__(self) -> str:
        return (
            f"<Advice on {self.step}: {self.num_workers} workers, {len(self.stages)} layers, recommends"
            f" {self.recommendation.option}>"
        )

    def _repr_html_(self) -> str:
        return registry.html(self)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Says what is sent in a step.

    - `sent_bytes`: mean over workers.
    - `seconds`: predicted, until all workers have the sums.
    """

    sent_bytes: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Measurements:
    """Makes rows of an advice from what was measured of a step.

    - `num_workers`: the workers of the step.
    - `noise`: by stage name, the variance of one worker's gradient.
    - `memory`: by stage name, the bytes of temporaries and results of a worker that differentiates from there on.
    """

    num_workers: int
    noise: Mapping[str, float]
    memory: Mapping[str, float]

    def full(self, depths: Depths, exchange: Exchange) -> AdviceRow:
        """Makes the row of full backpropagation, in which every worker differentiates everything.

        **Arguments:** `depths`: any of the step's, for its times. `exchange`: what is sent where all gradients are
        added up over all workers.
        """
        seconds = depths.forward + sum(segment.backward for segment in depths.segments)
        memory = self._memory(depths, 0)
        return AdviceRow(
            FULL,
            "everything, on all workers",
            1.0,
            seconds,
            seconds,
            exchange.sent_bytes,
            exchange.seconds,
            memory,
            memory,
            self._full(),
        )

    def smaller(self, fraction: float, full: AdviceRow, memory: float) -> AdviceRow:
        """Makes the row of full backpropagation with a part of the batch, for that part of the compute.

        **Arguments:** `fraction`: the part of the batch, in (0, 1]. `full`: the row of full backpropagation with the
        whole batch. `memory`: bytes of the temporaries and results of its program.
        """
        seconds = fraction * full.compute_seconds
        return AdviceRow(
            SMALLER,
            f"full, with {100 * fraction:.1f} % of the batch",
            fraction,
            seconds,
            seconds,
            full.sent_bytes,
            full.communication_seconds,
            memory,
            memory,
            self._full() / fraction,
        )

    def spatial(
        self, name: str, what: str, depths: Depths, exchange: Exchange, shares: Sequence[float] | None = None
    ) -> AdviceRow:
        """Makes the row of a way in which workers differentiate to different depths.

        **Arguments:** `name`, `what`: of the row (see `AdviceRow`). `depths`: of the workers. `exchange`: what is sent.
        `shares`: by slot its share of the examples, with a sum of 1, where they are balanced; None: equal ones.
        """
        slots = range(self.num_workers)
        shares = tuple(shares or (1 / self.num_workers for _ in slots))
        seconds = [shares[slot] * self.num_workers * (depths.forward + depths.backward(slot)) for slot in slots]
        whole = depths.forward + sum(segment.backward for segment in depths.segments)
        covered = [sum(shares[slot] for slot in depths.contributors(number)) for number in range(len(depths.segments))]
        memory = [
            self._memory(depths, depths.first[slot]) * max(1.0, shares[slot] * self.num_workers) for slot in slots
        ]
        mean = sum(memory) / len(memory) if depths.request.execution == PROGRAM else max(memory)
        return AdviceRow(
            name,
            what,
            sum(seconds) / (self.num_workers * whole),
            sum(seconds) / self.num_workers,
            max(seconds),
            exchange.sent_bytes,
            exchange.seconds,
            mean,
            max(memory),
            self._variance(depths, covered),
            self._cuts(depths),
        )

    def temporal(self, what: str, depths: Depths, exchange: Exchange) -> AdviceRow:
        """Makes the row of a way in which all workers share the depth of a slot, which changes from step to step.

        The variance is that of the mean over a whole cycle, at the same parameters.

        **Arguments:** `what`: of the row (see `AdviceRow`). `depths`: by slot. `exchange`: what is sent, mean over the
        steps of a cycle.
        """
        slots = range(self.num_workers)
        seconds = [depths.forward + depths.backward(slot) for slot in slots]
        whole = depths.forward + sum(segment.backward for segment in depths.segments)
        covered = [len(depths.contributors(number)) / self.num_workers for number in range(len(depths.segments))]
        memory = [self._memory(depths, depths.first[slot]) for slot in slots]
        mean = sum(memory) / len(memory) if depths.request.execution == PROGRAM else max(memory)
        compute = sum(seconds) / self.num_workers
        return AdviceRow(
            TEMPORAL_ROW,
            what,
            compute / whole,
            compute,
            compute,
            exchange.sent_bytes,
            exchange.seconds,
            mean,
            max(memory),
            self._variance(depths, covered),
            self._cuts(depths),
        )

    def _full(self) -> float:
        """Gives the variance of the gradient of full backpropagation."""
        return sum(self.noise.values()) / self.num_workers

    def _variance(self, depths: Depths, covered: Sequence[float]) -> float | None:
        """Gives the variance of the gradient; None where a segment never has one. `covered`: by segment the share of
        the examples (of the steps) that reach it."""
        if not all(covered):
            return None
        return sum(
            self.noise[stage.name] / (self.num_workers * share)
            for segment, share in zip(depths.segments, covered, strict=True)
            for stage in segment.stages
        )

    def _memory(self, depths: Depths, first: int) -> float:
        return self.memory[depths.segments[first].stages[0].name]

    def _cuts(self, depths: Depths) -> tuple[str, ...]:
        return tuple(depths.segments[first].stages[0].name for first in depths.first)


def compute_to_progress(row: AdviceRow, full: AdviceRow) -> float | None:
    """Gives what `Advice.compute` gives for `row`, where `full` is the row of full backpropagation."""
    return None if row.variance is None else row.device_time * _ratio(row.variance, full.variance)


def time_to_progress(row: AdviceRow, full: AdviceRow) -> float | None:
    """Gives what `Advice.alone` gives for `row`, where `full` is the row of full backpropagation."""
    return (
        None
        if row.variance is None
        else _ratio(row.step_seconds, full.step_seconds) * _ratio(row.variance, full.variance)
    )


def uniform_is_optimal(noise: Sequence[float], costs: Sequence[float]) -> bool:
    """Tells whether contributors in proportion to sqrt(noise / cost) come out alike for all segments, given that their
    number can only stay or grow from the input to the loss: then no assignment beats a smaller batch.

    **Arguments:** `noise`: per segment, input side first, the variance of one worker's gradient. `costs`: per segment
    the time that one worker spends; the last with the forward pass.
    """
    blocks: list[tuple[float, float]] = []
    for variance, cost in zip(noise, costs, strict=True):
        blocks.append((variance, cost))
        while len(blocks) > 1 and blocks[-2][0] * blocks[-1][1] >= blocks[-1][0] * blocks[-2][1]:
            (a, b), (c, d) = blocks[-2:]
            blocks[-2:] = [(a + c, b + d)]
    return len(blocks) == 1


def recommend(rows: Sequence[AdviceRow], is_uniform: bool) -> Recommendation:
    """Recommends the smaller batch unless some partial backpropagation needs less compute for the same progress.

    **Arguments:** `rows`: all ways to train, `FULL` and `SMALLER` among them. `is_uniform`: see `uniform_is_optimal`.
    """
    full, smaller = (next(row for row in rows if row.name == name) for name in (FULL, SMALLER))
    partial = [row for row in rows if row.name not in (FULL, SMALLER)]
    scored = [(score, row) for row in partial if (score := compute_to_progress(row, full)) is not None]
    best = min(scored, key=lambda pair: pair[0], default=None)
    reasons: list[str] = []
    if best is not None and best[0] < 1 - _MARGIN:
        option = best[1].name
        reasons.append(
            f"Partial backpropagation ({option}) is worth its compute here: to the same progress it needs"
            f" {100 * best[0]:.1f} % of the device time of full backpropagation, and of a smaller batch, which needs as"
            " much."
        )
    else:
        option = SMALLER
        reasons.append(
            f"Full backpropagation with a smaller batch ({smaller.what}) has at equal compute a gradient that is at"
            " least as good."
        )
        if best is not None:
            reasons.append(
                f"The best partial backpropagation here ({best[1].name}) needs {100 * best[0]:.1f} % of its device time"
                " to the same progress."
            )
        if is_uniform:
            reasons.append(
                "With the forward pass charged to the last layers, the square-root rule gives every layer the same"
                " contributors, which is a smaller batch."
            )
    timed = [(score, row) for row in rows if (score := time_to_progress(row, full)) is not None]
    shortest, fastest = min(timed, key=lambda pair: (pair[0], pair[1] is not smaller))
    unless = ""
    if fastest.name != option:
        own = next(score for score, row in timed if row.name == option)
        rival = f"the {option}" if option == SMALLER else option
        share = (
            f"takes {100 * shortest / own:.1f} % of the time of {rival}" if own > 0 else f"takes less time than {rival}"
        )
        unless = (
            "This goes by the device time of all workers. Only if the time until this job is done is all that counts,"
            f" and the job has its workers and their link to itself, {fastest.name} ({fastest.what}) is better: with"
            f" the exchange counted it {share}."
        )
    return Recommendation(option, fastest.name, tuple(reasons), _wins(partial, smaller), unless)


def _wins(partial: Sequence[AdviceRow], smaller: AdviceRow) -> tuple[str, ...]:
    """Says in which respects partial backpropagation does better than the smaller batch, whatever is recommended."""
    wins = []
    for row in partial:
        gains = []
        if row.sent_bytes < (1 - _MARGIN) * smaller.sent_bytes:
            slower = row.communication_seconds > (1 + _MARGIN) * smaller.communication_seconds
            gains.append(
                f"{_less(row.sent_bytes, smaller.sent_bytes, 'fewer')} bytes sent"
                + (", though in more time (group after group, then sums are handed on)" if slower else "")
            )
        if row.communication_seconds < (1 - _MARGIN) * smaller.communication_seconds:
            gains.append(f"{_less(row.communication_seconds, smaller.communication_seconds)} time for the exchange")
        if row.mean_memory_bytes < (1 - _MARGIN) * smaller.mean_memory_bytes:
            gains.append(f"{_less(row.mean_memory_bytes, smaller.mean_memory_bytes)} memory on the mean worker")
        if row.busiest_seconds > (1 + _MARGIN) * row.compute_seconds:
            gains.append(
                f"room for another job: workers are idle {100 * (1 - row.compute_seconds / row.busiest_seconds):.0f} %"
                " of the time"
            )
        if gains:
            wins.append(f"Compared with the smaller batch, {row.name} has {', '.join(gains)}.")
    return tuple(wins) or ("In no other respect does partial backpropagation do better here.",)


def _less(here: float, there: float, word: str = "less") -> str:
    return f"{100 * (1 - here / there):.0f} % {word}"


def _ratio(here: float, there: float | None) -> float:
    return here / there if there else (1.0 if here == there else math.inf)


def _tuples(value: Any) -> Any:
    """Gives a value read from JSON with its lists, inner ones included, as tuples."""
    if isinstance(value, list):
        return tuple(_tuples(entry) for entry in value)
    return {name: _tuples(entry) for name, entry in value.items()} if isinstance(value, dict) else value
