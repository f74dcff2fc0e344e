"""Evaluates kernels: each device runs them on its part, in a `shard_map`.

The equation of a kernel that is kept whole (`splitjax.kernel`), or of a `pallas_call`, and the mesh axes of its labels
come in (`planning.sites.kernels`, `planning.sites.grids`); its results come out, with the numbers of one device. Every
mesh axis is manual inside: a kernel for a TPU cannot stand where one is left to XLA. In the backward pass of a kernel
that is kept whole, gradients of operands that lack a split label are summed over its axes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from splitjax import _compat
from splitjax.mesh import MeshShape
from splitjax.planning.sites.kernels import LocalKernel
from splitjax.planning.sites.mesh_context import MeshContext
from splitjax.primitives.dims import Label, Labels
from splitjax.primitives.foreign.grids import grid_label, pallas_call
from splitjax.primitives.foreign.wrapped import KernelDims
from splitjax.step.kernel import with_derivative

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Runner:
    """Runs a kernel's equations on parts.

    - `split`: by label the axes over which each device has a part: those that no surrounding `shard_map` handles, and
      that divide the label here.
    - `where`: the mesh of the evaluation.
    """

    split: Mapping[Label, Axes]
    where: MeshContext

    def spec(self, labels: Labels) -> PartitionSpec:
        """Returns the spec of an array with these labels."""
        return PartitionSpec(*(self.split.get(dim[0], ()) or None if dim else None for dim in labels))

    def run(self, params: Mapping[str, Any], operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Runs the equation with `params` on whole `operands`, each device on its part."""
        dims: KernelDims = params["dims"]
        results = jax.eval_shape(params["fn"], *(jax.ShapeDtypeStruct(of.shape, of.dtype) for of in operands))
        fitted = dims.fitted([value.shape for value in operands], [of.shape for of in results])
        present = {label for tensor in fitted.inputs for dim in tensor for label in dim}
        missing = [self._summed(labels, present) if dims.adds else () for labels in fitted.outputs]

        def local(*parts: jax.Array) -> list[jax.Array]:
            results = params["fn"](*parts)
            return [lax.psum(result, axes) if axes else result for result, axes in zip(results, missing, strict=True)]

        specs = [tuple(self.spec(labels) for labels in side) for side in (fitted.inputs, fitted.outputs)]
        with jax.named_scope(params["name"]):
            return list(self.where.shard_map(local, self.where.mesh.axis_names, specs[0], list(specs[1]))(*operands))

    def _summed(self, labels: Labels, present: set[Label]) -> Axes:
        """Returns the axes over which a result with `labels` is a summand, where the operands have the labels
        `present`."""
        own = {label for dim in labels for label in dim}
        return tuple(axis for label in self.split if label in present - own for axis in self.split[label])


def evaluate_kernel(kernel: LocalKernel, eqn: Any, operands: Sequence[jax.Array], where: MeshContext) -> list[Any]:
    """Evaluates a kernel's equation device by device, and returns its results.

    **Arguments:**

    - `kernel`: the mesh axes of its labels by the plan. Those that do not divide a label here are left out.
    - `eqn`, `operands`: the equation, and its operands.
    - `where`: the mesh, and the axes of it that are handled already. On one device, and where all are, it is the call
      of the kernel's function.
    """
    left = where.left(where.mesh.axis_names)
    if not left or math.prod(where.mesh.shape.values()) == 1:
        return list(eqn.params["fn"](*operands))
    types = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in operands]
    runner = _Runner(_dividing(kernel, eqn, types, where), where)
    return list(with_derivative(eqn.params, types, runner.run)(*operands))


def evaluate_grid(kernel: LocalKernel, eqn: Any, operands: Sequence[jax.Array], where: MeshContext) -> list[Any]:
    """Evaluates a `pallas_call` device by device, with a smaller grid, and returns its results. Arguments are as for
    `evaluate_kernel`."""
    left, mesh = where.left(where.mesh.axis_names), MeshShape.of(where.mesh)
    if not left or mesh.num_devices == 1:
        return _compat.bind_equation(eqn, operands)
    sizes = _compat.pallas_grid(eqn.params).sizes
    split: dict[Label, Axes] = {}
    factors: dict[int, int] = {}
    for dim, size in enumerate(sizes):
        axes = where.left(kernel.split.get(grid_label(dim), ()))
        if axes and size is not None and size % mesh.size(axes) == 0:
            split[grid_label(dim)], factors[dim] = axes, mesh.size(axes)
    runner = _Runner(split, where)
    shapes = [[tuple(v.aval.shape) for v in side] for side in (eqn.invars, eqn.outvars)]
    labels = pallas_call(shapes[0], shapes[1], eqn.params)
    specs = [tuple(runner.spec(each) for each in side) for side in (labels.inputs, labels.outputs)]
    smaller = _compat.smaller_pallas_call(eqn, factors)
    local = lambda *parts: _compat.bind_equation(smaller, parts)
    return list(where.shard_map(local, where.mesh.axis_names, specs[0], list(specs[1]))(*operands))


def _dividing(
    kernel: LocalKernel, eqn: Any, types: Sequence[jax.ShapeDtypeStruct], where: MeshContext
) -> dict[Label, Axes]:
    """Returns the axes of each label that split operands of these types here."""
    dims: KernelDims = eqn.params["dims"]
    results = jax.eval_shape(eqn.params["fn"], *types)
    fitted = dims.fitted([of.shape for of in types], [of.shape for of in results])
    sizes: dict[Label, int] = dict(fitted.sizes)
    for labels, of in zip(fitted.inputs, types, strict=True):
        sizes |= {dim[0]: size for dim, size in zip(labels, of.shape, strict=True) if len(dim) == 1}
    mesh = MeshShape.of(where.mesh)
    split = {label: where.left(axes) for label, axes in kernel.split.items()}
    return {label: axes for label, axes in split.items() if axes and sizes.get(label, 1) % mesh.size(axes) == 0}
