"""Decides over which mesh axes each kernel that is kept whole runs on parts (`splitjax.kernel`).

A step's graph and what the plan splits come in; for every kernel the axes of its labels come out, with a sentence for
the plan. `lower.products.local_kernel` evaluates it so. XLA is not asked: it cannot partition a kernel, and on a TPU it
does not take one in a program for several devices unless every mesh axis is manual.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from splitjax.errors import PlanError
from splitjax.mesh import MeshShape
from splitjax.planning.sites.sharded_dims import Axes, ShardedDims
from splitjax.primitives.dims import DimMap, Label
from splitjax.primitives.foreign.wrapped import KERNEL, KernelDims
from splitjax.primitives.walk import Site
from splitjax.trace.graph import Dim, ForeignCall, Graph


@dataclasses.dataclass(frozen=True)
class LocalKernel:
    """Names the mesh axes over which a kernel runs on parts.

    - `site`: the place of its equation.
    - `split`: by label the axes over which each device has a part, major first.
    """

    site: Site
    split: Mapping[Label, Axes]


def derive_kernels(graph: Graph, sharded: ShardedDims, mesh: MeshShape) -> tuple[LocalKernel, ...]:
    """Returns how the kernels of a step run, in program order. `sharded`: what the plan splits on `mesh`.

    Raises `PlanError` for a kernel that stands inside a derivative rule of the user's own and that something split
    reaches."""
    kernels = []
    for call in _kernels(graph):
        if call.editable:
            fitted, dims = _fitted(call)
            kernels.append(LocalKernel(call.site, split_labels(call, fitted, dims.may_split(fitted), sharded, mesh)))
        elif mesh.num_devices > 1 and sharded.reaches((*call.operand_dims, *call.result_dims), call.site):
            raise PlanError(
                "a kernel that is kept whole stands inside a function with a derivative rule of its own, and something"
                " split reaches it",
                value=_name(call),
                place=call.source,
                remedy=(
                    "wrap the function that has the rule (jax.custom_vjp, jax.custom_jvp) in splitjax.kernel, not what"
                    " it calls"
                ),
            )
    return tuple(kernels)


def kernel_notes(graph: Graph, kernels: Sequence[LocalKernel], sharded: ShardedDims) -> tuple[str, ...]:
    """Returns sentences for the plan on how `kernels` of `graph` run, and on what is gathered for them."""
    by_site = {kernel.site: kernel for kernel in kernels}
    notes: list[str] = []
    for call in _kernels(graph):
        kernel = by_site.get(call.site)
        if kernel is None:
            continue
        parts = [f"{label} over {' x '.join(axes)}" for label, axes in kernel.split.items() if axes]
        gathered = list(_gathered(call, _fitted(call)[0], kernel, sharded))
        if parts or gathered:
            runs = f"runs on parts: {', '.join(parts)}" if parts else "runs whole on every device"
            notes.append(f"kernel {_name(call)} at {call.source} {runs}" + "".join(f"; {text}" for text in gathered))
    return tuple(dict.fromkeys(notes))


def _kernels(graph: Graph) -> Iterator[ForeignCall]:
    return (call for call in graph.foreign if call.eqn.primitive.name == KERNEL)


def _name(call: ForeignCall) -> str:
    return call.eqn.params["name"]


def _fitted(call: ForeignCall) -> tuple[DimMap, KernelDims]:
    dims: KernelDims = call.eqn.params["dims"]
    shapes = [[v.aval.shape for v in side] for side in (call.eqn.invars, call.eqn.outvars)]
    return dims.fitted(*shapes), dims


def split_labels(
    call: ForeignCall, fitted: DimMap, labels: Sequence[Label], sharded: ShardedDims, mesh: MeshShape
) -> dict[Label, Axes]:
    """Chooses the axes of `labels`, those of what `fitted` has for `call` along which it may run on parts: what splits
    their dim classes on `mesh`. Examples take what others leave, as crossings bring them where split layers want
    them."""
    dims = {label: list(_dims_of(call, fitted, label)) for label in labels}
    is_example = {label: any(sharded.graph.is_example(dim) for dim, _ in found) for label, found in dims.items()}
    taken: set[str] = set()
    split: dict[Label, Axes] = {}
    for label in sorted(labels, key=lambda label: is_example[label]):
        wanted = next((axes for dim, _ in dims[label] if (axes := sharded.axes(dim, call.site))), ())
        size = dims[label][0][1]
        axes: Axes = ()
        for axis in wanted:
            if axis not in taken and size % mesh.size((*axes, axis)) == 0:
                axes = (*axes, axis)
        taken.update(axes)
        split[label] = axes
    return {label: split[label] for label in labels}


def _dims_of(call: ForeignCall, fitted: DimMap, label: Label) -> Iterator[tuple[Dim, int]]:
    """Yields the dims of operands and results that `label` leads, with the size of the label."""
    variables = (*call.eqn.invars, *call.eqn.outvars)
    tensors = zip((*fitted.inputs, *fitted.outputs), (*call.operand_dims, *call.result_dims), variables, strict=True)
    for labels, dims, variable in tensors:
        for names, dim, size in zip(labels, dims, variable.aval.shape, strict=True):
            if names[:1] == (label,):
                yield dim, size if len(names) == 1 else fitted.sizes[label]


def _gathered(call: ForeignCall, fitted: DimMap, kernel: LocalKernel, sharded: ShardedDims) -> Iterator[str]:
    """Yields what each operand is gathered for: a split dim that the kernel takes whole."""
    for operand, (labels, dims) in enumerate(zip(fitted.inputs, call.operand_dims, strict=True)):
        used = {axis for names in labels for axis in kernel.split.get(names[0] if names else "", ())}
        for names, dim in zip(labels, dims, strict=True):
            axes = [axis for axis in sharded.axes(dim, call.site) if axis not in used]
            if axes:
                yield f"{' '.join(map(str, names)) or 'a dim'} of operand {operand} is gathered over {', '.join(axes)}"
