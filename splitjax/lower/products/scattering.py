"""Evaluates products with whole weights, biases and scales, whose gradients are summed into parts (`scatter.py`): each
device for its own examples, and backward a reduce-scatter of its summand of the gradient.

An equation, its operands and what was planned for it (`Scatter`, `Summed`) come in; its results come out,
differentiable. It exists because XLA would sum the whole gradient on every device and cut its part out.

A `custom_vjp` of `shard_map`s over the batch axes, as `groups.py` has it for split weights: what is sent backward is
written out.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from splitjax import _compat
from splitjax.cost.convolutions import LocalConvolution
from splitjax.cost.use_links import RAGGED
from splitjax.lower.products.groups import scope, sum_into_parts
from splitjax.lower.products.local_convolution import evaluate_local, is_whole
from splitjax.mesh import MeshShape
from splitjax.planning.sites.layout import named_sharding
from splitjax.planning.sites.mesh_context import MeshContext
from splitjax.planning.sites.parts import Parts
from splitjax.planning.sites.scatter import Scatter
from splitjax.planning.sites.spreads import Summed


@dataclasses.dataclass(frozen=True)
class _ScatteredProduct:
    """Joins a product with its equation. Specs are of whole values, over the batch axes.

    - `scatter`: as planned. `where`: the mesh of the evaluation. `eqn`: the equation.
    - `keeps`: whether a weight that was gathered for the forward pass serves the backward pass, too.
    - `convolution`: how it is evaluated where XLA's partitioner must not be asked over the other axes.
    - `axes`: over which the evaluation is manual: those of the examples, or all, where heads come out that devices
      along the others share, or a convolution is whole over the others. Were that a `shard_map` of its own inside that
      of the examples, the partitioner of JAX 0.10 would end the process in some networks (VGG-16 under `megatron` with
      sharded state: a check in `hlo_sharding_util.cc` fails).
    """

    scatter: Scatter
    where: MeshContext
    eqn: Any
    keeps: bool
    convolution: LocalConvolution | None
    axes: tuple[str, ...]

    @property
    def data_spec(self) -> PartitionSpec:
        """The data, in its examples."""
        travel = self.scatter.travel
        return self._lying(self.scatter.example_dim, None if travel is None else travel.data_dims[1])

    @property
    def out_spec(self) -> PartitionSpec:
        """The result, in its examples."""
        travel = self.scatter.travel
        return self._lying(self.scatter.out_example_dim, None if travel is None else travel.out_dims[1])

    def _lying(self, example_dim: int, expert_dim: int | None) -> PartitionSpec:
        """Returns the spec of a value with these dims of examples and, if any, of experts."""
        parts: Parts = ((example_dim, self.scatter.axes),)
        if self.scatter.travel is not None and expert_dim is not None:
            parts += ((expert_dim, self.scatter.travel.axes),)
        return _spec(1 + max(dim for dim, _ in parts), parts)

    def weight_spec(self, rank: int) -> PartitionSpec:
        """Returns the spec of the weight, of `rank` dims, as it is stored."""
        return _spec(rank, self.scatter.experts, self.scatter.stored)

    def whole_spec(self, rank: int) -> PartitionSpec:
        """Returns the spec of the gathered weight, of `rank` dims: of experts, each device has its own."""
        return _spec(rank, self.scatter.experts)

    @property
    def gathers_before(self) -> bool:
        """Whether the stored weight is gathered in a `shard_map` of its own. One that is computed in parts has to be:
        over axes that a `shard_map` leaves to XLA, XLA makes the operand of an explicit all-gather whole (CPU and TPU,
        jax 0.10.2)."""
        return bool(self.scatter.stored and self.scatter.kept)

    def gathered(self, weight: jax.Array) -> jax.Array:
        """Gathers the weight inside a `shard_map`, over the axes over which it is stored in parts."""
        with jax.named_scope(scope("stored", self.scatter.layer)):
            for dim, axes in self.scatter.stored:
                weight = lax.all_gather(weight, axes, axis=dim, tiled=True)
        return weight

    def gathered_before(self, weight: jax.Array, cotangent: jax.Array | None = None) -> jax.Array:
        """Gathers a weight that is computed in parts, over the axes over which it is stored alone; for the backward
        pass tied to the `cotangent` of the result."""
        kept, stored, out_kept = (*self.scatter.experts, *self.scatter.kept), self.scatter.stored, self.scatter.out_kept
        whole = _spec(weight.ndim, kept)
        specs = [_spec(weight.ndim, kept, stored)]
        operands = [weight]
        if cotangent is not None and out_kept is not None:
            travel, examples = self.scatter.travel, ((self.scatter.out_example_dim, self.scatter.axes),)
            experts = () if travel is None else ((travel.out_dims[1], travel.axes),)
            specs.append(_spec(cotangent.ndim, examples, experts, out_kept))
            operands.append(cotangent)
        elif cotangent is not None:  # how it lies is not known: its first element is sent to all devices
            operands = [weight + _nothing(cotangent, num_elements=1).astype(weight.dtype)]

        def local(weight: jax.Array, *cotangents: jax.Array) -> jax.Array:
            for cotangent in cotangents:
                weight = weight + _nothing(cotangent).astype(weight.dtype)
            return self.gathered(weight)

        return self.where.shard_map(local, self.where.mesh.axis_names, tuple(specs), whole)(*operands)

    def local(self, data: jax.Array, weight: jax.Array, *sizes: jax.Array) -> jax.Array:
        """Evaluates the product of a device's examples with the whole weight. `sizes`: of a ragged product, those of
        the groups of all devices' rows."""
        operands = (weight, data) if self.scatter.weight == 0 else (data, weight)
        operands += tuple(self._own_sizes(each, data.shape[self.scatter.example_dim]) for each in sizes)
        if self.convolution is not None and self.axes == self.scatter.axes:
            return evaluate_local(
                self.convolution, self.eqn, operands, MeshContext(self.where.mesh, self.scatter.axes)
            )[0]
        return _compat.bind_equation(self.eqn, operands)[0]

    def _own_sizes(self, sizes: jax.Array, num_rows: int) -> jax.Array:
        """Returns how many of a device's `num_rows` rows are in each group, of which all devices' rows have `sizes`."""
        # Sizes may be unsigned, or too narrow for the number of a row: the differences below are neither.
        numbers = jnp.int64 if sizes.dtype.itemsize == 8 else jnp.int32
        first = lax.axis_index(self.scatter.axes).astype(numbers) * num_rows
        ends = jnp.clip(jnp.cumsum(sizes, dtype=numbers) - first, 0, num_rows)
        return jnp.diff(ends, prepend=jnp.clip(-first, 0, num_rows)[None]).astype(sizes.dtype)


