"""Fourier transforms that XLA's partitioner is not asked about: each device transforms its own examples, in a
`shard_map`.

Goes in: an `fft` equation and the mesh axes that split its dims by the plan. Comes out: its result, differentiable,
with the numbers of one device. It exists because the partitioner gathers a whole batch for a transform, or splits it
along a transformed dim, and the program that results fails to compile on the CPU backend or ends the process. A
transformed dim that is split is gathered; the dims beside it stay where they are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from splitjax import _compat
from splitjax.lower.products.groups import Where
from splitjax.lower.products.sharded_dims import ShardedDims
from splitjax.mesh import MeshShape
from splitjax.trace.graph import Suspect

Site = tuple[int, ...]
Axes = tuple[str, ...]


def derive_transforms(suspects: Sequence[Suspect], sharded: ShardedDims) -> dict[Site, tuple[Axes, ...]]:
    """Maps the site of every Fourier transform among `suspects` to the axes that split its operand, a tuple for each
    dim."""
    return {
        suspect.site: tuple(
            sharded.axes(atoms, suspect.site)
            for atoms in next(one.atoms for one in suspect.touched if one.position == 0)
        )
        for suspect in suspects
        if suspect.primitive == "fft" and suspect.editable
    }


@dataclasses.dataclass(frozen=True)
class _Transform:
    """An equation with the layout of its operand and of its result, which have the same rank."""

    eqn: Any
    spec: PartitionSpec
    where: Where

    def local(self, operand: Any) -> Any:
        """The transform of a device's part."""
        return _compat.bind_equation(self.eqn, (operand,))[0]

    def each(self, fn: Any, num_operands: int) -> Any:
        """A function of parts, run by every device on its own."""
        return self.where.shard_map(fn, self.where.mesh.axis_names, (self.spec,) * num_operands, self.spec)


def evaluate_transform(axes: Sequence[Axes], eqn: Any, operands: Sequence[Any], where: Where) -> list[Any]:
    """The result of an `fft` equation. `axes`: by dim; those that do not divide a dim, or split a transformed one, are
    left out."""
    (operand,) = operands
    if not where.left(where.mesh.axis_names):
        return _compat.bind_equation(eqn, operands)
    spec = _untransformed(axes, operand.shape, len(eqn.params["fft_lengths"]), where)
    return [transform(_Transform(eqn, spec, where), operand)]


def _untransformed(axes: Sequence[Axes], shape: Sequence[int], num_transformed: int, where: Where) -> PartitionSpec:
    size, taken, entries = MeshShape.of(where.mesh).size, set(), []
    for names, length in zip(axes[: len(shape) - num_transformed], shape, strict=False):
        here = tuple(name for name in where.left(names) if name not in taken)
        here = here if length % size(here) == 0 else ()
        taken.update(here)
        entries.append(here or None)
    return PartitionSpec(*entries)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def transform(fourier: _Transform, operand: Any) -> Any:
    """The transform, each device's part by itself; its derivative likewise."""
    return fourier.each(fourier.local, 1)(operand)


def _forward(fourier: _Transform, operand: Any) -> tuple[Any, Any]:
    return transform(fourier, operand), operand


def _backward(fourier: _Transform, operand: Any, cotangent: Any) -> tuple[Any]:
    # The operand's values do not matter, as the transform is linear; XLA removes them.
    return (
        fourier.each(lambda operand, cotangent: jax.vjp(fourier.local, operand)[1](cotangent)[0], 2)(
            operand, cotangent
        ),
    )


transform.defvjp(_forward, _backward)
