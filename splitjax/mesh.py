"""Axis names and mesh arithmetic: the shape of a mesh, and the mesh itself, made late so that import touches no device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from splitjax.errors import MeshError

DATA = "data"
MODEL = "model"
# Axes a shipped rule set may name although the mesh lacks them: they then have size 1.
KNOWN_AXES = (DATA, MODEL)


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Axis names with their sizes, major first: a mesh without its devices. Hashable, serialisable."""

    axes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, mesh: Mesh | Mapping[str, int] | MeshShape) -> MeshShape:
        """Reads the shape of a `jax.sharding.Mesh` or of a mapping axis -> size."""
        if isinstance(mesh, MeshShape):
            return mesh
        shape = dict(mesh.shape) if isinstance(mesh, Mesh) else dict(mesh)
        for axis, size in shape.items():
            if not isinstance(axis, str) or not axis:
                raise MeshError("a mesh axis needs a name", value=axis, place="mesh", remedy='use {"data": 2, "model": 4}')
            if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
                raise MeshError(
                    f"mesh axis {axis!r} needs a positive whole size", value=size, place="mesh",
                    remedy="give the number of devices along that axis",
                )
        return cls(tuple((axis, int(size)) for axis, size in shape.items()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis for axis, _ in self.axes)

    @property
    def num_devices(self) -> int:
        return math.prod(size for _, size in self.axes)

    def size(self, axis: str | Sequence[str] | None) -> int:
        """The number of devices along an axis, or along several together; 1 for None and for an absent known axis."""
        if axis is None:
            return 1
        if not isinstance(axis, str):
            return math.prod(self.size(one) for one in axis)
        for name, size in self.axes:
            if name == axis:
                return size
        if axis in KNOWN_AXES:
            return 1
        raise MeshError(
            f"the mesh has no axis {axis!r}", value=dict(self.axes), place="mesh",
            remedy=f"name one of {', '.join(self.names)}, or add {axis!r} to the mesh",
        )

    def present(self, axes: Sequence[str]) -> tuple[str, ...]:
        """The given axes that this mesh has with a size above 1, in the given order."""
        return tuple(axis for axis in axes if self.size(axis) > 1)

    def __str__(self) -> str:
        return " x ".join(f"{axis}={size}" for axis, size in self.axes)


def make_mesh(mesh: Mesh | Mapping[str, int] | None) -> Mesh:
    """The `jax.sharding.Mesh` for what the user gave: a mesh as it is, sizes over the local run's devices, or None for all
    devices on `data`. Axes are of type Auto, so that XLA places what the plan leaves open.

    Raises `MeshError` when the product of the sizes is not the number of devices."""
    if isinstance(mesh, Mesh):
        return mesh
    devices = jax.devices()
    shape = MeshShape.of({DATA: len(devices)} if mesh is None else mesh)
    if shape.num_devices > len(devices):
        raise MeshError(
            f"the mesh {shape} needs {shape.num_devices} devices, and JAX sees {len(devices)}",
            value=dict(shape.axes), place="mesh",
            remedy="make the product of the axis sizes the number of devices; on one CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={shape.num_devices} before JAX starts",
        )
    # Alone, a smaller mesh takes the first devices; a process without a device in the mesh could not take part.
    if shape.num_devices < len(devices) and jax.process_count() > 1:
        raise MeshError(
            f"the mesh {shape} uses {shape.num_devices} of {len(devices)} devices, and every process needs its own in it",
            value=dict(shape.axes), place="mesh", remedy="make the product of the axis sizes the number of devices",
        )
    chosen = np.asarray(devices[: shape.num_devices]).reshape([size for _, size in shape.axes])
    return Mesh(chosen, shape.names, axis_types=(AxisType.Auto,) * len(shape.names))
