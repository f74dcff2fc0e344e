"""How activations flow between a plan's layers: per use of a weight, over which axes it is split, and what feeds it.

A graph does not keep the edges between uses, but its dim classes say enough: where a free dim of one use's weight and a
contracted dim of a later use's weight are in one local class, the later use reads the earlier one's output (through
elementwise operations, reshapes, attention).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import ml_dtypes  # noqa: F401  (registers bfloat16 and the float8 family with numpy)
import numpy as np

from splitjax.mesh import DATA, MeshShape
from splitjax.plan import LeafPlan, Spec, spec_axes
from splitjax.trace.graph import Graph, Leaf, Use

Axes = tuple[str, ...]
_ROLES = ("contracted", "free", "stacked", "whole")


@dataclasses.dataclass(frozen=True)
class Flow:
    """One use of a weight, as its layout sees it. Byte counts are of all repetitions (`Use.trips`), of one device.

    *Share*: a worker's examples, as replicated layers hold them. *Group*: the examples that a device sees in this
    layer.
    """

    use: Use
    # axes over which the weight's contracted dims stay split: row-parallel; the rows of a looked-up table
    contracted: Axes
    free: Axes  # axes over which its free dims stay split: column-parallel
    stacked: Axes  # axes over which a dim that data and result share is split: experts
    crossing: bool  # replicated layers split their batch over these axes too, so that entering and leaving is a reshard
    data_share_bytes: int  # 0 for lookups of ids, here and below
    data_group_bytes: int  # features whole
    out_share_bytes: int
    out_group_bytes: int  # features whole
    producer: int | None  # position of the last use before this one whose output it reads, None for none known
    consumer: int | None  # position of the first use that reads this one's output, None for none known
    same_input: int | None  # position of an earlier use of the very same input (q, k and v), split over the same axes
    # it reads a batch, no other use's output, and the batch lies where it is wanted
    # (`lower.products.constraints.place_batches`)
    at_hand: bool = False

    @property
    def axes(self) -> Axes:
        return (*self.contracted, *self.free, *self.stacked)


def used_axes(spec: Spec, mesh: MeshShape, batch_axes: Sequence[str], replicated_batch: str) -> Axes:
    """The axes over which a weight stays split while it is used (model parallelism); over the rest of its axes it is
    stored in pieces and gathered first (fully sharded data parallelism).

    Over axes that do not split the batch it stays split. With `replicated_batch = "all"` every axis splits the batch of
    replicated layers: a weight stays split within the group, unless it is split over `data`, between groups, as well:
    then its layer is one whose examples stay where they are, and the whole weight comes to them."""
    axes = mesh.present(spec_axes(spec))
    if replicated_batch == "all" and DATA not in axes:
        return axes
    return tuple(axis for axis in axes if axis not in batch_axes)


def flows(
    graph: Graph, leaves: Sequence[LeafPlan], mesh: MeshShape, batch_axes: Sequence[str], replicated_batch: str
) -> tuple[Flow, ...]:
    """The flow of every forward use of a planned parameter, in program order. What a backward pass sends follows from
    the forward uses, so uses in one that plain JAX already traced are passed over."""
    planned = {leaf.path: leaf for leaf in leaves}
    traced = {leaf.path: leaf for leaf in graph.leaves}
    uses = [use for use in graph.uses if not use.backward and use.param in planned and use.param in traced]
    roles = [_dim_roles(graph, use, traced[use.param]) for use in uses]
    reads = [_classes(graph, use, traced[use.param], role, "contracted") for use, role in zip(uses, roles, strict=True)]
    writes = [_classes(graph, use, traced[use.param], role, "free") for use, role in zip(uses, roles, strict=True)]
    result: list[Flow] = []
    for i, use in enumerate(uses):
        contracted, free, stacked = _split(planned[use.param], roles[i], mesh, batch_axes, replicated_batch)
        own = (*contracted, *free, *stacked)
        workers, in_layer = (
            mesh.size(tuple(batch_axes)),
            mesh.size(tuple(axis for axis in batch_axes if axis not in own)),
        )
        data_bytes = _num_bytes(use.data_shape, use.data_dtype) * use.trips if _reads_activations(use) else 0
        out_bytes = _num_bytes(use.out_shape, use.out_dtype) * use.trips
        data_batched, out_batched = (any(map(graph.is_example, dims)) for dims in (use.data_dims, use.out_dims))
        producer = next((j for j in reversed(range(i)) if writes[j] & reads[i]), None)
        result.append(
            Flow(
                use,
                contracted,
                free,
                stacked,
                crossing=any(axis in batch_axes for axis in own),
                data_share_bytes=data_bytes // workers if data_batched else data_bytes,
                data_group_bytes=data_bytes // in_layer if data_batched else data_bytes,
                out_share_bytes=out_bytes // workers if out_batched else out_bytes,
                out_group_bytes=out_bytes // in_layer if out_batched else out_bytes,
                producer=producer,
                consumer=next((j for j in range(i + 1, len(uses)) if writes[i] & reads[j]), None),
                same_input=next(
                    (
                        j
                        for j in range(i)
                        if free
                        and result[j].free == free
                        and _same_value(uses[j], use)
                        and reads[j] == reads[i] != writes[j]
                    ),
                    None,
                ),
                at_hand=producer is None
                and bool(use.fed_by)
                and all(
                    path in planned and not set(spec_axes(planned[path].spec[:1])) & set(own) for path in use.fed_by
                ),
            )
        )
    return tuple(result)


def linked(position: int | None, axes: Axes, chain: Sequence[Flow]) -> Flow | None:
    """The neighbouring use, if it is split over some of these axes too; replicated neighbours are as good as none."""
    flow = None if position is None else chain[position]
    return flow if flow and set(flow.axes) & set(axes) else None


def _num_bytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def _reads_activations(use: Use) -> bool:
    """A lookup reads ids: nothing is differentiated through them, and they are too small to count."""
    return use.data is not None and np.dtype(use.data_dtype).kind not in "iub"


def _same_value(a: Use, b: Use) -> bool:
    """Whether two uses may read one value; that their classes agree as well (and do not chain) is asked beside this.
    One weight used twice reads two values: it would be the same operation otherwise."""
    return a.param != b.param and (a.data_shape, a.data_dtype, a.trips) == (b.data_shape, b.data_dtype, b.trips)


def _classes(graph: Graph, use: Use, leaf: Leaf, roles: Sequence[str], role: str) -> frozenset[int]:
    """The local classes of a weight's dims of one role."""
    return frozenset(
        graph.local[atom] for dim, found in zip(leaf.dims, roles, strict=True) if found == role for atom in dim
    )


