"""Decides over which mesh axes a Fourier transform is split that lowering evaluates device by device, and what is sent
for it.

The traced step and the specs of its leaves come in; the axes of every such transform come out, by dim. XLA's
partitioner is not asked about Fourier transforms (`splitjax.partitioner.DEFECTS`), so what it would decide is decided
here, for predictions (`cost.collectives`) and for lowering (`lower.products.local_transform`) alike.

Along dims that are not transformed each device transforms its own part. A transformed dim that the layout splits is
brought together first, and the result is split as the operand was, so that the layers around the transform see one
layout; backward the same happens to the cotangent.

- Over axes that do not split the batch of replicated layers (`megatron`) it is gathered, and each device keeps its part
  of the result, for which nothing is sent.
- Over axes that do (`splitbrain`) examples are exchanged for it, all to all: each device of the group transforms some
  examples, and sends what the others need of the result back.

The last dim of a transform from or to real numbers changes its size, and with it its dim class: it leaves whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterator, Mapping, Sequence

from splitjax.cost.flow import Axes, used_axes
from splitjax.mesh import MeshShape
from splitjax.plan import LeafPlan
from splitjax.trace.graph import Dim, Graph, itemsize
from splitjax.trace.suspect_dims import Suspect, TransformDims

# (op, axes, bytes that the op's formula takes, whether it belongs to the backward pass)
Sent = tuple[str, Axes, int, bool]


@dataclasses.dataclass(frozen=True)
class LocalTransform:
    """Names the mesh axes over which the dims of a Fourier transform are split.

    **Attributes:**

    - `site`: the place of the equation.
    - `layer`: the layer whose split dim is brought together; the equation's line where there is none.
    - `dims`: what it reads and gives.
    - `split`: for each dim of the operand the axes that split it. A transformed dim is brought together over them.
    - `example_dim`: the dim that holds the examples; None where there is none, or where it is transformed.
    - `exchanges`: whether examples are exchanged for transformed dims, rather than these gathered.
    - `backward`: whether it belongs to a backward pass that plain JAX already traced.
    - `differentiated`: whether it stands in a gradient boundary, whose backward pass sends, too.
    """

    site: tuple[int, ...]
    layer: str
    dims: TransformDims
    split: tuple[Axes, ...]
    example_dim: int | None
    exchanges: bool
    backward: bool
    differentiated: bool

    @property
    def brought(self) -> tuple[int, ...]:
        """The transformed dims that are brought together, in the order in which they are: one that leaves whole is the
        first."""
        rank = len(self.split)
        dims = [dim for dim in range(rank - self.dims.num_transformed, rank) if self.split[dim]]
        return tuple(sorted(dims, key=self.keeps))

    @property
    def kept(self) -> tuple[int, ...]:
        """Lists the dims brought together along which the result is split as the operand is."""
        return tuple(dim for dim in self.brought if self.keeps(dim))

    def keeps(self, dim: int) -> bool:
        """Tells whether `dim` keeps its size."""
        return self.dims.operand_shape[dim] == self.dims.result_shape[dim]

    @property
    def result_split(self) -> tuple[Axes, ...]:
        """Lists for each dim of the result the axes that split it."""
        result = [axes if dim not in self.brought or self.keeps(dim) else () for dim, axes in enumerate(self.split)]
        if self.exchanges and self.example_dim is not None:
            left = tuple(axis for dim in self.brought if not self.keeps(dim) for axis in self.split[dim])
            result[self.example_dim] = (*result[self.example_dim], *left)
        return tuple(result)

    def sent(self, mesh: MeshShape) -> Iterator[Sent]:
        """Yields what is sent on `mesh` to bring transformed dims together, and to part them again."""
        dims = self.dims
        operand = _part_bytes(dims.operand_shape, dims.operand_dtype, self.split, mesh) * dims.trips
        result = _part_bytes(dims.result_shape, dims.result_dtype, self.result_split, mesh) * dims.trips
        if self.exchanges:
            forth = [("all_to_all", self.split[dim], operand) for dim in self.brought]
            back = [("all_to_all", self.split[dim], result) for dim in self.kept]
            backward = [*back, *forth]
        else:
            forth, back = self._gathers(self.brought, operand, mesh), []
            backward = self._gathers(self.kept, result, mesh)
        yield from ((*each, self.backward) for each in (*forth, *back))
        if self.differentiated:
            yield from ((*each, True) for each in backward)

    def _gathers(self, dims: Sequence[int], num_bytes: int, mesh: MeshShape) -> list[tuple[str, Axes, int]]:
        """Returns the gathers along `dims` of a part of `num_bytes`."""
        gathers = []
        for dim in dims:
            num_bytes *= mesh.size(self.split[dim])
            gathers.append(("all_gather", self.split[dim], num_bytes))
        return gathers


def _part_bytes(shape: Sequence[int], dtype: str, split: Sequence[Axes], mesh: MeshShape) -> int:
    """Returns the bytes of a device's part of an array."""
    return math.prod(shape) * itemsize(dtype) // mesh.size(tuple(axis for axes in split for axis in axes))