def evaluate_scatter(
    scatter: Scatter,
    eqn: Any,
    operands: Sequence[jax.Array],
    where: MeshContext,
    rematerialised: bool,
    convolution: LocalConvolution | None = None,
) -> list[jax.Array]:
    """Evaluates a product, differentiated as planned, and returns its result in a list.

    **Arguments:**

    - `scatter`: as planned for the equation `eqn`, which it `fits`.
    - `operands`: of the equation.
    - `where`: the mesh of the evaluation.
    - `rematerialised`: whether the backward pass runs the forward once more, and gathers a stored weight in doing so.
    - `convolution`: as the layout has it at this site; None where XLA may be asked.
    """
    with jax.named_scope(scope("product", scatter.layer)):
        data, weight = operands[scatter.data], operands[scatter.weight]
        sizes = operands[2:] if eqn.primitive.name == RAGGED else ()
        for spec in scatter.pins:
            data = lax.with_sharding_constraint(data, named_sharding(where.mesh, spec))
        own = () if scatter.travel is None else scatter.travel.axes
        axes = tuple(where.mesh.axis_names) if scatter.alone else (*scatter.axes, *own)
        if convolution is not None:
            shape = list(data.shape)
            shape[scatter.example_dim] //= MeshShape.of(where.mesh).size(axes)
            if is_whole(convolution, eqn, (tuple(shape), weight.shape), MeshContext(where.mesh, axes)):
                axes = tuple(where.mesh.axis_names)
        return [
            multiply(_ScatteredProduct(scatter, where, eqn, rematerialised, convolution, axes), data, weight, *sizes)
        ]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply(product: _ScatteredProduct, data: jax.Array, weight: jax.Array, *sizes: jax.Array) -> jax.Array:
    """Evaluates `product` of whole `data` and `weight`, each device's examples by themselves. `sizes`: as for
    `_ScatteredProduct.local`."""
    return _forward(product, data, weight, *sizes)[0]


