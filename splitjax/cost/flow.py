"""Follows activations between a plan's layers: per use of a weight, over which axes it is split, and what feeds it.

The traced step and the layout of its parameters come in; a chain of `WeightFlow`s, one a forward use of a weight in
program order, comes out. Predictions of collectives and memory, and the exchanges that lowering inserts, all read this
chain, so that what is predicted and what is compiled follow from the same account.

A graph does not keep the edges between uses, but its dim classes say enough: where a free dim of one use's weight and a
contracted dim of a later use's weight are in one local class, the later use reads the earlier one's output (through
elementwise operations, reshapes, attention).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import ml_dtypes  # noqa: F401  (registers bfloat16 and the float8 family with numpy)
import numpy as np

from splitjax.cost.heads import HeadReaders, SharedHeads, find_readers
from splitjax.mesh import MeshShape
from splitjax.plan import LeafPlan
from splitjax.trace.graph import Graph, Leaf, Pick, Reduction, Use

Axes = tuple[str, ...]
# Products of rows with the matrix of their group: XLA makes no parts of them, so no token travels to its expert.
RAGGED = "ragged_dot_general"
_ROLES = ("contracted", "free", "stacked", "whole")


@dataclasses.dataclass(frozen=True)
class WeightFlow:
    """Describes one use of a weight under a layout. Byte counts are of one device, all repetitions (`Use.trips`)
    together.

    In the names of the byte counts, *share* means a worker's examples, as replicated layers hold them, and *group* the
    examples that a device sees in this layer, with whole features.

    **Attributes:**

    - `use`: the operation.
    - `contracted`: the axes over which the weight's contracted dims stay split: row-parallel, or the rows of a table
      that is looked up.
    - `free`: the axes over which its free dims stay split: column-parallel.
    - `stacked`: the axes over which a dim is split that data and result share: experts.
    - `crossing`: whether replicated layers split their batch over the axes of `contracted` or `free` too, so that
      entering and leaving this use reshards. `travels`: whether they split it over those of `stacked`, so that examples
      travel to the devices of their experts.
    - `data_share_bytes`, `data_group_bytes`: bytes of the activations that it reads; 0 for lookups of ids.
    - `out_share_bytes`, `out_group_bytes`: bytes of its output.
    - `producer`: the position in the chain of the last use before it whose output it reads; None for none known.
    - `consumer`: the position of the first use that reads its output; None for none known.
    - `producers`: the positions of all uses before it whose output it reads, the last first: of an attention's output
      projection those of query, key and value.
    - `same_input`: the position of an earlier use of the very same input (q, k and v) that is split over the same axes;
      None for none.
    - `recurs`: whether it reads, in every iteration of a loop, what it gave in the iteration before.
    - `reduced`: what reductions over the columns of its output send, where these stay split behind it.
    - `at_hand`: whether it reads a batch, no use's output, and that batch lies where it is wanted
      (`planning.sites.constraints.place_batches`).
    - `sorting`: what sorts the rows that it reads by expert, or puts back those that it makes.
    - `shared`: the heads of an attention that its whole output holds, where devices share them; None where none do, and
      where no gradient boundary holds it: XLA decides there what each device computes.
    - `joined`: the local label of its columns, where they are concatenated with other values while no use reads them as
      they are: its output is brought together then (`planning.sites.joined_outputs`). None elsewhere.
    """

    use: Use
    contracted: Axes
    free: Axes
    stacked: Axes
    crossing: bool
    data_share_bytes: int
    data_group_bytes: int
    out_share_bytes: int
    out_group_bytes: int
    producer: int | None
    consumer: int | None
    same_input: int | None
    at_hand: bool = False
    producers: tuple[int, ...] = ()
    recurs: bool = False
    reduced: tuple[Reduced, ...] = ()
    shared: SharedHeads | None = None
    travels: bool = False
    sorting: tuple[Sorting, ...] = ()
    joined: int | None = None

    @property
    def axes(self) -> Axes:
        """Returns all axes over which the weight stays split while it is used."""
        return (*self.contracted, *self.free, *self.stacked)

    @property
    def by_layout(self) -> Hashable:
        """What a layout decides about it: two flows of one use that have it equal are equal."""
        return self.contracted, self.free, self.stacked, self.same_input, self.at_hand, self.shared, self.sorting


@dataclasses.dataclass(frozen=True)
class Reduced:
    """Says what a reduction over columns that devices have parts of sends.

    - `op`: the collective. `num_bytes`: what its formula takes. `dtype`: of what is sent.
    - `repeated`: how often rematerialisation repeats it.
    """

    op: str
    num_bytes: int
    dtype: str
    repeated: int


@dataclasses.dataclass(frozen=True)
class Sorting:
    """Says what it sends to sort rows by expert, or to put them back.

    - `pick`: the operation. `axes`: over which the rows lie. `is_before`: whether it stands before the product.
    - `num_bytes`: of the value with all examples. `num_rows`: the elements of the rows. Both are of all repetitions.
    """

    pick: Pick
    axes: Axes
    is_before: bool
    num_bytes: int
    num_rows: int


def used_axes(leaf: LeafPlan, mesh: MeshShape, batch_axes: Sequence[str], replicated_batch: str) -> Axes:
    """Returns the axes over which a weight of the layout `leaf` stays split while it is used (model parallelism); over
    the rest of its axes it is stored in pieces and gathered first (fully sharded data parallelism).

    **Arguments:** `mesh`: the shape of the mesh; axes of size 1 are left out. `batch_axes`: its axes over which batch
    arguments are split. `replicated_batch`: as for `cost.predict_collectives`.

    Over axes that do not split the batch a weight stays split. With `replicated_batch = "all"` every axis splits the
    batch of replicated layers: a weight stays split within the group, unless it is split over an axis of the role data
    or storage, between groups, as well: the examples of its layer then stay where they are, and the whole weight comes
    to them."""
    axes = tuple(axis for axis in leaf.axes if axis in mesh.wide)
    if not axes or (replicated_batch == "all" and mesh.storing.isdisjoint(axes)):
        return axes
    return tuple(axis for axis in axes if axis not in batch_axes)


@dataclasses.dataclass(frozen=True)
class UseLinks:
    """Holds what no layout changes about a use of a weight: what it reads and writes, and between which uses it stands.

    **Attributes:**

    - `use`: the operation. `roles`: of its weight's dims: contracted, free, stacked or whole.
    - `data_bytes`, `out_bytes`: bytes of the activations that it reads (0 for lookups of ids) and of its output, for
      the whole batch and all repetitions; `data_batched`, `out_batched`: whether these hold examples.
    - `producer`, `consumer`, `producers`, `recurs`: as for `WeightFlow`.
    - `same_value`: the positions of earlier uses of other weights that read the very same input.
    - `reductions`: those over the columns of its output, where its weight has one dim of these.
    - `heads`: the heads of an attention that its output has and that more heads read; None for none.
    - `picks`: what sorts the rows that a ragged product reads, and puts back those that it makes; whether it stands
      before the product.
    - `deals`: whether tokens can be dealt out to the devices of their experts: in a gradient boundary, and where no
      gradient is taken, but for ragged products. A backward pass that plain JAX traced would gather them.
    - `joined`: the local label of its columns, where they are concatenated with other values and its weight has one
      dim of these; None elsewhere.
    """

    use: Use
    roles: tuple[str, ...]
    data_bytes: int
    out_bytes: int
    data_batched: bool
    out_batched: bool
    producer: int | None
    consumer: int | None
    same_value: tuple[int, ...]
    producers: tuple[int, ...] = ()
    recurs: bool = False
    reductions: tuple[Reduction, ...] = ()
    heads: HeadReaders | None = None
    deals: bool = True
    picks: tuple[tuple[Pick, bool], ...] = ()
    joined: int | None = None


def link_uses(graph: Graph) -> tuple[UseLinks, ...]:
    """Returns the links of every forward use of a parameter of `graph`, in program order: they hold for every layout.

    What a backward pass sends follows from the forward uses, so uses in a backward pass that plain JAX already traced
    are passed over."""
    traced = {leaf.path: leaf for leaf in graph.leaves}
    uses = [use for use in graph.uses if not use.backward and use.param in traced]
    roles = [_dim_roles(graph, use, traced[use.param]) for use in uses]
    reads = [_classes(graph, use, traced[use.param], role, "contracted") for use, role in zip(uses, roles, strict=True)]
    writes = [_classes(graph, use, traced[use.param], role, "free") for use, role in zip(uses, roles, strict=True)]
    consumers = _first_readers(reads, writes)
    reductions = _reductions(graph, uses, roles, writes)
    heads = dict(find_readers(graph, uses, roles))
    picks = _picks(graph, uses)
    derived = {use.param for use in graph.uses if use.backward}
    recurrent = {path for layer in graph.layers if layer.kind == "recurrent" for path in layer.params}
    last_writer: dict[int, int] = {}
    writers: dict[int, list[int]] = {}
    read_by: dict[int, tuple[Hashable, ...]] = {}  # per use, what it reads
    readers: dict[Hashable, list[int]] = {}  # of one value
    links = []
    for i, use in enumerate(uses):
        # Uses of one value, or of what looks like one and is handed on by neither to the other (copies of a cast).
        alike: tuple[Hashable, ...] = () if use.data_value is None else (use.data_value,)
        if reads[i] != writes[i]:
            alike += ((use.data_shape, use.data_dtype, use.trips, reads[i]),)
        others = sorted({j for value in alike for j in readers.get(value, ())})
        links.append(
            UseLinks(
                use,
                roles[i],
                data_bytes=_num_bytes(use.data_shape, use.data_dtype) * use.trips if _reads_activations(use) else 0,
                out_bytes=_num_bytes(use.out_shape, use.out_dtype) * use.trips,
                data_batched=any(dim and dim[0] in graph.example_atoms for dim in use.data_dims),
                out_batched=any(dim and dim[0] in graph.example_atoms for dim in use.out_dims),
                producer=max((last_writer[label] for label in reads[i] if label in last_writer), default=None),
                producers=tuple(sorted({j for label in reads[i] for j in writers.get(label, ())}, reverse=True)),
                recurs=use.param in recurrent and not reads[i].isdisjoint(writes[i]),
                consumer=consumers[i],
                # A weight that is used twice reads two values: it would be the same operation otherwise.
                same_value=tuple(j for j in others if uses[j].param != use.param),
                reductions=tuple(reductions.get(i, ())),
                heads=heads.get(i),
                picks=tuple(picks.get(i, ())),
                deals=use.primitive != RAGGED and (use.in_boundary or use.param not in derived),
                joined=_joined(graph, traced[use.param], roles[i]),
            )
        )
        for label in writes[i]:
            # What read a layer's input together writes together: query, key and value.
            beside = [j for j in writers.get(label, ()) if set(alike) & set(read_by.get(j, ()))]
            writers[label] = [*beside, i]
        read_by[i] = alike
        last_writer.update(dict.fromkeys(writes[i], i))
        for value in alike:
            readers.setdefault(value, []).append(i)
    return tuple(links)


def _joined(graph: Graph, leaf: Leaf, roles: Sequence[str]) -> int | None:
    """Returns the local label of the only free dim of a weight, if values with that dim are concatenated along it; None
    otherwise. `roles`: of its dims."""
    free = [dim for dim, role in zip(leaf.dims, roles, strict=True) if role == "free"]
    if len(free) != 1 or not free[0]:
        return None
    label = graph.local[free[0][0]]
    return label if any(each.label == label for each in graph.joined) else None


def _reductions(
    graph: Graph, uses: Sequence[Use], roles: Sequence[Sequence[str]], writes: Sequence[frozenset[int]]
) -> dict[int, list[Reduction]]:
    """Returns the reductions over columns of the last output before them, by the position of its use."""
    found: dict[int, list[Reduction]] = {}
    for reduction in graph.reductions:
        before = (i for i in reversed(range(len(uses))) if uses[i].site < reduction.site)
        source = next((i for i in before if writes[i] & reduction.labels), None)
        if source is not None and list(roles[source]).count("free") == 1:
            found.setdefault(source, []).append(reduction)
    return found


def _picks(graph: Graph, uses: Sequence[Use]) -> dict[int, list[tuple[Pick, bool]]]:
    """Returns what sorts and puts back the rows of ragged products, by the position of the first that stands behind it,
    or else of the last before it; and whether it stands before that."""
    found: dict[int, list[tuple[Pick, bool]]] = {}
    ragged = [i for i, use in enumerate(uses) if use.primitive == RAGGED and use.in_boundary]
    for pick in graph.picks if ragged else ():
        behind = next((i for i in ragged if uses[i].site > pick.site), None)
        before = next((i for i in reversed(ragged) if uses[i].site < pick.site), None)
        if behind is not None and pick.primitive == "gather":
            # Between two layers: what puts back the results of the first has as many rows as these.
            ends = before is not None and uses[before].out_shape == pick.shape != uses[behind].data_shape
            found.setdefault(before if ends and before is not None else behind, []).append((pick, not ends))
        elif before is not None:
            found.setdefault(before, []).append((pick, False))
    return found


def _first_readers(reads: Sequence[frozenset[int]], writes: Sequence[frozenset[int]]) -> list[int | None]:
    """Returns for every use the position of the first use after it that reads a class that it writes."""
    first: list[int | None] = []
    next_reader: dict[int, int] = {}
    for i in reversed(range(len(reads))):
        first.append(min((next_reader[label] for label in writes[i] if label in next_reader), default=None))
        next_reader.update(dict.fromkeys(reads[i], i))
    return first[::-1]


@dataclasses.dataclass(frozen=True)
class Setting:
    """Says on what mesh a step is laid out, and how its examples lie.

    - `mesh`: the shape of the mesh. `batch_axes`: its axes over which batch arguments are split.
    - `replicated_batch`: as for `cost.LaidOutStep`.
    """

    mesh: MeshShape
    batch_axes: Axes
    replicated_batch: str

    @functools.cached_property
    def num_workers(self) -> int:
        """The number of parts that the batch has."""
        return self.mesh.size(self.batch_axes)


Split = tuple[Axes, Axes, Axes]  # the axes over which a weight's contracted, free and stacked dims stay split


def split_of(links: UseLinks, leaf: LeafPlan, setting: Setting) -> Split:
    """Returns the axes over which the contracted, free and stacked dims of a use's weight stay split while it is used.
    `leaf`: the layout of the weight."""
    axes_of: dict[str, list[str]] = {role: [] for role in _ROLES}
    mesh = setting.mesh
    used = used_axes(leaf, mesh, setting.batch_axes, setting.replicated_batch)
    for role, axes in zip(links.roles, leaf.axes_by_dim, strict=False):
        # Experts stay where they are, whatever the axis, if tokens can travel to them.
        stays = role == "stacked" and _can_travel(links, axes, setting)
        axes_of[role].extend(axis for axis in axes if axis in mesh.wide and (stays or axis in used))
    return tuple(axes_of["contracted"]), tuple(axes_of["free"]), tuple(axes_of["stacked"])


def flow_of(
    links: UseLinks, split: Split, split_at: Callable[[int], Split], planned: Mapping[str, LeafPlan], setting: Setting
) -> WeightFlow:
    """Returns the flow of a use under a layout.

    **Arguments:** `links`: of the use. `split`: what `split_of` says of it. `split_at`: the same of the use at a
    position before it. `planned`: the layout of its weight and of the batches that it reads, by path."""
    contracted, free, stacked = split
    own = (*contracted, *free, *stacked)
    mesh, batch_axes, use = setting.mesh, setting.batch_axes, links.use
    num_workers = setting.num_workers
    apart = tuple(axis for axis in batch_axes if axis not in own)
    num_shares = math.prod(mesh.sizes[axis] for axis in apart)  # of the batch, in this layer
    same_input = (j for j in links.same_value if split_at(j)[1:] == (free, stacked))
    stays = bool(free) and not set(own) & set(batch_axes)  # else its output returns to the workers
    joined = links.joined if stays and links.consumer is None and use.in_boundary else None
    return WeightFlow(
        use,
        contracted,
        free,
        stacked,
        crossing=any(axis in batch_axes for axis in (*contracted, *free)),
        travels=any(axis in batch_axes for axis in stacked),
        sorting=tuple(_sortings(links, own, planned, setting)),
        data_share_bytes=links.data_bytes // (num_workers if links.data_batched else 1),
        data_group_bytes=links.data_bytes // (num_shares if links.data_batched else 1),
        out_share_bytes=links.out_bytes // (num_workers if links.out_batched else 1),
        out_group_bytes=links.out_bytes // (num_shares if links.out_batched else 1),
        producer=links.producer,
        consumer=links.consumer,
        same_input=next(same_input, None) if free or stacked else None,
        at_hand=links.producer is None
        and bool(use.fed_by)
        and all(
            path in planned and not set(planned[path].axes_by_dim[0] if planned[path].spec else ()) & set(own)
            for path in use.fed_by
        ),
        producers=links.producers,
        recurs=links.recurs,
        reduced=tuple(_sent_by_reductions(links, num_shares, mesh.size(free))) if stays and joined is None else (),
        shared=_shared(links.heads, split_at, setting) if links.heads and use.in_boundary and not own else None,
        joined=joined,
    )


def _sortings(links: UseLinks, own: Axes, planned: Mapping[str, LeafPlan], setting: Setting) -> Iterator[Sorting]:
    """Yields what sorts the rows around a use, where each device computes its own of them: its weight is stored in
    parts. Elsewhere XLA may have every device compute all. `own`: the axes over which the weight stays split."""
    axes = setting.mesh.present(setting.batch_axes)
    for pick, is_before in links.picks:
        if set(planned[links.use.param].axes) & set(axes) - set(own):
            num_bytes = _num_bytes(pick.shape, pick.dtype) * pick.trips
            yield Sorting(pick, axes, is_before, num_bytes, num_rows=math.prod(pick.rows) * pick.trips)


def _shared(heads: HeadReaders, split_at: Callable[[int], Split], setting: Setting) -> SharedHeads | None:
    """Returns how devices share heads of a whole weight; None where the weights whose heads read them are whole too, or
    where devices do not divide evenly among the heads."""
    mesh = setting.mesh
    axes = next((axes for j in heads.readers if (axes := (*split_at(j)[0], *split_at(j)[1]))), ())
    if len(axes) != 1 or axes[0] in setting.batch_axes or mesh.size(axes) % heads.num_heads:
        return None
    return SharedHeads(axes[0], heads.num_heads, mesh.size(axes) // heads.num_heads)


def _sent_by_reductions(links: UseLinks, num_shares: int, num_parts: int) -> Iterator[Reduced]:
    """Yields what the reductions over the columns of a use's output send.

    **Arguments:** `links`: of the use. `num_shares`: the parts of the batch. `num_parts`: the parts of the columns.

    XLA all-reduces the devices' results; of the place of a maximum it gathers their maxima and places."""
    for each in links.reductions:
        if each.primitive in ("argmax", "argmin"):
            for dtype in (each.operand_dtype, each.dtype):
                num_bytes = num_parts * _num_bytes(each.shape, dtype) * each.trips // num_shares
                yield Reduced("all_gather", num_bytes, dtype, each.repeated)
        else:
            num_bytes = _num_bytes(each.shape, each.dtype) * each.trips // num_shares
            yield Reduced("all_reduce", num_bytes, each.dtype, each.repeated)


