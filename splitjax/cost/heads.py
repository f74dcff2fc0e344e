"""Finds the heads of an attention that more heads read: keys and values of which there are fewer than queries.

The uses of weights of a traced step come in; which of their outputs hold heads that others share comes out, with how
many these are and where they are read (grouped-query attention, Ainslie et al., arXiv 2305.13245). Weights whose heads
meet have labels in common of what lies inside of a head: keys with the queries, over which scores are summed, values
with the output's weight.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from splitjax.trace.graph import Graph, Leaf, Use


@dataclasses.dataclass(frozen=True)
class SharedHeads:
    """Says how devices share heads of which there are fewer than devices: the first `copies` of them the first head.

    - `axis`: the mesh axis over which the heads are split that read these. `num_heads`: how many these are.
    - `copies`: how many devices read each.
    """

    axis: str
    num_heads: int
    copies: int


@dataclasses.dataclass(frozen=True)
class Heads:
    """Describes the heads of a weight.

    - `dim`: the dim of the weight that counts them, or, where there is a single one, that holds it.
    - `count`: their number. `inside`: the local labels of what lies inside of a head.
    """

    dim: int
    count: int
    inside: frozenset[int]


@dataclasses.dataclass(frozen=True)
class HeadReaders:
    """Says which uses read the heads that the output of a use holds. `num_heads`: how many it holds. `readers`: the
    positions of the uses whose weights have more heads that meet these, by column (queries) or by row (the output)."""

    num_heads: int
    readers: tuple[int, ...]


def find_readers(
    graph: Graph, uses: Sequence[Use], roles: Sequence[Sequence[str]]
) -> Iterator[tuple[int, HeadReaders]]:
    """Yields the position of each use whose output has heads that more heads share, with who reads them.

    **Arguments:** `graph`: of the step. `uses`: of weights, in program order. `roles`: of the dims of their weights.
    """
    if not graph.inside_heads:
        return
    apart = {use.param for use in uses if use.copied}
    found = (
        (i, _heads_in_parts(graph, use) if use.param in apart else find_heads(graph, graph.leaf(use.param)))
        for i, use in enumerate(uses)
    )
    held = {i: heads for i, heads in found if heads is not None}
    for i, own in held.items():
        more = [
            j
            for j, other in held.items()
            if own.inside & other.inside and other.count > own.count and other.count % own.count == 0
        ]
        if more and (uses[i].copied or (uses[i].param not in apart and roles[i][own.dim] == "free")):
            yield i, HeadReaders(own.count, tuple(more))


def find_heads(graph: Graph, leaf: Leaf) -> Heads | None:
    """Returns the heads that a `leaf` of `graph` holds; None where it holds none."""
    for dim, atoms in enumerate(leaf.dims):
        inside = graph.inside_heads.intersection(graph.local[atom] for atom in atoms)
        if inside:
            counting, heads = dim, _leading(graph, atoms)
            if not heads:  # heads have a dim of their own, if there are several
                alike = (at for at, name in enumerate(leaf.dim_names) if name == leaf.dim_names[dim])
                counting = next((at for at in alike if _leading(graph, leaf.dims[at])), dim)
                heads = _leading(graph, leaf.dims[counting])
            return Heads(counting, math.prod(graph.atom_sizes[atom] for atom in heads), inside)
    return None


def _heads_in_parts(graph: Graph, use: Use) -> Heads | None:
    """Returns the heads that a `use` reads of a fused weight, some columns of which are copied: what its operand has
    behind the dim that it contracts; None where it reads none. Heads that are dealt out are counted by the dim of
    shares, and by what is in a share."""
    read = {graph.local[dim[0]] for dim in use.data_dims if dim}
    free = [
        (d, atom) for d, dim in enumerate(use.weight_dims) if dim and graph.local[dim[0]] not in read for atom in dim
    ]
    inside = graph.inside_heads.intersection(graph.local[atom] for _, atom in free)
    heads = _leading(graph, [atom for _, atom in free])
    return Heads(free[0][0], math.prod(graph.atom_sizes[atom] for atom in heads), inside) if inside else None


def _leading(graph: Graph, atoms: Sequence[int]) -> list[int]:
    """Returns those of `atoms` that are major to what lies inside of a head."""
    return list(itertools.takewhile(lambda atom: graph.local[atom] not in graph.inside_heads, atoms))
