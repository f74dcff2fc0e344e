"""Runs the loops of a step's workers as programs of their own, one per depth, without collectives between workers.

Each program is compiled for the devices of a place (a row of the mesh).

The places of a boundary's loops and a truncation go in, `RowPrograms` come out, which take arrays over the whole mesh
and give such arrays. A call dispatches three kinds of programs, all of which evaluate the traced step and differ in
what they do at its gradient boundary:

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

from splitjax.lower.microbatch.places import REPLICATED, RunnableLoops, Sums, over_places
from splitjax.lower.partial.truncation import Truncation


class Captured(Exception):
    """Ends the trace of a step at its boundary, where only what comes before is wanted.

    - `places`: of the boundary's loops, with what crosses into them.
    - `truncation`: of the boundary.
    """

    def __init__(self, places: RunnableLoops, truncation: Truncation) -> None:
        super().__init__(places, truncation)
        self.places: RunnableLoops = places
        self.truncation: Truncation = truncation


@dataclasses.dataclass(frozen=True, eq=False)
class Capture:
    """The runner that ends the trace.

    - `truncation`: of the boundary.
    """

    truncation: Truncation

    def run(self, places: RunnableLoops) -> Sums:
        """Raises `Captured` with `places`."""
        raise Captured(places, self.truncation)

    def scaled(self, value: Any, position: int) -> Any:
        """Gives `value`, whatever its `position`: the trace never comes here."""
        return value


@dataclasses.dataclass(frozen=True, eq=False)
class Given:
    """The runner that goes on with what the places have summed.

    - `truncation`: of the boundary.
    - `sums`: ((loss, sums, gradients), unsummed gradients of islands, rows), all but rows with a leading dim for the
      places.
    """

    truncation: Truncation
    sums: Sums

    def run(self, places: RunnableLoops) -> Sums:
        """Adds the sums of all `places` up, in a `shard_map` over them."""
        totals, unsummed, rows = self.sums
        spec = PartitionSpec(places.workers.axes)

        def total(given: Any, cycle_step: Any) -> Any:
            own = jax.tree.map(lambda array: array.reshape(array.shape[1:]), given)
            return self.truncation.summed(places, own, cycle_step)

        added = jax.shard_map(
            total,
            mesh=places.mesh,
            in_specs=(spec, REPLICATED),
            out_specs=REPLICATED,
            axis_names=frozenset(places.workers.axes),
            check_vma=False,
        )(totals, self.truncation.cycle_step)
        return added, unsummed, rows

    def scaled(self, value: Any, position: int) -> Any:
        """Scales `value`, a sum of contributions to the gradient of operand number `position`, to an estimate of the
        whole gradient."""
        return self.truncation.scaled(value, position)


@dataclasses.dataclass(frozen=True)
class Specs:
    """A pytree of specs that can be a key: they say how what crosses into the loops lies on the whole mesh.

    - `flat`: the leaves.
    - `structure`: the pytree's structure.
    """

    flat: tuple[PartitionSpec, ...]
    structure: Any

    @classmethod
    def of(cls, arrays: Any) -> Specs:
        """Gives the specs of `arrays`, a pytree of arrays on a mesh or of their shardings."""
        sharding = lambda leaf: leaf if isinstance(leaf, NamedSharding) else leaf.sharding
        return cls(tuple(sharding(leaf).spec for leaf in jax.tree.leaves(arrays)), jax.tree.structure(arrays))

    @property
    def tree(self) -> Any:
        """The specs as a pytree."""
        return jax.tree.unflatten(self.structure, self.flat)


@dataclasses.dataclass(frozen=True, eq=False)
class RowPrograms:
    """The row programs of a signature of a step.

    - `places`: as the trace of `before` left them; their values are not read.
    - `truncation`: of the boundary.
    - `mesh`: the whole mesh.
    - `input_types`: of `places.inputs()`, `ShapeDtypeStruct`s of the whole mesh.
    """

    places: RunnableLoops
    truncation: Truncation
    mesh: Mesh
    input_types: Any

    @functools.cached_property
    def rows(self) -> tuple[Mesh, ...]:
        """The mesh of every place: its devices, with size 1 along the axes of the places."""
        names, axes = self.mesh.axis_names, self.places.workers.axes
        moved = np.moveaxis(self.mesh.devices, [names.index(axis) for axis in axes], range(len(axes)))
        shape = tuple(1 if name in axes else self.mesh.shape[name] for name in names)
        count = self.places.workers.num_workers
        return tuple(Mesh(devices.reshape(shape), names) for devices in moved.reshape(count, -1))

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
    def in_specs(self) -> tuple[list[PartitionSpec], ...]:
        """The specs of what crosses into the loops, over the axes of the places."""
        return self.places.in_specs()

    @functools.cached_property
    def sum_types(self) -> Any:
        """The types of a place's results where it differentiates everything, with shapes as on a mesh of one place."""
        return jax.eval_shape(
            self._run(self.rows[self.mine[0]], 0, self.truncation.variant(0)[1], 0),
            *self._local(self.input_types, self.in_specs),
        )

    def sum_specs(self, input_specs: Any) -> Any:
        """Gives the specs of the results, on a row's mesh and on the whole mesh alike: gradients lie as their
        parameters do. `input_specs`: of what crosses into the loops, a pytree."""
        lead, contribution = self.places.workers.axes, self.places.contribution
        return (
            (
                PartitionSpec(lead),
                [PartitionSpec(lead)] * len(contribution.summed),
                [PartitionSpec(lead, *spec) for spec in input_specs[0]],
            ),
            [PartitionSpec(lead, self.places.island_axes)] * len(contribution.on_islands),
            self.places.whole_row_specs(),
        )

    def local_inputs(self, types: Any) -> Any:
        """Gives the types of what a row program takes. `types`: the same of the whole mesh."""
        return self._local(types, self.in_specs)

    def sum_types_everywhere(self, specs: Any) -> Any:
        """Gives the types of the sums that `after` takes. `specs`: from `sum_specs`."""
        return jax.tree.map(self._everywhere, self.sum_types, specs)

    def _everywhere(self, result: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        """Gives the type on the whole mesh of a place's result, or of its type."""
        return jax.ShapeDtypeStruct(
            tuple(size * self._parts(entry) for size, entry in _with_entries(result.shape, spec)), result.dtype
        )

    def _parts(self, entry: Any) -> int:
        """Counts the places over which a dim is split."""
        return math.prod(self.mesh.shape[axis] for axis in _axes(entry) if axis in self.places.workers.axes)

    def _local(self, types: Any, specs: Any) -> Any:
        """Gives types on a row's mesh for those on the whole mesh."""
        local = lambda whole, spec: jax.ShapeDtypeStruct(
            tuple(size // self._parts(entry) for size, entry in _with_entries(whole.shape, spec)), whole.dtype
        )
        return jax.tree.map(local, types, specs)

    def _run(self, mesh: Mesh, first: int, share: int, offset: int) -> Any:
        """Makes the loop of a place to a depth, with its share of the examples (0: an equal one). Results of what it
        does not differentiate are left out (None)."""
        live = self.truncation.live(first)
        same, on_islands = (
            [self.places.position(v) in live for v in group]
            for group in (self.places.contribution.same, self.places.contribution.on_islands)
        )

        def run(inputs: Any) -> Any:
            (value, sums, grads), unsummed, rows = self.places.with_share(share, offset).at_place(inputs, live)
            grads, unsummed = (
                [grad[None] if is_live else None for grad, is_live in zip(group, lives, strict=True)]
                for group, lives in ((grads, same), (unsummed, on_islands))
            )
            return (value[None], [total[None] for total in sums], grads), unsummed, rows

        lead, contribution = PartitionSpec(self.places.workers.axes), self.places.contribution
        some = lambda lives: [lead if is_live else None for is_live in lives]
        out_specs = (lead, [lead] * len(contribution.summed), some(same)), some(on_islands), self.places.row_specs()
        return lambda *inputs: over_places(self.places, run, out_specs, mesh=mesh)(inputs)

    def program(self, place: int, slot: int, specs: Specs) -> Any:
        """Gives the program, from `jax.jit`, of place number `place` in slot number `slot`. `specs`: of what crosses
        into the loops."""
        first, share = self.truncation.variant(slot)
        depths = self.truncation.depths
        steps = (number for number in range(depths.num_cycle_steps) if depths.slot(place, number) == slot)
        return self._program(place, first, share, self.truncation.offset(place, next(steps, 0)), specs)

    @functools.cache  # noqa: B019 (lives as long as the step's programs)
    def _program(self, place: int, first: int, share: int, offset: int, specs: Specs) -> Any:
        mesh, run = self.rows[place], self._run(self.rows[place], first, share, offset)
        run.__name__ = f"worker_{place}_from_segment_{first}"
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), self.sum_specs(specs.tree), is_leaf=_is_spec)
        types = jax.eval_shape(run, *self._local(self.input_types, self.in_specs))
        keep = lambda result, sharding: None if result is None else sharding
        return jax.jit(run, out_shardings=jax.tree.map(keep, types, shardings, is_leaf=lambda value: value is None))

    @functools.cache  # noqa: B019
    def _blank(self, place: int, index: int, spec: PartitionSpec) -> Any:
        """Makes the program that gives zeros for result number `index` on the devices of a place."""
        result = jax.tree.leaves(self.sum_types)[index]
        return jax.jit(
            lambda: jnp.zeros(result.shape, result.dtype), out_shardings=NamedSharding(self.rows[place], spec)
        )

    def __call__(self, inputs: Any, slots: Mapping[int, int]) -> Any:
        """Runs the programs of all places of this process.

        **Arguments:** `inputs`: what `before` gave, a pytree of arrays over the whole mesh. `slots`: by place the slot
        that it is in.

        Returns what `after` takes: a pytree of arrays over the whole mesh.
        """
        flat, specs = jax.tree.leaves(inputs), Specs.of(inputs)
        tree, by_place = jax.tree.structure(inputs), {}
        for place in self.mine:
            own = jax.tree.unflatten(tree, [self._of_place(array, place) for array in flat])
            results = self.program(place, slots[place], specs)(*own)
            by_place[place] = jax.tree.leaves(results, is_leaf=lambda value: value is None)
        sums = []
        for index, spec in enumerate(jax.tree.leaves(self.sum_specs(specs.tree), is_leaf=_is_spec)):
            given = [by_place[place][index] for place in self.mine]
            parts = [
                self._blank(place, index, spec)() if result is None else result
                for place, result in zip(self.mine, given, strict=True)
            ]
            sums.append(self._joined(parts, spec))
        return jax.tree.unflatten(jax.tree.structure(self.sum_types), sums)

    def _of_place(self, array: Any, place: int) -> Any:
        """Gives the part of an array that a place holds, as an array on its mesh; nothing is copied."""
        mesh, spec = self.rows[place], array.sharding.spec
        devices = set(mesh.devices.flat)
        shards = [shard.data for shard in array.addressable_shards if shard.device in devices]
        shape = self._local(jax.ShapeDtypeStruct(array.shape, array.dtype), spec).shape
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, spec), shards)

    def _joined(self, parts: Sequence[Any], spec: PartitionSpec) -> Any:
        """Joins the places' results to an array over the whole mesh; nothing is copied."""
        shards = [shard.data for part in parts for shard in part.addressable_shards]
        return jax.make_array_from_single_device_arrays(
            self._everywhere(parts[0], spec).shape, NamedSharding(self.mesh, spec), shards
        )


def _with_entries(shape: Sequence[int], spec: PartitionSpec) -> list[tuple[int, Any]]:
    """Gives each dim's size with its entry of the spec."""
    return list(zip(shape, (*spec, *[None] * (len(shape) - len(spec))), strict=True))


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
