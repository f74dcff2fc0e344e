"""Finds the mesh axes that a collective runs over, from the groups of devices that XLA wrote down.

Devices are numbered by their position in the mesh, row-major: that is how `jax.jit` assigns the partitions of a program
to a mesh's devices, whatever ids the devices have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from splitjax.mesh import MeshShape
from splitjax.mesh.axis_parts import part_of_places
from splitjax.report.wire import GroupList, Groups, MeshGroups

OTHER = "other"


def expand(groups: GroupList, num_devices: int) -> Groups:
    """Returns `groups` as lists of device numbers, whatever form they are written in; no groups means that all
    `num_devices` devices are one group."""
    if groups.iota is not None:
        count, size, reshape, transpose = groups.iota
        return _rows(_iota(reshape, transpose).reshape(count, size))
    if groups.mesh is not None:
        return _of_mesh(groups.mesh)
    return groups.listed or (tuple(range(num_devices)),)


def axes_of(groups: Groups, mesh: MeshShape) -> tuple[str, ...] | None:
    """Returns the axes of `mesh`, or parts of axes (`mesh.axis_parts`), in its order, such that devices of a group
    differ in exactly these and in all their combinations; None where no set of them gives these `groups`."""
    coordinates = _coordinates(mesh)
    if coordinates is None:
        return None
    axes: tuple[str, ...] | None = None
    for group in groups:
        if any(not 0 <= device < mesh.num_devices for device in group):
            return None
        varying = _varying(coordinates[list(group)], mesh)
        if varying is None or (axes is not None and varying != axes) or len(set(group)) != mesh.size(varying):
            return None
        axes = varying
    return axes or ()


def _varying(places: np.ndarray, mesh: MeshShape) -> tuple[str, ...] | None:
    """Returns the axes, or parts of axes, in which `places`, int[devices, axes], differ; None where they differ in what
    is no part of an axis."""
    names: list[str] = []
    for axis in np.flatnonzero((places != places[0]).any(axis=0)):
        name, size = mesh.axes[axis]
        part = part_of_places(name, np.unique(places[:, axis]).tolist(), size)
        if part is None:
            return None
        names.append(part)
    return tuple(names)


def varying_axes(groups: Groups, mesh: MeshShape) -> tuple[str, ...] | None:
    """Returns the axes of `mesh` in which devices of any of the `groups` differ, whatever part of these axes the groups
    are: a sum over some of an axis's workers, say. None where a device is not the mesh's."""
    return permuted_axes(((group[0], device) for group in groups for device in group), mesh)


def permuted_axes(pairs: Iterable[tuple[int, int]], mesh: MeshShape) -> tuple[str, ...] | None:
    """Returns the axes of `mesh` along which a permutation moves data, given as `pairs` (from, to) of device numbers;
    None where a device is not the mesh's."""
    coordinates = _coordinates(mesh)
    moved: set[int] = set()
    for source, target in pairs:
        if coordinates is None or not (0 <= source < mesh.num_devices and 0 <= target < mesh.num_devices):
            return None
        moved.update(int(axis) for axis in np.flatnonzero(coordinates[source] != coordinates[target]))
    return tuple(mesh.names[axis] for axis in sorted(moved))


def _coordinates(mesh: MeshShape) -> np.ndarray | None:
    """Returns the place of every device along every axis, int[devices, axes]; None for a mesh without axes."""
    sizes = [size for _, size in mesh.axes]
    return np.stack(np.unravel_index(np.arange(mesh.num_devices), sizes), axis=1) if sizes else None


def _iota(reshape: tuple[int, ...], transpose: tuple[int, ...]) -> np.ndarray:
    """Returns the devices in order as an array of the sizes `reshape`, its dims permuted by `transpose`."""
    devices = np.arange(math.prod(reshape)).reshape(reshape)
    return devices.transpose(transpose) if transpose else devices


def _of_mesh(groups: MeshGroups) -> Groups:
    """Lists groups that are axes of a mesh: splits every axis that is used in part into its factors, and brings the
    factors that are used to the end."""
    if groups.device_ids:
        devices = np.asarray(groups.device_ids)
    elif groups.iota is not None:
        devices = _iota(*groups.iota)
    else:
        devices = np.arange(math.prod(groups.sizes))
    bounds = [{1, size} for size in groups.sizes]
    for axis, before, size in groups.axes:
        if size:
            bounds[axis] |= {before, before * size}
    factors, starts = [], []  # sizes of all factors; the axis of each factor and what lies before it
    for axis, cuts in enumerate(bounds):
        ordered = sorted(cuts)
        for low, high in zip(ordered, ordered[1:], strict=False):
            factors.append(high // low)
            starts.append((axis, low))
    used = [
        position
        for axis, before, size in groups.axes
        for position, (own, low) in enumerate(starts)
        if own == axis and (not size or before <= low < before * size)
    ]
    rest = [position for position in range(len(factors)) if position not in used]
    grid = devices.reshape(factors).transpose([*rest, *used])
    return _rows(grid.reshape(-1, math.prod(factors[position] for position in used)))


def _rows(devices: np.ndarray) -> Groups:
    return tuple(tuple(int(device) for device in row) for row in devices)
