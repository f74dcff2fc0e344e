"""Finds state that an optimizer stores in blocks of the flattened parameter, and the dims along which it lies as the
parameter does.

A traced graph comes in; dims and leaves come out. An 8-bit optimizer flattens its moments, fills them up to a multiple
of the size of a block, and stores the blocks as rows, with a scale for each. A part of the leading dim of the parameter
is a run of blocks. A part of another dim is none: the devices would exchange the moments in each step.
"""

from __future__ import annotations

from splitjax.mesh import MeshShape
from splitjax.plan import Spec, spec_axes
from splitjax.rules.match import divides, mapped_dims
from splitjax.trace.graph import Graph, Leaf


def block_dims(graph: Graph, leaf: Leaf) -> tuple[int, ...]:
    """Finds the dims of the parameter `leaf` of `graph` along which all state that follows it can lie as it does, where
    it cannot along others; those along which operations cannot gather the parameter (`mapped_dims`) are left out. Empty
    where every dim will do, or none."""
    followers = [_labels(graph, other) for other in graph.once(_followers).get(leaf.path, ()) if other.size > 1]
    labels = {dim: graph.hard[atoms[0]] for dim, atoms in enumerate(leaf.dims) if atoms}
    found = [dim for dim, label in labels.items() if all(label in own for own in followers)]
    return tuple(sorted(set(found) & set(mapped_dims(graph, leaf)))) if len(found) < len(labels) else ()


def in_blocks(graph: Graph, param: Leaf) -> tuple[Leaf, ...]:
    """Returns the state that follows the parameter `param` of `graph` in dims of its own: as many elements or more,
    which are no array of the parameter's dims."""
    return graph.once(_in_blocks).get(param.path, ())


def blocks_cut(graph: Graph, param: Leaf, had: Spec, spec: Spec, mesh: MeshShape) -> Leaf | None:
    """Returns state in blocks that cannot lie as its parameter `param` would where that were split over `mesh` as
    `spec` says, along the dims along which it is not as `had` says; None where all of it can."""
    for leaf in in_blocks(graph, param):
        of_label = {graph.hard[atoms[0]]: atoms for atoms in leaf.dims if atoms}
        for atoms, before, entry in zip(param.dims, had, spec, strict=True):
            if entry == before:
                continue
            parts = mesh.size(spec_axes((entry,)))
            mine = of_label.get(graph.hard[atoms[0]]) if atoms else None
            if parts > 1 and not (mine and divides([graph.atom_sizes[atom] for atom in mine], parts)):
                return leaf
    return None


def _followers(graph: Graph) -> dict[str, tuple[Leaf, ...]]:
    """Returns the state that follows each parameter, by its path."""
    found: dict[str, list[Leaf]] = {}
    for leaf in graph.leaves:
        if leaf.follows is not None:
            found.setdefault(leaf.follows, []).append(leaf)
    return {path: tuple(leaves) for path, leaves in found.items()}


def _in_blocks(graph: Graph) -> dict[str, tuple[Leaf, ...]]:
    """Returns what `in_blocks` says of each parameter, by its path, for those that have some."""
    found: dict[str, tuple[Leaf, ...]] = {}
    for path, followers in graph.once(_followers).items():
        param = graph.leaf(path)
        own = _labels(graph, param)
        blocks = tuple(leaf for leaf in followers if leaf.size >= param.size > 1 and _labels(graph, leaf) != own)
        if blocks:
            found[path] = blocks
    return found


def _labels(graph: Graph, leaf: Leaf) -> frozenset[int]:
    """Returns the hard classes of the dims of a leaf, by their leading atoms."""
    return frozenset(graph.hard[atoms[0]] for atoms in leaf.dims if atoms)
