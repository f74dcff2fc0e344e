"""Finds the sizes that keep parameters from where their rules would have them first, and sizes that would not.

A traced graph, a rule set and the mesh's shape go in; for each class of dims that is to be padded, its padded size
comes out. It is what `uneven="pad"` asks for; without it these parameters lie as the rules have them next, or whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from splitjax.mesh import MeshShape
from splitjax.rules.decide import decide
from splitjax.rules.decisions import Decisions
from splitjax.rules.match import candidates, divides, first_match, named_params, param_kinds
from splitjax.rules.pins import Pin
from splitjax.rules.ruleset import RuleSet
from splitjax.trace.graph import Graph

_MOST_ROUNDS = 8


def padded_sizes(graph: Graph, rules: RuleSet, mesh: MeshShape, pins: Mapping[str, Pin]) -> dict[int, int]:
    """Returns the sizes to which classes of dims are padded, so that parameters are split as their rules say first.

    **Arguments:** `graph`, `rules`, `mesh`, `pins`: as for `assign`.

    Returns soft label -> size. A dim that is smaller than the number of its parts is not padded, nor one that a reshape
    takes apart, nor the dim of examples."""
    examples = {graph.soft[atom] for atom in graph.example_atoms}
    multiples: dict[int, int] = {}
    grown = graph
    for _ in range(_MOST_ROUNDS):
        decisions = decide(grown, rules, mesh, pins)
        found = dict(multiples)
        for label, num in _in_the_way(grown, rules, mesh, decisions, pins):
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
            if axes and len(leaf.dims[dim]) == 1 and (label := graph.soft[leaf.dims[dim][0]]) in multiples:
                used[label] = math.lcm(used.get(label, 1), mesh.size(axes))
    sizes = {graph.soft[atom]: graph.atom_sizes[atom] for leaf in graph.params for dim in leaf.dims for atom in dim}
    return {
        label: _next_multiple(sizes[label], multiple) for label, multiple in used.items() if sizes[label] % multiple
    }


def _in_the_way(
    graph: Graph, rules: RuleSet, mesh: MeshShape, decisions: Decisions, pins: Mapping[str, Pin]
) -> list[tuple[int, int]]:
    """Returns the labels of dims that do not divide into as many parts as a rule or a pin asks for, with that
    number."""
    kinds, found = param_kinds(graph), []
    for path, leaf in named_params(graph).items():
        asked = [] if path not in pins else [([dim], pins[path].axes(dim) or ()) for dim in range(len(leaf.shape))]
        rule = first_match(rules.rules, leaf, kinds[path])
        if rule is not None and rule.shard and decisions.params[path].unfit:
            asked += [(candidates(leaf, ref), mesh.meant(names)) for ref, names in rule.shard[0]]
        for dims, axes in asked:
            num = mesh.size(axes)
            sizes = [[graph.atom_sizes[atom] for atom in leaf.dims[dim]] for dim in dims]
            if not axes or not dims or any(divides(each, num) for each in sizes):
                continue
            dim = next((dim for dim, each in zip(dims, sizes, strict=True) if len(each) == 1 and each[0] > num), None)
            if dim is not None:
                found.append((graph.soft[leaf.dims[dim][0]], num))
    return found


def _grown(graph: Graph, multiples: Mapping[int, int]) -> Graph:
    """Returns the graph with the dims of these labels at the next multiples."""
    sizes = tuple(
        _next_multiple(size, multiples[label]) if label in multiples else size
        for size, label in zip(graph.atom_sizes, graph.soft, strict=True)
    )
    return dataclasses.replace(graph, atom_sizes=sizes)


def _next_multiple(size: int, of: int) -> int:
    return -(-size // of) * of
