"""Says who the workers of a step are: one value for all who cut its batch, loop over it, or add gradients up.

A plan comes in, `Workers` come out, which know axes and sizes and no devices. The batch lies over some axes of the
mesh. Along those of them over which every parameter is whole, each place is a *worker*: it has examples of its own, and
gradients are exchanged over the workers once. Along the others layers are split, and the devices there share a worker's
examples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from splitjax.cost.flow import used_axes
from splitjax.mesh import MeshShape
from splitjax.plan import Plan


@dataclasses.dataclass(frozen=True)
class Workers:
    """Says along which axes of a mesh the workers lie that share a batch.

    - `mesh`: the axes with their sizes. `batch_axes`: those over which the batch is split, major first.
    - `axes`: those of them along which the workers lie, major first: a loop over microbatches handles them itself.
    """

    mesh: MeshShape = MeshShape(())
    batch_axes: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()

    @classmethod
    def beside(cls, mesh: MeshShape, batch_axes: Sequence[str], split: Collection[str]) -> Workers:
        """Returns the workers along those of `batch_axes` that are none of the axes `split`, over which something is
        split that every worker has whole."""
        axes = tuple(axis for axis in mesh.present(batch_axes) if axis not in split)
        return cls(mesh, tuple(batch_axes), axes)

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return self.mesh.size(self.axes)

    @property
    def num_batch_parts(self) -> int:
        """The number of parts in which the whole batch lies on the mesh."""
        return self.mesh.size(self.batch_axes)

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """The axes that split the batch in more than one part, with their sizes, major first."""
        return tuple((axis, self.mesh.size(axis)) for axis in self.mesh.present(self.batch_axes))

    @property
    def shared_axes(self) -> tuple[str, ...]:
        """The axes along which devices share the examples of a worker, in equal parts."""
        return tuple(axis for axis in self.mesh.present(self.batch_axes) if axis not in self.axes)

    @property
    def devices_each(self) -> int:
        """The number of devices that share the examples of a worker."""
        return self.mesh.size(self.shared_axes)

    def divided(self, axes: Sequence[str]) -> Workers:
        """Returns the workers that there are where each of these is divided further, along `axes`."""
        return dataclasses.replace(self, axes=(*self.axes, *axes))


def workers_of(plan: Plan, *, gathers: bool = False, apart: Collection[str] = ()) -> Workers:
    """Returns the workers of a step: the places along the batch axes over which no parameter is split.

    **Arguments:** `plan`: of the step. `gathers`: whether parameters that are only stored in pieces are gathered before
    the workers use them; otherwise their axes are none of the workers'. `apart`: the paths of parameters that a worker
    does not read whole.
    """
    split: set[str] = set()
    for leaf in plan.leaves:
        if leaf.role == "param" and leaf.path not in apart:
            used = used_axes(leaf, plan.mesh, plan.batch_axes, plan.replicated_batch) if gathers else None
            split.update(leaf.axes if used is None else used)
    return Workers.beside(plan.mesh, plan.batch_axes, split)
