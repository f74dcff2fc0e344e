"""Predicts the memory of a planned step, per device: state exactly, activations and the peak approximately.

The traced step, the layout of its leaves and a mesh shape come in, a `plan.Memory` comes out. It is a sum of terms: one
for each leaf (`leaf_bytes`), one for each use of a weight (`use_bytes`), so that `cost.prediction` keeps those that a
change of the layout does not touch. Plans print it, and `planning.group_comm` chooses by it, before anything is
compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from splitjax.cost.flow import WeightFlow
from splitjax.mesh import MeshShape
from splitjax.plan import LeafPlan, Memory
from splitjax.trace.graph import Graph


def predict_memory(
    graph: Graph,
    leaves: Sequence[LeafPlan],
    chain: Sequence[WeightFlow],
    mesh: MeshShape,
    batch_axes: Sequence[str],
    *,
    group_comm: str = "gather",
    by_rows: Mapping[str, int] = MappingProxyType({}),
) -> Memory:
    """Predicts the bytes per device of a step under a layout.

    **Arguments:**

    - `graph`: the traced step: its activations for the whole batch, its uses of weights.
    - `leaves`: the layout of every leaf; `bytes_per_device` must be set.
    - `chain`: the flows of all uses of weights under that layout (`cost.flow.flows`).
    - `mesh`: the shape of the mesh. `batch_axes`: its axes over which batch arguments are split.
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
    return total_memory(
        bytes_by_leaf(leaves, mesh, group_comm, by_rows),
        [use_bytes(flow, mesh, group_comm) for flow in chain],
        base_bytes=graph.activation_bytes // mesh.size(tuple(batch_axes)),
        least_bytes=graph.activation_bytes // mesh.num_devices,
    )


@dataclasses.dataclass(frozen=True)
class LeafBytes:
    """Holds what a leaf adds to the memory of a device, in bytes.

    - `state`: its shard, where it belongs to a state.
    - `gradient`: what is kept of its gradient.
    - `unsummed`: its gradient before that is summed into parts; 0 where it is not.
    - `of_turn`: its gradient of a turn, before it is added to those of earlier turns; 0 where it is not split.
    """

    state: int
    gradient: int
    unsummed: int
    of_turn: int


def leaf_bytes(leaf: LeafPlan, mesh: MeshShape, group_comm: str, by_rows: Mapping[str, int]) -> LeafBytes:
    """Returns what a leaf adds to the memory of a device. The arguments are those of `predict_memory`; `leaf`: its
    layout."""
    held = leaf.bytes_per_device
    state = held if leaf.is_state else 0
    if leaf.path in by_rows:
        return LeafBytes(state, by_rows[leaf.path], 0, 0)
    if leaf.role != "param":
        return LeafBytes(state, 0, 0, 0)
    of_turn = held if group_comm != "gather" and leaf.axes else 0
    if leaf.gradient is None:
        return LeafBytes(state, held, 0, of_turn)
    part = leaf.whole_bytes(mesh) // mesh.size(leaf.gradient_axes)
    return LeafBytes(state, part, unsummed=held, of_turn=of_turn)


def bytes_by_leaf(
    leaves: Iterable[LeafPlan], mesh: MeshShape, group_comm: str, by_rows: Mapping[str, int]
) -> tuple[LeafBytes, ...]:
    """Returns what `leaf_bytes` says of each of `leaves`."""
    return tuple(leaf_bytes(leaf, mesh, group_comm, by_rows) for leaf in leaves)


def use_bytes(flow: WeightFlow, mesh: MeshShape, group_comm: str) -> int:
    """Returns by how many bytes a use's activations differ from an equal share of the batch; negative where its output
    is left to other devices."""
    if not flow.free:
        return 0
    # a layer's activations are alive for one turn at a time
    num_turns = 1 if group_comm == "gather" else mesh.size(flow.axes)
    more = flow.data_group_bytes // num_turns - flow.data_share_bytes if flow.same_input is None else 0
    return more - (flow.out_share_bytes - flow.out_group_bytes // mesh.size(flow.free) // num_turns)


def total_memory(leaves: Iterable[LeafBytes], uses: Iterable[int], base_bytes: int, least_bytes: int) -> Memory:
    """Returns the memory of a step of its terms.

    **Arguments:** `leaves`, `uses`: what `leaf_bytes` and `use_bytes` say of each. `base_bytes`: activations of an
    equal share of the batch. `least_bytes`: activations that a device has at least."""
    state = kept = unsummed = of_turn = 0
    for leaf in leaves:
        state += leaf.state
        kept += leaf.gradient
        unsummed = max(unsummed, leaf.unsummed)
        of_turn = max(of_turn, leaf.of_turn)
    activations = max(base_bytes + sum(uses), least_bytes)
    return Memory(state, activations, state + kept + unsummed + of_turn + activations)
