"""Finds the sizes that keep parameters from where their rules would have them first, and sizes that would not.

A traced graph, a rule set and the mesh's shape go in; for each class of dims that is to be padded, its padded size
comes out. It is what `uneven="pad"` asks for; without it these parameters lie as the rules have them next, or whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

from splitjax.mesh import MeshShape
from splitjax.rules.decide import decide
from splitjax.rules.decisions import Axes, Decisions
from splitjax.rules.match import candidates, divides, first_match, named_params, param_kinds
from splitjax.rules.pins import Pin
from splitjax.rules.ruleset import RuleSet
from splitjax.trace.graph import Graph, Leaf

_MOST_ROUNDS = 8


def padded_sizes(
    graph: Graph,
    rules: RuleSet,
    mesh: MeshShape,
    pins: Mapping[str, Pin],
    fused: Collection[tuple[int, int]] = (),
) -> dict[int, int]:
    """Returns the sizes to which classes of dims are padded, so that parameters are split as their rules say first.

    **Arguments:** `graph`, `rules`, `mesh`, `pins`: as for `assign`. `fused`: the counts of heads, or of columns, that
    parts of fused weights have, with the number of devices that are to share them.

    Returns soft label -> size. Of a dim that a reshape takes apart, such as columns that hold heads side by side, the
    leading part is padded: whole heads. One that is smaller than the number of its parts is not, nor the dim of
    examples."""
    examples = {graph.soft[atom] for atom in graph.example_atoms}
    multiples: dict[int, int] = {}
    for label, num in _asked_by_pins(graph, mesh, pins):  # what is pinned has to divide before anything is decided
        if label not in examples:
            multiples[label] = math.lcm(multiples.get(label, 1), num)
    for label, num in _asked_by_parts(graph, fused):
        multiples[label] = math.lcm(multiples.get(label, 1), num)
    grown = _grown(graph, multiples)
    for _ in range(_MOST_ROUNDS):
        decisions = decide(grown, rules, mesh, pins)
        found = dict(multiples)
        for label, num in _asked_by_rules(grown, rules, mesh, decisions):
            if label not in examples:
                found[label] = math.lcm(found.get(label, 1), num)
        if found == multiples:
            break
        multiples = found
        grown = _grown(graph, multiples)
    else:
        return {}
    used: dict[int, int] = {}
    for leaf in graph.params:
        for dim, axes in enumerate(decisions.params[leaf.path].axes):
            if axes and leaf.dims[dim] and (label := graph.soft[leaf.dims[dim][0]]) in multiples:
                used[label] = math.lcm(used.get(label, 1), mesh.size(axes))
    sizes = {graph.soft[atom]: graph.atom_sizes[atom] for leaf in graph.params for dim in leaf.dims for atom in dim}
    for label, num in multiples.items():
        if (sizes.get(label), num) in fused:
            used[label] = math.lcm(used.get(label, 1), num)
    return {
        label: _next_multiple(sizes[label], multiple) for label, multiple in used.items() if sizes[label] % multiple
    }


def _asked_by_pins(graph: Graph, mesh: MeshShape, pins: Mapping[str, Pin]) -> list[tuple[int, int]]:
    """Returns the labels of dims that do not divide into as many parts as a pin asks for, with that number."""
    found = []
    for leaf in graph.params:
        for dim in range(len(leaf.shape)) if leaf.path in pins else ():
            found += _in_the_way(graph, mesh, leaf, [dim], pins[leaf.path].axes(dim) or ())
    return found


def _asked_by_parts(graph: Graph, fused: Collection[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the labels of dims that are read of parts of fused weights, each with the number of parts that it is to
    have: of those of the size of a part which layers read and none makes, as it does not show what a fused weight makes
    before that is cut apart. Parts of fewer heads than devices are left out."""
    read, made = dict[int, int](), set[int]()
    for leaf in graph.params:
        for name, dim in zip(leaf.dim_names, leaf.dims, strict=False):
            if name == "in" and dim:
                read[graph.soft[dim[0]]] = graph.atom_sizes[dim[0]]
            elif dim:  # what stands behind the first is made in parts
                made.add(graph.soft[dim[0]])
    wanted = [(count, num) for count, num in fused if count > num]
    return [(label, num) for label, size in read.items() if label not in made for count, num in wanted if count == size]


def _asked_by_rules(graph: Graph, rules: RuleSet, mesh: MeshShape, decisions: Decisions) -> list[tuple[int, int]]:
    """Returns the labels of dims that do not divide into as many parts as the first choice of a rule asks for, with
    that number."""
    kinds, found = param_kinds(graph), []
    for path, leaf in named_params(graph).items():
        rule = first_match(rules.rules, leaf, kinds[path])
        if rule is not None and rule.shard and decisions.params[path].unfit:
            for ref, names in rule.shard[0]:
                found += _in_the_way(graph, mesh, leaf, candidates(leaf, ref), mesh.meant(names))
    return found


def _in_the_way(graph: Graph, mesh: MeshShape, leaf: Leaf, dims: Sequence[int], axes: Axes) -> list[tuple[int, int]]:
    """Returns the label of the first of the `dims` of a parameter that could be padded, where none of them divides over
    `axes`, with the number of parts."""
    num = mesh.size(axes)
    sizes = [[graph.atom_sizes[atom] for atom in leaf.dims[dim]] for dim in dims]
    if not axes or any(divides(each, num) for each in sizes):
        return []
    fits = [dim for dim, each in zip(dims, sizes, strict=True) if each and each[0] > num]
    return [(graph.soft[leaf.dims[fits[0]][0]], num)] if fits else []


def _grown(graph: Graph, multiples: Mapping[int, int]) -> Graph:
    """Returns the graph with the dims of these labels at the next multiples."""
    sizes = tuple(
        _next_multiple(size, multiples[label]) if label in multiples else size
        for size, label in zip(graph.atom_sizes, graph.soft, strict=True)
    )
    return dataclasses.replace(graph, atom_sizes=sizes)


def _next_multiple(size: int, of: int) -> int:
    return -(-size // of) * of
