"""Says which examples a microbatch has, cuts values into microbatches and puts them together again.

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
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from splitjax.planning.workers import Workers
from splitjax.primitives.example_relation import ExampleDim


@functools.partial(jax.tree_util.register_dataclass, data_fields=["microbatch", "places"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class LoopPosition:
    """Says where an evaluation inside the loop is.

    `microbatch`: the number of the microbatch; `places`: by manual axis the worker's position along it (both scalar
    int32 tracers)."""

    microbatch: Any
    places: Mapping[str, Any]

    def is_first(self) -> Any:
        """Tells whether this is microbatch 0 of the first worker, as a bool[] tracer."""
        first = self.microbatch == 0
        for place in self.places.values():
            first = first & (place == 0)
        return first


@dataclasses.dataclass(frozen=True)
class Split:
    """Describes how the batch is cut, and cuts values so.

    - `num_microbatches`: N in the module's docstring.
    - `workers`: over which axes the batch lies, and which of them `shard_map` handles.
    - `mesh`: with the devices that evaluate it; None before that is known, and on a single device.
    """

    num_microbatches: int
    workers: Workers
    mesh: Mesh | AbstractMesh | None = None

    @functools.cached_property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """The batch axes with their sizes, major first."""
        return self.workers.sizes

    @functools.cached_property
    def manual(self) -> frozenset[str]:
        """Those of the batch axes that `shard_map` handles."""
        return frozenset(self.workers.axes) & {name for name, _ in self.axes}

    @property
    def num_contributions(self) -> int:
        """The number of parts that are added up: one per microbatch and worker along the manual axes."""
        return self.num_microbatches * math.prod(size for name, size in self.axes if name in self.manual)

    @property
    def held(self) -> tuple[Any, ...]:
        """The traced values that the split works with: a `shard_map` has to be given them (`holding`)."""
        return ()

    def holding(self, held: tuple[Any, ...]) -> Split:
        """Returns the same split with the traced values `held`, in the order of the property; it works with none."""
        return self

    def _factors(self, size: int, layout: ExampleDim) -> tuple[int, ...]:
        """Returns the sizes (major, s1..sk, N, n, minor) of a dim of `size` that holds the whole batch."""
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
        """Returns the same factors inside of the `shard_map`, where manual axes have size 1."""
        return (
            factors[0],
            *(1 if name in self.manual else size for name, size in self.axes),
            *factors[len(self.axes) + 1 :],
        )

    def cut(self, value: Any, layout: ExampleDim, whole_over: Sequence[str] = ()) -> Any:
        """Returns a whole `value` as (N, *before, major, s1..sk, n, minor, *behind): microbatches lead.

        `layout`: where it holds examples; `whole_over`: batch axes over which it is not split, but whole."""
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

    def cut_spec(self, rank: int, layout: ExampleDim) -> PartitionSpec:
        """Returns the `shard_map` spec of a cut value whose whole form has `rank` dims, and examples at `layout`."""
        entries: list[Any] = [None] * (rank + len(self.axes) + 3)
        for i, (name, _) in enumerate(self.axes):
            if name in self.manual:
                entries[1 + layout.dim + 1 + i] = name
        return PartitionSpec(*entries)

    def part(self, cut: Any, layout: ExampleDim) -> Any:
        """Returns a microbatch of a `cut` value (without its leading dim) in the shape of the part trace.

        `layout`: where the whole value holds examples."""
        dim, width = layout.dim, len(self.axes) + 3
        shape = cut.shape
        return jnp.reshape(cut, (*shape[:dim], math.prod(shape[dim : dim + width]), *shape[dim + width :]))

    def take(self, whole: Any, layout: ExampleDim, slot: LoopPosition) -> Any:
        """Returns the part of a `whole` value, with examples at `layout`, that belongs to the microbatch of `slot`.

        For use inside the loop, where every worker has the whole value."""
        whole = jnp.asarray(whole)
        shape, dim = whole.shape, layout.dim
        value = jnp.reshape(whole, (*shape[:dim], *self._factors(shape[dim], layout), *shape[dim + 1 :]))
        for i, (name, _) in enumerate(self.axes):
            if name in self.manual:
                value = lax.dynamic_slice_in_dim(value, slot.places[name], 1, dim + 1 + i)
        value = lax.dynamic_index_in_dim(value, slot.microbatch, dim + 1 + len(self.axes), keepdims=False)
        return self.part(value, layout)

    def uncut_local(self, part: Any, layout: ExampleDim, whole_size: int) -> Any:
        """Returns a microbatch's result `part` with its example dim taken apart as in `cut`, ready to be stacked.

        `layout`: where it holds examples; `whole_size`: the size of that dim for the whole batch."""
        shape, dim = part.shape, layout.dim
        factors = self._local(self._factors(whole_size, layout))
        without = (*factors[: len(self.axes) + 1], *factors[len(self.axes) + 2 :])
        return jnp.reshape(part, (*shape[:dim], *without, *shape[dim + 1 :]))

    def apart(self, part: Any, layout: ExampleDim, whole_size: int) -> Any:
        """Returns a `part` with its example dim taken apart by axes, to cross into an island or out of it.

        `layout`, `whole_size`: as for `uncut_local`."""
        return self.uncut_local(part, layout, whole_size)

    def together(self, apart: Any, layout: ExampleDim) -> Any:
        """Returns what `apart` made, behind the border of the island, as a part with examples at `layout` again."""
        return self.part(apart, layout)

    def join(self, stacked: Any, layout: ExampleDim, whole_size: int) -> Any:
        """Returns the `stacked` results of all microbatches and workers as the whole value, in the order of examples.

        `layout`: where the whole value holds examples, in a dim of `whole_size`."""
        value = jnp.moveaxis(stacked, 0, layout.dim + 1 + len(self.axes))
        width = len(self.axes) + 4
        shape = value.shape
        return jnp.reshape(value, (*shape[: layout.dim], whole_size, *shape[layout.dim + width :]))

    def resize(self, value: Any, layout: ExampleDim | None, now: int, then: int) -> Any:
        """Returns a part with `now` examples as one with `then`: its first examples, or its only one repeated.

        `value`: the part; `layout`: where it holds examples, None for one that holds none and is returned as it is."""
        if layout is None:
            return value
        shape, dim = value.shape, layout.dim
        value = jnp.reshape(value, (*shape[:dim], layout.major, now, layout.minor, *shape[dim + 1 :]))
        if then < now:
            value = lax.slice_in_dim(value, 0, then, axis=dim + 1)
        else:
            value = jnp.broadcast_to(value, (*shape[:dim], layout.major, then, layout.minor, *shape[dim + 1 :]))
        return jnp.reshape(value, (*shape[:dim], layout.major * then * layout.minor, *shape[dim + 1 :]))
