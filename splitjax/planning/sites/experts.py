"""Decides where tokens travel to the devices of their experts, and their results back.

The flows of a step come in (`cost.flow`), `Travel`s and `Constraint`s come out. Experts of equal capacity (Lepikhin et
al., "GShard", arXiv 2006.16668) read an array with a dim of experts beside that of examples. Where the batch lies over
the axes over which experts are split, a device has its own examples of every expert outside of the layer, and within it
its own experts' tokens of all of the group's examples: an all-to-all on either side. Asked to keep the examples where
they are, XLA gathers all experts' weights instead, and left alone it gathers tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from splitjax.cost.flow import WeightFlow, stays_dealt
from splitjax.cost.use_links import RAGGED
from splitjax.mesh import MeshShape
from splitjax.plan import Constraint, LeafPlan, Spec, SpecEntry, spec_entry
from splitjax.planning.sites.constraints import FREE
from splitjax.rules.match import axes_text
from splitjax.trace.graph import Dim, Graph, Use


@dataclasses.dataclass(frozen=True)
class Travel:
    """Describes how examples lie around a product with experts that are split over axes of the batch.

    - `site`: of the product's equation. `layer`: the layer whose experts they are.
    - `data`, `weight`: the operand positions of activations and weight.
    - `axes`: over which the experts are split. `rest`: the batch axes that split the examples within the layer, too.
    - `data_dims`, `out_dims`: the dims of examples and of experts, in the data and in the result.
    - `weight_dim`: the dim of experts in the weight operand.
    - `enters`: whether its data comes from layers that split the examples over all batch axes. `leaves`: whether its
      result goes to such. Between products with the same experts nothing travels.
    - `in_boundary`: whether a `splitjax.value_and_grad` differentiates it, so that its all-to-alls are written out.
    """

    site: tuple[int, ...]
    layer: str
    data: int
    weight: int
    axes: tuple[str, ...]
    rest: tuple[str, ...]
    data_dims: tuple[int, int]
    out_dims: tuple[int, int]
    weight_dim: int
    enters: bool
    leaves: bool
    in_boundary: bool


def derive_travels(
    graph: Graph, chain: Sequence[WeightFlow], mesh: MeshShape, batch_axes: tuple[str, ...]
) -> tuple[Travel, ...]:
    """Derives the travels of a step's tokens, in program order.

    **Arguments:** `graph`: of the step. `chain`: its flows. `mesh`: the shape of the mesh. `batch_axes`: the mesh axes
    that split the batch, major first.

    There is none for data without a dim of experts or of examples, for experts over other axes than the last ones of
    the batch, and where plain JAX traced the backward pass, whose products would have to be told as well.
    """
    derived = {use.param for use in graph.uses if use.backward}
    told = (i for i, flow in enumerate(chain) if flow.use.in_boundary or flow.use.param not in derived)
    travels = (_travel(graph, i, chain, mesh, batch_axes) for i in told)
    return tuple(travel for travel in travels if travel is not None)


def _travel(
    graph: Graph, i: int, chain: Sequence[WeightFlow], mesh: MeshShape, batch_axes: tuple[str, ...]
) -> Travel | None:
    flow = chain[i]
    use, axes = flow.use, flow.stacked
    rest = tuple(axis for axis in batch_axes if axis not in axes)
    if not flow.travels or flow.crossing or not use.editable or use.data is None or (*rest, *axes) != batch_axes:
        return None
    weight_dim = _expert_dim(graph, use)
    if weight_dim is None:
        return None
    label = graph.local[use.weight_dims[weight_dim][0]]
    data_dims, out_dims = _places(graph, use.data_dims, label), _places(graph, use.out_dims, label)
    if data_dims is None or out_dims is None:
        return None
    if use.data_shape[data_dims[0]] % mesh.size(batch_axes) or use.data_shape[data_dims[1]] % mesh.size(axes):
        return None
    enters, leaves = (not stays_dealt(position, axes, chain) for position in (flow.producer, flow.consumer))
    return Travel(
        use.site,
        use.layer,
        use.data,
        use.weight,
        axes,
        rest,
        data_dims,
        out_dims,
        weight_dim,
        enters,
        leaves,
        use.in_boundary,
    )


def _expert_dim(graph: Graph, use: Use) -> int | None:
    """Returns the dim of experts of a use's weight operand; None where that is not one dim."""
    leaf = graph.leaf(use.param)
    named = [dim for dim, name in zip(leaf.dims, leaf.dim_names, strict=False) if name == "expert" and len(dim) == 1]
    labels = {graph.local[dim[0]] for dim in named}
    places = [place for place, dim in enumerate(use.weight_dims) if dim and graph.local[dim[0]] in labels]
    return places[0] if len(places) == 1 else None


