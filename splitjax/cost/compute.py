"""Predicts what the devices of a planned step compute: products with weights, over an even share of them.

How the uses of weights are split (`cost.flow`) comes in, a `plan.Compute` comes out. It exists because a layout that
makes devices repeat each other's work is legal and gives the right numbers: nobody would see it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from splitjax.cost.flow import Axes, WeightFlow
from splitjax.mesh import MeshShape
from splitjax.plan import Compute
from splitjax.trace.graph import Dim, Graph, Use


def predict_compute(
    graph: Graph, flows: Sequence[WeightFlow], mesh: MeshShape, batch_axes: Axes, backward: bool
) -> Compute:
    """Predicts the flops of a device per step.

    **Arguments:** `graph`: the traced step. `flows`: of its uses of weights. `mesh`: the shape of the mesh.
    `batch_axes`: its axes over which the examples are split. `backward`: whether the step takes a gradient, which
    computes a product for the weight and one for its input, but for that of a layer that reads a batch."""
    return total_compute(flows, (use_split(graph, flow, mesh, batch_axes) for flow in flows), mesh, backward)


def total_compute(flows: Sequence[WeightFlow], splits: Iterable[int], mesh: MeshShape, backward: bool) -> Compute:
    """Returns what a device computes per step. `splits`: among how many devices each of the uses is shared
    (`use_split`). The others are those of `predict_compute`."""
    flops, ideal, num_devices = 0, 0, mesh.num_devices
    for flow, split in zip(flows, splits, strict=True):
        total = step_flops(flow.use, backward)
        flops += total // split
        ideal += total // num_devices
    return Compute(flops, ideal)


def step_flops(use: Use, backward: bool) -> int:
    """Returns the flops of a use of a weight per step, forward and backward, over all devices."""
    return use.flops * (1 + backward * (2 if use.reads_learned else 1))


def use_split(graph: Graph, flow: WeightFlow, mesh: MeshShape, batch_axes: Axes) -> int:
    """Returns among how many devices the product of a use is shared. The arguments are those of `predict_compute`."""
    return mesh.size(split_axes(graph, flow, mesh, batch_axes))


def split_axes(graph: Graph, flow: WeightFlow, mesh: MeshShape, batch_axes: Axes) -> Axes:
    """Returns the mesh axes whose devices share the product of a use, in the mesh's order; over the others each device
    computes the same. The arguments are those of `predict_compute`."""
    use, own = flow.use, mesh.present(flow.axes)
    examples = _num_examples(graph, (*use.data_dims, *use.out_dims))
    # What does not divide is not counted as split: XLA would fill it up, if it splits it at all.
    shared = mesh.dividing([axis for axis in batch_axes if axis not in own], examples)
    return mesh.in_order((*own, *shared))


def _num_examples(graph: Graph, dims: Sequence[Dim]) -> int:
    """Returns the size of the first dim of examples; 1 where there is none."""
    for dim in dims:
        if graph.is_example(dim):
            size = 1
            for atom in dim:
                size *= graph.atom_sizes[atom]
            return size
    return 1