def flows(
    graph: Graph, leaves: Sequence[LeafPlan], mesh: MeshShape, batch_axes: Sequence[str], replicated_batch: str
) -> tuple[WeightFlow, ...]:
    """Returns the flow of every forward use of a parameter, in program order.

    **Arguments:** `graph`: the traced step. `leaves`: the layout of all of its leaves. `mesh`, `batch_axes`,
    `replicated_batch`: as for `cost.predict_collectives`."""
    return flow_all(link_uses(graph), leaves, Setting(mesh, tuple(batch_axes), replicated_batch))


def flow_all(links: Sequence[UseLinks], leaves: Sequence[LeafPlan], setting: Setting) -> tuple[WeightFlow, ...]:
    """Returns the flow of every use whose `links` are given, in their order, under the layout `leaves`."""
    planned = {leaf.path: leaf for leaf in leaves}
    splits = [split_of(each, planned[each.use.param], setting) for each in links]
    return tuple(
        flow_of(each, split, splits.__getitem__, planned, setting) for each, split in zip(links, splits, strict=True)
    )


def linked(position: int | None, axes: Axes, chain: Sequence[WeightFlow]) -> WeightFlow | None:
    """Returns the neighbour at a `position` of the `chain`, if it is split over some of these `axes` too; None
    otherwise: a replicated neighbour, like none at all (`position` None), has no split value to hand on."""
    flow = None if position is None else chain[position]
    return flow if flow and set(flow.axes) & set(axes) else None


