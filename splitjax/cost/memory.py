"""Predicts the memory of a planned step, per device: state exactly, activations and the peak approximately.

The traced step, the layout of its leaves and a mesh shape come in, a `plan.Memory` comes out. Plans print it, and
`planning.group_comm` chooses by it, before anything is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from splitjax.cost.flow import flows
from splitjax.mesh import MeshShape
from splitjax.plan import LeafPlan, Memory, spec_axes
from splitjax.trace.graph import Graph


def predict_memory(
    graph: Graph,
    leaves: Sequence[LeafPlan],
    mesh: MeshShape,
    batch_axes: Sequence[str],
    replicated_batch: str = "all",
    *,
    group_comm: str = "gather",
    by_rows: Mapping[str, int] = MappingProxyType({}),
) -> Memory:
    """Predicts the bytes per device of a step under a layout.

    **Arguments:**

    - `graph`: the traced step: its activations for the whole batch, its uses of weights.
    - `leaves`: the layout of every leaf; `bytes_per_device` must be set.
    - `mesh`: the shape of the mesh. `batch_axes`: its axes over which batch arguments are split.
    - `replicated_batch`: as for `predict_collectives`; it says which weights stay split over axes that split the batch.
    - `group_comm`: `gather`, `turns` or `modulo`; in turns a split layer sees the examples of one turn at a time.
    - `by_rows`: for tables whose gradients are rows, path -> the bytes that a device has of these rows; they take the
      gradient's place.

    **Returns:** a `Memory` of three figures, in bytes.

    - `state_bytes`: exact: the shards of all state leaves (parameters, optimizer state, statistics).
    - `activation_bytes`: `Graph.activation_bytes` (forward values of the whole batch) divided by the devices over which
      the batch is split, plus what a split layer sees beyond its worker's share, the gathered examples of its group
      (SplitBrain's *gather* crossing: arXiv 2112.15317; Krizhevsky 2014, arXiv 1404.5997, scheme a), minus what
      column-split outputs leave to other devices. An approximation: elementwise results within split layers count
      whole, XLA's reuse and rematerialisation do not count.
    - `peak_bytes`: state, one gradient per parameter (laid out as the parameter, or its part with sharded state),
      activations; where gradients are summed into parts, the largest of them once more, as each device has it before it
      is sent; in turns also the largest of a split layer, before it is added to those of earlier turns. XLA may reach
      less by consuming gradients as they come.
    """
    state = sum(leaf.bytes_per_device for leaf in leaves if leaf.is_state)
    gradients = _gradient_bytes([leaf for leaf in leaves if leaf.path not in by_rows], mesh) + sum(by_rows.values())
    activations = graph.activation_bytes // mesh.size(tuple(batch_axes))
    if group_comm != "gather":
        split = [leaf for leaf in leaves if leaf.role == "param" and spec_axes(leaf.spec) and leaf.path not in by_rows]
        gradients += max((leaf.bytes_per_device for leaf in split), default=0)
    for flow in flows(graph, leaves, mesh, batch_axes, replicated_batch):
        if not flow.free:
            continue
        # a layer's activations are alive for one turn at a time
        num_turns = 1 if group_comm == "gather" else mesh.size(flow.axes)
        if flow.same_input is None:
            activations += flow.data_group_bytes // num_turns - flow.data_share_bytes
        activations -= flow.out_share_bytes - flow.out_group_bytes // mesh.size(flow.free) // num_turns
    activations = max(activations, graph.activation_bytes // mesh.num_devices)
    return Memory(state_bytes=state, activation_bytes=activations, peak_bytes=state + gradients + activations)


def _gradient_bytes(leaves: Sequence[LeafPlan], mesh: MeshShape) -> int:
    """Returns the bytes of the gradients of all parameters, plus those of the largest that is on its way to its
    part."""
    kept, in_flight = 0, 0
    for leaf in leaves:
        if leaf.role == "param":
            part = leaf.bytes_per_device
            if leaf.gradient is not None:
                part = leaf.whole_bytes(mesh) // mesh.size(spec_axes(leaf.gradient))
                in_flight = max(in_flight, leaf.bytes_per_device)
            kept += part
    return kept + in_flight
