"""Follows activations between a plan's layers: per use of a weight, over which axes it is split, and what feeds it.

The traced step and the layout of its parameters come in; a chain of `WeightFlow`s, one a forward use of a weight in
program order, comes out. Predictions of collectives and memory, and the exchanges that lowering inserts, all read this
chain, so that what is predicted and what is compiled follow from the same account.

What is the same under every layout, such as which use reads the output of which, comes from `cost.use_links`; over
which axes a use is split, and what is resharded around it, is added here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from splitjax.cost.heads import HeadReaders, SharedHeads
from splitjax.cost.use_links import Met, UseLinks, link_uses, num_bytes
from splitjax.mesh import MeshShape
from splitjax.plan import LeafPlan
from splitjax.primitives.walk import Site
from splitjax.trace.activations.picks import Pick
from splitjax.trace.graph import Graph, Use

Axes = tuple[str, ...]
_ROLES = ("contracted", "free", "stacked", "whole")
_PLACES = {"reduce_max": "argmax", "reduce_min": "argmin"}  # what gives the place of a maximum or minimum


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
    - `columns_inside`: as for `cost.use_links.UseLinks`.
    - `recurs`: whether it reads, in every iteration of a loop, what it gave in the iteration before.
    - `reduced`: what reductions over the columns of its output send if these stay split, which depends on who reads
      them (`leaves_group`).
    - `at_hand`: whether it reads a batch, no use's output, and that batch lies where it is wanted
      (`planning.sites.constraints.place_batches`).
    - `sorting`: what sorts the rows that it reads by expert, or puts back those that it makes.
    - `sharable`: the heads of an attention that its whole output holds, which devices share if a gradient boundary
      holds it; None where there are none.
    - `joins`: the positions of the uses whose columns are parts of a joined dim that it reads.
    - `brings`: what its columns meet that a replicated layer made, whose examples lie as such layers have them, with
      the bytes of a worker's share; None for nothing. Ask `brought`, which knows whether the columns are left where
      they are.
    - `meets_examples`: whether its output is added to, or joined with, values whose examples lie as replicated layers
      have them (`leaves_group`).
    - `joined`: the site of the first operation that reads its columns where they are concatenated with other values, or
      meet whole rows of a table, if no use reads them as they are: its output is brought together there
      (`planning.sites.joined_outputs`). None elsewhere.
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
    columns_inside: bool = False
    recurs: bool = False
    reduced: tuple[Reduced, ...] = ()
    sharable: SharedHeads | None = None
    travels: bool = False
    sorting: tuple[Sorting, ...] = ()
    joins: tuple[int, ...] = ()
    meets_examples: bool = False
    brings: Met | None = None
    joined: Site | None = None

    @property
    def axes(self) -> Axes:
        """Returns all axes over which the weight stays split while it is used."""
        return (*self.contracted, *self.free, *self.stacked)

    @property
    def shared(self) -> SharedHeads | None:
        """Returns the heads that devices share; None where no gradient boundary holds this use: XLA decides there what
        each device computes."""
        return self.sharable if self.use.in_boundary else None

    @property
    def by_layout(self) -> Hashable:
        """What a layout decides about it: two flows of one use that have it equal are equal."""
        split = self.contracted, self.free, self.stacked
        meets = self.meets_examples, self.brings, self.joined
        return split, self.same_input, self.at_hand, self.sharable, self.sorting, meets


@dataclasses.dataclass(frozen=True)
class Reduced:
    """Says what a reduction over columns that devices have parts of sends.

    - `op`: the collective. `num_bytes`: what its formula takes. `dtype`: of what is sent.
    - `repeated`: how often rematerialisation repeats it. `backward`: whether it is what the backward pass reduces.
    - `beside_place`: whether it is a maximum or minimum of what the place of one is taken of, too.
    """

    op: str
    num_bytes: int
    dtype: str
    repeated: int
    backward: bool = False
    beside_place: bool = False


@dataclasses.dataclass(frozen=True)
class Sorting:
    """Says what it sends to sort rows by expert, or to put them back.

    - `pick`: the operation. `axes`: over which the rows lie.
    - `num_bytes`: of the value with all examples. `num_rows`: the elements of the rows. Both are of all repetitions.
    """

    pick: Pick
    axes: Axes
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
    crossed = (*contracted, *free)
    crossing = not set(crossed).isdisjoint(batch_axes)
    meets_examples = crossing and _meets_examples(links, crossed, split_at)
    same_input = (j for j in links.same_value if split_at(j)[1:] == (free, stacked))
    stays = bool(free) and not set(own) & set(batch_axes)  # else whole layers have their examples elsewhere
    sites = [links.joined] if links.joined is not None and free and not stacked and not meets_examples else []
    # Rows of a table that is split by columns, too, have the parts that are met; those of any other are whole.
    if links.compared is not None and stays and not any(split_at(j)[1] for j in links.compared[1]):
        sites.append(links.compared[0])
    joined = min(sites, default=None) if links.consumer is None and use.in_boundary else None
    return WeightFlow(
        use,
        contracted,
        free,
        stacked,
        crossing=crossing,
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
        columns_inside=links.columns_inside,
        recurs=links.recurs,
        reduced=tuple(_sent_by_reductions(links, num_shares, mesh.size(free), joined)) if free else (),
        sharable=_sharable(links.heads, split_at, setting) if links.heads and not own else None,
        joins=links.joins,
        meets_examples=meets_examples,
        brings=_brought(links.met, own, split_at, num_workers)
        if crossing and free and use.in_boundary and not (contracted or stacked or meets_examples or joined)
        else None,
        joined=joined,
    )


def _meets_examples(links: UseLinks, axes: Axes, split_at: Callable[[int], Split]) -> bool:
    """Tells whether a use's output meets values that have their examples over `axes`, as they come from a replicated
    layer, or one reads them first."""
    met = [at for at in (links.stream, *links.joined_with) if at is not None]
    return any(set(axes).isdisjoint(axis for role in split_at(at) for axis in role) for at in met)


def _brought(met: Met | None, axes: Axes, split_at: Callable[[int], Split], num_workers: int) -> Met | None:
    """Returns what a use's columns meet, if it comes from a layer that has its examples over these `axes`, with the
    bytes of a worker's share; None otherwise."""
    if met is None or not set(axes).isdisjoint(axis for role in split_at(met.head) for axis in role):
        return None
    return dataclasses.replace(met, num_bytes=met.num_bytes // num_workers)


def _sortings(links: UseLinks, own: Axes, planned: Mapping[str, LeafPlan], setting: Setting) -> Iterator[Sorting]:
    """Yields what sorts the rows around a use, where each device computes its own of them: its weight is stored in
    parts. Elsewhere XLA may have every device compute all. `own`: the axes over which the weight stays split."""
    axes = setting.mesh.present(setting.batch_axes)
    for pick in links.picks:
        if set(planned[links.use.param].axes) & set(axes) - set(own):
            whole = num_bytes(pick.shape, pick.dtype) * pick.trips
            yield Sorting(pick, axes, whole, num_rows=math.prod(pick.rows) * pick.trips)


def _sharable(heads: HeadReaders, split_at: Callable[[int], Split], setting: Setting) -> SharedHeads | None:
    """Returns how devices share heads of a whole weight; None where the weights whose heads read them are whole too, or
    where devices do not divide evenly among the heads."""
    mesh = setting.mesh
    axes = next((axes for j in heads.readers if (axes := (*split_at(j)[0], *split_at(j)[1]))), ())
    if len(axes) != 1 or axes[0] in setting.batch_axes or mesh.size(axes) % heads.num_heads:
        return None
    return SharedHeads(axes[0], heads.num_heads, mesh.size(axes) // heads.num_heads)


def _sent_by_reductions(links: UseLinks, num_shares: int, num_parts: int, joined: Site | None) -> Iterator[Reduced]:
    """Yields what the reductions over the columns of a use's output send.

    **Arguments:** `links`: of the use. `num_shares`: the parts of the batch. `num_parts`: the parts of the columns.
    `joined`: the site from which on the columns are whole, so that reductions over them send nothing; None for none.

    XLA all-reduces the devices' results; of the place of a maximum it gathers their maxima and places."""
    for each in links.reductions:
        if joined is not None and each.site >= joined:
            continue
        if each.primitive in _PLACES.values():
            for dtype in (each.operand_dtype, each.dtype):
                sent = num_parts * num_bytes(each.shape, dtype) * each.trips // num_shares
                yield Reduced("all_gather", sent, dtype, each.repeated)
        else:
            sent = num_bytes(each.shape, each.dtype) * each.trips // num_shares
            beside = any(
                (other.primitive, other.labels, other.shape) == (_PLACES.get(each.primitive), each.labels, each.shape)
                for other in links.reductions
            )
            yield Reduced("all_reduce", sent, each.dtype, each.repeated, each.backward, beside)


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


def feeding(position: int | None, axes: Axes, chain: Sequence[WeightFlow]) -> WeightFlow | None:
    """Returns the producer at a `position` of the `chain`, if it is split over some of these `axes`, too, and its
    output is not taken to the workers whose examples it is, for what it meets there; None otherwise."""
    source = linked(position, axes, chain)
    return None if source is None or source.meets_examples else source


def has_group(flow: WeightFlow, axes: Axes, chain: Sequence[WeightFlow]) -> bool:
    """Tells whether what a use reads is there for the examples of its whole group: a layer that is split over some
    of these `axes`, too, made it, or it was joined of columns that were brought together."""
    is_joined = bool(flow.joins) and all(chain[j].joined is not None for j in flow.joins)
    return is_joined or feeding(flow.producer, axes, chain) is not None


def leaves_group(flow: WeightFlow, chain: Sequence[WeightFlow]) -> bool:
    """Tells whether the output of a split use is taken to the workers whose examples it is: a replicated layer reads it
    first, or it is added to what lies so. Elsewhere columns stay split until another layer reads them, or to the end,
    and sums of rows are had by all devices of the group."""
    axes = (*flow.contracted, *flow.free)
    if not flow.crossing or not axes:
        return False
    is_read_whole = flow.consumer is not None and linked(flow.consumer, axes, chain) is None
    return is_read_whole or flow.meets_examples


def brought(flow: WeightFlow, chain: Sequence[WeightFlow]) -> Met | None:
    """Returns what the columns of a use meet and what becomes columns there, as it was made by a replicated layer; None
    where there is nothing, or the columns leave their group before."""
    return None if flow.brings is None or leaves_group(flow, chain) else flow.brings


def stays_dealt(position: int | None, axes: Axes, chain: Sequence[WeightFlow]) -> bool:
    """Tells whether the neighbour at a `position` of the `chain` has its tokens with experts over the same `axes`, so
    that nothing travels between the two."""
    neighbour = linked(position, axes, chain)
    return neighbour is not None and neighbour.stacked == axes


def _can_travel(links: UseLinks, axes: Axes, setting: Setting) -> bool:
    """Tells whether examples can travel to experts that are split over `axes`: where they have to, these are the last
    axes of the batch. What a device has after an all-to-all along others is no part of the examples that lie side by
    side."""
    batch_axes = setting.batch_axes
    shared = tuple(axis for axis in setting.mesh.present(axes) if axis in batch_axes)
    return not shared or (links.deals and batch_axes[-len(shared) :] == shared)
