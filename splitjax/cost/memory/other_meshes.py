"""Says the axes of another mesh, one of the user's own over the devices of the step, by the axes of the step's mesh.

What lies on the same devices under both meshes is one layout, however its axes are called: under data=2 x model=4 the
axis `b` of a=2 x b=4 is `model`, and the one axis of 8 is `data` and `model` together. Both meshes are taken to number
the devices alike, row-major, as `jax.make_mesh` does where no topology asks for another order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class OtherAxis:
    """Describes an axis of another mesh that no axes of the step's mesh make up: its `size`, and the axes of the step's
    mesh that it `crosses`."""

    size: int
    crosses: Axes


def is_other(mesh: Mapping[str, int], own: Mapping[str, int]) -> bool:
    """Returns whether `mesh` has an axis that the mesh `own` has not, by name and size."""
    return any(own.get(axis) != size for axis, size in mesh.items())


def same_axes(axes: Axes, mesh: Mapping[str, int], own: Mapping[str, int]) -> tuple[Axes, dict[str, OtherAxis]]:
    """Returns the `axes` of `mesh` by those of the mesh `own`, major first, and by its name each that has none there:
    such an axis keeps its name and has that of its mesh behind it."""
    strides, found, others = _strides(mesh), [], {}
    rest = [axis for axis in axes if mesh[axis] > 1]
    while rest:
        # Axes that follow each other may be one axis of the other mesh: the most of them first.
        for count in range(len(rest), 0, -1):
            begin, end = strides[rest[count - 1]], strides[rest[0]] * mesh[rest[0]]
            if math.prod(mesh[axis] for axis in rest[:count]) * begin != end:
                continue
            inside = [axis for axis, stride in _strides(own).items() if begin <= stride and stride * own[axis] <= end]
            inside = [axis for axis in inside if own[axis] > 1]
            if math.prod(own[axis] for axis in inside) * begin == end:
                found += inside
                break
        else:
            count, size = 1, mesh[rest[0]]
            begin, end = strides[rest[0]], strides[rest[0]] * size
            name = f"{rest[0]} of {' x '.join(f'{axis}={size}' for axis, size in mesh.items())}"
            crossed = [axis for axis, stride in _strides(own).items() if stride < end and stride * own[axis] > begin]
            others[name] = OtherAxis(size, tuple(axis for axis in crossed if own[axis] > 1))
            found.append(name)
        rest = rest[count:]
    return tuple(found), others


def _strides(mesh: Mapping[str, int]) -> dict[str, int]:
    """Returns by axis how far apart the numbers of devices are that follow each other along it."""
    strides, stride = {}, 1
    for axis in reversed(tuple(mesh)):
        strides[axis] = stride
        stride *= mesh[axis]
    return {axis: strides[axis] for axis in mesh}
