"""Says what a use of a weight sends: the collectives of a planned step that move activations.

The flows of a step's activations and the layout of its leaves come in (`cost.prediction` puts them together for a
step), `Event`s come out: for each what one device sends per step, and why; nothing is compiled.
After Lai, Kadav, Kruus, "SplitBrain" (arXiv 2112.15317), whose column-split layers stand on replicated convolutions: N
workers in G groups of K, B examples a worker, d features at the crossing, h_l the widths of the column-split outputs
that are gathered for the next layer, s bytes a value, send per worker and step

    2(N-1)/N P_conv s + 2(G-1)/G (P_dense/K) s + 2(K-1) B d s + 2 sum_l (K-1) B h_l s

bytes (the tests hold the sum of the prediction against this formula):

- gradients (`cost.gradients`): the first two terms;
- crossings between replicated layers, whose batch is split over all axes, and split layers: the third;
- activations between split layers, by the column and row rules of Shoeybi et al., "Megatron-LM" (arXiv 1909.08053,
  section 3): the fourth;
- beside the formula, split dims that a Fourier transform needs whole (`cost.transforms`).

An output that no later layer reads stays as it is: the loss is computed where it lies, and what it reduces of split
columns is sent for each example. So is what a normalisation reduces of split features, and the cotangents of that.
Tokens that are sorted by expert for ragged products are gathered as they are picked
or put. Not predicted: what XLA makes of these products where their weights are not stored in parts
(`planning.sites.ragged`); and, because small: scalars and ids. What
rematerialisation repeats is sent once more, in the backward pass. Where the collectives are left to XLA (no gradient
boundary, or not a plain product: see `planning.sites.exchange`), compilers write an all-reduce for each reduce-scatter
(twice the bytes), one per cotangent for several layers that read one input (q, k, v) where one of the sum would do, and
keep a gathered weight from the forward for the backward pass.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

from splitjax.cost.flow import (
    Axes,
    Setting,
    Sorting,
    WeightFlow,
    brought,
    feeding,
    has_group,
    leaves_group,
    linked,
    stays_dealt,
)
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
def on_forward(kind: Kind, leaf: str | None = None, source: str = "") -> Purpose:
    """Returns a purpose in the forward pass. The arguments are those of `Purpose`."""
    return Purpose(kind, Phase.FORWARD, leaf, source)


@functools.lru_cache(maxsize=4096)
def on_backward(kind: Kind, leaf: str | None = None, source: str = "") -> Purpose:
    """Returns a purpose in the backward pass. The arguments are those of `Purpose`."""
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
        yield op, axes, num_bytes, (on_backward if is_backward else on_forward)(kind)


def saved_events(saved: SavedInput, widens: bool) -> Iterator[Event]:
    """Yields what brings the parts of an activation together that is kept for the backward pass. `widens`: as for
    `use_events`."""
    event = "all_gather", saved.axes, saved.whole_bytes, on_backward(Kind.SAVED_INPUT)
    yield from _sent_as((event,), saved.dtype, widens)


def statistic_events(statistic: Statistic, leaf: LeafPlan, setting: Setting) -> Iterator[Event]:
    """Yields what sums a statistic of the batch over the devices that have its examples, and the cotangents of what is
    made of it and laid along the examples again. `leaf`: the layout of its running average."""
    mesh = setting.mesh
    split = tuple(axis for axis in leaf.axes if axis in mesh.wide)
    axes = tuple(axis for axis in setting.batch_axes if axis in mesh.wide and axis not in split)
    times, parts = statistic.trips * itemsize(statistic.dtype), mesh.size(split)
    for purpose, sizes in (
        (on_forward(Kind.STATISTIC, leaf.path), statistic.sums),
        (on_backward(Kind.STATISTIC_COTANGENT, leaf.path), statistic.laid),
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
        return ("all_gather", axes, whole, on_backward(Kind.ROWS_COTANGENT)), summed
    return (summed,)


def use_events(
    i: int,
    chain: Sequence[WeightFlow],
    mesh: MeshShape,
    group_comm: str,
    sums_apart: bool = False,
    widens: bool = False,
    maxima_apart: bool = True,
) -> Iterator[Event]:
    """Yields what moves activations and their cotangents around the use at position `i`: entering it, then leaving it.
    It depends on the flow at `i`, and on those at its producer and its consumer.

    `group_comm`: `gather` and `modulo` send the same bytes, the latter a part in each turn; `turns` all-reduces them
    instead. `sums_apart`, `widens`, `maxima_apart`: what the compiler does (`parts.Manner`)."""
    events = itertools.chain(
        _activations(i, chain, mesh, sums_apart, widens), _reductions(chain[i], chain, widens, maxima_apart)
    )
    for event in events:
        yield from _in_turns(event, mesh) if group_comm == "turns" else (event,)


def _activations(
    i: int, chain: Sequence[WeightFlow], mesh: MeshShape, sums_apart: bool, widens: bool
) -> Iterator[Event]:
    """Yields what moves activations and their cotangents around the use at position `i`: entering it, then leaving
    it."""
    flow = chain[i]
    use = flow.use
    differentiated = use.reads_learned  # else nobody asks for the cotangent of its input
    reads_again = shared = flow.same_input is not None
    apart = sums_apart and bool(flow.free) and not flow.crossing and differentiated
    in_loop = flow.recurs or _reads_turn(flow, chain)
    if shared and apart and not in_loop:
        source = feeding(flow.producer, flow.free, chain)
        shared = source is not None and bool(set(source.free) & set(flow.free))
    if flow.data_group_bytes and not shared:
        entering = (
            *(() if reads_again else _enter_stacked(flow, chain, mesh)),
            *_enter_column(flow, chain, mesh),
            *_enter_row(flow, chain, mesh),
        )
        entering = tuple(event for event in entering if differentiated or event[-1].phase == Phase.FORWARD)
        yield from _sent_as((*entering, *again(entering, use.reread)), use.data_dtype, widens)
    elif flow.data_group_bytes and in_loop and apart:  # the state is gathered once for all gates
        entering = [event for event in _enter_column(flow, chain, mesh) if event[-1].kind == Kind.COLUMNS_COTANGENT]
        yield from _sent_as(entering, use.data_dtype, widens)
    leaving = (*_leave_stacked(flow, chain, mesh), *_leave_row(flow, chain, mesh), *_leave_column(flow, chain, mesh))
    leaving = (*leaving, *_leave_shared(flow), *_meet(flow, chain))
    yield from _sent_as((*leaving, *again(leaving, use.repeated)), use.out_dtype, widens)
    for sorting in flow.sorting:
        events = [event for event in _sort(sorting) if event[-1].phase == Phase.FORWARD or sorting.pick.is_learned]
        yield from _sent_as((*events, *again(events, sorting.pick.repeated)), sorting.pick.dtype, widens)


def _reductions(flow: WeightFlow, chain: Sequence[WeightFlow], widens: bool, maxima_apart: bool) -> Iterator[Event]:
    """Yields what reduces the columns of a use's output, of which each device has a part."""
    for each in () if leaves_group(flow, chain) else flow.reduced:
        if maxima_apart or not each.beside_place:
            purpose = (on_backward if each.backward else on_forward)(Kind.REDUCED_FEATURES)
            event = each.op, flow.free, each.num_bytes, purpose
            yield from _sent_as((event, *again((event,), each.repeated)), each.dtype, widens)


