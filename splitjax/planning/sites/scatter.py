"""Decides where gradients are summed into parts (ZeRO stage 2, arXiv 1910.02054).

A step's graph and the specs of its leaves come in; the products, biases and scales that are evaluated with collectives
of their own come out, and pins for all other gradients.

XLA sums the gradient of a whole weight on every device and cuts its part out afterwards (CPU, jax 0.10.2): twice the
bytes, and the whole sum in memory. So a product with such a weight is evaluated as `shard_map`s with their own
derivative (`scattering.py`), in which each device's summand leaves by a reduce-scatter as it appears. Products that are
exchanges already (`exchange.py`) sum the copies of their shards likewise.

Biases and scales are laid along the examples in the same way (`spreads.py`). What else reads a parameter (recurrent
weights, whose summands a loop adds up before they are sent) has its gradient pinned where it leaves the boundary
(`gradients.py`), and XLA decides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from splitjax.cost.flow import WeightFlow, used_axes
from splitjax.mesh import MeshShape
from splitjax.plan import LeafPlan, Spec
from splitjax.planning.sites.exchange import Exchange
from splitjax.planning.sites.experts import Travel
from splitjax.planning.sites.parts import Parts, gained_dims, gradient_gains, read_once, split_dims
from splitjax.planning.sites.spreads import Summed, derive_spreads
from splitjax.primitives.operation import Trait
from splitjax.primitives.table import OPERATIONS
from splitjax.trace.graph import Dim, Graph, Use


@dataclasses.dataclass(frozen=True)
class Scatter:
    """Describes a product of examples with a weight that is used whole over all batch axes, and whose gradient is
    summed into parts.

    - `site`: of the product's equation. `layer`: the layer whose weight it is.
    - `data`, `weight`: the operand positions of activations and weight.
    - `axes`: the batch axes, over all of which the examples are split.
    - `example_dim`: of the data operand. `out_example_dim`: of the result.
    - `parts`: dims of the weight along which its gradient is cut, with the axes.
    - `kept`: dims of the weight that other axes split, as the rules have them.
    - `stored`: dims along which the weight is stored in parts, and gathered for the product: once forward, once
      backward.
    - `out_kept`: dims of the result that are split as `kept` has them; None where tracing does not tell them apart.
    - `alone`: whether each device computes it whole over all other axes: what it makes are heads that devices share.
    - `pins`: the layouts that its data is pinned to, one after the other, before it is evaluated (`row_inputs.py`).
    - `travel`: how its tokens lie where it is a product with experts that are split over axes of the batch: `axes` are
      those that are left then.
    """

    site: tuple[int, ...]
    layer: str
    data: int
    weight: int
    axes: tuple[str, ...]
    example_dim: int
    out_example_dim: int
    parts: Parts
    kept: Parts = ()
    stored: Parts = ()
    out_kept: Parts | None = None
    alone: bool = False
    pins: tuple[Spec, ...] = ()
    travel: Travel | None = None

    @property
    def experts(self) -> Parts:
        """The dim of the weight's experts, with the axes over which they are split; none where it has none that are."""
        return () if self.travel is None else ((self.travel.weight_dim, self.travel.axes),)

    def fits(self, eqn: Any) -> bool:
        """Returns whether the equation `eqn` treats examples one by one, so that a device can evaluate it for its
        own."""
        check = _FITS.get(eqn.primitive.name)
        return check is not None and len(eqn.outvars) == 1 and check(self, eqn)


