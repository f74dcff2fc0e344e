"""Evaluates Fourier transforms that XLA's partitioner is not asked about: each device its own examples, in a
`shard_map`.

Goes in: an `fft` equation and the mesh axes that split its dims by the plan (`cost.transforms`). Comes out: its result,
differentiable, with the numbers of one device. It exists because the partitioner gathers a whole batch for a transform,
or splits it along a transformed dim, and the program that results fails to compile on the CPU backend or ends the
process. What brings a transformed dim together is written out, forward and backward, as it was planned.

A transform is linear, so its derivative needs nothing of the forward pass.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from splitjax import _compat
from splitjax.cost.flow import Axes
from splitjax.cost.transforms import LocalTransform
from splitjax.lower.products.groups import scope
from splitjax.mesh import MeshShape
from splitjax.planning.sites.mesh_context import MeshContext


@dataclasses.dataclass(frozen=True)
class _Transform:
    """Joins an equation with the axes that split it here. Specs are of whole values.

    - `split`: the axes that its sizes allow, less those that a surrounding `shard_map` handles already.
    - `where`: the mesh of the evaluation. `eqn`: the equation.
    """

    split: LocalTransform
    where: MeshContext
    eqn: Any

    @property
    def operand_spec(self) -> PartitionSpec:
        """The operand, of which each device has a part."""
        return PartitionSpec(*(axes or None for axes in self.split.split))

    @property
    def result_spec(self) -> PartitionSpec:
        """The result, in parts."""
        return PartitionSpec(*(axes or None for axes in self.split.result_split))

    @property
    def axes(self) -> Axes:
        """The axes over which transformed dims are gathered."""
        dims = () if self.split.exchanges else self.split.brought
        return tuple(axis for dim in dims for axis in self.split.split[dim])

    def forward(self, part: jax.Array, places: Mapping[str, jax.Array]) -> jax.Array:
        """Transforms a device's part of the operand to its part of the result."""
        split = self.split
        whole = _sent(part, split.dims.operand_dtype, lambda part: self._brought(part, split.brought))
        (result,) = _compat.bind_equation(self.eqn, (whole,))
        return _sent(result, split.dims.result_dtype, lambda result: self._parted(result, split.kept, places))

    def backward(self, cotangent: jax.Array, places: Mapping[str, jax.Array]) -> jax.Array:
        """Brings a device's part of the result's cotangent back to its part of the operand's."""
        split = self.split
        cotangent = _sent(cotangent, split.dims.result_dtype, lambda part: self._brought(part, split.kept))
        operand = self.eqn.invars[0].aval
        first = cotangent.ndim - split.dims.num_transformed
        whole = jax.ShapeDtypeStruct((*cotangent.shape[:first], *operand.shape[first:]), operand.dtype)
        apply = lambda operand: _compat.bind_equation(self.eqn, (operand,))[0]
        (of_operand,) = jax.linear_transpose(apply, whole)(cotangent)
        return _sent(of_operand, split.dims.operand_dtype, lambda part: self._parted(part, split.brought, places))

    def _brought(self, part: jax.Array, dims: Sequence[int]) -> jax.Array:
        """Brings `dims` of a device's part together."""
        for dim in dims:
            axes = self.split.split[dim]
            if self.split.exchanges:
                part = lax.all_to_all(part, axes, self._examples, dim, tiled=True)
            else:
                part = _gathered(part, axes, dim)
        return part

    def _parted(self, whole: jax.Array, dims: Sequence[int], places: Mapping[str, jax.Array]) -> jax.Array:
        """Undoes `_brought`: a device's part of a value along `dims`."""
        size = MeshShape.of(self.where.mesh).size
        for dim in reversed(dims):
            axes = self.split.split[dim]
            if self.split.exchanges:
                whole = lax.all_to_all(whole, axes, dim, self._examples, tiled=True)
            else:
                length = whole.shape[dim] // size(axes)
                whole = lax.dynamic_slice_in_dim(whole, self._place(axes, places) * length, length, dim)
        return whole

    def _place(self, axes: Axes, places: Mapping[str, jax.Array]) -> jax.Array:
        """Returns a device's place along `axes` together, the first of them major."""
        size = MeshShape.of(self.where.mesh).size
        return functools.reduce(
            lambda place, axis: place * size((axis,)) + places[axis][0], axes, jnp.zeros((), jnp.int32)
        )

    @property
    def _examples(self) -> int:
        assert self.split.example_dim is not None, "there are no examples to exchange"
        return self.split.example_dim

    def each(self, fn: Callable[..., jax.Array], value: jax.Array, specs: tuple[Any, Any]) -> jax.Array:
        """Runs `fn` of a device's part of `value` and its place along each gathered axis, on every device.

        The places are an operand: over the axes of nested `shard_map`s a device cannot ask for them."""
        names = self.where.mesh.axis_names
        sizes = MeshShape.of(self.where.mesh)
        places = {axis: jnp.arange(sizes.size((axis,)), dtype=jnp.int32) for axis in self.axes}
        places_specs = {axis: PartitionSpec(axis) for axis in self.axes}
        with jax.named_scope(scope("product", self.split.layer)):
            return self.where.shard_map(fn, names, (specs[0], places_specs), specs[1])(value, places)


