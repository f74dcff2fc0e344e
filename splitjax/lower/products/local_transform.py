"""Evaluates Fourier transforms that XLA's partitioner is not asked about: each device its own examples, in a
`shard_map`.

Goes in: an `fft` equation and the mesh axes that split its dims by the plan. Comes out: its result, differentiable,
with the numbers of one device. It exists because the partitioner gathers a whole batch for a transform, or splits it
along a transformed dim, and the program that results fails to compile on the CPU backend or ends the process. A
transformed dim that is split is gathered; the dims beside it stay where they are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from splitjax import _compat
from splitjax.lower.products.groups import Where
from splitjax.lower.products.sharded_dims import ShardedDims
from splitjax.mesh import MeshShape
from splitjax.trace.graph import Suspect
from splitjax.trace.sites import Site

Axes = tuple[str, ...]


def derive_transforms(suspects: Sequence[Suspect], sharded: ShardedDims) -> dict[Site, tuple[Axes, ...]]:
    """Maps the site of every Fourier transform among `suspects` to the axes that split its operand, a tuple for each
    dim. `sharded` says what the plan splits."""
    return {
        suspect.site: tuple(
            sharded.axes(atoms, suspect.site)
            for atoms in next(tensor.atoms for tensor in suspect.touched if tensor.position == 0)
        )
        for suspect in suspects
        if suspect.primitive == "fft" and suspect.editable
    }


@dataclasses.dataclass(frozen=True)
class _Transform:
    """Joins an equation with the spec of its operand and of its result, which have the same rank."""

    eqn: Any
    spec: PartitionSpec
    where: Where

    def local(self, operand: jax.Array) -> jax.Array:
        """Transforms a device's part."""
        return _compat.bind_equation(self.eqn, (operand,))[0]

    def each(self, fn: Callable[..., jax.Array], num_operands: int) -> Callable[..., jax.Array]:
        """Makes a function of parts run by every device on its own."""
        return self.where.shard_map(fn, self.where.mesh.axis_names, (self.spec,) * num_operands, self.spec)


def evaluate_transform(axes: Sequence[Axes], eqn: Any, operands: Sequence[jax.Array], where: Where) -> list[jax.Array]:
    """Evaluates an `fft` equation device by device, and returns its result in a list.

    **Arguments:**

    - `axes`: for each dim of the operand the mesh axes that split it by the plan. Those that do not divide a dim, or
      split a transformed one, are left out.
    - `eqn`, `operands`: the equation, and its operand.
    - `where`: the mesh, and the axes of it that are handled already.
    """
    (operand,) = operands
    if not where.left(where.mesh.axis_names):
        return _compat.bind_equation(eqn, operands)
    spec = _untransformed(axes, operand.shape, len(eqn.params["fft_lengths"]), where)
    return [transform(_Transform(eqn, spec, where), operand)]


def _untransformed(axes: Sequence[Axes], shape: Sequence[int], num_transformed: int, where: Where) -> PartitionSpec:
    """Returns the spec that splits the dims before the transformed ones, as far as their axes divide them."""
    size = MeshShape.of(where.mesh).size
    taken: set[str] = set()
    entries: list[Axes | None] = []
    for names, length in zip(axes[: len(shape) - num_transformed], shape, strict=False):
        here = tuple(name for name in where.left(names) if name not in taken)
        here = here if length % size(here) == 0 else ()
        taken.update(here)
        entries.append(here or None)
    return PartitionSpec(*entries)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def transform(fourier: _Transform, operand: jax.Array) -> jax.Array:
    """Evaluates the transform `fourier` of a whole `operand`, each device's part by itself; its derivative likewise."""
    return fourier.each(fourier.local, 1)(operand)


def _forward(fourier: _Transform, operand: jax.Array) -> tuple[jax.Array, jax.Array]:
    return transform(fourier, operand), operand


def _backward(fourier: _Transform, operand: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    # The operand's values do not matter, as the transform is linear; XLA removes them.
    return (
        fourier.each(lambda operand, cotangent: jax.vjp(fourier.local, operand)[1](cotangent)[0], 2)(
            operand, cotangent
        ),
    )


transform.defvjp(_forward, _backward)
