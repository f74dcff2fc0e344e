"""Compares what partial backpropagation would save and cost on a step with a smaller batch of equal cost.

An `Advice` has a row per way to train, which `partial.ways` makes of what `measure.advising` measured, and a
recommendation by `partial.recommending`. What a way to train costs is compared by the variance of its gradient. With
sigma_j^2 the variance of one worker's gradient of layer j, of N workers that differentiate everything the mean has
sum_j sigma_j^2 / N; where n_j workers differentiate layer j, sum_j sigma_j^2 / n_j; with a fraction f of the batch,
sum_j sigma_j^2 / (N f). Steps that noise keeps from being longer are needed in proportion to it: time x variance is the
time to the same progress. A smaller batch costs f and has 1 / f of the variance, whatever f is: partial backpropagation
is worth its compute where its product is below 1.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

from splitjax.codec import Codec, Wording
from splitjax.display import registry
from splitjax.errors import PartialError
from splitjax.partial.request import Measured

FORMAT = 1
FULL, SMALLER, SPATIAL_ROW, OPTIMAL_ROW, TEMPORAL_ROW = "full", "smaller batch", "spatial", "optimal", "temporal"


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
        return _JSON.text(self)

    @classmethod
    def from_json(cls, text: str) -> Advice:
        """Reads the `text` that `to_json` wrote. Raises `PartialError` for anything else, with the key path of the
        first problem."""
        return _JSON.parse(text)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draws a `matplotlib.figure.Figure`: the noise of each layer beside its time, and what each way to train takes
        to the same progress.

        `path`: also written there (PNG, SVG, PDF by the ending). Raises `PartialError` where matplotlib is not
        installed, or the file cannot be written."""
        return registry.draw(self, path)

    def __str__(self) -> str:
        return registry.show(self)

    def __repr__(self) -> str:
        return (
            f"<Advice on {self.step}: {self.num_workers} workers, {len(self.stages)} layers, recommends"
            f" {self.recommendation.option}>"
        )

    def _repr_html_(self) -> str:
        return registry.html(self)


def _check(advice: Advice) -> None:
    """Raises `PartialError` for an advice without rows, with the first of which others are compared, and for bytes that
    are no count. A variance may be infinite."""
    if not advice.rows:
        raise PartialError(
            "an advice has at least the row of full backpropagation",
            value=[],
            place="rows",
            remedy="use a file that Advice.to_json wrote",
        )
    for number, row in enumerate(advice.rows):
        for name in ("sent_bytes", "mean_memory_bytes", "max_memory_bytes"):
            if not 0 <= getattr(row, name) < math.inf:
                raise PartialError(
                    "bytes are 0 or more, and finite",
                    value=getattr(row, name),
                    place=f"rows[{number}].{name}",
                    remedy="use a file that Advice.to_json wrote",
                )


_JSON = Codec(Advice, PartialError, Wording.of_result("an advice", "advice"), format=FORMAT, check=_check)


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


def _ratio(here: float, there: float | None) -> float:
    return here / there if there else (1.0 if here == there else math.inf)
