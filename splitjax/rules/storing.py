"""Stores weights in parts over the axes that their rule names for that, beside those over which it computes them.

Decisions on what is computed over which axes come in and go out with storage: fully sharded data parallelism
(Rajbhandari et al., "ZeRO", arXiv 1910.02054, stage 3) beside tensor parallelism, as large models are laid out. A
weight is gathered over these axes where it is used, and over no others.

Only what a product or a lookup reads is stored: a bias or a scale costs a message to gather, and saves little. The axes
go to a dim that the computation leaves whole, since a part of a part would be scattered over the gathered weight. Of
these a dim comes first along which every operation can gather the weight as it needs it (in a weight that holds the
layers of a loop not the dim of the layers), of these one that the blocks of an 8-bit optimizer's moments lie along,
then the largest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from splitjax.mesh import MeshShape
from splitjax.rules.decisions import Axes, Decisions, ParameterDecision
from splitjax.rules.match import axes_text, divides
from splitjax.rules.parameters import Parameters
from splitjax.rules.rule import Rule
from splitjax.trace.graph import Leaf


def store(
    known: Parameters,
    rules: Mapping[str, Rule | None],
    mesh: MeshShape,
    decisions: Decisions,
    pinned: frozenset[int] = frozenset(),
) -> Decisions:
    """Returns the decisions with the axes over which weights are stored.

    **Arguments:**

    - `known`: what no rule changes about the parameters.
    - `rules`: by path, the first rule that matches a parameter; None for none.
    - `mesh`: the mesh's shape.
    - `decisions`: what is computed over which axes.
    - `pinned`: hard labels of dims that are pinned, and take no axis besides.

    They stay legal: every split divides, an array uses an axis once, arrays that share storage agree. What fits no dim
    stays as it is computed, and its note says so.
    """
    work = _Storing(known, mesh, dict(decisions.params), dict(decisions.classes), pinned)
    for path, leaf in known.leaves.items():
        rule = rules.get(path)
        if rule is not None and rule.store and path in known.read:
            work.place(leaf, mesh.meant(rule.store))
    return dataclasses.replace(decisions, params=work.decided, classes=work.classes)


class _Storing:
    """Holds the decisions while storage is added to them.

    **Attributes:** `decided`: path -> decision. `classes`: hard label -> axes.
    """

    def __init__(
        self,
        known: Parameters,
        mesh: MeshShape,
        decided: dict[str, ParameterDecision],
        classes: dict[int, Axes],
        pinned: frozenset[int],
    ) -> None:
        self._known, self._mesh, self._pinned = known, mesh, pinned
        self.decided, self.classes = decided, classes

    def _dims(self, label: int) -> list[tuple[str, int]]:
        """Returns the (path, dim) that have a hard label."""
        paths, labels = self._known.by_hard[label], self._known.hard
        return [(path, dim) for path in paths for dim, own in labels[path].items() if own == label]

    def place(self, leaf: Leaf, wanted: Axes) -> None:
        """Stores a parameter over the axes `wanted`: all of them along one dim if one divides, else one after the
        other, the largest first."""
        if self._pinned.issuperset(self._known.hard[leaf.path].values()):
            return
        decision = self.decided[leaf.path]
        used = {axis for axes in decision.axes for axis in axes}
        left = tuple(axis for axis in wanted if axis not in used)  # what shares its storage may have placed some
        if not left or self._placed(leaf, left):
            return
        missed = [
            axis
            for axis in sorted(left, key=lambda axis: -self._mesh.size(axis))
            if len(left) == 1 or not self._placed(leaf, (axis,))
        ]
        if missed:
            text = axes_text(self._mesh, [axis for axis in left if axis in missed])
            note = f"it is not stored over {text}, by which no dim divides that is computed whole"
            decision = self.decided[leaf.path]
            self.decided[leaf.path] = dataclasses.replace(
                decision,
                note="; ".join(filter(None, (decision.note, note))),
                problem=decision.problem or "misfit",
                unfit="; ".join(filter(None, (decision.unfit, note))),
            )

    def _placed(self, leaf: Leaf, axes: Axes) -> bool:
        """Stores a parameter, and what shares its storage, over `axes` along one dim; returns whether one fits."""
        labels, mapped = self._known.hard[leaf.path], self._known.mapped[leaf.path]
        blocks = self._known.blocks[leaf.path]
        for dim in sorted(labels, key=lambda dim: (dim not in mapped, dim not in blocks, -leaf.shape[dim], dim)):
            label = labels[dim]
            if label in self._pinned:
                continue
            if not self.classes.get(label) and all(self._fits(path, at, axes) for path, at in self._dims(label)):
                self.classes[label] = axes
                for path, at in self._dims(label):
                    self._put(path, at, axes)
                return True
        return False

    def _fits(self, path: str, dim: int, axes: Axes) -> bool:
        """Tells whether a dim of a parameter divides by `axes`, and no other dim of it would be split over them too."""
        leaf = self._known.leaves[path]
        others = [
            at
            for at, label in self._known.hard[leaf.path].items()
            if label == self._known.hard[leaf.path][dim] and at != dim
        ]
        elsewhere = {axis for at, own in enumerate(self.decided[path].axes) if at != dim for axis in own}
        sizes = [self._known.graph.atom_sizes[atom] for atom in leaf.dims[dim]]
        return not others and not elsewhere & set(axes) and divides(sizes, self._mesh.size(axes))

    def _put(self, path: str, dim: int, axes: Sequence[str]) -> None:
        decision = self.decided[path]
        self.decided[path] = dataclasses.replace(
            decision, axes=tuple(tuple(axes) if at == dim else own for at, own in enumerate(decision.axes))
        )
