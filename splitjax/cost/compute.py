"""Predicts what the devices of a planned step compute: products with weights, over an even share of them.

How the uses of weights are split (`cost.flow`) comes in, a `plan.Compute` comes out. It exists because a layout that
makes devices repeat each other's work is legal and gives the right numbers: nobody would see it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from splitjax.cost.flow import Axes, WeightFlow
from splitjax.mesh import MeshShape
from splitjax.plan import Compute, LeafPlan, spec_axes
from splitjax.trace.graph import Dim, Graph, Use

# By number of examples, the axes over which the arrays of a batch lie that have so many.
ByNumber = Mapping[int, Axes]
_ALIKE: ByNumber = MappingProxyType({})


def total_compute(flows: Sequence[WeightFlow], splits: Iterable[int], mesh: MeshShape, backward: bool) -> Compute:
    """Predicts the flops of a device per step.

    **Arguments:** `flows`: of the uses of weights. `splits`: among how many devices each of them is shared
    (`use_split`). `mesh`: the shape of the mesh. `backward`: whether the step takes a gradient, which computes a
    product for the weight and one for its input, but for that of a layer that reads a batch."""
    flops, ideal, num_devices = 0, 0, mesh.num_devices
    for flow, split in zip(flows, splits, strict=True):
        total = step_flops(flow.use, backward)
        flops += total // split
        ideal += total // num_devices
    return Compute(flops, ideal)


def step_flops(use: Use, backward: bool) -> int:
    """Returns the flops of a use of a weight per step, forward and backward, over all devices."""
    return use.flops * (1 + backward * (2 if use.reads_learned else 1))


def apart_axes(graph: Graph, leaves: Sequence[LeafPlan], mesh: MeshShape, batch_axes: Axes) -> ByNumber:
    """Returns over which axes examples lie in a batch whose arrays have numbers of examples of their own (the nodes,
    edges and targets of graphs), and are laid out one by one; empty for any other batch.

    `leaves`: the layout of the step that `graph` describes. `batch_axes`: those over which all of its arrays lie."""
    found: dict[int, set[str]] = {}
    for leaf, planned in zip(graph.leaves, leaves, strict=True):
        if leaf.role == "batch" and leaf.shape:
            entry = planned.spec[leaf.example_dim]
            found.setdefault(leaf.shape[leaf.example_dim], set(batch_axes)).update(spec_axes((entry,)))
    if len(found) < 2:
        return _ALIKE
    return {number: tuple(axis for axis in mesh.names if axis in axes) for number, axes in found.items()}


def use_split(graph: Graph, flow: WeightFlow, mesh: MeshShape, batch_axes: Axes, apart: ByNumber = _ALIKE) -> int:
    """Returns among how many devices the product of a use is shared. The arguments are those of `split_axes`."""
    return mesh.size(split_axes(graph, flow, mesh, batch_axes, apart))


def split_axes(graph: Graph, flow: WeightFlow, mesh: MeshShape, batch_axes: Axes, apart: ByNumber = _ALIKE) -> Axes:
    """Returns the mesh axes whose devices share the product of a use, in the mesh's order; over the others each device
    computes the same.

    **Arguments:** `graph`: the traced step. `flow`: of the use. `mesh`: the shape of the mesh. `batch_axes`: its axes
    over which the examples are split. `apart`: as `apart_axes` returns it; XLA carries the layout of an array on to
    what is made of it, which has as many examples."""
    use, own = flow.use, mesh.present(flow.axes)
    leading, examples = _num_examples(graph, (*use.data_dims, *use.out_dims))
    # What does not divide is not counted as split: XLA would fill it up, if it splits it at all.
    over = apart.get(leading, batch_axes)
    shared = mesh.dividing([axis for axis in over if axis not in own], examples)
    return mesh.in_order((*own, *shared))


def _num_examples(graph: Graph, dims: Sequence[Dim]) -> tuple[int, int]:
    """Returns the number of examples in the first dim that has some, and the size of that dim, in which more may lie;
    1 and 1 where there is none."""
    for dim in dims:
        if graph.is_example(dim):
            size = 1
            for atom in dim:
                size *= graph.atom_sizes[atom]
            return graph.atom_sizes[dim[0]], size
    return 1, 1
