"""Truncates the backward pass of a boundary by worker: tells the loop over microbatches how far each worker goes.

The depths of a step and the places of a boundary's loops go in, sums over all workers come out. A single program serves
all workers: each takes the branch of its depth, in which no collective over the workers' axes stands; then every
segment's gradient is added up over the workers that computed it (`allreduce`). A collective inside a branch would wait
for workers that never enter it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from splitjax.lower.microbatch.convolutions import with_cpu_layouts
from splitjax.lower.microbatch.places import REPLICATED, RunnableLoops, Sums, over_places
from splitjax.lower.partial.allreduce import total_of_contributors
from splitjax.partial.contributors import in_groups
from splitjax.partial.depths import Depths
from splitjax.planning.partial_step import PartialStep
from splitjax.planning.workers import Workers


def turns_scope(counts: Sequence[int], what: str = "turns") -> str:
    """Gives the name scope of a choice among branches, by which `report.hlo` counts what runs how often.

    **Arguments:** `counts`: by branch the number of those that take it. `what`: "turns" where these are the steps of a
    cycle, "depths" where they are workers.
    """
    return f"splitjax:{what}:{'.'.join(map(str, counts))}"


@dataclasses.dataclass(frozen=True, eq=False)
class Truncation:
    """Says how a boundary is truncated, and runs its loops so: a `Runner`.

    - `depths`: how far each slot differentiates.
    - `segments`, `params`: by position of a differentiated operand, its segment and the path of its parameter.
    - `workers`: who differentiates so far. `platform`: of their devices, such as `cpu`.
    - `cycle_step`: i32[], the step's number in the cycle of the depths.
    - `examples`: by slot its number of examples, where shares are balanced; else empty.
    """

    depths: Depths
    segments: Mapping[int, int]
    params: Mapping[int, str]
    workers: Workers
    platform: str
    cycle_step: Any
    examples: tuple[int, ...] = ()

    @classmethod
    def of(cls, step: PartialStep, platform: str, eqn: Any, more: Sequence[str], cycle_step: Any) -> Truncation:
        """Makes the truncation of a boundary in a step.

        **Arguments:** `step`: its partial backpropagation. `platform`: of the devices. `eqn`, `more`: the boundary's
        equation and the parameters of its further operands, as for `PartialStep.segments_for`. `cycle_step`: i32[], the
        step's number in the cycle of the depths.
        """
        segments, params = step.segments_for(eqn, more), step.params_for(eqn, more)
        return cls(step.depths, segments, params, step.workers, platform, cycle_step, step.examples)

    @property
    def num_workers(self) -> int:
        """The number of workers, which is that of the slots."""
        return self.depths.num_slots

    def live(self, first: int) -> frozenset[int]:
        """Gives the positions of the operands that a worker differentiates whose first segment is number `first`."""
        return frozenset(position for position, segment in self.segments.items() if segment >= first)

    def place(self, places: Mapping[str, Any]) -> Any:
        """Gives a worker's number, i32[], from its `places` along the axes, i32[] each."""
        number = jnp.zeros((), jnp.int32)
        for axis in self.workers.axes:
            number = number * self.workers.mesh.size(axis) + places[axis]
        return number

    def run(self, places: RunnableLoops) -> Sums:
        """Runs each worker's loop to its depth, in a `shard_map` over `places`, and adds up over the workers."""
        variants = sorted({self.variant(slot) for slot in range(self.num_workers)}, reverse=True)
        table = jnp.asarray([variants.index(self.variant(slot)) for slot in range(self.num_workers)], jnp.int32)
        counts = [sum(self.variant(slot) == variant for slot in range(self.num_workers)) for variant in variants]
        offsets = jnp.asarray(
            [
                [self.offset(worker, number) for worker in range(self.num_workers)]
                for number in range(self.depths.num_cycle_steps)
            ],
            jnp.int32,
        )

        def run(inputs: tuple[list[Any], ...], cycle_step: Any) -> Sums:
            number = self.place({name: place[0] for name, place in zip(self.workers.axes, inputs[-1], strict=True)})
            slot = (number + cycle_step) % self.num_workers if self.depths.request.rotate else number
            offset = offsets[cycle_step % self.depths.num_cycle_steps, number]
            branches = [
                lambda given, start, first=first, share=share: places.with_share(share, start).at_place(
                    given, self.live(first)
                )
                for first, share in variants
            ]
            if self.platform == "cpu":
                branches = [with_cpu_layouts(branch) for branch in branches]
            with jax.named_scope(turns_scope(counts, "depths")):
                totals, unsummed, rows = lax.switch(table[slot], branches, inputs, offset)
            return self.summed(places, totals, cycle_step), [grad[None] for grad in unsummed], rows

        out_specs = REPLICATED, PartitionSpec(self.workers.axes), places.row_specs()
        return over_places(places, run, out_specs, (REPLICATED,))(places.inputs(), self.cycle_step)

    def variant(self, slot: int) -> tuple[int, int]:
        """Gives what the loop of slot number `slot` depends on: the first segment that it differentiates, and its share
        of the examples (0 where all are equal)."""
        return self.depths.first[slot], self.examples[slot] if self.examples else 0

    def offset(self, worker: int, cycle_step: int) -> int:
        """Gives the number of the first example of worker number `worker` in step `cycle_step` of a cycle; 0 where
        shares are equal."""
        return sum(self.examples[slot] for slot in self.depths.slots(cycle_step)[:worker]) if self.examples else 0

    def summed(self, places: RunnableLoops, totals: Any, cycle_step: Any) -> Any:
        """Adds this worker's totals up over all workers, inside a `shard_map` over them.

        **Arguments:** `places`: those of the workers. `totals`: (loss, sums, gradients) of this worker. `cycle_step`:
        i32[].
        """
        value, sums, grads = totals
        value, sums = lax.psum((value, sums), self.workers.axes)
        return value, sums, self.total(grads, [places.position(v) for v in places.contribution.same], cycle_step)

    def total(self, values: Sequence[Any], positions: Sequence[int], cycle_step: Any) -> list[Any]:
        """Adds gradients up over their contributors, and scales them by the estimator.

        **Arguments:** `values`: this worker's gradients of some operands. `positions`: of these operands.
        `cycle_step`: i32[].
        """
        values, members = list(values), {}
        for segment in range(len(self.depths.segments)):
            members[segment] = [k for k, position in enumerate(positions) if self.segments[position] == segment]
        names = [self.params.get(position, "") for position in positions]
        sums = [
            lambda parts, number=number: self._sums_at(parts, names, members, number)
            for number in range(self.depths.num_cycle_steps)
        ]
        if len(sums) == 1 or not in_groups(self.workers.axes, self.platform):  # all steps of the cycle are alike
            values = sums[0](values)
        else:
            with jax.named_scope(turns_scope([1] * len(sums))):
                values = lax.switch(cycle_step % len(sums), sums, values)
        return [self.scaled(value, position) for value, position in zip(values, positions, strict=True)]

    def scaled(self, value: Any, position: int) -> Any:
        """Scales `value`, a sum of contributions to the gradient of operand number `position`, to an estimate of the
        whole gradient."""
        shares = [share / sum(self.examples) for share in self.examples] or None
        factor = self.depths.scale(self.segments[position], shares)
        return value if factor == 1.0 else value * jnp.asarray(factor, value.dtype)

    def _sums_at(
        self, values: Sequence[Any], names: Sequence[str], members: Mapping[int, Sequence[int]], cycle_step: int
    ) -> list[Any]:
        """Gives the sums in a step of the cycle, whose contributors are known. `members`: by segment the numbers of its
        values."""
        results: dict[int, Any] = {}
        slot_of = self.depths.slots(cycle_step)
        for segment, numbers in members.items():
            slots = set(self.depths.contributors(segment))
            who = [worker for worker, slot in enumerate(slot_of) if slot in slots]
            parts, called = [values[k] for k in numbers], [names[k] for k in numbers]
            sums = total_of_contributors(parts, who, self.workers.axes, len(slot_of), self.platform, called)
            results.update(zip(numbers, sums, strict=True))
        return [results[k] for k in range(len(values))]
