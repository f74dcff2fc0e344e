"""Makes the rows of an advice: what each way to train saves and costs on a step that was measured.

Noise, memory, depths and exchanges go in; an `AdviceRow` for full backpropagation, a smaller batch, or workers that
differentiate to different depths comes out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from splitjax.partial.advice import FULL, SMALLER, TEMPORAL_ROW, AdviceRow
from splitjax.partial.depths import Depths
from splitjax.partial.request import PROGRAM


@dataclasses.dataclass(frozen=True)
class PredictedExchange:
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

    def full(self, depths: Depths, exchange: PredictedExchange) -> AdviceRow:
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
        self, name: str, what: str, depths: Depths, exchange: PredictedExchange, shares: Sequence[float] | None = None
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

    def temporal(self, what: str, depths: Depths, exchange: PredictedExchange) -> AdviceRow:
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
