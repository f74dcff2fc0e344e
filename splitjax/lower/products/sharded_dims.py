"""Over which mesh axes the dims of a step's values are split: by dim class, as far as a plan's leaves say."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from splitjax.plan import LeafPlan, spec_axes
from splitjax.trace.graph import Dim, Graph

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ShardedDims:
    """The axes of every local dim class in which some leaf is split.

    Inside a gradient boundary the parameters' own layout counts: what only their optimizer state has does not get
    there."""

    graph: Graph
    batch_axes: Axes
    anywhere: Mapping[int, Axes]  # by label of the class
    in_boundaries: Mapping[int, Axes]
    boundaries: frozenset[tuple[int, ...]]  # sites

    @classmethod
    def of(cls, graph: Graph, leaves: Sequence[LeafPlan], batch_axes: Axes) -> ShardedDims:
        """`leaves`: of the plan, in the order of the graph's."""

        def classes(with_optimizer: bool) -> dict[int, Axes]:
            found: dict[int, Axes] = {}
            for leaf, planned in zip(graph.leaves, leaves, strict=True):
                if planned.is_state and (with_optimizer or planned.role != "optimizer"):
                    for dim, entry in zip(leaf.dims, planned.spec, strict=False):
                        if dim and entry is not None:
                            label = graph.local[dim[0]]
                            found[label] = tuple(dict.fromkeys((*found.get(label, ()), *spec_axes((entry,)))))
            return found

        return cls(graph, batch_axes, classes(True), classes(False), frozenset(one.site for one in graph.gradients))

    def axes(self, dim: Dim, site: tuple[int, ...]) -> Axes:
        """The axes over which a dim of an operation at a site may be split: those of the batch for an example dim."""
        if not dim:
            return ()
        if self.graph.is_example(dim):
            return self.batch_axes
        inside = any(site[:depth] in self.boundaries for depth in range(1, len(site)))
        return (self.in_boundaries if inside else self.anywhere).get(self.graph.local[dim[0]], ())

    def reaches(self, tensors: Iterable[Sequence[Dim]], site: tuple[int, ...]) -> bool:
        """Whether any dim of some operands or results of an operation is split."""
        return any(self.axes(dim, site) for dims in tensors for dim in dims)
