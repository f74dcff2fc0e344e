"""Lays the axes of a mesh onto the links of a target: what each axis can carry, and which axes share links.

Mesh axes take the axes of a torus as `jax.make_mesh` gives them: from the last mesh axis to the first, each gets the
most torus axes whose sizes multiply to its own (jax.experimental.mesh_utils). Where none do, a torus axis is divided,
and those who share it share its links. Elsewhere the last mesh axes are neighbours, and the first cross hosts.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from splitjax.errors import TargetError
from splitjax.machines.links import Link, Topology
from splitjax.machines.targets import Target


@dataclasses.dataclass(frozen=True)
class Route:
    """Says what carries a mesh axis.

    **Attributes:**

    - `size`: devices along it.
    - `link`: what a device sends along it while nothing else uses its links, and the latency of a step.
    - `over`: the names of the links that it takes (`axis 0` of a torus, `switch`, `hosts`): routes with one in common
      share it.
    - `is_slow`: whether it crosses hosts or slices.
    """

    size: int
    link: Link
    over: frozenset[str]
    is_slow: bool = False


def routes(target: Target, sizes: Mapping[str, int], place: str = "--mesh") -> dict[str, Route]:
    """Returns by axis of a mesh what carries it; axes of size 1 are absent.

    **Arguments:** `target`: the machine. `sizes`: of the mesh axes, in the mesh's order. `place`: what an error names.

    Raises `TargetError` for a mesh with another number of devices."""
    if math.prod(sizes.values()) != target.num_devices:
        raise TargetError(
            f"the mesh has {math.prod(sizes.values())} devices and the target {target.num_devices}",
            value=dict(sizes),
            place=place,
            remedy=f"give sizes whose product is {target.num_devices}",
        )
    found: dict[str, Route] = {}
    inside: list[tuple[str, int]] = []
    stride = 1
    for axis, size in reversed(list(sizes.items())):
        if size == 1:
            continue
        if stride * size <= target.island_size and target.island_size % (stride * size) == 0:
            inside.append((axis, size))
        else:
            found[axis] = _between(target, size, min(stride, target.island_size))
        stride *= size
    within = _on_torus(target, inside) if target.kind.fabric.topology is Topology.TORUS else _switched(target, inside)
    return {axis: route for axis in sizes if (route := found.get(axis) or within.get(axis)) is not None}


def _between(target: Target, size: int, num_rings: int) -> Route:
    """Returns the route of an axis that crosses fast networks, of which `num_rings` rings leave each at once."""
    slow, fast = target.kind.fabric.host_link, target.kind.fabric.link
    rate = min(fast.bytes_per_second, target.island_bytes_per_second / num_rings)
    return Route(size, Link(slow.latency_seconds, rate), frozenset(("hosts",)), is_slow=True)


def _switched(target: Target, axes: Sequence[tuple[str, int]]) -> dict[str, Route]:
    return {axis: Route(size, target.kind.fabric.link, frozenset(("switch",))) for axis, size in axes}


def _on_torus(target: Target, axes: Sequence[tuple[str, int]]) -> dict[str, Route]:
    """Returns the routes of mesh axes, the last of the mesh first, within a torus."""
    found, free = {}, {number: size for number, size in enumerate(target.shape) if size > 1}
    left = []
    for axis, size in axes:
        taken = _whole_axes(free, size)
        if taken is None:
            left.append((axis, size))
            continue
        for number in taken:
            del free[number]
        found[axis] = _along(target, size, [(number, target.shape[number], 1) for number in taken])
    # What is left fits: the sizes of the mesh axes inside multiply to a divisor of the torus's devices.
    inner = dict.fromkeys(free, 1)  # by torus axis, how many neighbours earlier mesh axes took of it
    for axis, size in left:
        parts, rest = [], size
        for number in free:
            part = math.gcd(rest, free[number] // inner[number])
            if part > 1:
                parts.append((number, part, inner[number]))
                inner[number] *= part
                rest //= part
        found[axis] = _along(target, size, parts)
    return found


def _whole_axes(free: Mapping[int, int], size: int) -> tuple[int, ...] | None:
    for count in range(len(free), 0, -1):
        for chosen in itertools.combinations(free, count):
            if math.prod(free[number] for number in chosen) == size:
                return chosen
    return None


def _along(target: Target, size: int, parts: Sequence[tuple[int, int, int]]) -> Route:
    """Returns the route of a mesh axis along parts of torus axes: (torus axis, devices, distance of neighbours).

    All torus axes carry at once. A ring sends both ways; on a line the device at the end receives from one side only.
    Rings whose neighbours are k apart interleave with k - 1 others over the same links."""
    fabric, rate, latency = target.kind.fabric, 0.0, 0.0
    for number, devices, distance in parts:
        closes = devices * distance == target.shape[number] and fabric.closes(target.shape[number])
        rate += (2 if closes else 1) * fabric.link.bytes_per_second / distance
        latency = max(latency, distance * fabric.link.latency_seconds)
    return Route(size, Link(latency, rate), frozenset(f"axis {number}" for number, _, _ in parts))
