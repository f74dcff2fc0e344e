"""Which examples a microbatch has, and how values are cut and put together again.

The batch of B examples lies on the workers in order: with the batch axes of sizes s1..sk, worker (i1..ik) has a
contiguous part. A microbatch takes one N-th of *each* worker's part, so that cutting moves nothing: the example index
is read as (s1, .., sk, N, n) and microbatch m has the entries with N-index m. Axes that are manual in the surrounding
`shard_map` appear with size 1 inside it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from splitjax.lower.microbatch.example_relation import Layout


@functools.partial(jax.tree_util.register_dataclass, data_fields=["microbatch", "places"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Slot:
    """Inside the loop: the number of the microbatch, and the worker's place along each manual axis (scalar int32
    tracers)."""

    microbatch: Any
    places: Mapping[str, Any]

    def is_first(self) -> Any:
        """Whether this is microbatch 0 of the first worker."""
        first = self.microbatch == 0
        for place in self.places.values():
            first = first & (place == 0)
        return first


@dataclasses.dataclass(frozen=True)
class Split:
    """How the batch is cut. `axes`: the batch axes with their sizes, major first; `manual`: those that `shard_map`
    handles."""

    num_microbatches: int
    axes: tuple[tuple[str, int], ...]
    manual: frozenset[str]
    mesh: Mesh | None = None

    @property
    def num_contributions(self) -> int:
        """How many parts are added up: one a microbatch and place along the manual axes."""
        return self.num_microbatches * math.prod(size for name, size in self.axes if name in self.manual)

    @property
    def held(self) -> tuple[Any, ...]:
        """Traced values that it works with: a `shard_map` has to be given them (`holding`)."""
        return ()

    def holding(self, held: tuple[Any, ...]) -> Split:
        """The same with these."""
        return self

    def _factors(self, size: int, layout: Layout) -> tuple[int, ...]:
        sizes = tuple(size for _, size in self.axes)
        examples = size // (layout.major * layout.minor)
        return (
            layout.major,
            *sizes,
            self.num_microbatches,
            examples // (math.prod(sizes) * self.num_microbatches),
            layout.minor,
        )

    def _local(self, factors: Sequence[int]) -> tuple[int, ...]:
        return (
            factors[0],
            *(1 if name in self.manual else size for name, size in self.axes),
            *factors[len(self.axes) + 1 :],
        )

    def cut(self, value: Any, layout: Layout, whole_over: Sequence[str] = ()) -> Any:
        """A whole value as (N, *before, major, s1..sk, n, minor, *behind): microbatches lead. `whole_over`: batch axes
        over which it is not split, but whole."""
        shape, dim = value.shape, layout.dim
        split = jnp.reshape(value, (*shape[:dim], *self._factors(shape[dim], layout), *shape[dim + 1 :]))
        return self._pin(jnp.moveaxis(split, dim + 1 + len(self.axes), 0), 1 + dim, whole_over)

    def _pin(self, value: Any, major: int, whole_over: Sequence[str]) -> Any:
        """Keeps a cut value where the batch is: its axis dims stay on their mesh axes."""
        if self.mesh is None or not self.axes:
            return value
        entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * value.ndim
        for i, (name, _) in enumerate(self.axes):
            entries[major + 1 + i] = None if name in whole_over else name
        return lax.with_sharding_constraint(value, NamedSharding(self.mesh, PartitionSpec(*entries)))

    def cut_spec(self, rank: int, layout: Layout) -> PartitionSpec:
        """The `shard_map` spec of a cut value whose whole form has `rank` dims."""
        entries: list[Any] = [None] * (rank + len(self.axes) + 3)
        for i, (name, _) in enumerate(self.axes):
            if name in self.manual:
                entries[1 + layout.dim + 1 + i] = name
        return PartitionSpec(*entries)

    def part(self, cut: Any, layout: Layout) -> Any:
        """One microbatch of a cut value (without its leading dim) in the shape of the part trace."""
        dim, width = layout.dim, len(self.axes) + 3
        shape = cut.shape
        return jnp.reshape(cut, (*shape[:dim], math.prod(shape[dim : dim + width]), *shape[dim + width :]))

    def take(self, whole: Any, layout: Layout, slot: Slot) -> Any:
        """The part of a whole value that belongs to a microbatch, inside the loop."""
        whole = jnp.asarray(whole)
        shape, dim = whole.shape, layout.dim
        value = jnp.reshape(whole, (*shape[:dim], *self._factors(shape[dim], layout), *shape[dim + 1 :]))
        for i, (name, _) in enumerate(self.axes):
            if name in self.manual:
                value = lax.dynamic_slice_in_dim(value, slot.places[name], 1, dim + 1 + i)
        value = lax.dynamic_index_in_dim(value, slot.microbatch, dim + 1 + len(self.axes), keepdims=False)
        return self.part(value, layout)

    def uncut_local(self, part: Any, layout: Layout, whole_size: int) -> Any:
        """A microbatch's result with its example dim taken apart as in `cut`, ready to be stacked."""
        shape, dim = part.shape, layout.dim
        factors = self._local(self._factors(whole_size, layout))
        without = (*factors[: len(self.axes) + 1], *factors[len(self.axes) + 2 :])
        return jnp.reshape(part, (*shape[:dim], *without, *shape[dim + 1 :]))

    def apart(self, part: Any, layout: Layout, whole_size: int) -> Any:
        """A part with its example dim taken apart by axes, so that it can cross into an island (`islands.py`), or out
        of it."""
        return self.uncut_local(part, layout, whole_size)

    def together(self, apart: Any, layout: Layout) -> Any:
        """A part again, from the other side."""
        return self.part(apart, layout)

    def join(self, stacked: Any, layout: Layout, whole_size: int) -> Any:
        """Stacked results of all microbatches and workers as the whole value, examples in their original order."""
        value = jnp.moveaxis(stacked, 0, layout.dim + 1 + len(self.axes))
        width = len(self.axes) + 4
        shape = value.shape
        return jnp.reshape(value, (*shape[: layout.dim], whole_size, *shape[layout.dim + width :]))

    def resize(self, value: Any, layout: Layout | None, now: int, then: int) -> Any:
        """A part with `now` examples as one with `then`: its first examples, or its only one repeated."""
        if layout is None:
            return value
        shape, dim = value.shape, layout.dim
        value = jnp.reshape(value, (*shape[:dim], layout.major, now, layout.minor, *shape[dim + 1 :]))
        if then < now:
            value = lax.slice_in_dim(value, 0, then, axis=dim + 1)
        else:
            value = jnp.broadcast_to(value, (*shape[:dim], layout.major, then, layout.minor, *shape[dim + 1 :]))
        return jnp.reshape(value, (*shape[:dim], layout.major * then * layout.minor, *shape[dim + 1 :]))