def stays_dealt(position: int | None, axes: Axes, chain: Sequence[WeightFlow]) -> bool:
    """Tells whether the neighbour at a `position` of the `chain` has its tokens with experts over the same `axes`, so
    that nothing travels between the two."""
    neighbour = linked(position, axes, chain)
    return neighbour is not None and neighbour.stacked == axes


def _num_bytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def _reads_activations(use: Use) -> bool:
    """Returns whether a use reads activations. A lookup reads ids: nothing is differentiated through them, and they are
    too small to count."""
    return use.data is not None and np.dtype(use.data_dtype).kind not in "iub"


def reads_ids(use: Use) -> bool:
    """Returns whether a use looks rows up by ids: its derivative reads the ids again, not the weight."""
    return use.data is not None and np.dtype(use.data_dtype).kind in "iub"


def _classes(graph: Graph, use: Use, leaf: Leaf, roles: Sequence[str], role: str) -> frozenset[int]:
    """Returns the local dim classes of those dims of a weight whose entry in `roles` is `role`."""
    return frozenset(
        graph.local[atom] for dim, its_role in zip(leaf.dims, roles, strict=True) if its_role == role for atom in dim
    )


def _dim_roles(graph: Graph, use: Use, leaf: Leaf) -> tuple[str, ...]:
    """Returns the role of every dim of a use's weight: contracted, free, stacked, or whole (a window's height)."""
    data = {graph.local[atom] for dim in use.data_dims for atom in dim}
    out = {graph.local[atom] for dim in use.out_dims for atom in dim}
    names = leaf.dim_names or (None,) * len(leaf.dims)
    lookup = not _reads_activations(use)
    return tuple(
        _dim_role(name, {graph.local[atom] for atom in dim}, data, out, lookup)
        for dim, name in zip(leaf.dims, names, strict=True)
    )


def _dim_role(name: str | None, classes: set[int], data: set[int], out: set[int], lookup: bool) -> str:
    """Decides the role of a dim by its classes, and by its `name` where classes tie (square recurrent kernels) or say
    nothing. `lookup`: the use reads ids."""
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


def _can_travel(links: UseLinks, axes: Axes, setting: Setting) -> bool:
    """Tells whether examples can travel to experts that are split over `axes`: where they have to, these are the last
    axes of the batch. What a device has after an all-to-all along others is no part of the examples that lie side by
    side."""
    batch_axes = setting.batch_axes
    shared = tuple(axis for axis in setting.mesh.present(axes) if axis in batch_axes)
    return not shared or (links.deals and batch_axes[-len(shared) :] == shared)
