"""Decides over which mesh axes the devices share the examples of every turn of a loop around the gradient, where a step
cuts its batch into turns (`trace.stepping`).

A step's graph and the layout of its leaves come in, a `LocalTurns` for every such reshape comes out.
`lower.products.local_turns` evaluates it. Left to XLA it is an all-to-all and as much again in permutes where there are
more devices than turns, and the whole batch on every device where neither number divides the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from splitjax.cost.turning import other_axes, turn_axes
from splitjax.mesh import MeshShape
from splitjax.plan import LeafPlan
from splitjax.primitives.walk import Site
from splitjax.trace.graph import Graph


@dataclasses.dataclass(frozen=True)
class LocalTurns:
    """Names the mesh axes over which devices exchange the examples of turns.

    - `site`: of the reshape. `leaf`: the path of the batch leaf. `dim`: the position of the dim that holds examples.
    - `axes`: over which they lie before, and those of every turn after, major first. `others`: by dim the axes that
      split the value besides.
    """

    site: Site
    leaf: str
    dim: int
    axes: tuple[str, ...]
    others: tuple[tuple[str, ...], ...]


def derive_turns(graph: Graph, leaves: Sequence[LeafPlan], mesh: MeshShape) -> tuple[LocalTurns, ...]:
    """Returns the reshapes of `graph` at which devices exchange examples on `mesh`, laid out as `leaves`."""
    planned = {leaf.path: leaf for leaf in leaves}
    found = ((each, turn_axes(each, planned[each.leaf], mesh)) for each in graph.turned)
    return tuple(
        LocalTurns(each.site, each.leaf, each.dim, axes, other_axes(each, planned[each.leaf], mesh))
        for each, axes in found
        if axes
    )
