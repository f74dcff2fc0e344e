"""Finds the moves by which devices deal out the columns of a fused weight, and counts what they send.

Each device holds consecutive columns, and is to hold its share of every part. Columns move in units: the largest number
of columns of which all that is sent and kept are multiples. What goes from device to device is a bipartite multigraph
in which no device has more edges than units; its edges are coloured (Konig's theorem: with as many colours as the
largest degree), and each colour is a round, in which no device sends or receives more than one unit.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math

from splitjax.mesh import MeshShape
from splitjax.plan import LeafPlan
from splitjax.trace.dealt import DealtWeight
from splitjax.trace.graph import Graph, itemsize

Edge = tuple[int, int, int, int]  # from which device and place, to which device and place; places count units


@dataclasses.dataclass(frozen=True)
class Moves:
    """Says how units of columns move between devices.

    - `num`: of devices. `unit`: columns in a unit. `places`: units that a device holds.
    - `kept`: units that stay on their device. `rounds`: those that move, of which a device sends and receives at most
      one in a round.
    """

    num: int
    unit: int
    places: int
    kept: tuple[Edge, ...]
    rounds: tuple[tuple[Edge, ...], ...]

    @property
    def num_rounds(self) -> int:
        """The number of rounds."""
        return len(self.rounds)

    @property
    def reverse(self) -> Moves:
        """The moves that take everything back."""
        back = lambda edges: tuple((to, at, source, place) for source, place, to, at in edges)
        return dataclasses.replace(self, kept=back(self.kept), rounds=tuple(map(back, self.rounds)))


def moves_of(weight: DealtWeight) -> Moves:
    """Returns the moves that deal out `weight`."""
    return find_moves(weight.sizes, weight.num, weight.stored)


@functools.lru_cache(maxsize=256)
def find_moves(sizes: tuple[int, ...], num: int, stored: tuple[int, ...] | None = None) -> Moves:
    """Returns the moves that deal out columns of parts of these `sizes`, side by side, to `num` devices, which divides
    each of them: as they are `stored` with padding, if they are. All padding stands behind the last part before, and
    stays on its device where it can."""
    stored = stored or sizes
    held, pieces = sum(stored) // num, [size // num for size in stored]
    unit = math.gcd(held, *pieces, *(sizes if sizes != stored else ()))
    places = held // unit
    edges: list[Edge] = []
    wanted: list[tuple[int, int]] = []  # the devices and places of padding
    for to in range(num):
        at, start = 0, 0
        for size, piece in zip(sizes, pieces, strict=True):
            for column in range(to * piece, (to + 1) * piece, unit):
                if column < size:
                    edges.append(((start + column) // held, (start + column) % held // unit, to, at))
                else:
                    wanted.append((to, at))
                at += 1
            start += size
    left = [divmod(column, held) for column in range(sum(sizes), sum(stored), unit)]
    for to, at in sorted(wanted, key=lambda place: place[0] not in {source for source, _ in left}):
        source, column = next((each for each in left if each[0] == to), left[0])
        left.remove((source, column))
        edges.append((source, column // unit, to, at))
    kept = tuple(edge for edge in edges if edge[0] == edge[2])
    return Moves(num, unit, places, kept, _rounds([edge for edge in edges if edge[0] != edge[2]], num))


def _rounds(edges: list[Edge], num: int) -> tuple[tuple[Edge, ...], ...]:
    """Colours edges so that no device has two of a colour on either side, with as few colours as can be."""
    degrees = (
        *collections.Counter(edge[0] for edge in edges).values(),
        *collections.Counter(edge[2] for edge in edges).values(),
    )
    degree = max(degrees, default=0)
    leaving: list[dict[int, int]] = [{} for _ in range(num)]  # per device, colour -> edge
    coming: list[dict[int, int]] = [{} for _ in range(num)]
    colour: list[int] = [0] * len(edges)
    for number, (source, _, to, _) in enumerate(edges):
        ours = next(c for c in range(degree) if c not in leaving[source])
        theirs = next(c for c in range(degree) if c not in coming[to])
        if ours != theirs:
            # Along the path of these two colours from the receiver they change places: then `ours` is free there.
            path, side, device, wanted = [], coming, to, ours
            while wanted in side[device]:
                edge = side[device][wanted]
                path.append(edge)
                device = edges[edge][0] if side is coming else edges[edge][2]
                side = leaving if side is coming else coming
                wanted = theirs if wanted == ours else ours
            for edge in path:
                del leaving[edges[edge][0]][colour[edge]], coming[edges[edge][2]][colour[edge]]
            for edge in path:
                colour[edge] = theirs if colour[edge] == ours else ours
                leaving[edges[edge][0]][colour[edge]] = coming[edges[edge][2]][colour[edge]] = edge
        colour[number] = ours
        leaving[source][ours] = coming[to][ours] = number
    return tuple(tuple(edge for edge, own in zip(edges, colour, strict=True) if own == c) for c in range(degree))


def deal_axes(graph: Graph, weight: DealtWeight, leaf: LeafPlan, mesh: MeshShape) -> tuple[str, ...]:
    """Returns the axes over which the columns of `weight` are dealt out on `mesh`: those that split them in the layout
    of its parameter, `leaf`, if there are as many devices as shares; else none."""
    columns = weight.dims[weight.dim]
    for dim, axes in zip(graph.leaf(leaf.path).dims, leaf.axes_by_dim, strict=False):
        own = mesh.present(axes)
        if dim and columns and own and graph.local[dim[0]] == graph.local[columns[0]] and mesh.size(own) == weight.num:
            return own
    return ()


def sent_by_deal(weight: DealtWeight, leaf: LeafPlan, mesh: MeshShape, axes: tuple[str, ...]) -> int:
    """Returns the bytes that a device sends to deal out `weight` once over `axes`, where its parameter is laid out as
    `leaf`: what it is stored over besides stays so."""
    moves, rest = moves_of(weight), [size for dim, size in enumerate(weight.shape) if dim != weight.dim]
    stored = [axis for axis in mesh.present(leaf.axes) if axis not in axes]
    unit = moves.unit * math.prod(rest) * itemsize(weight.dtype)
    return moves.num_rounds * unit // mesh.size(tuple(stored))


def copied_bytes(weight: DealtWeight, leaf: LeafPlan, mesh: MeshShape, axes: tuple[str, ...]) -> int:
    """Returns the bytes that each device has of `weight` where all of its columns are copied to the devices along
    `axes`; the arguments are those of `sent_by_deal`."""
    stored = [axis for axis in mesh.present(leaf.axes) if axis not in axes]
    return weight.num_elements * itemsize(weight.dtype) // mesh.size(tuple(stored))
