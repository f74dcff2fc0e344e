"""Decides which leaves of a step are stored padded (`uneven="pad"`), and describes them.

A `Draft` of which nothing is decided comes in; the padded sizes of its leaves come out, with which the step is traced
again (`step.padding.stored.padded_traced`) before anything else is decided: every later room sees dims that divide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from splitjax.mesh import MeshShape
from splitjax.plan import LeafPlan, Spec, spec_axes
from splitjax.planning.draft import Draft
from splitjax.planning.fused import find_uneven
from splitjax.rules.pins import resolve
from splitjax.rules.uneven import padded_sizes
from splitjax.step.padding.rewriting import joined_leaves
from splitjax.trace.graph import Dim, Graph

Sizes = Mapping[int, int]


def find_padding(draft: Draft) -> dict[int, Sizes]:
    """Returns the padded dims of the leaves that are stored padded, by position: as the training step of an evaluation
    has them, as a pinned plan says, or so that parameters are split as their rules say first."""
    request, graph = draft.request, draft.graph
    if request.followed is not None:
        known = request.followed.values()
        found = {leaf.index: matching(known, leaf.path, leaf.shape) for leaf in graph.leaves if leaf.is_state}
        return {number: _sizes(plan) for number, plan in found.items() if plan is not None}
    if request.pinned is not None:
        planned = {leaf.path: leaf for leaf in request.pinned.leaves if leaf.logical is not None}
        fits = {leaf.index: planned.get(leaf.path) for leaf in graph.leaves}
        shapes = {leaf.index: leaf.shape for leaf in graph.leaves}
        return {n: _sizes(plan) for n, plan in fits.items() if plan is not None and plan.logical == shapes[n]}
    if request.uneven != "pad" or not request.returns_state:
        return {}
    pins = resolve(draft.traced.said, graph, draft.shape, must_divide=False)
    fused = find_uneven(draft)
    uneven = frozenset[tuple[int, int]]().union(*(each.uneven for each in fused))
    sizes = padded_sizes(graph, request.rules, draft.shape, pins.by_path, uneven)
    known = {(graph.atom_sizes[atom], sizes[label]) for atom, label in enumerate(graph.soft) if label in sizes}
    columns = {each.labels: size for each in fused if (size := each.padded(known)) is not None}
    padding = {}
    for leaf in graph.leaves if sizes else ():
        own = {dim: size for dim, atoms in enumerate(leaf.dims) if (size := _padded_size(graph, atoms, sizes, columns))}
        if own and leaf.is_state:
            padding[leaf.index] = own
    joined = joined_leaves(draft.traced.jaxpr, padding, draft.traced.matched) if padding else frozenset()
    return {number: own for number, own in padding.items() if number not in joined}


def _padded_size(
    graph: Graph, atoms: Dim, sizes: Mapping[int, int], fused: Mapping[tuple[int, ...], int]
) -> int | None:
    """Returns the size of a leaf's dim with its padding; None where it has none. `sizes`: by soft label. `fused`: by
    the labels of the columns of fused weights."""
    labels = tuple(graph.soft[atom] for atom in atoms)
    if labels in fused:
        return fused[labels]
    inside = math.prod(graph.atom_sizes[atom] for atom in atoms[1:])
    return sizes[labels[0]] * inside if labels and labels[0] in sizes else None


def matching(known: Iterable[LeafPlan], path: str, shape: tuple[int, ...], is_stored: bool = False) -> LeafPlan | None:
    """Returns the plan of a padded leaf that an evaluation has at `path`, or at the end of whose path: the one of its
    `shape`, as the step knows it, or as it `is_stored`."""
    fits = [leaf for leaf in known if leaf.logical is not None and (leaf.shape if is_stored else leaf.logical) == shape]
    exact = [leaf for leaf in fits if leaf.path == path]
    ends = [leaf for leaf in fits if leaf.path.endswith("/" + path)]
    params = [leaf for leaf in ends if leaf.role == "param"]
    return next(iter(exact or (ends if len(ends) == 1 else params)), None)


def _sizes(plan: LeafPlan) -> Sizes:
    assert plan.logical is not None, "a padded leaf knows what it is without"
    return {dim: n for dim, (n, size) in enumerate(zip(plan.shape, plan.logical, strict=True)) if n != size}


def logical_spec(leaf: LeafPlan, mesh: MeshShape, moves: bool = True) -> Spec:
    """Returns how a leaf is split without its padding: axes of a dim that then does not divide go to the largest of the
    whole dims that does, if there is one and they may (`moves`)."""
    if leaf.logical is None:
        return leaf.spec
    spec = list(leaf.spec)
    for dim, size in enumerate(leaf.logical):
        axes = spec_axes((spec[dim],))
        if not axes or size % mesh.size(axes) == 0:
            continue
        entry, spec[dim] = spec[dim], None
        if not moves:
            continue
        free = [d for d, own in enumerate(spec) if own is None and d != dim and leaf.logical[d] % mesh.size(axes) == 0]
        if free:
            spec[max(free, key=lambda d: leaf.logical[d] if leaf.logical else 0)] = entry
    return tuple(spec)


def describe(leaves: Iterable[LeafPlan]) -> str:
    """Says what the padded of a plan's `leaves` are, in a line for the plan; empty where none is."""
    padded = [leaf for leaf in leaves if leaf.logical is not None]
    if not padded:
        return ""
    shown = [leaf for leaf in padded if leaf.role == "param"] or padded
    texts = [f"{leaf.path} {_shape(leaf.logical)} as {_shape(leaf.shape)}" for leaf in shown[:4]]
    more = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
    others = len(padded) - len(shown)
    with_them = f", with {others} leaves of state that follow them" if others else ""
    num_bytes = sum(leaf.padding_bytes for leaf in padded)
    return (
        f'stored padded (uneven="pad"): {", ".join(texts)}{more}{with_them}; the padding takes {num_bytes} bytes of'
        " each device, and the step sees none of it"
    )


def _shape(shape: tuple[int, ...] | None) -> str:
    return " x ".join(map(str, shape or ()))
