"""Circles, floors and longest chains of a directed graph: nodes and edges go in, tuples of nodes come out.

An edge (a, b) says that a depends on b. A circle is a strongly connected component of more than one node; the graph
with each circle taken as a single node has no circles, so floors and chains are counted in it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

Edge = tuple[str, str]
Component = tuple[str, ...]


def components(nodes: Iterable[str], edges: Iterable[Edge]) -> list[Component]:
    """Gives the strongly connected components, each sorted, a component after all that it depends on (Tarjan, 1972).

    `nodes` has to hold both ends of every edge. Recursion is avoided: chains may be longer than Python's stack.
    """
    below = _adjacent(nodes, edges)
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    result: list[Component] = []
    for root in sorted(below):
        if root in index:
            continue
        work = [(root, iter(sorted(below[root])))]
        index[root] = lowest[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, targets = work[-1]
            for target in targets:
                if target not in index:
                    index[target] = lowest[target] = len(index)
                    stack.append(target)
                    on_stack.add(target)
                    work.append((target, iter(sorted(below[target]))))
                    break
                if target in on_stack:
                    lowest[node] = min(lowest[node], index[target])
            else:
                work.pop()
                if work:
                    caller = work[-1][0]
                    lowest[caller] = min(lowest[caller], lowest[node])
                if lowest[node] == index[node]:
                    start = stack.index(node)
                    result.append(tuple(sorted(stack[start:])))
                    on_stack.difference_update(stack[start:])
                    del stack[start:]
    return result


def circles(nodes: Iterable[str], edges: Iterable[Edge]) -> list[Component]:
    """Gives the components of more than one node, the largest first."""
    groups = [group for group in components(nodes, edges) if len(group) > 1]
    return sorted(groups, key=lambda group: (-len(group), group))


def mutual_pairs(edges: Iterable[Edge]) -> list[Edge]:
    """Gives the pairs (a, b) with a before b in the alphabet where a depends on b and b on a."""
    known = set(edges)
    return sorted((source, target) for source, target in known if source < target and (target, source) in known)


def floors(nodes: Collection[str], edges: Collection[Edge]) -> dict[str, int]:
    """Maps every node to its floor: 1 where it depends on nothing, else 1 above the highest that it depends on.

    The nodes of a circle share a floor.
    """
    return {node: len(chain) for group, chain in _chains(nodes, edges).items() for node in group}


def longest_chain(nodes: Collection[str], edges: Collection[Edge]) -> tuple[Component, ...]:
    """Gives a longest path from the top down; every step is a component, mostly of a single node.

    Its length is the number of floors. Empty where there are no nodes.
    """
    return max(_chains(nodes, edges).values(), key=len, default=())


def _chains(nodes: Collection[str], edges: Collection[Edge]) -> dict[Component, tuple[Component, ...]]:
    """Maps every component to the longest chain that starts at it."""
    below = _adjacent(nodes, edges)
    group_of: dict[str, Component] = {}
    chains: dict[Component, tuple[Component, ...]] = {}
    for group in components(nodes, edges):
        group_of.update(dict.fromkeys(group, group))
        targets = {group_of[target] for node in group for target in below[node]} - {group}
        chains[group] = (group, *max((chains[target] for target in sorted(targets)), key=len, default=()))
    return chains


def _adjacent(nodes: Iterable[str], edges: Iterable[Edge]) -> dict[str, set[str]]:
    below: dict[str, set[str]] = {node: set() for node in nodes}
    for source, target in edges:
        below[source].add(target)
    return below