def _forward(
    product: _ScatteredProduct, data: jax.Array, weight: jax.Array, *sizes: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    def local(data: jax.Array, weight: jax.Array, *sizes: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        whole = product.gathered(weight)
        return product.local(data, whole, *sizes), whole if product.keeps else None

    everywhere = (PartitionSpec(),) * len(sizes)

    if product.gathers_before:
        whole = product.gathered_before(weight)
        specs = product.data_spec, product.whole_spec(weight.ndim), *everywhere
        out = product.where.shard_map(product.local, product.axes, specs, product.out_spec)(data, whole, *sizes)
        return out, (data, whole if product.keeps else weight, *sizes)
    specs = (product.data_spec, product.weight_spec(weight.ndim), *everywhere)
    out_specs = product.out_spec, product.whole_spec(weight.ndim)
    out, whole = product.where.shard_map(local, product.axes, specs, out_specs)(data, weight, *sizes)
    return out, (data, weight if whole is None else whole, *sizes)


def _backward(
    product: _ScatteredProduct, kept: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[jax.Array | np.ndarray, ...]:
    data, weight, *sizes = kept
    scatter = product.scatter
    floating = jnp.issubdtype(data.dtype, jnp.inexact)  # ids of a lookup have no gradient

    def local(
        data: jax.Array, weight: jax.Array, cotangent: jax.Array, *sizes: jax.Array
    ) -> tuple[jax.Array | None, jax.Array]:
        if scatter.stored and not product.keeps and not product.gathers_before:
            weight = product.gathered(weight + _nothing(cotangent).astype(weight.dtype))
        if floating:
            run = lambda data, weight: product.local(data, weight, *sizes)
            to_data, to_weight = jax.vjp(run, data, weight)[1](cotangent)
        else:
            to_data, (to_weight,) = None, jax.vjp(lambda weight: product.local(data, weight), weight)[1](cotangent)
        return to_data, to_weight[None]

    whole = product.whole_spec(weight.ndim)
    out_specs = (product.data_spec if floating else None, PartitionSpec(scatter.axes, *whole))
    if product.gathers_before and not product.keeps:
        weight = product.gathered_before(weight, cotangent)
    weight_spec = whole if product.keeps or product.gathers_before else product.weight_spec(weight.ndim)
    specs = product.data_spec, weight_spec, product.out_spec, *(PartitionSpec(),) * len(sizes)
    to_data, summands = product.where.shard_map(local, product.axes, specs, out_specs)(data, weight, cotangent, *sizes)
    # Over axes that split the weight XLA partitions the product, but would gather its result for a sum inside the same
    # shard_map. This one is manual over all axes: where some are left to XLA, its CPU backend dies of 16-bit sums
    # ("Invalid binary instruction opcode copy").
    add = product.where.shard_map(
        lambda summand: sum_into_parts(summand[0], scatter.parts, scatter.axes),
        product.where.mesh.axis_names,
        (PartitionSpec(scatter.axes, *_spec(weight.ndim, scatter.experts, scatter.kept)),),
        _spec(weight.ndim, scatter.experts, scatter.kept, scatter.parts),
    )
    nothing = [np.zeros(each.shape, jax.dtypes.float0) for each in sizes]
    return to_data if floating else np.zeros(data.shape, jax.dtypes.float0), add(summands), *nothing


multiply.defvjp(_forward, _backward)


def _nothing(value: jax.Array, num_elements: int = 2) -> jax.Array:
    """Returns a zero of which XLA cannot know that it is one: a number is not infinite and no number at once. Added to
    a stored weight, it ties the gather of the backward pass to that pass; XLA would keep what the forward pass gathered
    otherwise (an optimization barrier does not help on CPU: it is taken out before equal operations are merged). An
    empty cotangent ties nothing.

    The number is the largest of `num_elements` neighbours along the first dim that has several. Of one element, the
    layout as an array of one, which is any, would become that of the cotangent on TPUs, and from there that of all
    activations between convolutions (`f32[16,64,64,128]{2,1,3,0}`, filled up to twice its bytes)."""
    if not value.size:
        return jnp.zeros((), bool)
    along = next((dim for dim, size in enumerate(value.shape) if size > 1), None)
    few = value[tuple(slice(num_elements if dim == along else 1) for dim in range(value.ndim))]
    largest = jnp.max(few)
    return jnp.isnan(largest) & jnp.isinf(largest)


def _spec(rank: int, *parts: Parts) -> PartitionSpec:
    """Returns the spec of a value of `rank` dims that is split in all of these parts."""
    entries: dict[int, tuple[str, ...]] = {}
    for dim, axes in itertools.chain(*parts):
        entries[dim] = (*entries.get(dim, ()), *axes)
    return PartitionSpec(*(entries.get(dim) for dim in range(rank)))


@dataclasses.dataclass(frozen=True)
class _Laid:
    """Describes a bias or scale to be laid along the examples.

    - `summed`: as planned, with its parts in dims of the result.
    - `where`: the mesh of the evaluation.
    - `num_examples`: the size of the result's example dim.
    - `shape`: of the bias or scale, which has the result's dims (1 for each that it lacks).
    """

    summed: Summed
    where: MeshContext
    num_examples: int
    shape: tuple[int, ...]


def evaluate_summed(summed: Summed, eqn: Any, operands: Sequence[Any], where: MeshContext) -> list[jax.Array]:
    """Evaluates an operation with its bias or scale laid along the examples, differentiated as planned.

    **Arguments:**

    - `summed`: as planned for the equation `eqn`, an elementwise operation or a `broadcast_in_dim`.
    - `operands`: of the equation.
    - `where`: the mesh of the evaluation.

    Returns the equation's results.
    """
    value, out = operands[summed.operand], eqn.outvars[0].aval.shape
    if eqn.primitive.name != "broadcast_in_dim":
        return _compat.bind_equation(
            eqn, [_laid(summed, value, out, where) if k == summed.operand else x for k, x in enumerate(operands)]
        )
    places = eqn.params["broadcast_dimensions"]
    value = lax.broadcast_in_dim(
        value, tuple(value.shape[places.index(d)] if d in places else 1 for d in range(len(out))), places
    )
    move = lambda parts: tuple((places[dim], axes) for dim, axes in parts)
    value = _laid(dataclasses.replace(summed, parts=move(summed.parts), kept=move(summed.kept)), value, out, where)
    return [lax.broadcast_in_dim(value, out, tuple(range(len(out))))]


def _laid(summed: Summed, value: jax.Array, out: Sequence[int], where: MeshContext) -> jax.Array:
    """Lays a bias or scale along the examples of a result of shape `out`."""
    with jax.named_scope(scope("spread", summed.layer)):
        return along(_Laid(summed, where, out[summed.example_dim], value.shape), value)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def along(laid: _Laid, value: jax.Array) -> jax.Array:
    """Lays a bias or scale along the examples, as `laid` says: `value` [.., 1, ..] -> [.., examples, ..]."""
    summed, rank = laid.summed, len(laid.shape)
    num = laid.num_examples // math.prod(laid.where.mesh.shape[axis] for axis in summed.axes)

    def local(value: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(
            value, (*value.shape[: summed.example_dim], num, *value.shape[summed.example_dim + 1 :]), tuple(range(rank))
        )

    specs = _spec(rank, summed.kept), _spec(rank, summed.kept, ((summed.example_dim, summed.axes),))
    return laid.where.shard_map(local, laid.where.mesh.axis_names, specs[:1], specs[1])(value)


def _along_forward(laid: _Laid, value: jax.Array) -> tuple[jax.Array, None]:
    return along(laid, value), None


def _along_backward(laid: _Laid, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    summed, rank = laid.summed, len(laid.shape)

    def local(cotangent: jax.Array) -> jax.Array:
        return sum_into_parts(cotangent.sum(summed.example_dim, keepdims=True), summed.parts, summed.axes)

    specs = (
        _spec(rank, summed.kept, ((summed.example_dim, summed.axes),)),
        _spec(rank, summed.kept, summed.parts),
    )
    return (laid.where.shard_map(local, laid.where.mesh.axis_names, specs[:1], specs[1])(cotangent),)


along.defvjp(_along_forward, _along_backward)
