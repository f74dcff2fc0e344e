"""Tells over which mesh axes the dims of a step's values are split.

A step's graph and the leaves of a plan come in; the axes of any dim at any site can be asked then. It goes by dim
class: a dim is split like the leaves' dims of its class, or like the batch. It exists because what is decided about an
operation depends on whether something split reaches it, and XLA decides the layouts of intermediate values only later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from splitjax.plan import LeafPlan
from splitjax.trace.graph import Dim, Graph

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ShardedDims:
    """Holds the axes of every local dim class in which some leaf is split.

    Inside a gradient boundary the parameters' own layout counts: what only their optimizer state has does not get
    there.

    - `graph`: of the step.
    - `batch_axes`: the mesh axes that split the batch, major first.
    - `anywhere`, `in_boundaries`: by label of the class (`Graph.local`) the axes that split it, outside of gradient
      boundaries and inside.
    - `boundaries`: the sites of the boundaries.
    """

    graph: Graph
    batch_axes: Axes
    anywhere: Mapping[int, Axes]
    in_boundaries: Mapping[int, Axes]
    boundaries: frozenset[tuple[int, ...]]

    @classmethod
    def of(cls, graph: Graph, leaves: Sequence[LeafPlan], batch_axes: Axes) -> ShardedDims:
        """Makes the axes of a step's dim classes.

        `leaves` are the plan's, in the order of those of `graph`; `batch_axes` the mesh axes that split the batch.
        """

        def classes(with_optimizer: bool) -> dict[int, Axes]:
            by_label: dict[int, Axes] = {}
            for leaf, planned in zip(graph.leaves, leaves, strict=True):
                counts = planned.is_state and (with_optimizer or planned.role != "optimizer")
                if counts and any(planned.spec):
                    for dim, entry, axes in zip(leaf.dims, planned.spec, planned.axes_by_dim, strict=False):
                        if dim and entry is not None:
                            label = graph.local[dim[0]]
                            by_label[label] = tuple(dict.fromkeys((*by_label.get(label, ()), *axes)))
            return by_label

        boundaries = frozenset(gradient.site for gradient in graph.gradients)
        return cls(graph, batch_axes, classes(True), classes(False), boundaries)

    def axes(self, dim: Dim, site: tuple[int, ...]) -> Axes:
        """Returns the axes over which `dim` of an operation at `site` may be split: those of the batch for an example
        dim."""
        if not dim:
            return ()
        if self.graph.is_example(dim):
            return self.batch_axes
        inside = any(site[:depth] in self.boundaries for depth in range(1, len(site)))
        return (self.in_boundaries if inside else self.anywhere).get(self.graph.local[dim[0]], ())

    def reaches(self, tensors: Iterable[Sequence[Dim]], site: tuple[int, ...]) -> bool:
        """Returns whether any dim of `tensors`, operands or results of an operation at `site`, is split."""
        return any(self.axes(dim, site) for dims in tensors for dim in dims)
