"""Predicts the collectives of a planned step: for each, what one device sends per step, for which layer, and why.

The traced step, the layout of its leaves and a mesh shape come in, `plan.Collective`s come out; nothing is compiled.
After Lai, Kadav, Kruus, "SplitBrain" (arXiv 2112.15317), whose column-split layers stand on replicated convolutions: N
workers in G groups of K, B examples a worker, d features at the crossing, h_l the widths of the column-split outputs
that are gathered for the next layer, s bytes a value, send per worker and step

    2(N-1)/N P_conv s + 2(G-1)/G (P_dense/K) s + 2(K-1) B d s + 2 sum_l (K-1) B h_l s

bytes (the tests hold the sum of the prediction against this formula):

- gradients (`_gradients`): the first two terms;
- crossings between replicated layers, whose batch is split over all axes, and split layers: the third;
- activations between split layers, by the column and row rules of Shoeybi et al., "Megatron-LM" (arXiv 1909.08053,
  section 3): the fourth;
- beside the formula, split dims that a Fourier transform needs whole (`cost.transforms`).

An output that no later layer reads stays as it is: the loss is computed where it lies. Not predicted, because small:
scalars and per-example sums, norms and batch-norm statistics, ids; nor what rematerialisation repeats. Where the
collectives are left to XLA (no gradient boundary, or not a plain product: see `lower.products.exchange`), compilers
write an all-reduce for each reduce-scatter (twice the bytes), one per cotangent for several layers that read one input
(q, k, v) where one of the sum would do, and keep a gathered weight from the forward for the backward pass.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from splitjax.cost.convolutions import derive_convolutions
from splitjax.cost.flow import Axes, WeightFlow, flows, linked, reads_ids, used_axes
from splitjax.cost.ring import all_gather_bytes, all_reduce_bytes, all_to_all_bytes, reduce_scatter_bytes
from splitjax.cost.transforms import LocalTransform, derive_transforms
from splitjax.mesh import MeshShape
from splitjax.plan import Collective, LayerPlan, LeafPlan, Phase, Purpose, spec_axes
from splitjax.plan import PurposeKind as Kind
from splitjax.trace.graph import Graph

_BYTES = {
    "all_reduce": all_reduce_bytes,
    "all_gather": all_gather_bytes,
    "reduce_scatter": reduce_scatter_bytes,
    "all_to_all": all_to_all_bytes,
}
# What `_activations` gives for crossings, where a worker's examples go to, or come from, the rest of its group.
_CROSSINGS = frozenset({Kind.ENTER_COLUMNS, Kind.RETURN_COLUMNS, Kind.ENTER_ROWS, Kind.RETURN_ROWS})
# (op, axes, bytes that the op's formula takes, what it is for)
_Event = tuple[str, Axes, int, Purpose]


def _forward(kind: Kind, leaf: str | None = None, source: str = "") -> Purpose:
    return Purpose(kind, Phase.FORWARD, leaf, source)


def _backward(kind: Kind, leaf: str | None = None, source: str = "") -> Purpose:
    return Purpose(kind, Phase.BACKWARD, leaf, source)


@dataclasses.dataclass(frozen=True, eq=False)
class LaidOutStep:
    """Holds a traced step with the layout of its leaves, from which its collectives follow.

    - `graph`: the traced step: shapes of activations (`Graph.uses`, for the whole batch), dim classes.
    - `leaves`, `layers`: the layout; `bytes_per_device` must be set.
    - `mesh`: the shape of the mesh.
    - `batch_axes`: its axes over which batch arguments are split.
    - `replicated_batch`: `"all"` where the batch of replicated layers is split over every axis, `"data"` where split
      and replicated layers see the same batch.
    """

    graph: Graph
    leaves: Sequence[LeafPlan]
    layers: Sequence[LayerPlan]
    mesh: MeshShape
    batch_axes: Sequence[str]
    replicated_batch: str


def predict_collectives(
    step: LaidOutStep, *, backward: bool = True, group_comm: str = "gather"
) -> tuple[Collective, ...]:
    """Predicts the collectives that a step of this layout needs: those of activations in program order, then those of
    gradients in leaf order.

    **Arguments:**

    - `step`: the traced step and its layout.
    - `group_comm`: `gather` and `modulo` send the same bytes, the latter a part in each turn; `turns` all-reduces them
      instead.
    - `backward`: False for a step that takes no gradient (evaluation).

    **Returns:** `Collective`s with `bytes` sent per device and step, by ring algorithms (`cost.ring`); those of 0 bytes
    left out.
    """
    graph, leaves, layers, mesh = step.graph, step.leaves, step.layers, step.mesh
    batch_axes, replicated_batch = step.batch_axes, step.replicated_batch
    names = {leaf.path: leaf.layer for leaf in graph.leaves if leaf.layer}
    names |= {path: layer.name for layer in layers for path in layer.params}
    chain = flows(graph, leaves, mesh, batch_axes, replicated_batch)
    states = _states(graph, leaves)
    experts = {flow.use.param: flow.stacked for flow in chain}
    events: list[tuple[str, _Event]] = []
    transforms = collections.deque(derive_transforms(graph, leaves, mesh, tuple(batch_axes), replicated_batch))
    for i, flow in enumerate(chain):
        while transforms and transforms[0].site < flow.use.site:
            events += _transformed(transforms.popleft(), mesh)
        layer = names.get(flow.use.param, flow.use.layer)
        for event in _activations(i, chain, mesh):
            events += [(layer, it) for it in (_in_turns(event, mesh) if group_comm == "turns" else (event,))]
    for transform in transforms:
        events += _transformed(transform, mesh)
    parts = {
        convolution.param: convolution.gathered
        for convolution in derive_convolutions(graph, leaves, mesh, tuple(batch_axes), replicated_batch)
        if convolution.gathered
    }
    # The backward pass of a lookup adds rows up, and does not read the table.
    behind = {
        flow.use.param for i, flow in enumerate(chain) if (i or flow.use.trips > 1) and not reads_ids(flow.use)
    } | {leaf.path for leaf in leaves if leaf.path not in experts}
    in_group = _added_in_group(names, chain)
    for leaf in leaves:
        if leaf.role == "param":
            path = leaf.path
            weight = _Weight(
                leaf,
                states.get(path, ()),
                experts.get(path, ()),
                path in behind,
                parts.get(path, ()),
                in_group.get(path, ()),
            )
            of_gradient = _gradients(weight, mesh, tuple(batch_axes), replicated_batch)
            events += [(names.get(path, path), event) for event in of_gradient]
    return tuple(
        Collective(op, "+".join(axes), sent, layer, purpose)
        for layer, (op, axes, num_bytes, purpose) in events
        if (backward or purpose.phase == Phase.FORWARD) and (sent := _BYTES[op](mesh.size(axes), num_bytes)) > 0
    )


def _transformed(transform: LocalTransform, mesh: MeshShape) -> Iterator[tuple[str, _Event]]:
    """Yields what brings the transformed dims of a Fourier transform together, with the layer whose they are."""
    for op, axes, num_bytes, is_backward in transform.sent(mesh):
        kind = Kind.FOURIER_EXAMPLES if op == "all_to_all" else Kind.FOURIER_DIM
        yield transform.layer, (op, axes, num_bytes, (_backward if is_backward else _forward)(kind))


def _in_turns(event: _Event, mesh: MeshShape) -> tuple[_Event, ...]:
    """Translates a crossing into what `group_comm="turns"` does: a worker's examples are broadcast, and their
    cotangents summed, by masked all-reduces. Returns any event that is no crossing as it is."""
    _, axes, num_bytes, purpose = event
    if purpose.kind not in _CROSSINGS:
        return (event,)
    # A row-split layer gets whole features in turns, and cuts its own out of them.
    by_rows = purpose.kind in (Kind.ENTER_ROWS, Kind.RETURN_ROWS)
    whole = num_bytes * mesh.size(axes) if by_rows else num_bytes
    summed = "all_reduce", axes, whole, dataclasses.replace(purpose, in_turns=True)
    if purpose.kind == Kind.RETURN_ROWS:
        return ("all_gather", axes, whole, _backward(Kind.ROWS_COTANGENT)), summed
    return (summed,)


def _activations(i: int, chain: Sequence[WeightFlow], mesh: MeshShape) -> Iterator[_Event]:
    """Yields what moves activations and their cotangents around the use at position `i`: entering it, then leaving
    it."""
    flow = chain[i]
    differentiated = i > 0  # below the first use stand no parameters: nobody asks for the cotangent of its input
    if flow.data_group_bytes and flow.same_input is None:
        entering = (
            *_enter_stacked(flow, chain, mesh),
            *_enter_column(flow, chain, mesh),
            *_enter_row(flow, chain, mesh),
        )
        yield from (event for event in entering if differentiated or event[-1].phase == Phase.FORWARD)
    yield from _leave_stacked(flow, chain, mesh)
    yield from _leave_row(flow, chain, mesh)
    yield from _leave_column(flow, chain, mesh)


def _enter_column(flow: WeightFlow, chain: Sequence[WeightFlow], mesh: MeshShape) -> Iterator[_Event]:
    """Yields what enters a column-parallel use: it needs whole features, and each device has a summand of their
    cotangent."""
    axes, whole = flow.free, flow.data_group_bytes // mesh.size(flow.contracted)
    if not axes or flow.at_hand:
        return
    source = linked(flow.producer, axes, chain)
    if source and set(source.free) & set(axes):
        name = source.use.layer
        yield "all_gather", axes, whole, _forward(Kind.WHOLE_FEATURES, source=name)
        yield "reduce_scatter", axes, whole, _backward(Kind.WHOLE_FEATURES_COTANGENT, source=name)
    elif source or not flow.crossing:
        yield "all_reduce", axes, whole, _backward(Kind.COLUMNS_COTANGENT)
    else:
        yield "all_gather", axes, whole, _forward(Kind.ENTER_COLUMNS)
        yield "reduce_scatter", axes, whole, _backward(Kind.RETURN_COLUMNS)


def _enter_row(flow: WeightFlow, chain: Sequence[WeightFlow], mesh: MeshShape) -> Iterator[_Event]:
    """Yields what enters a row-parallel use: it needs its slice of the features, which a column-parallel producer
    leaves in place."""
    axes = flow.contracted
    if not axes or flow.at_hand:
        return
    source = linked(flow.producer, axes, chain)
    if source and set(source.free) & set(axes):
        return
    if source or not flow.crossing:
        yield "all_gather", axes, flow.data_group_bytes, _backward(Kind.ROWS_COTANGENT)
    else:
        yield "all_to_all", axes, flow.data_share_bytes, _forward(Kind.ENTER_ROWS)
        yield "all_to_all", axes, flow.data_share_bytes, _backward(Kind.RETURN_ROWS)


def _leave_row(flow: WeightFlow, chain: Sequence[WeightFlow], mesh: MeshShape) -> Iterator[_Event]:
    """Yields what leaves a row-parallel use, of whose output each device has a summand."""
    axes, whole = flow.contracted, flow.out_group_bytes // mesh.size(flow.free)
    if not axes:
        return
    if _stays_in_group(flow, chain):
        yield "all_reduce", axes, whole, _forward(Kind.ROWS_OUTPUT)
    else:
        yield "reduce_scatter", axes, whole, _forward(Kind.LEAVE_ROWS)
        yield "all_gather", axes, whole, _backward(Kind.COTANGENTS_TO_ROWS)


def _leave_column(flow: WeightFlow, chain: Sequence[WeightFlow], mesh: MeshShape) -> Iterator[_Event]:
    """Yields what leaves a column-parallel use, whose output stays split for a split consumer (which sees to it), and
    for the loss if it is the last."""
    axes = flow.free
    if not axes or flow.consumer is None or linked(flow.consumer, axes, chain):
        return
    if flow.crossing:
        yield "all_to_all", axes, flow.out_share_bytes, _forward(Kind.LEAVE_COLUMNS)
        yield "all_to_all", axes, flow.out_share_bytes, _backward(Kind.COTANGENTS_TO_COLUMNS)
    else:
        yield "all_gather", axes, flow.out_group_bytes, _forward(Kind.WHOLE_OUTPUT)


def _enter_stacked(flow: WeightFlow, chain: Sequence[WeightFlow], mesh: MeshShape) -> Iterator[_Event]:
    """Yields what enters experts: tokens travel to the device of their expert, their cotangents back (Lepikhin et al.,
    "GShard", arXiv 2006.16668)."""
    axes = flow.stacked
    source = linked(flow.producer, axes, chain)
    if not axes or (source and source.stacked == axes):
        return
    if flow.crossing:
        yield "all_to_all", axes, flow.data_share_bytes, _forward(Kind.TO_EXPERTS)
        yield "all_to_all", axes, flow.data_share_bytes, _backward(Kind.TO_EXPERTS_COTANGENT)
    else:
        yield "all_gather", axes, flow.data_group_bytes, _backward(Kind.ALL_EXPERTS_COTANGENT)


def _leave_stacked(flow: WeightFlow, chain: Sequence[WeightFlow], mesh: MeshShape) -> Iterator[_Event]:
    """Yields what leaves experts: results return to the devices of their tokens."""
    axes = flow.stacked
    target = linked(flow.consumer, axes, chain)
    if not axes or (target and target.stacked == axes):
        return
    if flow.crossing:
        yield "all_to_all", axes, flow.out_share_bytes, _forward(Kind.FROM_EXPERTS)
        yield "all_to_all", axes, flow.out_share_bytes, _backward(Kind.FROM_EXPERTS_COTANGENT)
    else:
        yield "all_gather", axes, flow.out_group_bytes, _forward(Kind.ALL_EXPERTS)


def _states(graph: Graph, leaves: Sequence[LeafPlan]) -> dict[str, list[LeafPlan]]:
    """Maps a parameter to the optimizer state that mirrors it (moments; not factored statistics, which are small)."""
    follows = {leaf.path: leaf.follows for leaf in graph.leaves if leaf.follows}
    shapes = {leaf.path: leaf.shape for leaf in leaves}
    states: dict[str, list[LeafPlan]] = {}
    for leaf in leaves:
        param = follows.get(leaf.path)
        if param is not None and leaf.shape == shapes.get(param):
            states.setdefault(param, []).append(leaf)
    return states


def _added_in_group(names: Mapping[str, str], chain: Sequence[WeightFlow]) -> dict[str, Axes]:
    """Maps the biases of row-split layers to the axes over which these are split, where their output is all-reduced: to
    the sum, which is the same on all devices of a group, each of them adds the bias for all of the group's examples."""
    used = {flow.use.param for flow in chain}
    axes: dict[str, Axes] = {}
    for flow in chain:
        if flow.contracted and flow.crossing and _stays_in_group(flow, chain) and not reads_ids(flow.use):
            layer = names.get(flow.use.param, flow.use.layer)
            axes |= {path: flow.contracted for path, name in names.items() if name == layer and path not in used}
    return axes


