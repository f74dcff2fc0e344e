"""A gradient boundary whose workers differentiate to different depths (`partial.depths`): what the loop over
microbatches is told of it.

One program for all workers: each takes the branch of its depth, in which no collective over the workers' axes stands;
then every segment's gradient is added up over the workers that computed it (`contributors.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from splitjax.lower.microbatch.convolutions import with_cpu_layouts
from splitjax.lower.microbatch.places import REPLICATED, Places, Sums, over_places
from splitjax.lower.partial.allreduce import in_groups, total_of_contributors
from splitjax.partial.depths import Depths


def turns_scope(num_turns: Sequence[int], what: str = "turns") -> str:
    """The name scope of a choice among branches by the number of the turn, so many of which take each; or of `depths`,
    by worker, so many of which take each. `report.hlo` counts by it."""
    return f"splitjax:{what}:{'.'.join(map(str, num_turns))}"


@dataclasses.dataclass(frozen=True, eq=False)
class Truncation:
    """How one boundary is truncated.

    - `segments`, `params`: by position of a differentiated operand, its segment and the path of its parameter. `axes`:
      the mesh axes of the workers, major first.
    - `turn`: i32[], the number of the step among those of `depths.num_turns`.
    - `examples`: by slot how many it takes, where they differ.
    """

    depths: Depths
    segments: Mapping[int, int]
    params: Mapping[int, str]
    axes: tuple[str, ...]
    mesh: Mesh
    turn: Any
    examples: tuple[int, ...] = ()  # by slot, where shares are balanced

    @property
    def num_workers(self) -> int:
        return self.depths.num_slots

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    def live(self, first: int) -> frozenset[int]:
        """The operands that a worker differentiates whose first segment this is."""
        return frozenset(position for position, segment in self.segments.items() if segment >= first)

    def place(self, places: Mapping[str, Any]) -> Any:
        """A worker's number from its places along the axes."""
        number = jnp.zeros((), jnp.int32)
        for axis in self.axes:
            number = number * self.mesh.shape[axis] + places[axis]
        return number

    def run(self, places: Places) -> Sums:
        """Each worker's loop by its depth (`places.Runner`)."""
        variants = sorted({self.variant(slot) for slot in range(self.num_workers)}, reverse=True)
        table = jnp.asarray([variants.index(self.variant(slot)) for slot in range(self.num_workers)], jnp.int32)
        counts = [sum(self.variant(slot) == one for slot in range(self.num_workers)) for one in variants]
        offsets = jnp.asarray(
            [
                [self.offset(worker, turn) for worker in range(self.num_workers)]
                for turn in range(self.depths.num_turns)
            ],
            jnp.int32,
        )

        def run(inputs: tuple[list[Any], ...], turn: Any) -> Sums:
            number = self.place({name: place[0] for name, place in zip(places.axes, inputs[-1], strict=True)})
            slot = (number + turn) % self.num_workers if self.depths.request.rotate else number
            offset = offsets[turn % self.depths.num_turns, number]
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
            return self.summed(places, totals, turn), [one[None] for one in unsummed], rows

        out_specs = REPLICATED, PartitionSpec(places.axes), places.row_specs()
        return over_places(places, run, out_specs, (REPLICATED,))(places.inputs(), self.turn)

    def variant(self, slot: int) -> tuple[int, int]:
        """What a slot's loop depends on: the first segment that it differentiates, and its share of the examples (0
        where all are equal)."""
        return self.depths.first[slot], self.examples[slot] if self.examples else 0

    def offset(self, worker: int, turn: int) -> int:
        """The number of a worker's first example."""
        return sum(self.examples[self.depths.slot(before, turn)] for before in range(worker)) if self.examples else 0

    def summed(self, places: Places, totals: Any, turn: Any) -> Any:
        """(loss, sums, gradients) of this worker as those of all; inside a `shard_map` over the workers."""
        value, sums, grads = totals
        value, sums = lax.psum((value, sums), places.axes)
        return value, sums, self.total(grads, [places.position(v) for v in places.contribution.same], turn)

    def total(self, values: Sequence[Any], positions: Sequence[int], turn: Any) -> list[Any]:
        """Gradients of some operands added up over their contributors, and scaled by the estimator."""
        values, found = list(values), {}
        for segment in range(len(self.depths.segments)):
            found[segment] = [k for k, position in enumerate(positions) if self.segments[position] == segment]
        names = [self.params.get(position, "") for position in positions]
        turned = [
            lambda parts, number=number: self._turned(parts, names, found, number)
            for number in range(self.depths.num_turns)
        ]
        if len(turned) == 1 or not in_groups(self.axes, self.platform):  # all turns are alike
            values = turned[0](values)
        else:
            with jax.named_scope(turns_scope([1] * len(turned))):
                values = lax.switch(turn % len(turned), turned, values)
        return [self.scaled(value, position) for value, position in zip(values, positions, strict=True)]

    def scaled(self, value: Any, position: int) -> Any:
        """A sum of contributions as the estimate of the whole gradient."""
        shares = [one / sum(self.examples) for one in self.examples] or None
        factor = self.depths.scale(self.segments[position], shares)
        return value if factor == 1.0 else value * jnp.asarray(factor, value.dtype)

    def _turned(
        self, values: Sequence[Any], names: Sequence[str], found: Mapping[int, Sequence[int]], turn: int
    ) -> list[Any]:
        """The sums in one turn, whose contributors are known."""
        results: dict[int, Any] = {}
        workers = range(self.num_workers)
        for segment, members in found.items():
            slots = set(self.depths.contributors(segment))
            who = [worker for worker in workers if self.depths.slot(worker, turn) in slots]
            parts, called = [values[k] for k in members], [names[k] for k in members]
            sums = total_of_contributors(parts, who, self.axes, self.num_workers, self.platform, called)
            results.update(zip(members, sums, strict=True))
        return [results[k] for k in range(len(values))]
