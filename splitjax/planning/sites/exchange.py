"""Decides what a split layer exchanges where it is used.

A step's graph and the specs of its leaves come in; an `Exchange` comes out for every product with a split weight. XLA's
partitioner would place these collectives itself, but as an all-reduce of whole gradients where a reduce-scatter has
half the bytes (seen on CPU and TPU), and it is asked again at every compile. `groups.py` evaluates an exchange as
explicit collectives, forward and backward. Sources: Lai et al., "SplitBrain" (arXiv 2112.15317), Krizhevsky, "One weird
trick" (arXiv 1404.5997, section 4), and for rows Shoeybi et al., "Megatron-LM" (arXiv 1909.08053, section 3).

What is not a plain product with one weight dim split over the group (lookups, convolutions, experts, weights stored in
pieces) keeps its constraints (`constraints.py`), and so does every step without a gradient boundary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from splitjax.cost.flow import WeightFlow, feeding, has_group, leaves_group
from splitjax.mesh import MeshShape
from splitjax.plan import LeafPlan
from splitjax.trace.graph import Graph, Use

# How activations come in: what a device has before, and what is done about it.
EXAMPLES = "examples"  # its own examples, whole features: gathers its group's examples
FEATURES = "features"  # its group's examples, its part of the features: gathers the features
COPY = "copy"  # its group's examples, whole features: nothing forward, backward the sum over the group
SPLIT = "split"  # its group's examples, its part of the features, which is what rows need: nothing
SWAP = "swap"  # its own examples, and rows need a part of the features: examples for features, all to all
# How results go out.
STAY = "stay"  # a column-split result is a part of the features
SUM = "sum"  # rows: the sum over the group, on every device
SCATTER = "scatter"  # rows: the sum over the group, each worker its own examples


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Describes the exchanges of a product of activations with a weight that is split over `axes`.

    - `site`: of the product's equation. `layer`: the layer whose weight it is.
    - `data`, `weight`: the operand positions of activations and weight, 0 and 1 or the reverse.
    - `weight_dim`: the weight operand's dim that is split.
    - `axes`: the mesh axes over which it is split: those of the group.
    - `rest`: the batch axes that still split the examples inside the layer.
    - `example_dim`, `feature_dim`: of the data operand; `feature_dim` is the first dim that is contracted.
    - `out_example_dim`: of the result.
    - `enter`: how activations come in: `EXAMPLES`, `FEATURES`, `COPY`, `SPLIT` or `SWAP`.
    - `leave`: how results go out: `STAY`, `SUM` or `SCATTER`.
    - `scatter`: dims of the weight along which its gradient is summed into parts (`scatter.py`), each with the axes.
    """

    site: tuple[int, ...]
    layer: str
    data: int
    weight: int
    weight_dim: int
    axes: tuple[str, ...]
    rest: tuple[str, ...]
    example_dim: int
    feature_dim: int
    out_example_dim: int
    enter: str
    leave: str
    scatter: tuple[tuple[int, tuple[str, ...]], ...] = ()

    @functools.cached_property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes over which replicated layers split the examples, major first."""
        return (*self.rest, *self.axes)


@dataclasses.dataclass(frozen=True)
class WeightUse:
    """Describes a use of a weight inside a gradient boundary.

    - `site`: of the equation that uses it. `layer`: the layer whose weight it is.
    - `axes`: the mesh axes over which the weight is split; none for a replicated layer.
    """

    site: tuple[int, ...]
    layer: str
    axes: tuple[str, ...]


def weight_uses(chain: Sequence[WeightFlow], leaves: Sequence[LeafPlan], mesh: MeshShape) -> tuple[WeightUse, ...]:
    """Lists the forward uses of weights inside gradient boundaries, in program order.

    **Arguments:** `chain`: how the step's activations flow, as `cost.flow.flows` gives it. `leaves`: of the plan.
    `mesh`: the shape of the mesh.
    """
    split = {leaf.path: tuple(axis for axis in leaf.axes if axis in mesh.wide) for leaf in leaves}
    return tuple(
        WeightUse(flow.use.site, flow.use.layer, split[flow.use.param]) for flow in chain if flow.use.in_boundary
    )


def derive_exchanges(
    graph: Graph,
    chain: Sequence[WeightFlow],
    leaves: Sequence[LeafPlan],
    mesh: MeshShape,
    batch_axes: tuple[str, ...],
) -> tuple[Exchange, ...]:
    """Derives the exchanges of a step's forward products inside gradient boundaries, in program order.

    **Arguments:** `graph`: of the step. `chain`, `leaves`, `mesh`: as for `weight_uses`. `batch_axes`: the mesh axes
    that split the batch, major first.

    Products that are left to XLA (see the module's docstring) have no exchange.
    """
    planned = {leaf.path: leaf for leaf in leaves}
    exchanges = (_exchange(graph, flow, chain, planned, mesh, batch_axes) for flow in chain)
    return tuple(exchange for exchange in exchanges if exchange is not None)


def _exchange(
    graph: Graph,
    flow: WeightFlow,
    chain: Sequence[WeightFlow],
    planned: Mapping[str, LeafPlan],
    mesh: MeshShape,
    batch_axes: tuple[str, ...],
) -> Exchange | None:
    """Returns the exchange of a use of a weight; None where the product is left to XLA."""
    use, leaf = flow.use, planned[flow.use.param]
    axes = tuple(axis for axis in leaf.axes if axis in mesh.wide)
    rest = tuple(axis for axis in batch_axes if axis not in axes)
    if not use.by_labels or not use.in_boundary or not use.editable or not axes or not mesh.storing.isdisjoint(axes):
        return None
    if use.data is None or (flow.contracted and not use.adds_up):
        return None
    if not flow.crossing or (*rest, *axes) != batch_axes or flow.stacked or bool(flow.contracted) == bool(flow.free):
        return None
    weight_dim, feature_dim = _weight_dim(graph, use, leaf, axes), _feature_dim(graph, use)
    example_dim, out_example_dim = _example_dim(graph, use.data_dims), _example_dim(graph, use.out_dims)
    if weight_dim is None or feature_dim is None or example_dim is None or out_example_dim is None:
        return None
    source = feeding(flow.producer, axes, chain)
    in_group = flow.at_hand or has_group(flow, axes, chain)
    if flow.free:
        has_parts = source is not None and bool(source.free) and not flow.columns_inside
        in_parts = flow.recurs or has_parts  # a state stays where its gates are
        enter = FEATURES if in_parts and not flow.at_hand else COPY if in_group else EXAMPLES
        leave = STAY
    else:
        enter = SPLIT if in_group else SWAP
        leave = SCATTER if leaves_group(flow, chain) else SUM
    if enter in (FEATURES, SWAP) and use.data_shape[feature_dim] % mesh.size(axes):
        return None
    return Exchange(
        use.site,
        use.layer,
        use.data,
        use.weight,
        weight_dim,
        axes,
        rest,
        example_dim,
        feature_dim,
        out_example_dim,
        enter,
        leave,
    )


def _example_dim(graph: Graph, dims: Sequence[tuple[int, ...]]) -> int | None:
    return next((position for position, dim in enumerate(dims) if graph.is_example(dim)), None)


def _weight_dim(graph: Graph, use: Use, leaf: LeafPlan, axes: tuple[str, ...]) -> int | None:
    """Returns the dim of the weight operand (which may be a part of the parameter, or a reshape of it) that the split
    dim becomes; None where that is not one whole leading dim."""
    split = [d for d, own in enumerate(leaf.axes_by_dim) if set(own) & set(axes)]
    traced = graph.leaf(use.param)
    if len(split) != 1 or leaf.axes_by_dim[split[0]] != axes or not traced.dims[split[0]]:
        return None
    atom = graph.local[traced.dims[split[0]][0]]
    matching = [position for position, dim in enumerate(use.weight_dims) if dim and graph.local[dim[0]] == atom]
    if len(matching) > 1:  # both dims of a square kernel in one class: as the parameter has them
        alike = [position for position, dim in enumerate(traced.dims) if dim and graph.local[dim[0]] == atom]
        if len(alike) == len(matching):
            return matching[alike.index(split[0])]
        # Rows of it alone, of a class with its columns: the dims that have all atoms of the columns, in their order.
        own = [graph.local[each] for each in traced.dims[split[0]]]
        behind = {at: [graph.local[each] for dim in use.weight_dims[at:] for each in dim] for at in matching}
        columns = [at for at, atoms in behind.items() if atoms[: len(own)] == own]
        matching = columns if len(columns) == 1 else [split[0] - len(traced.dims) + len(use.weight_dims)]
    return matching[0] if len(matching) == 1 and matching[0] >= 0 else None


def _feature_dim(graph: Graph, use: Use) -> int | None:
    """Returns the first dim of the data that the product contracts: it is in the weight, and not in the result."""
    weight = {graph.local[dim[0]] for dim in use.weight_dims if dim}
    out = {graph.local[dim[0]] for dim in use.out_dims if dim}
    shared = [position for position, dim in enumerate(use.data_dims) if dim and graph.local[dim[0]] in weight]
    clear = [position for position in shared if graph.local[use.data_dims[position][0]] not in out]
    return (clear or shared or [None])[0]
