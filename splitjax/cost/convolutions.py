"""Decides over which mesh axes a convolution is split that lowering evaluates device by device.

The traced step and the specs of its leaves come in; the axes of every such convolution come out, by kind of dim. XLA's
partitioner is not asked about the convolutions that a row of `splitjax.partitioner.DEFECTS` covers, so what it would
decide is decided here, for predictions (`cost.collectives`) and for lowering (`lower.products.local_convolution`)
alike.

A convolution is bilinear in data and weight, and has four kinds of dims. In the letters of an einsum, without
positions:

    data[b, g i] * weight[g o, i] -> result[b, g o]            with feature groups g
    data[g b, i] * weight[g o, i] -> result[b, g o]            with batch groups g

`b` is the batch, `g` the groups, `i` the contracted features, `o` the free ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from splitjax.cost.flow import Axes, used_axes
from splitjax.mesh import MeshShape
from splitjax.plan import LeafPlan
from splitjax.trace.graph import Dim, Graph
from splitjax.trace.suspect_dims import ConvolutionDims

# The row of `splitjax.partitioner.DEFECTS` for convolutions without groups.
ORDINARY = "convolution"


@dataclasses.dataclass(frozen=True)
class LocalConvolution:
    """Names the mesh axes over which a convolution's dims are split, by kind of dim (see the module's docstring).

    **Attributes:**

    - `site`: the place of the equation.
    - `layer`: the layer whose weight it reads, or its source line.
    - `param`: the path of that weight; None where it reads no parameter.
    - `groups`, `batch`, `contracted`, `features`: the axes that split the dims of each kind.
    - `gathered`: those axes of `groups` over which the weight itself is whole: each device has the gradient of its
      groups alone, and an all-gather puts them together. Without `param`, the equation computes such a gradient itself,
      in a backward pass that plain JAX traced.
    """

    site: tuple[int, ...]
    layer: str
    param: str | None
    groups: Axes
    batch: Axes
    contracted: Axes
    features: Axes
    gathered: Axes


def derive_convolutions(
    graph: Graph, leaves: Sequence[LeafPlan], mesh: MeshShape, batch_axes: Axes, replicated_batch: str
) -> tuple[LocalConvolution, ...]:
    """Returns the convolutions of a step that are evaluated device by device, in program order.

    **Arguments:** `graph`: the traced step, with its suspects. `leaves`: the layout of its leaves. `mesh`,
    `batch_axes`, `replicated_batch`: as for `cost.predict_collectives`.

    Examples lie over the batch axes that the weight leaves free; groups, contracted and free features lie as the weight
    is used. Groups of a weight that is whole lie as the layers before it leave them, over axes that do not split the
    batch."""
    if mesh.num_devices == 1 or all(suspect.convolution is None for suspect in graph.suspects):
        return ()
    weights = {use.param for use in graph.uses if use.primitive == "conv_general_dilated"}
    planned = [leaf for leaf in leaves if leaf.role == "param"]
    # XLA is right about ordinary convolutions where every device has examples of its own and whole weights.
    are_whole = not any(axis in mesh.wide for leaf in planned if leaf.path in weights for axis in leaf.axes)
    trusted = are_whole and set(batch_axes) == mesh.wide
    axes_of = {leaf.path: used_axes(leaf, mesh, batch_axes, replicated_batch) if leaf.axes else () for leaf in planned}
    dims_of = {leaf.path: leaf.dims for leaf in graph.leaves}
    split = [  # (parameter, the dim that leads a class, the axes that split it)
        (leaf.path, dim, axes)
        for leaf in planned
        for dim, every in zip(dims_of[leaf.path], leaf.axes_by_dim, strict=False)
        if dim and (axes := tuple(axis for axis in every if axis in axes_of[leaf.path]))
    ]
    tables = {
        labels: (_by_class([each for each in split if each[0] in weights], labels), _by_class(split, labels))
        for labels in (graph.local, graph.soft)
    }
    uses = {use.site: use for use in graph.uses}
    convolutions = []
    for suspect in graph.suspects:
        kinds = suspect.convolution
        if kinds is None or (trusted and suspect.defect == ORDINARY and _has_example_dim(graph, kinds)):
            continue
        use = uses.get(suspect.site)
        labels = graph.soft if suspect.backward else graph.local
        of_weights, of_all = tables[labels]
        if use is not None and not suspect.backward:
            of_weights = _by_class([each for each in split if each[0] == use.param], labels)
        by_kind = _split(graph, kinds, labels, of_weights, of_all, batch_axes)
        layer, param = (suspect.source, None) if use is None else (use.layer, use.param)
        if suspect.backward != (param is None):  # neither reads a weight forward nor computes a weight's gradient
            by_kind["gathered"] = ()
        convolutions.append(LocalConvolution(suspect.site, layer, param, **by_kind))
    return tuple(convolutions)


def _has_example_dim(graph: Graph, kinds: ConvolutionDims) -> bool:
    """Returns whether examples lead one of a convolution's dims, so that they can be split over devices.

    Under `vmap` the mapped dim may lead its batch instead; XLA then splits whatever the layout of another layer
    suggests, and the kernel's gradient is wrong."""
    return any(graph.is_example(dim) for dim in (kinds.batch, kinds.groups, kinds.contracted, kinds.features))


def _by_class(split: Sequence[tuple[str, Dim, Axes]], labels: Sequence[int]) -> dict[int, Axes]:
    """Maps a dim class (by its label) to the axes over which parameters are split along the dims that it leads; leaves
    out classes in which parameters disagree. `split`: (path of a parameter, a dim of it, the axes that split that)."""
    choices: dict[int, set[Axes]] = {}
    for _, dim, axes in split:
        choices.setdefault(labels[dim[0]], set()).add(axes)
    return {label: next(iter(of_class)) for label, of_class in choices.items() if len(of_class) == 1}


def _split(
    graph: Graph,
    kinds: ConvolutionDims,
    labels: Sequence[int],
    of_weights: Mapping[int, Axes],
    of_all: Mapping[int, Axes],
    batch_axes: Axes,
) -> dict[str, Axes]:
    """Returns how a convolution is split, by field of `LocalConvolution`. No axis splits two kinds of dims: weights
    come first.

    `of_weights`, `of_all`: the axes of each dim class (by its label in `labels`), as weights of convolutions have them
    and as all parameters have them."""
    taken: list[str] = []

    def take(axes: Axes) -> Axes:
        left = tuple(axis for axis in axes if axis not in taken)
        taken.extend(left)
        return left

    def as_used(dim: Dim, table: Mapping[int, Axes]) -> Axes:
        return take(table.get(labels[dim[0]], ())) if dim and not graph.is_example(dim) else ()

    split = {
        "groups": as_used(kinds.groups, of_weights),
        "features": as_used(kinds.features, of_weights),
        "contracted": as_used(kinds.contracted, of_weights),
        "batch": as_used(kinds.batch, of_weights),
    }
    for kind, dim in (
        ("batch", kinds.batch),
        ("groups", kinds.groups),
        ("contracted", kinds.contracted),
        ("features", kinds.features),
    ):
        if graph.is_example(dim):
            split[kind] = take(batch_axes)
            break
    split["gathered"] = (
        ()
        if split["groups"]
        else as_used(
            kinds.groups,
            {label: tuple(axis for axis in axes if axis not in batch_axes) for label, axes in of_all.items()},
        )
    )
    split["groups"] = split["groups"] or split["gathered"]
    return split
