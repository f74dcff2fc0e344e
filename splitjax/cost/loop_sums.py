"""Says how often the gradient of a parameter is summed over devices where XLA runs the loop of a recurrent layer.

The graph of a step comes in, with the gradient boundaries that are left to XLA; numbers by parameter come out. Such a
loop adds gradients up from one iteration to the next, and XLA's partitioner carries no sum that is unfinished at the
end of an iteration: it all-reduces what each of them adds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence

from splitjax.primitives.walk import Site
from splitjax.trace.graph import Dim, Graph, Spread, Use


def loop_sums(graph: Graph, left: Collection[Site]) -> dict[str, int]:
    """Returns by path of a parameter how often its gradient is summed in a step, where that is more than once.

    `left`: the sites of the boundaries in which XLA adds gradients up. What JAX's own transformations differentiate is
    left to it, too.
    """
    layers = [layer for layer in graph.layers if layer.kind == "recurrent"]
    names = {layer.name for layer in layers}
    looped = [use for use in graph.uses if use.layer in names and use.trips > 1 and not use.backward]
    looped = [use for use in looped if not use.in_boundary or any(use.site[: len(site)] == site for site in left)]
    found: dict[str, int] = {}
    for use in looped:
        for path in (use.param, *use.beside):
            _count(found, graph, path, use.trips, use.weight_dims, 1 + len(use.beside))
    # Biases and scales of the loop. Around JAX's own gradient it is not known where they stand: as in a cell, in the
    # loop.
    known = {path for use in graph.uses for path in (use.param, *use.beside)}
    known.update(spread.param for spread in graph.spreads)
    for spread in graph.spreads:
        if any(_share_loop(spread, use) for use in looped):
            _count(found, graph, spread.param, spread.trips, spread.dims)
    for layer in layers:
        times = max((found.get(path, 1) for path in layer.params), default=1)
        found.update((path, times) for path in layer.params if path not in known)
    return {path: times for path, times in found.items() if times > 1}


def _count(
    found: dict[str, int], graph: Graph, path: str, trips: int, dims: Sequence[Dim], num_params: int = 1
) -> None:
    """Adds to `found` a place at which a step comes by `trips` times, and where the parameter at `path` has `dims`,
    maybe with others of its shape: `num_params` of them. A layer of a stack is a part of the parameter. What is cut out
    of a dim is one, too, but the rest of it meets other examples in the same loop."""
    leaf, atoms = graph.leaf(path), list(itertools.chain.from_iterable(dims))
    elements = math.prod(graph.atom_sizes[atom] for atom in atoms) // num_params
    if num_params == 1 and not set(itertools.chain.from_iterable(leaf.dims)).issuperset(atoms):
        elements = max(elements, leaf.size)
    found[path] = max(found.get(path, 1), trips * elements // (leaf.size * leaf.turns))


def _share_loop(spread: Spread, use: Use) -> bool:
    """Tells whether a parameter meets examples in the loop in which `use` stands: as often, and below the same equation
    of a boundary's forward."""
    return spread.trips == use.trips and spread.site[:3] == use.site[:3]
