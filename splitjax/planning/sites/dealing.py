"""Decides over which mesh axes the columns of each fused weight are dealt out (`primitives.dealt`).

A step's graph and the layout of its leaves come in, a `LocalDeal` for every weight comes out whose layout has its
columns over as many devices as there are shares. `lower.products.local_deal` evaluates it: each device sends away the
columns that are others', by the moves of `cost.dealing`. Elsewhere it is what it is on one device: columns that change
places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from splitjax.cost.dealing import copied_bytes, deal_axes, moves_of, sent_by_deal
from splitjax.mesh import MeshShape
from splitjax.plan import LeafPlan
from splitjax.planning.sites.parts import Parts, split_dims
from splitjax.primitives.walk import Site
from splitjax.trace.graph import Graph


@dataclasses.dataclass(frozen=True)
class LocalDeal:
    """Names the mesh axes over which the columns of a weight are dealt out, or copied.

    - `site`: of the operation. `axes`: over which both its columns and the shares lie, major first; none where devices
      have all of the weight, of which each takes for itself what is copied.
    - `stored`: other dims of the operand that are split, with their axes.
    """

    site: Site
    axes: tuple[str, ...]
    stored: Parts = ()


def derive_deals(graph: Graph, leaves: Sequence[LeafPlan], mesh: MeshShape) -> tuple[LocalDeal, ...]:
    """Returns the weights of `graph` that devices deal out among themselves, or copy to each other, on `mesh`, laid out
    as `leaves`."""
    planned = {leaf.path: leaf for leaf in leaves}
    found, copied = [], {each.param for each in graph.dealt if each.copied}
    for each in graph.dealt:
        leaf = planned[each.param]
        if axes := deal_axes(graph, each, leaf, mesh):
            found.append(LocalDeal(each.site, axes, split_dims(graph, each.dims, leaf, mesh, whole=axes) or ()))
        elif each.param in copied and not mesh.present(leaf.axes):
            found.append(LocalDeal(each.site, ()))
    return tuple(found)


def deal_notes(graph: Graph, leaves: Sequence[LeafPlan], mesh: MeshShape) -> tuple[str, ...]:
    """Returns a sentence for the plan on each fused weight that is dealt out, and on what is copied of it."""
    planned: Mapping[str, LeafPlan] = {leaf.path: leaf for leaf in leaves}
    notes = []
    for each in graph.dealt:
        axes = deal_axes(graph, each, planned[each.param], mesh)
        if axes and each.copied:
            whole = copied_bytes(each, planned[each.param], mesh, axes)
            notes.append(
                f"{each.param}: {sum(each.sizes)} of its columns, of heads that devices share, are copied to all"
                f" devices along {' x '.join(axes)} before they are used: {whole} bytes on each"
            )
        elif axes:
            sent = sent_by_deal(each, planned[each.param], mesh, axes)
            notes.append(
                f"{each.param}: holds {len(each.sizes)} weights side by side ({', '.join(map(str, each.sizes))});"
                f" their columns are dealt out over {' x '.join(axes)} before they are used, {sent} bytes a device and"
                f" pass in {moves_of(each).num_rounds} moves, which separate weights would not need"
            )
    return tuple(dict.fromkeys(notes))
