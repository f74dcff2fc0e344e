"""Axis names and mesh arithmetic: the shape of a mesh, and the mesh itself, made late so that import touches no
device."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.experimental.topologies import TopologyDescription
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from splitjax import _compat
from splitjax.errors import MeshError
from splitjax.mesh.axis_parts import read_part
from splitjax.mesh.device_order import FAST, SLOW, arrange
from splitjax.roles import KNOWN_AXES, MeshRoles, Role

# Sizes by axis as a user writes them: a number, -1 for what is left, or the sizes over the slow and the fast network.
MeshSizes = Mapping[str, "int | Mapping[str, int]"]
AnyMesh = TypeVar("AnyMesh", bound="Mesh | AbstractMesh")


DATA = "data"


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Axis names with their sizes, major first: a mesh without its devices. Hashable, serialisable.

    - `axes`: pairs of a name and a size.
    - `said`: pairs of an axis and its role, for axes of which the user said one that their name does not tell.
    """

    axes: tuple[tuple[str, int], ...]
    said: tuple[tuple[str, Role], ...] = ()

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh | Mapping[str, int] | MeshShape) -> MeshShape:
        """Reads the shape of `mesh`: a `jax.sharding.Mesh`, an abstract one, or a mapping axis -> size. Raises
        `MeshError` for anything else."""
        if isinstance(mesh, MeshShape):
            return mesh
        shape = dict(mesh.shape) if isinstance(mesh, (Mesh, AbstractMesh)) else _sizes(mesh)
        for axis, size in shape.items():
            if not isinstance(axis, str) or not axis:
                raise MeshError(
                    "a mesh axis needs a name", value=axis, place="mesh", remedy='use {"data": 2, "model": 4}'
                )
            if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
                raise MeshError(
                    f"mesh axis {axis!r} needs a positive whole size",
                    value=size,
                    place="mesh",
                    remedy="give the number of devices along that axis",
                )
        return cls(tuple((axis, int(size)) for axis, size in shape.items()))

    def with_roles(self, said: Mapping[str, Role]) -> MeshShape:
        """Returns the shape with the roles that a user `said` of its axes. Raises `MeshError` for an axis that the mesh
        lacks."""
        for axis in said:
            if axis not in self.names:
                raise MeshError(
                    f"roles speaks of an axis {axis!r} that the mesh lacks",
                    value=dict(self.axes),
                    place="roles",
                    remedy=f"name one of {', '.join(self.names)}, or add {axis!r} to the mesh",
                )
        # A role that the name tells already is not said: the shape is the same with and without it.
        news = MeshRoles.of(self.names, {})
        return dataclasses.replace(
            self,
            said=tuple((axis, said[axis]) for axis in self.names if axis in said and said[axis] != news.role(axis)),
        )

    @functools.cached_property
    def roles(self) -> MeshRoles:
        """The role of every axis."""
        return MeshRoles.of(self.names, dict(self.said))

    @functools.cached_property
    def wide(self) -> frozenset[str]:
        """The axes with a size above 1: all others split nothing."""
        return frozenset(axis for axis, size in self.axes if size > 1)

    @functools.cached_property
    def sizes(self) -> Mapping[str, int]:
        """The size of every axis."""
        return dict(self.axes)

    @functools.cached_property
    def storing(self) -> frozenset[str]:
        """The axes such that what is split over them is stored in parts (`MeshRoles.store`)."""
        return frozenset(axis for axis, _ in self.axes if self.roles.store((axis,)))

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the axes, in the mesh's order."""
        return tuple(axis for axis, _ in self.axes)

    @property
    def num_devices(self) -> int:
        """Returns the number of devices: the product of the sizes."""
        return math.prod(size for _, size in self.axes)

    def size(self, axis: str | Sequence[str] | None) -> int:
        """Returns the number of devices along `axis`, along a part of it (`axis_parts`), or along several axes
        together; 1 for None and for an absent known axis. Raises `MeshError` for any other axis that the mesh does not
        have."""
        if axis is None:
            return 1
        if not isinstance(axis, str):
            product = 1
            for name in axis:
                product *= self.sizes.get(name) or self.size(name)
            return product
        if axis in self.sizes:
            return self.sizes[axis]
        if axis in KNOWN_AXES:
            return 1
        part = read_part(axis)
        if part is not None and part.axis in self.sizes and self.sizes[part.axis] % (part.before * part.size) == 0:
            return part.size
        raise MeshError(
            f"the mesh has no axis {axis!r}",
            value=dict(self.axes),
            place="mesh",
            remedy=f"name one of {', '.join(self.names)}, or add {axis!r} to the mesh",
        )

    def local_shape(self, shape: Sequence[int], spec: Sequence[str | Sequence[str] | None]) -> tuple[int, ...]:
        """Returns the shape of one device's part of an array of this `shape` that is split as `spec` says, rounded
        up."""
        return tuple(-(-size // self.size(entry)) for size, entry in zip(shape, spec, strict=True))

    def present(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Returns those of `axes` that this mesh has with a size above 1, in the given order."""
        return tuple(axis for axis in axes if self.size(axis) > 1)

    def meant(self, names: Sequence[str]) -> tuple[str, ...]:
        """Returns the axes of a size above 1 that the `names` of a rule mean, axes or roles, in their order. Raises
        `MeshError` for an axis that the mesh lacks."""
        key = tuple(names)
        if key not in self._meant:
            self._meant[key] = self.present(self.roles.resolve(key))
        return self._meant[key]

    @functools.cached_property
    def _meant(self) -> dict[tuple[str, ...], tuple[str, ...]]:
        return {}

    def dividing(self, axes: Sequence[str], size: int) -> tuple[str, ...]:
        """Returns those of `axes`, in their order, over whose devices a dim of this `size` can lie in equal parts: the
        most devices, and among as many the first axes."""
        if size % self.size(axes) == 0 and all(self.size(axis) > 1 for axis in axes):
            return tuple(axes)
        best: tuple[str, ...] = ()
        for chosen in range(1, 1 << len(axes)):
            some = tuple(axis for i, axis in enumerate(axes) if chosen >> i & 1)
            if size % self.size(some) == 0 and self.size(some) > self.size(best):
                best = some
        return best

    def in_order(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Returns `axes`, which split a dim together, in the order in which XLA can be trusted with them.

        That is this mesh's, where it has three axes or more of a size above 1 (row `axes-out-of-mesh-order` of
        `splitjax.partitioner.DEFECTS`). Two axes are right in either order. Every device has a part of the same size
        either way; which part differs.
        """
        if len(axes) < 2 or len(self.present(self.names)) < 3:
            return tuple(axes)
        return tuple(sorted(axes, key=self.names.index))

    def __str__(self) -> str:
        said = dict(self.said)
        return " x ".join(f"{axis}={size}" + (f" ({said[axis]})" if axis in said else "") for axis, size in self.axes)


def _sizes(mesh: Any) -> dict[Any, Any]:
    """Axis -> size of a mapping, or of the pairs of one. Raises `MeshError` for what names no axes, saying what to
    write for it."""
    if isinstance(mesh, Mapping):
        return dict(mesh)
    entries = (
        mesh.ravel().tolist() if isinstance(mesh, np.ndarray) else list(mesh) if isinstance(mesh, Sequence) else [mesh]
    )
    if (
        entries
        and isinstance(mesh, Sequence)
        and all(isinstance(entry, tuple) and len(entry) == 2 for entry in entries)
    ):
        return dict(entries)
    are_sizes = all(isinstance(entry, (int, np.integer)) and not isinstance(entry, bool) for entry in entries)
    if entries and are_sizes and len(entries) <= 2:
        remedy = f"name the axes: mesh={dict(zip(KNOWN_AXES, map(int, entries), strict=False))}"
    elif entries and are_sizes:
        remedy = (
            f'name the axes: mesh={{"data": {entries[0]}, "model": {entries[1]}, ...}}, or'
            f" jax.make_mesh({tuple(map(int, entries))}, names)"
        )
    elif isinstance(mesh, TopologyDescription):
        remedy = f'name the axes: jax.experimental.topologies.make_mesh(topology, ({len(mesh.devices)},), ("data",))'
    elif entries and all(isinstance(entry, jax.Device) for entry in entries):
        remedy = 'name the axes of the devices: jax.sharding.Mesh(devices, ("data",))'
    else:
        remedy = 'give {"data": 2, "model": 4}, or what jax.make_mesh((2, 4), ("data", "model")) returns'
    raise MeshError(
        f"a mesh has named axes, and this {type(mesh).__name__} names none", value=mesh, place="mesh", remedy=remedy
    )


def check_mesh(mesh: Mesh | AbstractMesh | MeshSizes) -> None:
    """Raises `MeshError` where `mesh` is nothing that a step can be planned on: no mesh and no sizes by axis. Looks at
    no devices: a size of -1 passes here."""
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        _filled(_axis_networks(mesh), None)


def make_mesh(mesh: Mesh | AbstractMesh | MeshSizes | None) -> Mesh | AbstractMesh:
    """Makes the mesh for what the user gave as `mesh`: a mesh as it is, sizes over the local run's devices, or None for
    all devices on `data`.

    Sizes give axes of type Auto, so that XLA places what the plan leaves open, over devices in the order that
    `jax.make_mesh` chooses by their topology. A size is a number, -1 for as many as there are devices left, or
    `{"dcn": 2, "ici": 4}`: how many slices or nodes the axis crosses over the slow network, times how many devices it
    has within each. Sizes that need more devices than there are make an `AbstractMesh`, for which steps are planned and
    lowered.

    Raises `MeshError` for a size left open that does not divide the devices, for slices that are not those the devices
    stand in, and where a process would have no device in the mesh.
    """
    if isinstance(mesh, (Mesh, AbstractMesh)):
        return mesh
    devices = jax.devices()
    networks = _networks(mesh, len(devices))
    shape = _shape(networks)
    if shape.num_devices > len(devices):  # to plan and lower for; what runs says what is missing (`with_devices`)
        return abstract_mesh(shape)
    # Alone, a smaller mesh takes the first devices; a process without a device in the mesh could not take part.
    if shape.num_devices < len(devices) and jax.process_count() > 1:
        raise MeshError(
            f"the mesh {shape} uses {shape.num_devices} of {len(devices)} devices, and every process needs its own"
            " in it",
            value=dict(shape.axes),
            place="mesh",
            remedy="make the product of the axis sizes the number of devices",
        )
    arranged = arrange(devices[: shape.num_devices], networks)
    return Mesh(arranged, shape.names, axis_types=(AxisType.Auto,) * len(shape.names))


def abstract_mesh(shape: MeshShape, device: AbstractDevice | None = None) -> AbstractMesh:
    """Returns a mesh of this `shape` without devices, of Auto axes. `device`: what is known of them; None where steps
    are planned and lowered for JAX's default backend."""
    sizes = tuple(size for _, size in shape.axes)
    return AbstractMesh(sizes, shape.names, axis_types=(AxisType.Auto,) * len(sizes), abstract_device=device)


def shape_over(mesh: MeshSizes | None, num_devices: int) -> MeshShape:
    """Returns the shape that sizes as a user writes them have over `num_devices` devices, which are not looked at; None
    for all of them on `data`. Raises `MeshError` as `make_mesh` does."""
    return _shape(_networks(mesh, num_devices))


def _networks(mesh: MeshSizes | None, num_devices: int) -> dict[str, tuple[int, int]]:
    return _filled(_axis_networks({DATA: num_devices} if mesh is None else mesh), num_devices)


def _shape(networks: Mapping[str, tuple[int, int]]) -> MeshShape:
    return MeshShape(tuple((axis, slow * fast) for axis, (slow, fast) in networks.items()))


def inside_mesh(mesh: AnyMesh) -> AnyMesh:
    """Returns the mesh on which a step over `mesh` is planned and evaluated: the same devices and axes, with Auto ones
    in place of Explicit ones, because XLA places what a plan leaves open. It is `mesh` itself where it has none."""
    if AxisType.Explicit not in mesh.axis_types:
        return mesh
    types = tuple(AxisType.Auto if kind == AxisType.Explicit else kind for kind in mesh.axis_types)
    if isinstance(mesh, AbstractMesh):
        return cast("AnyMesh", mesh.update(axis_types=types))
    return cast("AnyMesh", Mesh(mesh.devices, mesh.axis_names, axis_types=types))


def with_devices(mesh: Mesh | AbstractMesh, place: str, runs: bool = True) -> Mesh:
    """Returns `mesh` where it has devices. `place`: what they are needed for, for the message. `runs`: whether programs
    are to run on them; otherwise they are compiled for, and those of a topology description will do. Raises `MeshError`
    for a mesh without such devices."""
    planning = "plan, shardings, abstract_state, graph and lower(...).as_text() work"
    if isinstance(mesh, Mesh):
        if runs and _compat.is_compile_only(mesh.devices.flat[0]):
            raise MeshError(
                f"the devices of the mesh are those of a topology description ({mesh.devices.flat[0].device_kind}),"
                " which programs are compiled for and cannot run on",
                value=dict(mesh.shape),
                place=place,
                remedy=f"{planning} on it, and so do lower(...).compile() and report; to run, give"
                f" {dict(mesh.shape)} on a machine with such devices",
            )
        return mesh
    num_seen, device = len(jax.devices()), mesh.abstract_device
    if device is not None and device.platform != jax.default_backend():
        raise MeshError(
            f"the mesh {MeshShape.of(mesh)} is of {device.device_kind}, and JAX sees devices of the platform"
            f" {jax.default_backend()}",
            value=dict(mesh.shape),
            place=place,
            remedy=f"{planning} without them; to run, leave target= away, or run on a machine with such devices",
        )
    if mesh.size > num_seen:
        raise MeshError(
            f"the mesh {MeshShape.of(mesh)} needs {mesh.size} devices, and JAX sees {num_seen}",
            value=dict(mesh.shape),
            place=place,
            remedy=f"{planning} without them; to run, make the product of the axis sizes the number of devices; on one"
            f" CPU set XLA_FLAGS=--xla_force_host_platform_device_count={mesh.size} before JAX starts",
        )
    raise MeshError(
        "an abstract mesh has no devices to run on",
        value=mesh,
        place=place,
        remedy=f"{planning} on it; to run, give {dict(mesh.shape)} or a jax.sharding.Mesh",
    )


def has_devices_here(mesh: Mesh | AbstractMesh) -> bool:
    """Returns whether the devices of `mesh` are here, so that arrays can lie on them: it is neither abstract nor made
    of a topology description."""
    return isinstance(mesh, Mesh) and not _compat.is_compile_only(mesh.devices.flat[0])


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """Returns the platform of a mesh's devices, such as `cpu`: of an abstract mesh what its abstract device says, or
    else that of JAX's default backend."""
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].platform
    return jax.default_backend() if mesh.abstract_device is None else mesh.abstract_device.platform


def device_kind_of(mesh: Mesh | AbstractMesh) -> str:
    """Returns the kind of a mesh's devices, such as `TPU v5 lite`; "" where an abstract mesh does not say it."""
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].device_kind
    return "" if mesh.abstract_device is None else mesh.abstract_device.device_kind


def _axis_networks(mesh: object) -> dict[str, tuple[int, int]]:
    """Returns by axis (how many slices or nodes it crosses, how many devices it has within each) of sizes as a user
    writes them; -1 for a size that is left open."""
    networks = {}
    for axis, size in _sizes(mesh).items():
        parts = dict(size) if isinstance(size, Mapping) else {FAST: size}
        if not parts or set(parts) - {SLOW, FAST}:
            raise MeshError(
                f"mesh axis {axis!r} is given by the networks that it crosses, and these are not known",
                value=size,
                place="mesh",
                remedy=f'write {{"{SLOW}": 2, "{FAST}": 4}}: slices or nodes on the slow network, devices in each',
            )
        networks[axis] = tuple(parts.get(part, 1) for part in (SLOW, FAST))
    return networks


def _filled(networks: Mapping[str, tuple[int, int]], num_devices: int | None) -> dict[str, tuple[int, int]]:
    """Returns `networks`, checked, with the size that is left open as `num_devices` says; 1 in its place where that is
    None, because nobody has looked yet. Raises `MeshError` for other sizes than whole ones, and for two left open."""
    open_axes = [axis for axis, (_, fast) in networks.items() if _is_open(fast)]
    if len(open_axes) > 1:
        raise MeshError(
            f"the sizes of {len(open_axes)} mesh axes are left open",
            value={axis: -1 for axis in open_axes},
            place="mesh",
            remedy="give -1 to one axis at most: it gets the devices that the others leave",
        )
    for part in (0, 1):
        MeshShape.of({axis: 1 if part and _is_open(sizes[part]) else sizes[part] for axis, sizes in networks.items()})
    known = math.prod(slow * (1 if _is_open(fast) else fast) for slow, fast in networks.values())
    if open_axes and num_devices is not None and num_devices % known:
        raise MeshError(
            f"the size of mesh axis {open_axes[0]!r} is left open, and {num_devices} devices do not divide by {known}",
            value={axis: fast if slow == 1 else {SLOW: slow, FAST: fast} for axis, (slow, fast) in networks.items()},
            place="mesh",
            remedy=f"make the product of the other sizes a divisor of {num_devices}",
        )
    left = 1 if num_devices is None else num_devices // known
    return {axis: (int(slow), left if _is_open(fast) else int(fast)) for axis, (slow, fast) in networks.items()}


def _is_open(size: object) -> bool:
    return isinstance(size, (int, np.integer)) and not isinstance(size, bool) and size == -1