def _places(graph: Graph, dims: Sequence[Dim], label: int) -> tuple[int, int] | None:
    """Returns the dims of examples and of experts, whose local class is `label`; None unless there is one of each."""
    examples = [place for place, dim in enumerate(dims) if graph.is_example(dim)]
    experts = [place for place, dim in enumerate(dims) if dim and graph.local[dim[0]] == label]
    return (examples[0], experts[0]) if len(examples) == len(experts) == 1 and examples != experts else None


def pin_experts(graph: Graph, travels: Sequence[Travel]) -> tuple[Constraint, ...]:
    """Returns the constraints of products whose tokens travel: examples over the axes that are left, experts over
    theirs.

    **Arguments:** `graph`: of the step. `travels`: what `derive_travels` gives for it.

    Within a gradient boundary all-to-alls are written out on either side. In a step that takes no gradient what enters
    is pinned twice, and what leaves, too: over all batch axes first, which makes the change between the two an
    all-to-all to XLA.
    """
    uses = {use.site: use for use in graph.uses}
    return tuple(pin for travel in travels for pin in _pins(travel, uses[travel.site]))


def _pins(travel: Travel, use: Use) -> Iterator[Constraint]:
    why = f"experts over {' x '.join(travel.axes)}: tokens travel to them"
    data, out = len(use.data_dims), len(use.out_dims)
    if travel.enters and not travel.in_boundary:
        yield Constraint(use.site, travel.data, _outside(travel, travel.data_dims, data), use.layer, why)
    yield Constraint(use.site, travel.data, _inside(travel, travel.data_dims, data), use.layer, why)
    yield Constraint(use.site, -1, _inside(travel, travel.out_dims, out), use.layer, why)
    if travel.leaves and not travel.in_boundary:
        yield Constraint(use.site, -1, _outside(travel, travel.out_dims, out), use.layer, why)


def expert_notes(
    graph: Graph, chain: Sequence[WeightFlow], leaves: Sequence[LeafPlan], mesh: MeshShape, batch_axes: tuple[str, ...]
) -> tuple[str, ...]:
    """Returns a sentence for the plan on each weight whose experts are gathered, though their layout would let tokens
    travel, with what would.

    **Arguments:** `leaves`: of the plan. The others are those of `derive_travels`.
    """
    planned = {leaf.path: leaf for leaf in leaves}
    notes = []
    for flow in chain:
        use, leaf, traced = flow.use, planned[flow.use.param], graph.leaf(flow.use.param)
        own = [axes for axes, name in zip(leaf.axes_by_dim, traced.dim_names, strict=False) if name == "expert"]
        shared = tuple(axis for axes in own for axis in mesh.present(axes) if axis in batch_axes)
        if not shared or flow.stacked or use.primitive == RAGGED:
            continue
        rest = tuple(axis for axis in batch_axes if axis not in shared)
        if (*rest, *shared) == batch_axes:
            remedy = "take the gradient by splitjax.value_and_grad: a backward pass that JAX has traced is left to XLA"
        else:
            remedy = f"list the axes of the mesh in the order {', '.join((*rest, *shared))}"
        over = axes_text(mesh, shared)
        notes.append(f"{use.param}: its experts are gathered along {over} and no token travels to them; {remedy}")
    return tuple(dict.fromkeys(notes))


def _outside(travel: Travel, dims: tuple[int, int], rank: int) -> Spec:
    """Returns the spec of a value with these dims of examples and experts in layers that split the examples alone."""
    return _spec(rank, {dims[0]: (*travel.rest, *travel.axes), dims[1]: ()})


def _inside(travel: Travel, dims: tuple[int, int], rank: int) -> Spec:
    """Returns the spec of a value with these dims of examples and experts where each device has its own experts."""
    return _spec(rank, {dims[0]: travel.rest, dims[1]: travel.axes})


def _spec(rank: int, axes_of: dict[int, tuple[str, ...]]) -> Spec:
    """Returns the spec of a value of `rank` dims that is split so, with all other dims left to XLA."""
    entries: list[SpecEntry] = []
    for dim in range(rank):
        axes = axes_of.get(dim, (FREE,))
        entries.append(spec_entry(axes))
    return tuple(entries)
