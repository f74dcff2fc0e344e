"""Shards state further: optimizer state and summed gradients of whole parameters, over the devices that hold them
whole.

After Rajbhandari et al., "ZeRO" (arXiv 1910.02054), stages 1 and 2: where every device of an axis holds the same
parameter, each keeps a part of the optimizer state, receives the sum of that part of the gradient, and computes
that part of the new values, which all then gather. The parameters themselves stay as the rules have them, as
SplitBrain's convolutions do (arXiv 2112.15317); sharding those too is stage 3, the rule set `fsdp`.

A pure function over leaves, after the rules: one choice per parameter, for its gradient and all that follows it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from splitjax.mesh import MeshShape
from splitjax.plan import LeafPlan, Spec, spec_axes, spec_entry
from splitjax.rules.blocks import block_dims, blocks_cut
from splitjax.rules.match import axes_text, dim_text, mapped_dims
from splitjax.trace.graph import Graph, Leaf

Axes = tuple[str, ...]
Entries = tuple[Axes, ...]  # per dim its axes, major first
_SHARDED = ", sharded state"  # behind the rule of state that lies in parts of its own


def shard_state(
    graph: Graph, leaves: Sequence[LeafPlan], mesh: MeshShape, batch_axes: Sequence[str]
) -> tuple[tuple[LeafPlan, ...], tuple[str, ...]]:
    """Lays state that follows parameters over the batch axes over which its parameter is whole.

    **Arguments:**

    - `graph`, `leaves`: the traced step and what the rules gave it, in the same order.
    - `mesh`: the mesh's shape.
    - `batch_axes`: the axes that split the batch: over these gradients are summed.

    **Returns** the leaves, parameters with `LeafPlan.gradient`, and lines for the plan's notes. What divides by
    no axis stays as it was, and its note says so.
    """
    traced = {leaf.path: leaf for leaf in graph.leaves}
    trained = _trained(graph)
    chosen: dict[str, Entries] = {}
    out: list[LeafPlan] = []
    for leaf in leaves:
        if leaf.role == "param" and leaf.path in trained and (free := _free(leaf, mesh, batch_axes)):
            mine = traced[leaf.path]
            prefer = block_dims(graph, mine), mapped_dims(graph, mine)
            entries, missed = spread(leaf.shape, _entries(leaf), free, mesh, prefer)
            gradient = tuple(map(spec_entry, entries))
            cut = blocks_cut(graph, mine, leaf.spec, gradient, mesh)
            if cut is None:
                chosen[leaf.path], said = entries, _missed(mine, missed, mesh, "its gradient")
            else:
                gradient, said = leaf.spec, _cut(cut, free, mesh)
            note = "; ".join(filter(None, (leaf.note, said)))
            leaf = dataclasses.replace(leaf, gradient=None if gradient == leaf.spec else gradient, note=note)
        out.append(leaf)
    by_path = {leaf.path: leaf for leaf in out}
    out = [_state(graph, traced, by_path, chosen, mesh, batch_axes, leaf) for leaf in out]
    return tuple(out), _notes(leaves, out, mesh, batch_axes)


def without_sharding(graph: Graph, leaves: Sequence[LeafPlan]) -> list[Spec]:
    """Returns how the `leaves` of a traced step, laid out, would lie without `shard_state`: optimizer state that is
    sharded further has what its parameter has along the same dims."""
    traced = {leaf.path: leaf for leaf in graph.leaves}
    planned = {leaf.path: leaf for leaf in leaves}
    return [_without(graph, traced, planned, leaf) if leaf.rule.endswith(_SHARDED) else leaf.spec for leaf in leaves]


def _without(graph: Graph, traced: Mapping[str, Leaf], planned: Mapping[str, LeafPlan], leaf: LeafPlan) -> Spec:
    """Returns how a leaf that is sharded further would lie without; as it lies, where its parameter is not known."""
    param = planned.get(leaf.rule.removesuffix(_SHARDED).removeprefix("follows "))
    if param is None:
        return leaf.spec
    had = _entries(param)
    if leaf.shape != param.shape:  # a statistic of some of its dims
        if leaf.path not in traced or param.path not in traced:
            return leaf.spec
        label = lambda atoms: graph.hard[atoms[0]] if atoms else None
        by_label = {label(atoms): axes for atoms, axes in zip(traced[param.path].dims, had, strict=True) if atoms}
        had = tuple(by_label.get(label(atoms), ()) for atoms in traced[leaf.path].dims)
    return tuple(
        spec_entry(tuple(axis for axis in axes if axis in known))
        for axes, known in zip(_entries(leaf), had, strict=True)
    )


def spread(
    shape: Sequence[int], entries: Entries, free: Axes, mesh: MeshShape, prefer: Sequence[Sequence[int]] = ()
) -> tuple[Entries, Axes]:
    """Adds axes to the dims of an array: all of them to one dim if one divides by them, else each, the largest
    first, to whatever dim divides by it.

    **Arguments:**

    - `shape`: the array's.
    - `entries`: per dim the axes that it has, major first.
    - `free`: the axes to add.
    - `mesh`: the mesh's shape.
    - `prefer`: dims that come first, those of the first sequence before all others; then those that are whole, then the
      largest part.

    **Returns** the entries and the axes that fit nowhere: nothing divides by them, or they would come behind axes that
    the mesh lists after them, beside another split dim, which XLA's partitioner computes wrongly.
    """

    def with_axes(entries: Entries, axes: Axes) -> Entries | None:
        rank = lambda dim: (*(dim not in dims for dims in prefer), bool(entries[dim]), -shape[dim], dim)
        for dim in sorted(range(len(shape)), key=rank):
            wider = (*entries[:dim], (*entries[dim], *axes), *entries[dim + 1 :])
            if shape[dim] % mesh.size(wider[dim]) == 0 and is_in_order(wider, mesh):
                return wider
        return None

    whole = with_axes(entries, free)
    if whole is not None:
        return whole, ()
    missed: list[str] = []
    for axis in sorted(free, key=lambda axis: -mesh.size(axis)) if len(free) > 1 else ():
        wider = with_axes(entries, (axis,))
        if wider is None:
            missed.append(axis)
        else:
            entries = wider
    return entries, tuple(axis for axis in free if axis in missed or len(free) == 1)


def is_in_order(entries: Entries, mesh: MeshShape) -> bool:
    """Tells whether XLA's partitioner gets an array that is split so right: along one dim alone, or along each by axes
    in the order of the mesh. `entries`: per dim its axes, major first."""
    split = [wide for axes in entries if (wide := tuple(axis for axis in axes if axis in mesh.wide))]
    return len(split) < 2 or all(mesh.in_order(axes) == axes for axes in split)


def _trained(graph: Graph) -> frozenset[str]:
    """Finds the parameters that the step updates: a boundary differentiates them, or optimizer state follows them."""
    return frozenset(gradient.param for gradient in graph.gradients) | {
        leaf.follows for leaf in graph.leaves if leaf.follows
    }


def _free(leaf: LeafPlan, mesh: MeshShape, batch_axes: Sequence[str]) -> Axes:
    """Returns the batch axes over which a leaf is whole."""
    used = spec_axes(leaf.spec)
    return tuple(axis for axis in mesh.present(tuple(batch_axes)) if axis not in used)


def _entries(leaf: LeafPlan) -> Entries:
    """Returns the axes per dim of a planned leaf."""
    return tuple(spec_axes((entry,)) for entry in (*leaf.spec, *(None,) * (len(leaf.shape) - len(leaf.spec))))


def _state(
    graph: Graph,
    traced: Mapping[str, Leaf],
    planned: Mapping[str, LeafPlan],
    chosen: Mapping[str, Entries],
    mesh: MeshShape,
    batch_axes: Sequence[str],
    leaf: LeafPlan,
) -> LeafPlan:
    """Lays optimizer state out like its parameter's gradient; a statistic of some of its dims (Adafactor's) has the
    axes of those, and the others wherever they divide."""
    mine = traced[leaf.path]
    if leaf.role != "optimizer" or mine.follows is None or mine.follows not in chosen or math.prod(leaf.shape) == 1:
        return leaf
    param, entries = traced[mine.follows], chosen[mine.follows]
    before = _entries(planned[param.path])
    missed: Axes = ()
    if leaf.shape == param.shape and _entries(leaf) == before:
        missed = tuple(axis for axis in _free(leaf, mesh, batch_axes) if axis not in spec_axes(entries))
    else:
        added = {
            graph.hard[atoms[0]]: after[len(had) :]
            for atoms, had, after in zip(param.dims, before, entries, strict=True)
            if atoms
        }
        entries = _entries(leaf)
        for dim, atoms in enumerate(mine.dims):
            axes = added.get(graph.hard[atoms[0]], ()) if atoms else ()
            if (
                axes
                and not set(axes) & set(spec_axes(entries))
                and leaf.shape[dim] % mesh.size((*entries[dim], *axes)) == 0
                and is_in_order(wider := (*entries[:dim], (*entries[dim], *axes), *entries[dim + 1 :]), mesh)
            ):
                entries = wider
        used = spec_axes(entries)
        if left := tuple(axis for axis in _free(leaf, mesh, batch_axes) if axis not in used):
            entries, missed = spread(leaf.shape, entries, left, mesh)
    spec: Spec = tuple(map(spec_entry, entries))
    note = "; ".join(filter(None, (leaf.note, _missed(mine, missed, mesh, "it"))))
    if spec == leaf.spec:
        return dataclasses.replace(leaf, note=note)
    return dataclasses.replace(
        leaf,
        spec=spec,
        rule=f"{leaf.rule}{_SHARDED}",
        note=note,
        bytes_per_device=leaf.whole_bytes(mesh) // mesh.size(spec_axes(spec)),
    )


def _missed(leaf: Leaf, axes: Axes, mesh: MeshShape, what: str) -> str:
    """Says over which axes a leaf stays whole, as a note; "" for none."""
    if not axes:
        return ""
    dims = ", ".join(f"{dim_text(leaf, dim)} {size}" for dim, size in enumerate(leaf.shape)) or "a scalar"
    if any(size % mesh.size(axes) == 0 for size in leaf.shape):
        return (
            f"sharded state: {what} stays whole over {axes_text(mesh, axes)}: behind the axes that its dims have"
            f" already ({dims}), against the order of the mesh, XLA's partitioner would get it wrong; a mesh that"
            f" lists {' and '.join(axes)} last may do"
        )
    return f"sharded state: {what} stays whole over {axes_text(mesh, axes)}, by which nothing of it divides ({dims})"


def _cut(state: Leaf, axes: Axes, mesh: MeshShape) -> str:
    """Says over which axes a parameter's gradient and state stay whole, since the parts of the gradient cut through the
    blocks of `state`."""
    return (
        f"sharded state: its gradient and what follows it stay whole over {axes_text(mesh, axes)}: the blocks of"
        f" {state.path} {state.shape} are no parts of any of its dims"
    )


def _notes(
    before: Sequence[LeafPlan], after: Sequence[LeafPlan], mesh: MeshShape, batch_axes: Sequence[str]
) -> tuple[str, ...]:
    """Says in one line what was sharded, and what it saves."""
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old.spec != new.spec]
    gradients = sum(leaf.gradient is not None for leaf in after)
    if not changed and not gradients:
        return ("sharded state: nothing to shard, for the rules split every trained parameter over all batch axes",)
    saved = sum(old.bytes_per_device - new.bytes_per_device for old, new in changed)
    axes = axes_text(mesh, mesh.present(tuple(batch_axes)))
    return (
        (
            f"sharded state (ZeRO stages 1 and 2): {len(changed)} arrays of optimizer state and {gradients} gradients"
            f" lie over {axes}, {saved:,} bytes less state per device"
        ),
    )
