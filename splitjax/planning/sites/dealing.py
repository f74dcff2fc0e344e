"""Decides over which mesh axes the columns of each fused weight are dealt out (`primitives.dealt`).

A step's graph and the layout of its leaves come in, a `LocalDeal` for every weight comes out whose layout has its
columns over as many devices as there are shares. `lower.products.local_deal` evaluates it: each device sends away the
columns that are others', by the moves of `cost.dealing`. Elsewhere it is what it is on one device: columns that change
places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from splitjax.cost.dealing import deal_axes, moves_of, sent_by_deal
from splitjax.mesh import MeshShape
from splitjax.plan import LeafPlan
from splitjax.primitives.walk import Site
from splitjax.trace.graph import Graph


@dataclasses.dataclass(frozen=True)
class LocalDeal:
    """Names the mesh axes over which the columns of a weight are dealt out.

    - `site`: of the operation. `axes`: over which both its columns and the shares lie, major first.
    """

    site: Site
    axes: tuple[str, ...]


def derive_deals(graph: Graph, leaves: Sequence[LeafPlan], mesh: MeshShape) -> tuple[LocalDeal, ...]:
    """Returns the weights of `graph` that devices deal out among themselves on `mesh`, laid out as `leaves`."""
    planned = {leaf.path: leaf for leaf in leaves}
    found = ((each.site, deal_axes(graph, each, planned[each.param], mesh)) for each in graph.dealt)
    return tuple(LocalDeal(site, axes) for site, axes in found if axes)


def deal_notes(graph: Graph, leaves: Sequence[LeafPlan], mesh: MeshShape) -> tuple[str, ...]:
    """Returns a sentence for the plan on each fused weight that is dealt out."""
    planned: Mapping[str, LeafPlan] = {leaf.path: leaf for leaf in leaves}
    notes = []
    for each in graph.dealt:
        axes = deal_axes(graph, each, planned[each.param], mesh)
        if axes:
            sent = sent_by_deal(each, planned[each.param], mesh, axes)
            notes.append(
                f"{each.param}: holds {len(each.sizes)} weights side by side ({', '.join(map(str, each.sizes))});"
                f" their columns are dealt out over {' x '.join(axes)} before they are used, {sent} bytes a device and"
                f" pass in {moves_of(each).num_rounds} moves, which separate weights would not need"
            )
    return tuple(dict.fromkeys(notes))
