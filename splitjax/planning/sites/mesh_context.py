"""Says where something is evaluated: on which devices, and inside of which `shard_map`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from splitjax.mesh import platform_of


@dataclasses.dataclass(frozen=True)
class MeshContext:
    """Says where something is evaluated.

    - `mesh`: of the step, with its devices; an abstract one where a step is lowered for devices that are not there.
    - `manual`: the axes of it that a surrounding `shard_map` handles.
    """

    mesh: Mesh | AbstractMesh
    manual: tuple[str, ...] = ()

    @property
    def platform(self) -> str:
        """The platform of the devices, such as `cpu`."""
        return platform_of(self.mesh)

    def here(self) -> MeshContext:
        """Returns the context in which an operation is evaluated now: what stands before and behind a loop over
        microbatches has the loop's context, and no `shard_map` around it."""
        inside = set(self.manual) <= set(jax.sharding.get_abstract_mesh().manual_axes)
        return self if inside else MeshContext(self.mesh)

    def left(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Returns those of `axes` that no surrounding `shard_map` handles, in their order."""
        return tuple(axis for axis in axes if axis not in self.manual)

    def spec(self, axes_of: Mapping[int, Sequence[str]]) -> PartitionSpec:
        """Returns how a value lies of which the dims `axes_of` are split, each over those of its axes that are left."""
        return PartitionSpec(*(self.left(axes_of.get(dim, ())) or None for dim in range(1 + max(axes_of))))

    def shard_map(
        self, fn: Callable[..., Any], axes: Sequence[str], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """Returns `fn` mapped over the parts that devices hold along those of `axes` that are left.

        `in_specs` and `out_specs` are trees of `PartitionSpec`s, as `jax.shard_map` takes them.
        """
        mesh = jax.sharding.get_abstract_mesh() if self.manual else self.mesh
        # check_vma=False: every sum is written out here.
        return jax.shard_map(
            fn,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=frozenset(self.left(axes)),
            check_vma=False,
        )