def derive_scatters(
    graph: Graph,
    leaves: Sequence[LeafPlan],
    mesh: MeshShape,
    batch_axes: tuple[str, ...],
    replicated_batch: str,
    told: Sequence[Exchange | Travel],
    chain: Sequence[WeightFlow],
) -> tuple[Exchange | Scatter | Summed, ...]:
    """Derives the operations of a step whose gradients are summed into parts.

    **Arguments:**

    - `graph`: of the step. `leaves`: of the plan.
    - `mesh`: the shape of the mesh.
    - `batch_axes`: the mesh axes that split the batch, major first.
    - `replicated_batch`: over which axes replicated layers split it, as the plan has it.
    - `told`: the products with split weights whose collectives are written out, and those whose tokens travel to
      experts. `chain`: the flows of the step.

    Returns the exchanges, those with split gradients marked so; the products with weights that are used whole and whose
    gradient is split, as their state is or they are themselves; biases and scales.
    """
    exchanges = [each for each in told if isinstance(each, Exchange)]
    planned = {
        leaf.path: leaf
        for leaf in leaves
        if leaf.gradient is not None or stored_axes(leaf, mesh, batch_axes, replicated_batch)
    }
    if not planned:
        return tuple(exchanges)
    uses = {use.site: use for use in graph.uses}
    products: list[Exchange | Scatter] = []
    for exchange in exchanges:
        use = uses[exchange.site]
        leaf = planned.get(use.param)
        parts = gained_dims(graph, use.weight_dims, leaf, exchange.rest) if leaf is not None else ()
        products.append(dataclasses.replace(exchange, scatter=parts))
    taken = {exchange.site for exchange in exchanges}
    travel_at = {each.site: each for each in told if isinstance(each, Travel)}
    alone = {flow.use.site for flow in chain if flow.shared is not None}
    for use in graph.uses:
        if use.site not in taken and use.param in planned:
            stored = stored_axes(planned[use.param], mesh, batch_axes, replicated_batch)
            scatter = _scatter(graph, use, planned[use.param], mesh, batch_axes, stored, travel_at.get(use.site))
            products += [] if scatter is None else [dataclasses.replace(scatter, alone=use.site in alone)]
    return (*products, *derive_spreads(graph, leaves, mesh, batch_axes, exchanges, chain))


def stored_axes(leaf: LeafPlan, mesh: MeshShape, batch_axes: tuple[str, ...], replicated_batch: str) -> tuple[str, ...]:
    """Returns the batch axes over which a parameter is stored in parts and used whole (ZeRO stage 3).

    **Arguments:** `leaf`: of the plan; `mesh`: the shape of the mesh; `batch_axes`: the mesh axes that split the batch;
    `replicated_batch`: over which axes replicated layers split it, as the plan has it.
    """
    if leaf.role != "param":
        return ()
    used = used_axes(leaf, mesh, batch_axes, replicated_batch)
    return tuple(axis for axis in leaf.axes if axis in mesh.wide and axis in batch_axes and axis not in used)


def _scatter(
    graph: Graph,
    use: Use,
    leaf: LeafPlan,
    mesh: MeshShape,
    batch_axes: tuple[str, ...],
    stored_over: tuple[str, ...],
    travel: Travel | None,
) -> Scatter | None:
    """Returns the sum of a use's gradient into parts; None where it is left to XLA. `stored_over`: the batch axes over
    which its weight is stored in parts."""
    experts = () if travel is None else travel.axes
    batch_axes = tuple(axis for axis in batch_axes if axis not in experts)
    inside = tuple(axis for axis in stored_over if axis not in experts)
    of_group = (set(leaf.axes) & set(batch_axes)) - set(inside)
    is_lookup = OPERATIONS[use.primitive].has(Trait.LOOKUP)
    if not use.in_boundary or not use.editable or use.backward or use.data is None or (of_group and not is_lookup):
        return None
    # Each device of a group looks its columns of all of the group's examples up.
    batch_axes = tuple(axis for axis in batch_axes if axis not in of_group)
    if not read_once(graph, use.weight_dims, leaf, use.trips):
        return None
    example_dim, out_example_dim = _example_dim(graph, use.data_dims), _example_dim(graph, use.out_dims)
    split, gained = (
        split_dims(graph, use.weight_dims, leaf, mesh, set(leaf.axes) - set(stored_over) if use.copied else ()),
        gained_dims(graph, use.weight_dims, leaf, batch_axes),
    )
    if example_dim is None or out_example_dim is None or split is None or not (gained or inside):
        return None
    num = mesh.size(batch_axes)
    if use.data_shape[example_dim] % num or use.out_shape[out_example_dim] != use.data_shape[example_dim]:
        return None
    stored = tuple((dim, own) for dim, axes in split if (own := tuple(axis for axis in axes if axis in inside)))
    apart = (*inside, *experts)
    kept = tuple((dim, own) for dim, axes in split if (own := tuple(axis for axis in axes if axis not in apart)))
    out_kept = _kept_in_result(graph, use, kept)
    if leaf.gradient is not None and not gained and gradient_gains(leaf):
        return None
    if of_group and (out_kept is None or len(out_kept) < len(kept)):
        return None
    return Scatter(
        use.site,
        use.layer,
        use.data,
        use.weight,
        batch_axes,
        example_dim,
        out_example_dim,
        (*stored, *gained),
        kept,
        stored,
        out_kept,
        travel=travel,
    )


