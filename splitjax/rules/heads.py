"""Keeps rules from cutting through the heads of an attention.

A head that is cut has its scores summed over devices: an all-reduce as large as all scores. Where there are fewer heads
than devices (keys and values that several heads share), a weight stays whole instead, and every device computes the
heads that it needs: they are copied in groups. A parameter and axes come in; what is in the way comes out, in words.

A step with a single head is not told apart: its weights are cut as its rules say.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container

from splitjax.mesh import MeshShape
from splitjax.rules.decisions import Axes
from splitjax.rules.match import axes_text, divides
from splitjax.rules.rule import LARGEST, Rule
from splitjax.trace.graph import Graph, Leaf


def heads_in_the_way(graph: Graph, mesh: MeshShape, leaf: Leaf, rule: Rule, given: Container[int]) -> str:
    """Says which heads the axes would cut through over which a rule computes a parameter; "" for none.

    **Arguments:** `graph`, `mesh`: the traced step, and the mesh's shape. `leaf`: the parameter. `rule`: the first that
    matches it. `given`: the dims of the parameter that are decided already.

    Another dim is no way out: of a sum every device would have a part.
    """
    if not graph.inside_heads:
        return ""
    named = [mesh.meant(names) for each in rule.shard for ref, names in each if ref != LARGEST]
    for axes in dict.fromkeys(axes for axes in named if not mesh.roles.store(axes)):
        for dim, atoms in enumerate(leaf.dims):
            if dim in given or not any(_is_inside(graph, atom) for atom in atoms):
                continue
            beside = [dim]
            if _is_inside(graph, atoms[0]):  # heads have a dim of their own, if there are several
                alike = [at for at, name in enumerate(leaf.dim_names) if name == leaf.dim_names[dim] and leaf.dims[at]]
                beside = [at for at in alike if not _is_inside(graph, leaf.dims[at][0])] or [dim]
            refusals = [_refusal(graph, mesh, leaf, at, axes) for at in beside]
            if all(refusals):
                return refusals[0]
    return ""


def cut_through(graph: Graph, mesh: MeshShape, leaf: Leaf, dim: int, axes: Axes) -> str:
    """Says that the axes `axes`, over which dim `dim` of `leaf` would be computed, cut through heads that it holds; ""
    where they do not, or only store it. `graph`, `mesh`: as for `heads_in_the_way`."""
    if mesh.roles.store(axes) or not any(_is_inside(graph, atom) for atom in leaf.dims[dim]):
        return ""
    return _refusal(graph, mesh, leaf, dim, axes)


def _is_inside(graph: Graph, atom: int) -> bool:
    return graph.local[atom] in graph.inside_heads


def _refusal(graph: Graph, mesh: MeshShape, leaf: Leaf, dim: int, axes: Axes) -> str:
    """Says that the heads that a dim counts, or holds, do not divide by the axes; "" where they do."""
    heads = itertools.takewhile(lambda atom: not _is_inside(graph, atom), leaf.dims[dim])
    sizes = [graph.atom_sizes[atom] for atom in heads]
    if not axes or divides(sizes, mesh.size(axes)):
        return ""
    count = math.prod(sizes)
    several = f"{count} heads do" if count > 1 else "a single head does"
    return f"{several} not divide by {axes_text(mesh, axes)}, and none is cut through"