def _sent_as(events: Iterable[Event], dtype: str, widens: bool) -> Iterator[Event]:
    """Yields `events` of values of a `dtype` with the bytes that the compiler sends; `widens`: as for `use_events`."""
    times = 2 if widens and dtype == "bfloat16" else 1
    for op, axes, num_bytes, purpose in events:
        yield op, axes, times * num_bytes, purpose


def again(events: Sequence[Event], times: int) -> Iterator[Event]:
    """Yields what rematerialisation sends again of `events`, in the backward pass: what the forward pass sends."""
    for op, axes, num_bytes, purpose in events if times else ():
        if purpose.phase == Phase.FORWARD:
            yield from [(op, axes, num_bytes, dataclasses.replace(purpose, phase=Phase.BACKWARD, again=True))] * times


def _enter_column(flow: WeightFlow, chain: Sequence[WeightFlow], mesh: MeshShape) -> Iterator[Event]:
    """Yields what enters a column-parallel use: it needs whole features, and each device has a summand of their
    cotangent."""
    axes = flow.free
    if not axes:
        return
    whole = flow.data_group_bytes // mesh.size((*flow.contracted, *_dealt_over(flow)))
    if flow.at_hand:  # all of it is there, perhaps with parameters added
        yield "all_reduce", axes, whole, on_backward(Kind.COLUMNS_COTANGENT)
        return
    source = feeding(flow.producer, axes, chain)
    if not flow.crossing and (flow.recurs or _reads_turn(flow, chain)):
        kind = Kind.WHOLE_STATE if flow.recurs else Kind.WHOLE_FEATURES
        name = "" if flow.recurs or source is None else source.use.layer
        # Each device keeps its part of them for the backward pass, where the weight's gradient reads them whole: as
        # rematerialisation has gathered them again, if it has.
        yield "all_gather", axes, whole, on_forward(kind, source=name)
        if not flow.use.reread:
            yield "all_gather", axes, whole, on_backward(kind, source=name)
        yield "all_reduce", axes, whole, on_backward(Kind.COLUMNS_COTANGENT)
    elif flow.recurs:
        yield "all_gather", axes, whole, on_forward(Kind.WHOLE_STATE)
        yield "reduce_scatter", axes, whole, on_backward(Kind.WHOLE_FEATURES_COTANGENT, source=flow.use.layer)
    elif source and set(source.free) & set(axes):
        name = source.use.layer
        yield "all_gather", axes, whole, on_forward(Kind.WHOLE_FEATURES, source=name)
        if flow.columns_inside:  # XLA brings them together before they are laid side by side
            yield "all_reduce", axes, whole, on_backward(Kind.COLUMNS_COTANGENT)
            return
        yield "reduce_scatter", axes, whole, on_backward(Kind.WHOLE_FEATURES_COTANGENT, source=name)
    elif not flow.crossing or has_group(flow, axes, chain):
        yield "all_reduce", axes, whole, on_backward(Kind.COLUMNS_COTANGENT)
    else:
        yield "all_gather", axes, whole, on_forward(Kind.ENTER_COLUMNS)
        yield "reduce_scatter", axes, whole, on_backward(Kind.RETURN_COLUMNS)


