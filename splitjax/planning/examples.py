"""Tells where the examples of a batch have to be told apart, and refuses batches in which they cannot.

A layout alone needs no examples: a batch that does not divide lies over fewer devices, and arrays whose leading dims
are of their own (the nodes and edges of graphs) are laid out one by one. What gives workers, turns or microbatches
examples of their own needs as many in every array of the batch, and equal shares.
"""

from __future__ import annotations

import math

from splitjax.errors import BatchError
from splitjax.mesh import MeshShape
from splitjax.planning.draft import Draft
from splitjax.primitives.walk import boundaries, everywhere
from splitjax.roles import Role
from splitjax.rules.match import axes_text
from splitjax.trace.graph import Graph


def check_examples(draft: Draft) -> None:
    """Raises `BatchError` where a step, a `draft` of its plan, has to tell its examples apart and cannot."""
    reason = _apart(draft)
    if reason is not None:
        place, num_microbatches = f"call of {draft.request.name}", math.lcm(*_microbatches(draft))
        check_shares(draft.graph, draft.shape, _wanted_axes(draft), reason, place, num_microbatches)


def check_shares(
    graph: Graph, mesh: MeshShape, axes: tuple[str, ...], reason: str, place: str, num_microbatches: int = 1
) -> None:
    """Raises `BatchError` where the batch has no examples that are divided into equal shares.

    **Arguments:** `graph`: the step. `mesh`: of its plan. `axes`: the mesh axes along which the shares lie. `reason`:
    who needs them, in words. `place`: what an error names as its place. `num_microbatches`: into how many parts each
    share is cut then, which the remedy takes into account."""
    sizes = {leaf.path: leaf.shape[leaf.example_dim] for leaf in graph.leaves if leaf.role == "batch" and leaf.shape}
    if len(set(sizes.values())) > 1:
        raise BatchError(
            f"batch arrays disagree on the number of examples (their leading dim), and {reason} needs to tell examples"
            " apart",
            value=sizes,
            place=place,
            remedy=(
                "give all batch arrays the same leading dim, pass what is not per example as an argument of its own,"
                " outside batch_argnums, or do without it: every array is laid out for itself then"
            ),
        )
    num = mesh.size(axes)
    for path, size in sizes.items():
        if size % num:
            unit = num * num_microbatches
            smaller, larger = size // unit * unit, -(-size // unit) * unit
            nearest = f"{smaller} or {larger}" if smaller else f"{larger}"
            times = f" times {num_microbatches} microbatches" if num_microbatches > 1 else ""
            raise BatchError(
                f"{size} examples do not divide by {axes_text(mesh, axes)}, and {reason} needs equal shares",
                value=size,
                place=path,
                remedy=f"use {nearest} examples, or a mesh in which {' x '.join(axes)}{times} divides {size}",
            )


def _wanted_axes(draft: Draft) -> tuple[str, ...]:
    """Returns the axes over which the batch is to lie. A pinned plan has only those of them that divided its batch, and
    says of the others by its mode."""
    mesh, pinned = draft.shape, draft.request.pinned
    if pinned is None:
        return draft.request.rules.batch_axes(mesh)
    if pinned.replicated_batch == "all":
        return mesh.present(mesh.names)
    by_role = (axis for axis in mesh.names if mesh.roles.role(axis) in (Role.DATA, Role.STORAGE))
    wanted = {*by_role, *pinned.batch_axes}
    return mesh.present([axis for axis in mesh.names if axis in wanted])


def _apart(draft: Draft) -> str | None:
    """Returns what needs to tell examples apart; None where the layout alone is asked for."""
    request = draft.request
    if request.backprop is not None or (request.pinned is not None and request.pinned.partial is not None):
        return "partial backpropagation"
    if request.group_comm in ("turns", "modulo"):
        return f"group_comm={request.group_comm!r}"
    if not request.sync.is_dense:
        return "a table that is synchronised by rows"
    return next((f"microbatches={number}" for number in _microbatches(draft)), None)


def _microbatches(draft: Draft) -> list[int]:
    """Returns the numbers of microbatches above one that the step's gradients ask for."""
    asked = (visit.eqn.params["microbatches"] for visit in boundaries(draft.traced.jaxpr, everywhere))
    return [number for number in asked if number not in (None, 1)]