def _dim_roles(graph: Graph, use: Use, leaf: Leaf) -> tuple[str, ...]:
    """Per dim of a use's weight: contracted, free, stacked, or whole (a window's height)."""
    data = {graph.local[atom] for dim in use.data_dims for atom in dim}
    out = {graph.local[atom] for dim in use.out_dims for atom in dim}
    names = leaf.dim_names or (None,) * len(leaf.dims)
    lookup = not _reads_activations(use)
    return tuple(
        _dim_role(name, {graph.local[atom] for atom in dim}, data, out, lookup)
        for dim, name in zip(leaf.dims, names, strict=True)
    )


def _dim_role(name: str | None, classes: set[int], data: set[int], out: set[int], lookup: bool) -> str:
    """Classes decide; names where classes tie (square recurrent kernels) or say nothing."""
    in_data, in_out = bool(classes & data), bool(classes & out)
    if name == "expert":
        return "stacked"
    if lookup:
        return "contracted" if name == "vocab" or (name is None and not in_out) else "free"
    if in_data != in_out:
        return "contracted" if in_data else "free"
    if name in ("in", "features"):
        return "contracted"
    if name in ("out", "vocab"):
        return "free"
    return "stacked" if in_data else "whole"


def _split(
    leaf: LeafPlan, roles: Sequence[str], mesh: MeshShape, batch_axes: Sequence[str], replicated_batch: str
) -> tuple[Axes, Axes, Axes]:
    """The axes over which a weight's contracted, free and stacked dims stay split while it is used."""
    found: dict[str, list[str]] = {role: [] for role in _ROLES}
    used = used_axes(leaf.spec, mesh, batch_axes, replicated_batch)
    for role, entry in zip(roles, leaf.spec, strict=False):
        axes = mesh.present(spec_axes((entry,)))
        # Experts stay where they are, whatever the axis.
        found[role].extend(axis for axis in axes if role == "stacked" or axis in used)
    return tuple(found["contracted"]), tuple(found["free"]), tuple(found["stacked"])