def derive_transforms(
    graph: Graph, leaves: Sequence[LeafPlan], mesh: MeshShape, batch_axes: Axes, replicated_batch: str
) -> tuple[LocalTransform, ...]:
    """Returns the Fourier transforms of a step that are evaluated device by device, in program order.

    **Arguments:** `graph`: the traced step, with its suspects. `leaves`: the layout of its leaves. `mesh`,
    `batch_axes`, `replicated_batch`: as for `cost.predict_collectives`.

    A dim lies as the parameters of its class are used, examples over the batch axes that are left."""
    suspects = [suspect for suspect in graph.suspects if suspect.transform is not None and suspect.editable]
    if mesh.num_devices == 1 or not suspects:
        return ()
    axes_of = {
        leaf.path: used_axes(leaf, mesh, batch_axes, replicated_batch) for leaf in leaves if leaf.role == "param"
    }
    boundaries = {gradient.site for gradient in graph.gradients}
    transforms = []
    for suspect in suspects:
        labels = graph.soft if suspect.backward else graph.local
        by_class = _axes_by_class(graph, leaves, axes_of, labels)
        transforms.append(_transform(graph, suspect, by_class, labels, mesh, tuple(batch_axes), boundaries))
    return tuple(transforms)


def _axes_by_class(
    graph: Graph, leaves: Sequence[LeafPlan], axes_of: Mapping[str, Axes], labels: Sequence[int]
) -> dict[int, Axes]:
    """Maps a dim class (by its label) to the axes over which parameters are split along the dims that it leads; leaves
    out classes in which parameters disagree. `axes_of`: path of a parameter -> axes over which it is split in use."""
    choices: dict[int, set[Axes]] = {}
    for leaf in leaves:
        if leaf.path in axes_of:
            for dim, every in zip(graph.leaf(leaf.path).dims, leaf.axes_by_dim, strict=False):
                axes = tuple(axis for axis in every if axis in axes_of[leaf.path])
                if dim and axes:
                    choices.setdefault(labels[dim[0]], set()).add(axes)
    return {label: next(iter(of_class)) for label, of_class in choices.items() if len(of_class) == 1}


def _transform(
    graph: Graph,
    suspect: Suspect,
    by_class: Mapping[int, Axes],
    labels: Sequence[int],
    mesh: MeshShape,
    batch_axes: Axes,
    boundaries: Container[tuple[int, ...]],
) -> LocalTransform:
    """Returns how the transform `suspect` is split. `by_class`: the axes of each dim class, by its label in
    `labels`."""
    dims = suspect.transform
    assert dims is not None, "a suspect that is no transform"
    atoms = next(tensor.atoms for tensor in suspect.touched if tensor.position == 0)
    taken: list[str] = []

    def take(axes: Axes, size: int) -> Axes:
        left = tuple(axis for axis in axes if axis not in taken)
        left = left if size % mesh.size(left) == 0 else ()
        taken.extend(left)
        return left

    examples = next((position for position, dim in enumerate(atoms) if graph.is_example(dim)), None)
    split = [
        take(by_class.get(labels[dim[0]], ()), dims.operand_shape[position]) if dim and position != examples else ()
        for position, dim in enumerate(atoms)
    ]
    if examples is not None:
        split[examples] = take(batch_axes, dims.operand_shape[examples])
    first = len(atoms) - dims.num_transformed
    example_dim = examples if examples is not None and examples < first else None
    brought = [dim for dim in range(first, len(atoms)) if split[dim]]
    over = tuple(axis for dim in brought for axis in split[dim])
    exchanges = (
        example_dim is not None
        and set(over) <= set(batch_axes)
        and dims.operand_shape[example_dim] % mesh.size((*split[example_dim], *over)) == 0
    )
    inside = any(suspect.site[:depth] in boundaries for depth in range(1, len(suspect.site)))
    return LocalTransform(
        site=suspect.site,
        layer=_layer(graph, suspect, atoms[brought[0]], labels) if brought else suspect.source,
        dims=dims,
        split=tuple(split),
        example_dim=example_dim,
        exchanges=exchanges and bool(over),
        backward=suspect.backward,
        differentiated=inside and not suspect.backward,
    )


def _layer(graph: Graph, suspect: Suspect, dim: Dim, labels: Sequence[int]) -> str:
    """Names the layer whose output's dim a transform reads: of those before it the last with a dim of this class; a
    weight's own layer where the transform reads the weight."""
    label = labels[dim[0]]
    of_class = lambda dims: any(each and labels[each[0]] == label for each in dims)
    before = [
        use.layer
        for use in graph.uses
        if not use.backward and of_class(use.out_dims) and (use.site < suspect.site or suspect.backward)
    ]
    own = [leaf.layer or leaf.path for leaf in graph.leaves if leaf.role == "param" and of_class(leaf.dims)]
    return (before[-1:] or own[:1] or [suspect.source])[0]