def _kept_in_result(graph: Graph, use: Use, kept: Parts) -> Parts | None:
    """Returns the dims of a use's result that are split as the dims `kept` of its weight are: none for a contracted
    dim. None where a dim class stands twice in the result, or is both contracted and free."""
    weight = [graph.local[dim[0]] if dim else None for dim in use.weight_dims]
    out = [graph.local[dim[0]] if dim else None for dim in use.out_dims]
    data = [graph.local[dim[0]] if dim else None for dim in use.data_dims]
    parts = []
    for dim, axes in kept:
        places = [position for position, label in enumerate(out) if label == weight[dim]]
        if weight.count(weight[dim]) > 1 or len(places) > 1 or (places and weight[dim] in data):
            return None
        parts += [(place, axes) for place in places]
    return tuple(parts)


def _example_dim(graph: Graph, dims: Sequence[Dim]) -> int | None:
    return next((position for position, dim in enumerate(dims) if graph.is_example(dim)), None)


def _fits_dot(scatter: Scatter, eqn: Any) -> bool:
    contract, batch = eqn.params["dimension_numbers"]
    if scatter.example_dim in (*contract[scatter.data], *batch[scatter.data]):
        return False
    # Experts: each device has its own, or all of them.
    own = () if scatter.travel is None else (scatter.travel.weight_dim,)
    if tuple(batch[scatter.weight]) != own and not {dim for dim, _ in scatter.kept}.isdisjoint(batch[scatter.weight]):
        return False
    taken = [(*contract[side], *batch[side]) for side in (0, 1)]
    free = [[d for d in range(len(eqn.invars[side].aval.shape)) if d not in taken[side]] for side in (0, 1)]
    before = len(batch[0]) + (len(free[0]) if scatter.data == 1 else 0)
    return scatter.out_example_dim == before + free[scatter.data].index(scatter.example_dim)


def _fits_ragged(scatter: Scatter, eqn: Any) -> bool:
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    product = numbers.dot_dimension_numbers
    rows = tuple(numbers.lhs_ragged_dimensions) == (scatter.example_dim,) and scatter.example_dim not in product[0][0]
    # A device's rows are those of some groups, which it finds in the sizes of all.
    plain = not any(product[1]) and len(eqn.invars) == 3 and eqn.invars[2].aval.ndim == 1
    return rows and plain and (scatter.data, scatter.weight) == (0, 1) and scatter.out_example_dim == 0


def _fits_conv(scatter: Scatter, eqn: Any) -> bool:
    numbers = eqn.params["dimension_numbers"]
    places = (
        scatter.data == 0
        and scatter.weight == 1
        and numbers.lhs_spec[0] == scatter.example_dim
        and numbers.out_spec[0] == scatter.out_example_dim
    )
    return places and eqn.params["batch_group_count"] == 1


def _fits_gather(scatter: Scatter, eqn: Any) -> bool:
    numbers = eqn.params["dimension_numbers"]
    rank = len(eqn.outvars[0].aval.shape)
    indexed = [d for d in range(rank) if d not in numbers.offset_dims]
    if (
        scatter.weight != 0
        or scatter.data != 1
        or getattr(numbers, "operand_batching_dims", ())
        or scatter.example_dim >= len(indexed)
    ):
        return False
    return indexed[scatter.example_dim] == scatter.out_example_dim


_FITS: Mapping[str, Callable[[Scatter, Any], bool]] = {
    "dot_general": _fits_dot,
    "conv_general_dilated": _fits_conv,
    "gather": _fits_gather,
    "ragged_dot_general": _fits_ragged,
}
