"""Protocols of what runs the loops of a boundary's workers: the places of the loops, and a runner for them.

`microbatch.places.WorkerLoops` are the places of a boundary whose workers have equal shares. `uneven.Balanced` and
`own_loss.OwnLoss` stand in for them where workers have unequal shares, or losses of their own. A runner of this room
(`truncation.Truncation`, `rows.Capture`, `rows.Given`) takes any of these, so it says here what it needs of them.
"""

from __future__ import annotations

from typing import Any, Protocol

from jax.sharding import Mesh, PartitionSpec

from splitjax.lower.microbatch.places import LoopValues, Sums


class LoopPlaces(Protocol):
    """An evaluation of a boundary's loops: what crosses into them, and the loop of a place."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of the places, major first."""
        ...

    @property
    def mesh(self) -> Mesh:
        """The whole mesh."""
        ...

    @property
    def island_axes(self) -> tuple[str, ...]:
        """The axes over which gradients of islands are unsummed."""
        ...

    @property
    def contribution(self) -> LoopValues:
        """The values that the loop of a place reads and returns."""
        ...

    def position(self, v: int) -> int:
        """Gives the position among the boundary's operands of the value `v` of `contribution`."""
        ...

    def inputs(self) -> tuple[list[Any], ...]:
        """Gives what crosses into the loops, in groups; the last has the places' numbers along each axis, i32[size]."""
        ...

    def in_specs(self) -> tuple[list[PartitionSpec], ...]:
        """Gives the specs of `inputs()` for a `shard_map` over the places."""
        ...

    def row_specs(self) -> tuple[list[PartitionSpec], ...]:
        """Gives the specs of the rows that come out of a `shard_map` over the places."""
        ...

    def whole_row_specs(self) -> tuple[list[PartitionSpec], ...]:
        """Gives the specs of these rows on the whole mesh."""
        ...

    def without_values(self) -> LoopPlaces:
        """Gives the same places without the values that cross into the loops."""
        ...

    def with_share(self, share: int, offset: Any) -> LoopPlaces:
        """Gives the same places for a worker that takes `share` examples from number `offset` (i32[]) on; 0 stands for
        an equal share."""
        ...

    def at_place(self, inputs: tuple[list[Any], ...], live: frozenset[int] | None = None) -> Sums:
        """Runs the loop of a place.

        **Arguments:** `inputs`: its part of `inputs()`. `live`: the positions of the operands that it differentiates;
        None: all.
        """
        ...


class LoopRunner(Protocol):
    """A `microbatch.places.Runner` that takes whatever stands in for places."""

    def run(self, places: LoopPlaces) -> Sums:
        """Runs the loops of all `places` and gives sums over them: gradients of islands unsummed, with a leading dim
        for the places; rows of all."""
        ...

    def scaled(self, value: Any, position: int) -> Any:
        """Gives `value`, a gradient of operand number `position` that was added up outside of `run`, as the boundary
        returns it."""
        ...
