"""A step whose workers run programs of their own: one a depth, compiled for the devices of one place (a row of the
mesh), without collectives between workers.

A call dispatches three kinds of programs, all of which evaluate the traced step and differ in what they do at its
gradient boundary:

1. `before`, on the whole mesh, ends there: it gives what crosses into the boundary's loops, which lies on its workers
   already.
2. A *row program* for every place: its loop, to the depth of its slot. It is as small as its depth: what shallow
   workers save in memory, too.
3. `after`, on the whole mesh, goes on from there with the rows' sums: it adds every segment up over its contributors
   and updates the state.

Places whose depth leaves a segment out hold zeros for it when `after` begins, where its sum arrives.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from splitjax.lower.microbatch.places import REPLICATED, Places, Sums, over_places
from splitjax.lower.partial.truncation import Truncation


class Captured(Exception):
    """Raised at the boundary of a step of which only what comes before is wanted."""

    def __init__(self, places: Places, truncation: Truncation) -> None:
        self.places, self.truncation = places, truncation


@dataclasses.dataclass(frozen=True, eq=False)
class Capture:
    """The runner that ends the trace."""

    truncation: Truncation

    def run(self, places: Places) -> Sums:
        raise Captured(places, self.truncation)

    def scaled(self, value: Any, position: int) -> Any:
        return value


@dataclasses.dataclass(frozen=True, eq=False)
class Given:
    """The runner that goes on with what the places have summed: by place, with a leading dim for them (rows
    without)."""

    truncation: Truncation
    sums: Any  # ((loss, sums, gradients), unsummed gradients of islands, rows)

    def run(self, places: Places) -> Sums:
        totals, unsummed, rows = self.sums
        spec = PartitionSpec(places.axes)

        def total(given: Any, turn: Any) -> Any:
            return self.truncation.summed(places, jax.tree.map(lambda one: one.reshape(one.shape[1:]), given), turn)

        added = jax.shard_map(
            total,
            mesh=places.mesh,
            in_specs=(spec, REPLICATED),
            out_specs=REPLICATED,
            axis_names=frozenset(places.axes),
            check_vma=False,
        )(totals, self.truncation.turn)
        return added, unsummed, rows

    def scaled(self, value: Any, position: int) -> Any:
        return self.truncation.scaled(value, position)


@dataclasses.dataclass(frozen=True)
class Specs:
    """How what crosses into the loops lies on the whole mesh, as a key: `flat`, and the structure."""

    flat: tuple[PartitionSpec, ...]
    structure: Any

    @classmethod
    def of(cls, arrays: Any) -> Specs:
        """Of arrays, or of their shardings."""
        sharding = lambda one: one if isinstance(one, NamedSharding) else one.sharding
        return cls(tuple(sharding(one).spec for one in jax.tree.leaves(arrays)), jax.tree.structure(arrays))

    @property
    def tree(self) -> Any:
        return jax.tree.unflatten(self.structure, self.flat)


@dataclasses.dataclass(frozen=True, eq=False)
class RowPrograms:
    """The row programs of one signature of a step. `places`: as the trace of `before` left them (its values are not
    read)."""

    places: Places
    truncation: Truncation
    mesh: Mesh
    input_types: Any  # of `Places.inputs()`: `ShapeDtypeStruct`s of the whole mesh

    @functools.cached_property
    def rows(self) -> tuple[Mesh, ...]:
        """The mesh of every place: its devices, with size 1 along the axes of the places."""
        names = self.mesh.axis_names
        moved = np.moveaxis(
            self.mesh.devices, [names.index(axis) for axis in self.places.axes], range(len(self.places.axes))
        )
        shape = tuple(1 if name in self.places.axes else self.mesh.shape[name] for name in names)
        count = math.prod(self.mesh.shape[axis] for axis in self.places.axes)
        return tuple(Mesh(one.reshape(shape), names) for one in moved.reshape(count, -1))

    @functools.cached_property
    def mine(self) -> tuple[int, ...]:
        """The places whose devices belong to this process."""
        here = jax.process_index()
        return tuple(
            place
            for place, mesh in enumerate(self.rows)
            if any(device.process_index == here for device in mesh.devices.flat)
        )

    @functools.cached_property
    def in_specs(self) -> Any:
        return self.places.in_specs()

    @functools.cached_property
    def sum_types(self) -> Any:
        """Of one place's results, everything differentiated: shapes as on a mesh with one place."""
        return jax.eval_shape(
            self._run(self.rows[self.mine[0]], 0, self.truncation.variant(0)[1], 0),
            *self._local(self.input_types, self.in_specs),
        )

    def sum_specs(self, input_specs: Any) -> Any:
        """Specs of the results, on a row's mesh and on the whole mesh alike: gradients lie as their parameters do.
        `input_specs`: of the inputs."""
        lead, one = self.places.axes, self.places.contribution
        return (
            (
                PartitionSpec(lead),
                [PartitionSpec(lead)] * len(one.summed),
                [PartitionSpec(lead, *spec) for spec in input_specs[0]],
            ),
            [PartitionSpec(lead, self.places.island_axes)] * len(one.on_islands),
            self.places.whole_row_specs(),
        )

    def local_inputs(self, types: Any) -> Any:
        """What a row program takes, as types."""
        return self._local(types, self.in_specs)

    def sum_types_everywhere(self, specs: Any) -> Any:
        """What `after` takes, as types."""
        return jax.tree.map(lambda one, spec: self._everywhere(one, spec), self.sum_types, specs)

    def _everywhere(self, one: Any, spec: PartitionSpec) -> Any:
        """The type of a place's result on the whole mesh."""
        return jax.ShapeDtypeStruct(
            tuple(size * self._parts(entry) for size, entry in _with_entries(one.shape, spec)), one.dtype
        )

    def _parts(self, entry: Any) -> int:
        """Over how many places a dim is split."""
        return math.prod(self.mesh.shape[axis] for axis in _axes(entry) if axis in self.places.axes)

    def _local(self, types: Any, specs: Any) -> Any:
        """Types on the whole mesh as those on a row's."""
        local = lambda one, spec: jax.ShapeDtypeStruct(
            tuple(size // self._parts(entry) for size, entry in _with_entries(one.shape, spec)), one.dtype
        )
        return jax.tree.map(local, types, specs)

    def _run(self, mesh: Mesh, first: int, share: int, offset: int) -> Any:
        """The loop of one place to a depth, with its share of the examples (0: an equal one): results of what it does
        not differentiate are left out (None)."""
        live = self.truncation.live(first)
        same, on_islands = (
            [self.places.position(v) in live for v in group]
            for group in (self.places.contribution.same, self.places.contribution.on_islands)
        )

        def run(inputs: Any) -> Any:
            (value, sums, grads), unsummed, rows = self.places.with_share(share, offset).at_place(inputs, live)
            grads, unsummed = (
                [one[None] if is_live else None for one, is_live in zip(group, lives, strict=True)]
                for group, lives in ((grads, same), (unsummed, on_islands))
            )
            return (value[None], [one[None] for one in sums], grads), unsummed, rows

        lead, one = PartitionSpec(self.places.axes), self.places.contribution
        some = lambda lives: [lead if is_live else None for is_live in lives]
        out_specs = (lead, [lead] * len(one.summed), some(same)), some(on_islands), self.places.row_specs()
        return lambda *inputs: over_places(self.places, run, out_specs, mesh=mesh)(inputs)

    def program(self, place: int, slot: int, specs: Specs) -> Any:
        """The program of a place in a slot. `specs`: of the inputs."""
        first, share = self.truncation.variant(slot)
        turn = next(
            (
                turn
                for turn in range(self.truncation.depths.num_turns)
                if self.truncation.depths.slot(place, turn) == slot
            ),
            0,
        )
        return self._program(place, first, share, self.truncation.offset(place, turn), specs)

    @functools.cache  # noqa: B019 (lives as long as the step's programs)
    def _program(self, place: int, first: int, share: int, offset: int, specs: Specs) -> Any:
        mesh, run = self.rows[place], self._run(self.rows[place], first, share, offset)
        run.__name__ = f"worker_{place}_from_segment_{first}"
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), self.sum_specs(specs.tree), is_leaf=_is_spec)
        types = jax.eval_shape(run, *self._local(self.input_types, self.in_specs))
        keep = lambda one, sharding: None if one is None else sharding
        return jax.jit(run, out_shardings=jax.tree.map(keep, types, shardings, is_leaf=lambda value: value is None))

    @functools.cache  # noqa: B019
    def _blank(self, place: int, index: int, spec: PartitionSpec) -> Any:
        """Makes zeros for one result on the devices of a place."""
        one = jax.tree.leaves(self.sum_types)[index]
        return jax.jit(lambda: jnp.zeros(one.shape, one.dtype), out_shardings=NamedSharding(self.rows[place], spec))

    def __call__(self, inputs: Any, slots: Mapping[int, int]) -> Any:
        """What `before` gave -> what `after` takes: arrays over the whole mesh. `slots`: by place."""
        flat, specs = jax.tree.leaves(inputs), Specs.of(inputs)
        tree, by_place = jax.tree.structure(inputs), {}
        for place in self.mine:
            own = jax.tree.unflatten(tree, [self._of_place(one, place) for one in flat])
            results = self.program(place, slots[place], specs)(*own)
            by_place[place] = jax.tree.leaves(results, is_leaf=lambda value: value is None)
        found = []
        for index, spec in enumerate(jax.tree.leaves(self.sum_specs(specs.tree), is_leaf=_is_spec)):
            given = [by_place[place][index] for place in self.mine]
            parts = [
                self._blank(place, index, spec)() if one is None else one
                for place, one in zip(self.mine, given, strict=True)
            ]
            found.append(self._joined(parts, spec))
        return jax.tree.unflatten(jax.tree.structure(self.sum_types), found)

    def _of_place(self, array: Any, place: int) -> Any:
        """The part of an array that a place holds, as an array on its mesh; nothing is copied."""
        mesh, spec = self.rows[place], array.sharding.spec
        devices = set(mesh.devices.flat)
        shards = [shard.data for shard in array.addressable_shards if shard.device in devices]
        shape = self._local(jax.ShapeDtypeStruct(array.shape, array.dtype), spec).shape
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, spec), shards)

    def _joined(self, parts: Sequence[Any], spec: PartitionSpec) -> Any:
        """The places' results as one array over the whole mesh; nothing is copied."""
        shards = [shard.data for part in parts for shard in part.addressable_shards]
        return jax.make_array_from_single_device_arrays(
            self._everywhere(parts[0], spec).shape, NamedSharding(self.mesh, spec), shards
        )


def _with_entries(shape: Sequence[int], spec: PartitionSpec) -> list[tuple[int, Any]]:
    return list(zip(shape, (*spec, *[None] * (len(shape) - len(spec))), strict=True))


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