def _reads_turn(flow: WeightFlow, chain: Sequence[WeightFlow]) -> bool:
    """Tells whether a use in a loop reads columns that another one gave, in the same turn or before, where examples do
    not cross: as states are, these are kept in parts from the forward loop to the backward one."""
    source = None if flow.crossing or flow.use.trips == 1 else feeding(flow.producer, flow.free, chain)
    return source is not None and not set(source.free).isdisjoint(flow.free)


def _enter_row(flow: WeightFlow, chain: Sequence[WeightFlow], mesh: MeshShape) -> Iterator[Event]:
    """Yields what enters a row-parallel use: it needs its slice of the features, which a column-parallel producer
    leaves in place."""
    axes = flow.contracted
    if not axes:
        return
    sources = [feeding(position, axes, chain) for position in (flow.producer, *flow.producers)]
    if any(each and set(each.free) & set(axes) for each in sources):
        return
    if flow.at_hand or not flow.crossing or has_group(flow, axes, chain):
        whole = flow.data_group_bytes // mesh.size(_dealt_over(flow))
        yield "all_gather", axes, whole, on_backward(Kind.ROWS_COTANGENT)
    else:
        yield "all_to_all", axes, flow.data_share_bytes, on_forward(Kind.ENTER_ROWS)
        yield "all_to_all", axes, flow.data_share_bytes, on_backward(Kind.RETURN_ROWS)


def _leave_row(flow: WeightFlow, chain: Sequence[WeightFlow], mesh: MeshShape) -> Iterator[Event]:
    """Yields what leaves a row-parallel use, of whose output each device has a summand."""
    axes = flow.contracted
    if not axes:
        return
    whole = flow.out_group_bytes // mesh.size((*flow.free, *_dealt_over(flow)))
    if not leaves_group(flow, chain):
        yield "all_reduce", axes, whole, on_forward(Kind.ROWS_OUTPUT)
    else:
        yield "reduce_scatter", axes, whole, on_forward(Kind.LEAVE_ROWS)
        yield "all_gather", axes, whole, on_backward(Kind.COTANGENTS_TO_ROWS)


