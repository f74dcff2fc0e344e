"""Says what a use of a weight, and what the gradient of a parameter, sends: the collectives of a planned step.

The flows of a step's activations and the layout of its leaves come in (`cost.prediction` puts them together for a
step), `Event`s come out: for each what one device sends per step, and why; nothing is compiled.
After Lai, Kadav, Kruus, "SplitBrain" (arXiv 2112.15317), whose column-split layers stand on replicated convolutions: N
workers in G groups of K, B examples a worker, d features at the crossing, h_l the widths of the column-split outputs
that are gathered for the next layer, s bytes a value, send per worker and step

    2(N-1)/N P_conv s + 2(G-1)/G (P_dense/K) s + 2(K-1) B d s + 2 sum_l (K-1) B h_l s

bytes (the tests hold the sum of the prediction against this formula):

- gradients (`gradient_events`): the first two terms;
- crossings between replicated layers, whose batch is split over all axes, and split layers: the third;
- activations between split layers, by the column and row rules of Shoeybi et al., "Megatron-LM" (arXiv 1909.08053,
  section 3): the fourth;
- beside the formula, split dims that a Fourier transform needs whole (`cost.transforms`).

An output that no later layer reads stays as it is: the loss is computed where it lies, and what it reduces of split
columns is sent for each example. Tokens that are sorted by expert for ragged products are gathered as they are picked
or put. Not predicted: what XLA makes of these products where their weights are not stored in parts
(`planning.sites.ragged`); and, because small: scalars, statistics of norms whose features are split, ids. What
rematerialisation repeats is sent once more, in the backward pass. Where the collectives are left to XLA (no gradient
boundary, or not a plain product: see `planning.sites.exchange`), compilers write an all-reduce for each reduce-scatter
(twice the bytes), one per cotangent for several layers that read one input (q, k, v) where one of the sum would do, and
keep a gathered weight from the forward for the backward pass.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence

from splitjax.cost.flow import Axes, Setting, Sorting, WeightFlow, linked, stays_dealt, used_axes
from splitjax.cost.ring import all_gather_bytes, all_reduce_bytes, all_to_all_bytes, reduce_scatter_bytes
from splitjax.cost.saved import SavedInput
from splitjax.cost.transforms import LocalTransform
from splitjax.cost.use_links import RAGGED
from splitjax.mesh import MeshShape
from splitjax.mesh.axis_parts import AxisPart
from splitjax.plan import Collective, LeafPlan, Phase, Purpose
from splitjax.plan import PurposeKind as Kind
from splitjax.trace.activations.statistics import Statistic
from splitjax.trace.graph import itemsize

_BYTES = {
    "all_reduce": all_reduce_bytes,
    "all_gather": all_gather_bytes,
    "reduce_scatter": reduce_scatter_bytes,
    "all_to_all": all_to_all_bytes,
    "collective_permute": lambda num_devices, num_bytes: num_bytes if num_devices > 1 else 0,
}
# What `_activations` gives for crossings, where a worker's examples go to, or come from, the rest of its group.
_CROSSINGS = frozenset({Kind.ENTER_COLUMNS, Kind.RETURN_COLUMNS, Kind.ENTER_ROWS, Kind.RETURN_ROWS})
# (op, axes, bytes that the op's formula takes, what it is for)
Event = tuple[str, Axes, int, Purpose]


@functools.lru_cache(maxsize=4096)
def _forward(kind: Kind, leaf: str | None = None, source: str = "") -> Purpose:
    return Purpose(kind, Phase.FORWARD, leaf, source)


@functools.lru_cache(maxsize=4096)
def _backward(kind: Kind, leaf: str | None = None, source: str = "") -> Purpose:
    return Purpose(kind, Phase.BACKWARD, leaf, source)


def sent_by(layer: str, events: Iterable[Event], mesh: MeshShape, backward: bool) -> tuple[Collective, ...]:
    """Returns the collectives of `events`, with `bytes` sent per device and step, by ring algorithms (`cost.ring`);
    those of 0 bytes left out.

    **Arguments:** `layer`: the name of the layer whose they are. `mesh`: the shape of the mesh. `backward`: False for a
    step that takes no gradient (evaluation)."""
    return tuple(
        Collective(op, "+".join(axes), sent, layer, purpose)
        for op, axes, num_bytes, purpose in events
        if (backward or purpose.phase == Phase.FORWARD) and (sent := _BYTES[op](mesh.size(axes), num_bytes)) > 0
    )


def transform_events(transform: LocalTransform, mesh: MeshShape) -> Iterator[Event]:
    """Yields what brings the transformed dims of a Fourier transform together."""
    for op, axes, num_bytes, is_backward in transform.sent(mesh):
        kind = Kind.FOURIER_EXAMPLES if op == "all_to_all" else Kind.FOURIER_DIM
        yield op, axes, num_bytes, (_backward if is_backward else _forward)(kind)


def saved_events(saved: SavedInput, widens: bool) -> Iterator[Event]:
    """Yields what brings the parts of an activation together that is kept for the backward pass. `widens`: as for
    `use_events`."""
    event = "all_gather", saved.axes, saved.whole_bytes, _backward(Kind.SAVED_INPUT)
    yield from _sent_as((event,), saved.dtype, widens)


def statistic_events(statistic: Statistic, leaf: LeafPlan, setting: Setting) -> Iterator[Event]:
    """Yields what sums a statistic of the batch over the devices that have its examples, and the cotangents of what is
    made of it and laid along the examples again. `leaf`: the layout of its running average."""
    mesh = setting.mesh
    split = tuple(axis for axis in leaf.axes if axis in mesh.wide)
    axes = tuple(axis for axis in setting.batch_axes if axis in mesh.wide and axis not in split)
    times, parts = statistic.trips * itemsize(statistic.dtype), mesh.size(split)
    for purpose, sizes in (
        (_forward(Kind.STATISTIC, leaf.path), statistic.sums),
        (_backward(Kind.STATISTIC_COTANGENT, leaf.path), statistic.laid),
    ):
        yield from (("all_reduce", axes, times * elements // parts, purpose) for elements in sizes if axes)


def _in_turns(event: Event, mesh: MeshShape) -> tuple[Event, ...]:
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


def use_events(
    i: int,
    chain: Sequence[WeightFlow],
    mesh: MeshShape,
    group_comm: str,
    sums_apart: bool = False,
    widens: bool = False,
) -> Iterator[Event]:
    """Yields what moves activations and their cotangents around the use at position `i`: entering it, then leaving it.
    It depends on the flow at `i`, and on those at its producer and its consumer.

    `group_comm`: `gather` and `modulo` send the same bytes, the latter a part in each turn; `turns` all-reduces them
    instead. `sums_apart`: whether the compiler sums the cotangents of one input by one, and `widens`: sends bfloat16 as
    float32 (`prediction.Manner`)."""
    for event in _activations(i, chain, mesh, sums_apart, widens):
        yield from _in_turns(event, mesh) if group_comm == "turns" else (event,)


def _activations(
    i: int, chain: Sequence[WeightFlow], mesh: MeshShape, sums_apart: bool, widens: bool
) -> Iterator[Event]:
    """Yields what moves activations and their cotangents around the use at position `i`: entering it, then leaving
    it."""
    flow = chain[i]
    use = flow.use
    differentiated = i > 0  # below the first use stand no parameters: nobody asks for the cotangent of its input
    reads_again = shared = flow.same_input is not None
    apart = sums_apart and bool(flow.free) and not flow.crossing and not flow.at_hand and differentiated
    if shared and apart and not flow.recurs:
        source = linked(flow.producer, flow.free, chain)
        shared = source is not None and bool(set(source.free) & set(flow.free))
    if flow.data_group_bytes and not shared:
        entering = (
            *(() if reads_again else _enter_stacked(flow, chain, mesh)),
            *_enter_column(flow, chain, mesh),
            *_enter_row(flow, chain, mesh),
        )
        entering = tuple(event for event in entering if differentiated or event[-1].phase == Phase.FORWARD)
        yield from _sent_as((*entering, *_again(entering, use.reread)), use.data_dtype, widens)
    elif flow.data_group_bytes and flow.recurs and apart:  # the state is gathered once for all gates
        entering = [event for event in _enter_column(flow, chain, mesh) if event[-1].kind == Kind.COLUMNS_COTANGENT]
        yield from _sent_as(entering, use.data_dtype, widens)
    leaving = (*_leave_stacked(flow, chain, mesh), *_leave_row(flow, chain, mesh), *_leave_column(flow, chain, mesh))
    leaving = (*leaving, *_leave_shared(flow))
    yield from _sent_as((*leaving, *_again(leaving, use.repeated)), use.out_dtype, widens)
    for sorting in flow.sorting:
        events = [event for event in _sort(sorting) if event[-1].phase == Phase.FORWARD or sorting.pick.is_learned]
        yield from _sent_as((*events, *_again(events, sorting.pick.repeated)), sorting.pick.dtype, widens)
    for each in flow.reduced:
        event = each.op, flow.free, each.num_bytes, _forward(Kind.REDUCED_FEATURES)
        yield from _sent_as((event, *_again((event,), each.repeated)), each.dtype, widens)


def _sent_as(events: Iterable[Event], dtype: str, widens: bool) -> Iterator[Event]:
    """Yields `events` of values of a `dtype` with the bytes that the compiler sends; `widens`: as for `use_events`."""
    times = 2 if widens and dtype == "bfloat16" else 1
    for op, axes, num_bytes, purpose in events:
        yield op, axes, times * num_bytes, purpose


def _again(events: Sequence[Event], times: int) -> Iterator[Event]:
    """Yields what rematerialisation sends again of `events`, in the backward pass: what the forward pass sends."""
    for op, axes, num_bytes, purpose in events if times else ():
        if purpose.phase == Phase.FORWARD:
            yield from [(op, axes, num_bytes, dataclasses.replace(purpose, phase=Phase.BACKWARD, again=True))] * times


def _enter_column(flow: WeightFlow, chain: Sequence[WeightFlow], mesh: MeshShape) -> Iterator[Event]:
    """Yields what enters a column-parallel use: it needs whole features, and each device has a summand of their
    cotangent."""
    axes = flow.free
    if not axes or flow.at_hand:
        return
    whole = flow.data_group_bytes // mesh.size((*flow.contracted, *_dealt_over(flow)))
    source = linked(flow.producer, axes, chain)
    if flow.recurs and not flow.crossing:
        # Each device keeps its part of the states for the backward pass, where the weight's gradient reads them whole.
        yield "all_gather", axes, whole, _forward(Kind.WHOLE_STATE)
        yield "all_gather", axes, whole, _backward(Kind.WHOLE_STATE)
        yield "all_reduce", axes, whole, _backward(Kind.COLUMNS_COTANGENT)
    elif source and set(source.free) & set(axes):
        name = source.use.layer
        yield "all_gather", axes, whole, _forward(Kind.WHOLE_FEATURES, source=name)
        yield "reduce_scatter", axes, whole, _backward(Kind.WHOLE_FEATURES_COTANGENT, source=name)
    elif source or not flow.crossing:
        yield "all_reduce", axes, whole, _backward(Kind.COLUMNS_COTANGENT)
    else:
        yield "all_gather", axes, whole, _forward(Kind.ENTER_COLUMNS)
        yield "reduce_scatter", axes, whole, _backward(Kind.RETURN_COLUMNS)


def _enter_row(flow: WeightFlow, chain: Sequence[WeightFlow], mesh: MeshShape) -> Iterator[Event]:
    """Yields what enters a row-parallel use: it needs its slice of the features, which a column-parallel producer
    leaves in place."""
    axes = flow.contracted
    if not axes or flow.at_hand:
        return
    sources = [linked(position, axes, chain) for position in (flow.producer, *flow.producers)]
    source = sources[0]
    if any(each and set(each.free) & set(axes) for each in sources):
        return
    if source or not flow.crossing:
        yield "all_gather", axes, flow.data_group_bytes // mesh.size(_dealt_over(flow)), _backward(Kind.ROWS_COTANGENT)
    else:
        yield "all_to_all", axes, flow.data_share_bytes, _forward(Kind.ENTER_ROWS)
        yield "all_to_all", axes, flow.data_share_bytes, _backward(Kind.RETURN_ROWS)


def _leave_row(flow: WeightFlow, chain: Sequence[WeightFlow], mesh: MeshShape) -> Iterator[Event]:
    """Yields what leaves a row-parallel use, of whose output each device has a summand."""
    axes = flow.contracted
    if not axes:
        return
    whole = flow.out_group_bytes // mesh.size((*flow.free, *_dealt_over(flow)))
    if stays_in_group(flow, chain):
        yield "all_reduce", axes, whole, _forward(Kind.ROWS_OUTPUT)
    else:
        yield "reduce_scatter", axes, whole, _forward(Kind.LEAVE_ROWS)
        yield "all_gather", axes, whole, _backward(Kind.COTANGENTS_TO_ROWS)


def _leave_column(flow: WeightFlow, chain: Sequence[WeightFlow], mesh: MeshShape) -> Iterator[Event]:
    """Yields what leaves a column-parallel use, whose output stays split for a split consumer (which sees to it), and
    for the loss if it is the last; not where its columns are joined with other values."""
    axes = flow.free
    if flow.joined is not None:
        yield "all_gather", axes, flow.out_group_bytes, _forward(Kind.WHOLE_OUTPUT)
        return
    if not axes or flow.consumer is None or linked(flow.consumer, axes, chain):
        return
    if flow.crossing:
        yield "all_to_all", axes, flow.out_share_bytes, _forward(Kind.LEAVE_COLUMNS)
        yield "all_to_all", axes, flow.out_share_bytes, _backward(Kind.COTANGENTS_TO_COLUMNS)
    else:
        yield "all_gather", axes, flow.out_group_bytes // mesh.size(_dealt_over(flow)), _forward(Kind.WHOLE_OUTPUT)


def _dealt_over(flow: WeightFlow) -> Axes:
    """Returns the axes over whose devices the tokens of a use lie by expert: each has those of its own experts, whose
    products alone it sums with others."""
    return () if flow.use.primitive == RAGGED else flow.stacked


def _enter_stacked(flow: WeightFlow, chain: Sequence[WeightFlow], mesh: MeshShape) -> Iterator[Event]:
    """Yields what enters experts: tokens travel to the device of their expert, their cotangents back (Lepikhin et al.,
    "GShard", arXiv 2006.16668)."""
    axes = flow.stacked
    if not axes or flow.use.primitive == RAGGED:
        return
    if stays_dealt(flow.producer, axes, chain):
        return
    if flow.travels:
        yield "all_to_all", axes, flow.data_share_bytes, _forward(Kind.TO_EXPERTS)
        yield "all_to_all", axes, flow.data_share_bytes, _backward(Kind.TO_EXPERTS_COTANGENT)
    else:
        yield "all_gather", axes, flow.data_group_bytes, _backward(Kind.ALL_EXPERTS_COTANGENT)


def _leave_stacked(flow: WeightFlow, chain: Sequence[WeightFlow], mesh: MeshShape) -> Iterator[Event]:
    """Yields what leaves experts: results return to the devices of their tokens."""
    axes = flow.stacked
    if not axes or flow.use.primitive == RAGGED:
        return
    if stays_dealt(flow.consumer, axes, chain):
        return
    if flow.travels:
        yield "all_to_all", axes, flow.out_share_bytes, _forward(Kind.FROM_EXPERTS)
        yield "all_to_all", axes, flow.out_share_bytes, _backward(Kind.FROM_EXPERTS_COTANGENT)
    else:
        yield "all_gather", axes, flow.out_group_bytes, _forward(Kind.ALL_EXPERTS)


def _sort(sorting: Sorting) -> Iterator[Event]:
    """Yields what brings rows of all devices together, to sort tokens by expert or to put their results back. Of rows
    that are picked the values of all examples are gathered, and cotangents summed onto these. Rows that are put are
    summed onto all examples; where several may be put at one place, their numbers are gathered to say which stays."""
    axes, whole = sorting.axes, sorting.num_bytes
    if sorting.pick.primitive == "gather":
        yield "all_gather", axes, whole, _forward(Kind.SORTED_ROWS)
        yield "all_reduce", axes, whole, _backward(Kind.SORTED_COTANGENT)
        return
    if sorting.pick.primitive == "scatter":
        yield "all_gather", axes, 4 * sorting.num_rows, _forward(Kind.SORTED_ROWS)
    yield "all_reduce", axes, whole, _forward(Kind.SORTED_ROWS)
    yield "all_gather", axes, whole, _backward(Kind.SORTED_COTANGENT)


def _leave_shared(flow: WeightFlow) -> Iterator[Event]:
    """Yields what brings the cotangents of heads together that devices share, each of which reads its own of them: they
    are summed over the devices that share a head, and the heads gathered."""
    if flow.shared is None:
        return
    axis, num_heads, copies = flow.shared.axis, flow.shared.num_heads, flow.shared.copies
    if num_heads == 1:
        yield "all_reduce", (axis,), flow.out_group_bytes, _backward(Kind.SHARED_HEADS)
        return
    over_copies, over_heads = AxisPart(axis, num_heads, copies), AxisPart(axis, 1, num_heads)
    yield "all_reduce", (str(over_copies),), flow.out_group_bytes // num_heads, _backward(Kind.SHARED_HEADS)
    yield "all_gather", (str(over_heads),), flow.out_group_bytes, _backward(Kind.WHOLE_HEADS)


def stays_in_group(flow: WeightFlow, chain: Sequence[WeightFlow]) -> bool:
    """Tells whether the output of a row-parallel use is summed onto all devices of its group, and not onto those whose
    examples it is."""
    return not flow.crossing or flow.consumer is None or linked(flow.consumer, flow.contracted, chain) is not None


@dataclasses.dataclass(frozen=True)
class Weight:
    """Holds what the collectives of a parameter depend on.

    **Attributes:**

    - `leaf`: its layout. `states`: the optimizer state that mirrors it.
    - `experts`: the axes over which it stays split as the weight of experts.
    - `read_back`: whether the backward pass reads it.
    - `parts`: the axes over which each device has the gradient of its own groups alone of a whole convolution weight.
    - `in_group`: the axes over whose devices it is added to one and the same value, so that all of them have its whole
      gradient.
    - `narrowed`: how many times fewer bytes it has in the dtype in which it travels (`StepStructure.narrowed`).
      `widened`: how many times more, where the compiler sends it in a wider one than its own.
    - `times_forward`, `times_back`: how often it is gathered in each pass. `times`: how many gradients of it are summed
      over devices, but over the axes `within` alone their sum is. `sums_apart`: whether these gradients are all-reduced
      one by one.
    - `dealt`: the axes over which its columns are dealt out, in rounds, each with the bytes that a device sends, and
      how often rematerialisation repeats it.
    """

    leaf: LeafPlan
    states: Sequence[LeafPlan]
    experts: Axes
    read_back: bool
    parts: Axes
    in_group: Axes
    narrowed: int = 1
    widened: int = 1
    times: int = 1
    times_forward: int = 1
    times_back: int = 1
    within: Axes = ()
    sums_apart: bool = False
    dealt: tuple[tuple[Axes, int, int], ...] = ()


def gradient_events(weight: Weight, setting: Setting) -> Iterator[Event]:
    """Yields the weight gathers and gradient sums of one parameter.

    Over batch axes that split it for storage alone, the weight is gathered for the forward and again for the backward
    pass, and its gradient is reduce-scattered (Rajbhandari et al., "ZeRO", arXiv 1910.02054, stage 3): each by one
    collective for every dim that is split so, in their order. Over batch axes that do not split it, the device's shard
    of the gradient is all-reduced; where the gradient or the optimizer state is split over them, the gradient is
    reduce-scattered and the new values are gathered instead (stages 1 and 2), which is as many bytes. An all-gather
    puts the gradients of groups of a convolution together. Weights are gathered, and gradients summed, in the dtype in
    which the weight is used; new values have that of the parameter.
    """
    leaf, parts, mesh, batch_axes = weight.leaf, weight.parts, setting.mesh, setting.batch_axes
    split = tuple(axis for axis in leaf.axes if axis in mesh.wide)
    used = used_axes(leaf, mesh, batch_axes, setting.replicated_batch) if split else ()
    stored = tuple(axis for axis in split if axis not in used and axis not in weight.experts)
    own = leaf.bytes_per_device * weight.widened
    shard = own // weight.narrowed
    of_dims = tuple(over for axes in leaf.axes_by_dim if (over := tuple(axis for axis in axes if axis in stored)))
    passes = [(_forward, weight.times_forward)]
    if weight.read_back:  # the first layer's input has no cotangent to be multiplied out
        passes.append((_backward, weight.times_back))
    for of_pass, times in passes:
        held = shard
        for axes in of_dims:
            held *= mesh.size(axes)
            yield from [("all_gather", axes, held, of_pass(Kind.STORED_WEIGHT, leaf.path))] * times
    left = shard * mesh.size(stored)
    for axes in of_dims:
        yield from [("reduce_scatter", axes, left, _backward(Kind.GRADIENT, leaf.path))] * weight.times
        left //= mesh.size(axes)
    taken = {*split, *weight.in_group}
    summed = tuple(axis for axis in batch_axes if axis in mesh.wide and axis not in taken)
    split_state = {axis for state in weight.states for axis in state.axes} | set(leaf.gradient_axes)
    zero = tuple(axis for axis in summed if axis in split_state)
    rest = tuple(axis for axis in summed if axis not in split_state)
    times = 1 if set(summed) <= set(weight.within) else weight.times
    if zero:
        gradient = "reduce_scatter", zero, shard, _backward(Kind.GRADIENT_ONTO_STATE, leaf.path)
        yield from [gradient] * times
        yield "all_gather", zero, own, Purpose(Kind.NEW_VALUE, Phase.UPDATE, leaf.path)
    if rest:
        part = shard // mesh.size((*zero, *parts)) if zero or parts else shard
        gradient = "all_reduce", rest, part, _backward(Kind.GRADIENT, leaf.path)
        yield from [gradient] * (times if weight.sums_apart else 1)
    if parts:
        yield "all_gather", parts, shard, _backward(Kind.GRADIENT_GROUPS, leaf.path)
    for axes, sent, times in weight.dealt:
        dealt = "collective_permute", axes, sent, _forward(Kind.DEALT_COLUMNS, leaf.path)
        yield from (dealt, *_again([dealt], times))
        yield "collective_permute", axes, sent, _backward(Kind.DEALT_GRADIENT, leaf.path)
