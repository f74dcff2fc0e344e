"""Says in which orders the axes of a mesh are compared, where slow links join hosts, slices or processes.

The devices of a mesh are numbered along its last axis first, and those of a host one after the other: the last axes
stay within hosts, and the major ones cross the slow links. So the order of the axes decides which of them do. Shapes
and the prices of a machine come in, further shapes come out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from splitjax.auto_mesh import AutoMesh
from splitjax.choosing.prices import Prices
from splitjax.mesh import MeshShape

# The axes of a mesh that cross slow links.
Crossing = tuple[MeshShape, tuple[str, ...]]


def other_orders(
    asked: AutoMesh, shapes: Iterable[MeshShape], prices: Callable[[MeshShape], Prices]
) -> Iterator[MeshShape]:
    """Yields the meshes of each of `shapes` in other orders of its axes, of which each lays them otherwise onto slow
    and fast links. None where all links are alike.

    **Arguments:** `asked`: what meshes were asked for. `prices`: of the machine under a mesh."""
    for shape in shapes:
        known = [prices(shape)]
        if not known[0].slow_axes:
            continue
        for other in asked.orders(shape):
            priced = prices(other)
            if all(priced.links != each.links for each in known):
                known.append(priced)
                yield other


def crossing(mesh: MeshShape, prices: Prices) -> Crossing:
    """Returns a `mesh` with those of its axes that cross slow links, by the `prices` of the machine under it."""
    return mesh, tuple(axis for axis in mesh.names if axis in prices.slow_axes)


def told(mesh: MeshShape, slow: Sequence[str]) -> str:
    """Returns which axes of a `mesh` are `slow` ones, and which stay within hosts, in words."""
    within = [axis for axis in mesh.present(mesh.names) if axis not in slow]
    crosses = f"{_listed(slow)} cross{'es' if len(slow) == 1 else ''} the slow links"
    return f"{crosses}, {_listed(within)} stay{'s' if len(within) == 1 else ''} within hosts" if within else crosses


def _listed(axes: Sequence[str]) -> str:
    return " and ".join(axes)