def _leave_column(flow: WeightFlow, chain: Sequence[WeightFlow], mesh: MeshShape) -> Iterator[Event]:
    """Yields what leaves a column-parallel use, whose output stays split for a split consumer (which sees to it), and
    for the loss if it is the last; not where its columns are joined with other values."""
    axes = flow.free
    if flow.joined is not None:
        yield "all_gather", axes, flow.out_group_bytes, on_forward(Kind.WHOLE_OUTPUT)
        return
    if axes and leaves_group(flow, chain):
        yield "all_to_all", axes, flow.out_share_bytes, on_forward(Kind.LEAVE_COLUMNS)
        yield "all_to_all", axes, flow.out_share_bytes, on_backward(Kind.COTANGENTS_TO_COLUMNS)
    elif axes and not flow.crossing and flow.consumer is not None and not linked(flow.consumer, axes, chain):
        yield "all_gather", axes, flow.out_group_bytes // mesh.size(_dealt_over(flow)), on_forward(Kind.WHOLE_OUTPUT)


def _meet(flow: WeightFlow, chain: Sequence[WeightFlow]) -> Iterator[Event]:
    """Yields what takes a residual stream, which comes from a replicated layer, to the columns of the first split use
    that is added to it."""
    met = brought(flow, chain)
    if met is not None:
        yield "all_to_all", flow.free, met.num_bytes, on_forward(Kind.STREAM_TO_COLUMNS)
        yield "all_to_all", flow.free, met.num_bytes, on_backward(Kind.STREAM_COTANGENT)


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
        yield "all_to_all", axes, flow.data_share_bytes, on_forward(Kind.TO_EXPERTS)
        yield "all_to_all", axes, flow.data_share_bytes, on_backward(Kind.TO_EXPERTS_COTANGENT)
    else:
        yield "all_gather", axes, flow.data_group_bytes, on_backward(Kind.ALL_EXPERTS_COTANGENT)


def _leave_stacked(flow: WeightFlow, chain: Sequence[WeightFlow], mesh: MeshShape) -> Iterator[Event]:
    """Yields what leaves experts: results return to the devices of their tokens."""
    axes = flow.stacked
    if not axes or flow.use.primitive == RAGGED:
        return
    if stays_dealt(flow.consumer, axes, chain):
        return
    if flow.travels:
        yield "all_to_all", axes, flow.out_share_bytes, on_forward(Kind.FROM_EXPERTS)
        yield "all_to_all", axes, flow.out_share_bytes, on_backward(Kind.FROM_EXPERTS_COTANGENT)
    else:
        yield "all_gather", axes, flow.out_group_bytes, on_forward(Kind.ALL_EXPERTS)


def _sort(sorting: Sorting) -> Iterator[Event]:
    """Yields what brings rows of all devices together, to sort tokens by expert or to put their results back. Of rows
    that are picked the values of all examples are gathered, and cotangents summed onto these. Rows that are put are
    summed onto all examples; where several may be put at one place, their numbers are gathered to say which stays."""
    axes, whole = sorting.axes, sorting.num_bytes
    if sorting.pick.primitive == "gather":
        yield "all_gather", axes, whole, on_forward(Kind.SORTED_ROWS)
        yield "all_reduce", axes, whole, on_backward(Kind.SORTED_COTANGENT)
        return
    if sorting.pick.primitive == "scatter":
        yield "all_gather", axes, 4 * sorting.num_rows, on_forward(Kind.SORTED_ROWS)
    yield "all_reduce", axes, whole, on_forward(Kind.SORTED_ROWS)
    yield "all_gather", axes, whole, on_backward(Kind.SORTED_COTANGENT)


def _leave_shared(flow: WeightFlow) -> Iterator[Event]:
    """Yields what brings the cotangents of heads together that devices share, each of which reads its own of them: they
    are summed over the devices that share a head, and the heads gathered."""
    if flow.shared is None:
        return
    axis, num_heads, copies = flow.shared.axis, flow.shared.num_heads, flow.shared.copies
    if num_heads == 1:
        yield "all_reduce", (axis,), flow.out_group_bytes, on_backward(Kind.SHARED_HEADS)
        return
    over_copies, over_heads = AxisPart(axis, num_heads, copies), AxisPart(axis, 1, num_heads)
    yield "all_reduce", (str(over_copies),), flow.out_group_bytes // num_heads, on_backward(Kind.SHARED_HEADS)
    yield "all_gather", (str(over_heads),), flow.out_group_bytes, on_backward(Kind.WHOLE_HEADS)