def _gathered(part: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Gathers parts along `dim` over `axes`, as flat arrays.

    A gather along a dim asks for a memory layout in which that dim varies slowest, and XLA hands it on to the
    transforms before and after, of which the CPU backend's fail with it."""
    shape = part.shape
    flat = lax.all_gather(part.reshape(-1), axes, axis=0)
    parts = jnp.moveaxis(flat.reshape(-1, *shape), 0, dim)
    return parts.reshape(*shape[:dim], -1, *shape[dim + 1 :])


def _sent(value: jax.Array, dtype: str, send: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Applies `send` to a value, to the real part alone where `dtype` says that this is all there is, or all that is
    used."""
    if jnp.iscomplexobj(value) and dtype.startswith("float"):
        return send(value.real).astype(value.dtype)
    return send(value)


def evaluate_transform(
    split: LocalTransform, eqn: Any, operands: Sequence[jax.Array], where: MeshContext
) -> list[jax.Array]:
    """Evaluates an `fft` equation device by device, and returns its result in a list.

    **Arguments:**

    - `split`: the mesh axes that split its dims by the plan. Those that do not divide a dim here are left out.
    - `eqn`, `operands`: the equation, and its operand.
    - `where`: the mesh, and the axes of it that are handled already.
    """
    (operand,) = operands
    if not where.left(where.mesh.axis_names):
        return _compat.bind_equation(eqn, operands)
    return [transform(_Transform(_dividing(split, operand.shape, where), where, eqn), operand)]


def _dividing(split: LocalTransform, shape: Sequence[int], where: MeshContext) -> LocalTransform:
    """Returns the axes that split an operand of this shape here."""
    size = MeshShape.of(where.mesh).size
    here = tuple(
        left if length % size(left := where.left(axes)) == 0 else ()
        for axes, length in zip(split.split, shape, strict=True)
    )
    here = dataclasses.replace(split, split=here)
    over = tuple(axis for dim in here.brought for axis in here.split[dim])
    examples = split.example_dim
    if not (split.exchanges and over and examples is not None):
        return dataclasses.replace(here, exchanges=False)
    return dataclasses.replace(here, exchanges=shape[examples] % size((*here.split[examples], *over)) == 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def transform(fourier: _Transform, operand: jax.Array) -> jax.Array:
    """Evaluates the transform `fourier` of a whole `operand`, each device's part by itself; its derivative likewise."""
    return fourier.each(fourier.forward, operand, (fourier.operand_spec, fourier.result_spec))


def _forward(fourier: _Transform, operand: jax.Array) -> tuple[jax.Array, None]:
    return transform(fourier, operand), None


def _backward(fourier: _Transform, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (fourier.each(fourier.backward, cotangent, (fourier.result_spec, fourier.operand_spec)),)


transform.defvjp(_forward, _backward)
