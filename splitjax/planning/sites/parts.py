"""Says which dims of an operand, which is made of a parameter, are split as its gradient and the parameter are."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

from splitjax.mesh import MeshShape
from splitjax.plan import LeafPlan, spec_axes
from splitjax.rules.match import whole_dims
from splitjax.trace.graph import Dim, Graph

# dims of the weight operand, each with the axes that its gradient gains
Parts = tuple[tuple[int, tuple[str, ...]], ...]


def gradient_gains(leaf: LeafPlan) -> bool:
    """Returns whether the gradient of the parameter `leaf` is split further than the parameter."""
    return set(leaf.gradient_axes) > set(leaf.axes)


def split_dims(
    graph: Graph, dims: Sequence[Dim], leaf: LeafPlan, mesh: MeshShape, whole: Container[str] = ()
) -> Parts | None:
    """Returns the dims of an operand made of a parameter that are split already, each with its axes.

    **Arguments:** `graph`: of the step; `dims`: of the operand; `leaf`: the parameter in the plan; `mesh`: the shape of
    the mesh. None where a split dim of the parameter is not a dim of the operand. The columns of a weight that is dealt
    out are split where its shares are, if there are as many devices along their axes. `whole`: axes over which the
    operand is whole, as columns are that were copied.
    """
    places = whole_dims(graph, graph.leaf(leaf.path), dims)
    own = [tuple(axis for axis in mesh.present(spec_axes((entry,))) if axis not in whole) for entry in leaf.spec]
    split = [(dim, axes) for dim, axes in enumerate(own) if axes]
    for dim, axes in split:
        share = leading_dim(graph, graph.leaf(leaf.path).dims[dim], dims)
        if dim in places or share is None:
            continue
        if math.prod(graph.atom_sizes[atom] for atom in dims[share]) == mesh.size(axes):
            places[dim] = share
    return None if any(dim not in places for dim, _ in split) else tuple((places[dim], axes) for dim, axes in split)


def leading_dim(graph: Graph, dim: Dim, dims: Sequence[Dim]) -> int | None:
    """Returns the position among `dims`, of an operand, of what is the major part of `dim`, of its parameter; None
    where there is none, or several."""
    own = [graph.local[atom] for atom in dim]
    there = [[graph.local[atom] for atom in each] for each in dims]
    places = [at for at, labels in enumerate(there) if labels and labels == own[: len(labels)]]
    return places[0] if len(places) == 1 else None


def gained_dims(graph: Graph, dims: Sequence[Dim], leaf: LeafPlan, summed: Sequence[str]) -> Parts:
    """Returns the dims of an operand made of a parameter along which its gradient gains axes, with these axes.

    **Arguments:** `graph`: of the step; `dims`: of the operand; `leaf`: the parameter in the plan; `summed`: the mesh
    axes over which the gradient is summed. Nothing where such a dim of the parameter is not a dim of the operand, or an
    axis is not summed over.
    """
    places = whole_dims(graph, graph.leaf(leaf.path), dims)
    parts = []
    before = (*leaf.spec, *(None,) * (len(leaf.shape) - len(leaf.spec)))
    for dim, (had, has) in enumerate(zip(before, leaf.gradient or (), strict=False)):
        gained = tuple(axis for axis in spec_axes((has,)) if axis not in spec_axes((had,)))
        if gained and (dim not in places or not set(gained) <= set(summed)):
            return ()
        if gained:
            parts.append((places[dim], gained))
    return tuple(parts)


def read_once(graph: Graph, dims: Sequence[Dim], leaf: LeafPlan, trips: int) -> bool:
    """Returns whether an operand made of a parameter is another part of it each time round a loop.

    **Arguments:** `graph`: of the step; `dims`: of the operand; `leaf`: the parameter in the plan; `trips`: how often
    the operation runs in a step.

    An operand that is read again and again has a summand each time: sent as often, they would cost more than the sum.
    """
    return trips == 1 or math.prod(graph.atom_sizes[atom] for dim in dims for atom in dim) * trips <= math.prod(
        leaf.shape
    )