def _stays_in_group(flow: WeightFlow, chain: Sequence[WeightFlow]) -> bool:
    """Tells whether the output of a row-parallel use is summed onto all devices of its group, and not onto those whose
    examples it is."""
    return not flow.crossing or flow.consumer is None or linked(flow.consumer, flow.contracted, chain) is not None


@dataclasses.dataclass(frozen=True)
class _Weight:
    """Holds what the collectives of a parameter depend on.

    **Attributes:**

    - `leaf`: its layout. `states`: the optimizer state that mirrors it.
    - `experts`: the axes over which it stays split as the weight of experts.
    - `read_back`: whether the backward pass reads it.
    - `parts`: the axes over which each device has the gradient of its own groups alone of a whole convolution weight.
    - `in_group`: the axes over whose devices it is added to one and the same value, so that all of them have its whole
      gradient.
    """

    leaf: LeafPlan
    states: Sequence[LeafPlan]
    experts: Axes
    read_back: bool
    parts: Axes
    in_group: Axes


def _gradients(weight: _Weight, mesh: MeshShape, batch_axes: Axes, replicated_batch: str) -> Iterator[_Event]:
    """Yields the weight gathers and gradient sums of one parameter.

    Over batch axes that split it for storage alone, the weight is gathered for the forward and again for the backward
    pass, and its gradient is reduce-scattered (Rajbhandari et al., "ZeRO", arXiv 1910.02054, stage 3). Over batch axes
    that do not split it, the device's shard of the gradient is all-reduced; where the gradient or the optimizer state
    is split over them, the gradient is reduce-scattered and the new values are gathered instead (stages 1 and 2), which
    is as many bytes. An all-gather puts the gradients of groups of a convolution together.
    """
    leaf, parts = weight.leaf, weight.parts
    split = mesh.present(spec_axes(leaf.spec))
    used = used_axes(leaf.spec, mesh, batch_axes, replicated_batch)
    stored = tuple(axis for axis in split if axis not in used and axis not in weight.experts)
    shard = leaf.bytes_per_device
    if stored:
        whole = shard * mesh.size(stored)
        yield "all_gather", stored, whole, _forward(Kind.STORED_WEIGHT, leaf.path)
        if weight.read_back:  # the first layer's input has no cotangent to be multiplied out
            yield "all_gather", stored, whole, _backward(Kind.STORED_WEIGHT, leaf.path)
        yield "reduce_scatter", stored, whole, _backward(Kind.GRADIENT, leaf.path)
    summed = tuple(axis for axis in mesh.present(batch_axes) if axis not in split and axis not in weight.in_group)
    split_state = {axis for state in weight.states for axis in spec_axes(state.spec)} | set(
        spec_axes(leaf.gradient or ())
    )
    zero = tuple(axis for axis in summed if axis in split_state)
    rest = tuple(axis for axis in summed if axis not in split_state)
    if zero:
        yield "reduce_scatter", zero, shard, _backward(Kind.GRADIENT_ONTO_STATE, leaf.path)
        yield "all_gather", zero, shard, Purpose(Kind.NEW_VALUE, Phase.UPDATE, leaf.path)
    if rest:
        yield "all_reduce", rest, shard // mesh.size((*zero, *parts)), _backward(Kind.GRADIENT, leaf.path)
    if parts:
        yield "all_gather", parts, shard, _backward(Kind.GRADIENT_GROUPS, leaf.path)
