"""A gradient boundary whose workers differentiate to different depths (`partial.depths`): what the loop over microbatches is told of it.

One program for all workers: each takes the branch of its depth, in which no collective over the workers' axes stands; then every segment's
gradient is added up over the workers that computed it (`contributors.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from splitjax.lower.contributors import total_of_contributors
from splitjax.partial.depths import Depths


@dataclasses.dataclass(frozen=True, eq=False)
class Truncation:
    """How one boundary is truncated.

    - `segments`: by position of a differentiated operand, its segment. `axes`: the mesh axes of the workers, major first.
    - `turn`: i32[], the number of the step among those of `depths.num_turns`.
    """

    depths: Depths
    segments: Mapping[int, int]
    axes: tuple[str, ...]
    mesh: Mesh
    turn: Any

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

    def branched(self, places: Mapping[str, Any], turn: Any, run: Callable[[frozenset[int]], Any]) -> Any:
        """`run(operands to differentiate)` by this worker's depth."""
        distinct = self.depths.distinct
        table = jnp.asarray([distinct.index(first) for first in self.depths.first], jnp.int32)
        number = self.place(places)
        slot = (number + turn) % self.num_workers if self.depths.request.rotate else number
        branches = [lambda _, first=first: run(self.live(first)) for first in distinct]
        return lax.switch(table[slot], branches, None)

    def total(self, values: Sequence[Any], positions: Sequence[int], turn: Any) -> list[Any]:
        """Gradients of some operands added up over their contributors, and scaled by the estimator."""
        values, found = list(values), {}
        for segment in range(len(self.depths.segments)):
            found[segment] = [k for k, position in enumerate(positions) if self.segments[position] == segment]
        if len(self.axes) > 1:  # groups of workers are named along one axis only
            values = lax.psum(values, self.axes)
        else:
            turned = [lambda parts, number=number: self._turned(parts, found, number) for number in range(self.depths.num_turns)]
            values = lax.switch(turn % len(turned), turned, values) if len(turned) > 1 else turned[0](values)
        return [self.scaled(value, position) for value, position in zip(values, positions, strict=True)]

    def scaled(self, value: Any, position: int) -> Any:
        """A sum of contributions as the estimate of the whole gradient."""
        factor = self.depths.scale(self.segments[position])
        return value if factor == 1.0 else value * jnp.asarray(factor, value.dtype)

    def _turned(self, values: Sequence[Any], found: Mapping[int, Sequence[int]], turn: int) -> list[Any]:
        """The sums in one turn, whose contributors are known."""
        results: dict[int, Any] = {}
        workers = range(self.num_workers)
        for segment, members in found.items():
            slots = set(self.depths.contributors(segment))
            who = [worker for worker in workers if self.depths.slot(worker, turn) in slots]
            sums = total_of_contributors([values[k] for k in members], who, self.axes[0], self.num_workers, self.platform)
            results.update(zip(members, sums, strict=True))
        return [results[k] for k in range(len(values))]
