"""Tables of the parameters of a step by which rules are decided: they hold for every rule set and every mesh.

A traced graph comes in, a `Parameters` comes out, which is made once for each graph (`Graph.once`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from splitjax.rules.blocks import block_dims
from splitjax.rules.match import mapped_dims, named_params, param_kinds
from splitjax.trace.graph import Graph, Leaf


@dataclasses.dataclass(frozen=True, eq=False)
class Parameters:
    """Holds what no rule changes about the parameters of a step.

    **Attributes:**

    - `leaves`: the parameters by path, with a layer's dim names on all of its arrays. `kinds`: the kind of the layer of
      each. `homes`: the name of the first layer that lists it.
    - `hard`, `local`: by path, dim -> label of the class of its leading atom, for the dims that have one.
    - `by_hard`, `by_local`: the reverse: label -> the paths of the parameters with a dim of that class.
    - `read`: the parameters that a product or a lookup reads.
    """

    graph: Graph
    leaves: Mapping[str, Leaf]
    kinds: Mapping[str, str]
    homes: Mapping[str, str]
    hard: Mapping[str, Mapping[int, int]]
    local: Mapping[str, Mapping[int, int]]
    by_hard: Mapping[int, tuple[str, ...]]
    by_local: Mapping[int, tuple[str, ...]]
    read: frozenset[str]

    @classmethod
    def of(cls, graph: Graph) -> Parameters:
        """Returns the tables of the parameters of `graph`."""
        return graph.once(cls._of)

    @classmethod
    def _of(cls, graph: Graph) -> Parameters:
        leaves = named_params(graph)
        homes: dict[str, str] = {}
        for layer in graph.layers:
            for path in layer.params:
                homes.setdefault(path, layer.name)
        hard, local = _labels(leaves, graph.hard), _labels(leaves, graph.local)
        read = frozenset(use.param for use in graph.uses if use.param is not None)
        return cls(graph, leaves, param_kinds(graph), homes, hard, local, _reverse(hard), _reverse(local), read)

    @functools.cached_property
    def mapped(self) -> Mapping[str, tuple[int, ...]]:
        """By path, the dims along which a parameter can be gathered as each operation needs it (`mapped_dims`)."""
        return {path: mapped_dims(self.graph, leaf) for path, leaf in self.leaves.items()}

    @functools.cached_property
    def blocks(self) -> Mapping[str, tuple[int, ...]]:
        """By path, the dims of a parameter that come first where they divide, since the blocks of its moments lie along
        these alone (`block_dims`)."""
        return {path: block_dims(self.graph, leaf) for path, leaf in self.leaves.items()}


def _labels(leaves: Mapping[str, Leaf], labels: tuple[int, ...]) -> dict[str, dict[int, int]]:
    return {
        path: {dim: labels[atoms[0]] for dim, atoms in enumerate(leaf.dims) if atoms} for path, leaf in leaves.items()
    }


def _reverse(labels: Mapping[str, Mapping[int, int]]) -> dict[int, tuple[str, ...]]:
    paths: dict[int, list[str]] = {}
    for path, by_dim in labels.items():
        for label in dict.fromkeys(by_dim.values()):
            paths.setdefault(label, []).append(path)
    return {label: tuple(found) for label, found in paths.items()}
