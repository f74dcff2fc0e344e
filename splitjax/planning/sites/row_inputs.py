"""Decides where the inputs of split products are pinned: of row-split ones, so that their cotangents are brought
together there, and of column-split ones, so that their features are.

The flows of a step come in (`cost.flow`), `Constraint`s come out. A product whose weight's contracted dim is split over
`model` takes a part of its input's features, and its backward pass gives each device the cotangent of that part
(Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3). Behind a layer that is split by columns over the same axes
that is as it should be. Behind any other the cotangent is needed whole, and the plan gathers it at the product. Left to
itself, XLA keeps the parts for as long as it can: through the mean of a feature map they are broadcast first and
gathered then, as often as the map has places, once for every layer that made it. Behind another row-split layer they
reach the gradient of its bias, and the new bias and its moments are computed in parts and gathered one by one.

A column-split product behind another one needs whole features, and so does its weight's gradient. Where both are
`shard_map`s over the axes of the examples (`lower.products.scattering`), XLA gathers the features for each of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from splitjax.cost.flow import WeightFlow, feeding
from splitjax.plan import Constraint, LeafPlan, Spec, SpecEntry, spec_axes, spec_entry
from splitjax.planning.sites.constraints import FREE, contracted_entries
from splitjax.planning.sites.exchange import Exchange
from splitjax.planning.sites.scatter import Scatter
from splitjax.planning.sites.spreads import Summed
from splitjax.primitives.walk import Site
from splitjax.trace.graph import Graph


def pin_row_inputs(graph: Graph, chain: Sequence[WeightFlow], leaves: Sequence[LeafPlan]) -> tuple[Constraint, ...]:
    """Returns the constraints on the inputs of row-split products that no columns feed: whole in their features,
    then in parts.

    **Arguments:** `graph`: of the step. `chain`: its flows. `leaves`: of the plan.
    """
    planned = {leaf.path: leaf for leaf in leaves}
    return tuple(pin for flow in chain for pin in _pins(graph, flow, chain, planned[flow.use.param]))


def pin_column_inputs(graph: Graph, chain: Sequence[WeightFlow], leaves: Sequence[LeafPlan]) -> tuple[Constraint, ...]:
    """Returns what pins the inputs of column-split products that columns feed whole in their features, for those of
    them that pin their data themselves (`Scatter.pins`). The arguments are those of `pin_row_inputs`."""
    planned = {leaf.path: leaf for leaf in leaves}
    found = []
    for flow in chain:
        use, axes = flow.use, flow.free
        source = feeding(flow.producer, axes, chain) if axes and not flow.recurs else None
        if source is None or use.data is None or not set(source.free) & set(axes):
            continue
        features = contracted_entries(graph, use, planned[use.param].spec)
        whole = tuple(None if dim in features else FREE for dim in range(len(use.data_dims)))
        why = f"column-split over {' x '.join(axes)} behind {source.use.layer}: whole features"
        found.append(Constraint(use.site, use.data, whole, use.layer, why))
    return tuple(found)


def _pins(graph: Graph, flow: WeightFlow, chain: Sequence[WeightFlow], leaf: LeafPlan) -> Iterator[Constraint]:
    use, axes = flow.use, flow.contracted
    if not axes or flow.crossing or not use.in_boundary or not use.editable or not flow.data_group_bytes:
        return
    # As `cost.collectives` has it: only columns over these axes leave their features where the rows want them.
    sources = [feeding(position, axes, chain) for position in (flow.producer, *flow.producers)]
    if any(source and set(source.free) & set(axes) for source in sources):
        return
    split = {dim: _among(entry, axes) for dim, entry in contracted_entries(graph, use, leaf.spec).items()}
    if use.data is None or not any(split.values()):
        return
    why = f"row-split over {' x '.join(axes)} behind a layer that is not column-split"
    if not flow.at_hand:  # of a batch nobody asks for a cotangent
        whole = tuple(None if dim in split else FREE for dim in range(len(use.data_dims)))
        yield Constraint(use.site, use.data, whole, use.layer, f"{why}: its cotangent is brought together here")
    parts = tuple(split.get(dim, FREE) for dim in range(len(use.data_dims)))
    yield Constraint(use.site, use.data, parts, use.layer, f"{why}: a part of the features")


def _among(entry: SpecEntry, axes: Sequence[str]) -> SpecEntry:
    """Returns what a weight's dim has of `axes`, over which it is computed: it may be stored over others besides."""
    return spec_entry([axis for axis in spec_axes((entry,)) if axis in axes])


def with_row_inputs(
    products: Sequence[Exchange | Scatter | Summed], pins: Sequence[Constraint]
) -> tuple[Exchange | Scatter | Summed, ...]:
    """Returns the `products` whose collectives are written out, those that pin their data themselves with what
    `pin_row_inputs` and `pin_column_inputs` gave for it (`Scatter.pins`)."""
    by_site: dict[Site, tuple[Spec, ...]] = {}
    for pin in pins:
        by_site[pin.site] = (*by_site.get(pin.site, ()), pin.spec)
    return tuple(
        dataclasses.replace(product, pins=by_site.get(product.site, ())) if isinstance(product, Scatter) else product
        for product in products
    )
