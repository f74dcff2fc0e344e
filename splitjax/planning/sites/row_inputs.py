"""Decides where the inputs of row-split products are pinned, so that their cotangents are brought together there.

The flows of a step come in (`cost.flow`), `Constraint`s come out. A product whose weight's contracted dim is split over
`model` takes a part of its input's features, and its backward pass gives each device the cotangent of that part
(Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3). Behind a layer that is split over the same axes that is as
it should be. Behind any other the cotangent is needed whole, and the plan gathers it at the product. Left to itself,
XLA keeps the parts for as long as it can: through the mean of a feature map they are broadcast first and gathered then,
as often as the map has places, once for every layer that made it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from splitjax.cost.flow import WeightFlow, linked
from splitjax.plan import Constraint, LeafPlan
from splitjax.planning.sites.constraints import FREE, contracted_entries
from splitjax.trace.graph import Graph


def pin_row_inputs(graph: Graph, chain: Sequence[WeightFlow], leaves: Sequence[LeafPlan]) -> tuple[Constraint, ...]:
    """Returns the constraints on the inputs of row-split products that no split layer feeds: whole in their features,
    then in parts.

    **Arguments:** `graph`: of the step. `chain`: its flows. `leaves`: of the plan.
    """
    planned = {leaf.path: leaf for leaf in leaves}
    return tuple(pin for flow in chain for pin in _pins(graph, flow, chain, planned[flow.use.param]))


def _pins(graph: Graph, flow: WeightFlow, chain: Sequence[WeightFlow], leaf: LeafPlan) -> Iterator[Constraint]:
    use, axes = flow.use, flow.contracted
    if not axes or flow.crossing or not use.in_boundary or not use.editable or not flow.data_group_bytes:
        return
    if any(linked(position, axes, chain) for position in (flow.producer, *flow.producers)):
        return
    split = contracted_entries(graph, use, leaf.spec)
    if use.data is None or not any(split.values()):
        return
    why = f"row-split over {' x '.join(axes)} behind a layer that is not"
    if not flow.at_hand:  # of a batch nobody asks for a cotangent
        whole = tuple(None if dim in split else FREE for dim in range(len(use.data_dims)))
        yield Constraint(use.site, use.data, whole, use.layer, f"{why}: its cotangent is brought together here")
    parts = tuple(split.get(dim, FREE) for dim in range(len(use.data_dims)))
    yield Constraint(use.site, use.data, parts, use.layer, f"{why}: a part of the features")
