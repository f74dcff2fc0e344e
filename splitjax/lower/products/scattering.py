"""Evaluates products with whole weights, biases and scales, whose gradients are summed into parts (`scatter.py`): each
device for its own examples, and backward a reduce-scatter of its summand of the gradient.

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
from splitjax.lower.products.groups import Where, scope, sum_into_parts
from splitjax.lower.products.local_convolution import evaluate_local
from splitjax.lower.products.scatter import Parts, Scatter, Summed


@dataclasses.dataclass(frozen=True)
class _Product:
    """A product with its equation's geometry. Specs are of whole values, over the batch axes."""

    scatter: Scatter
    where: Where
    eqn: Any
    keeps: bool  # a weight that was gathered for the forward pass serves the backward pass, too
    # how it is evaluated where XLA's partitioner must not be asked over the other axes
    convolution: LocalConvolution | None

    @property
    def data_spec(self) -> PartitionSpec:
        return PartitionSpec(*(None,) * self.scatter.example_dim, self.scatter.axes)

    @property
    def out_spec(self) -> PartitionSpec:
        return PartitionSpec(*(None,) * self.scatter.out_example_dim, self.scatter.axes)

    def weight_spec(self, rank: int) -> PartitionSpec:
        """The weight as it is stored."""
        return _spec(rank, self.scatter.stored)

    def gathered(self, weight: Any) -> Any:
        """Inside a `shard_map`: the whole weight."""
        with jax.named_scope(scope("stored", self.scatter.layer)):
            for dim, axes in self.scatter.stored:
                weight = lax.all_gather(weight, axes, axis=dim, tiled=True)
        return weight

    def local(self, data: Any, weight: Any) -> Any:
        operands = (weight, data) if self.scatter.weight == 0 else (data, weight)
        if self.convolution is not None:
            return evaluate_local(self.convolution, self.eqn, operands, Where(self.where.mesh, self.scatter.axes))[0]
        return _compat.bind_equation(self.eqn, operands)[0]


def evaluate_scatter(
    one: Scatter,
    eqn: Any,
    operands: Sequence[Any],
    where: Where,
    rematerialised: bool,
    convolution: LocalConvolution | None = None,
) -> list[Any]:
    """The result of the product, differentiated as planned. `rematerialised`: the backward pass runs the forward once
    more, and gathers a stored weight in doing so. `convolution`: as the layout has it at this site."""
    with jax.named_scope(scope("product", one.layer)):
        return [
            multiply(_Product(one, where, eqn, rematerialised, convolution), operands[one.data], operands[one.weight])
        ]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply(product: _Product, data: Any, weight: Any) -> Any:
    """The product, each device's examples by themselves."""
    return _forward(product, data, weight)[0]


def _forward(product: _Product, data: Any, weight: Any) -> tuple[Any, tuple[Any, Any]]:
    def local(data, weight):
        whole = product.gathered(weight)
        return product.local(data, whole), whole if product.keeps else None

    specs = (product.data_spec, product.weight_spec(weight.ndim))
    out, whole = product.where.shard_map(local, product.scatter.axes, specs, (product.out_spec, PartitionSpec()))(
        data, weight
    )
    return out, (data, weight if whole is None else whole)


def _backward(product: _Product, kept: tuple[Any, Any], cotangent: Any) -> tuple[Any, Any]:
    data, weight = kept
    one = product.scatter
    floating = jnp.issubdtype(data.dtype, jnp.inexact)  # ids of a lookup have no gradient

    def local(data, weight, cotangent):
        if one.stored and not product.keeps:
            weight = product.gathered(weight + _nothing(cotangent).astype(weight.dtype))
        if floating:
            to_data, to_weight = jax.vjp(product.local, data, weight)[1](cotangent)
        else:
            to_data, (to_weight,) = None, jax.vjp(lambda weight: product.local(data, weight), weight)[1](cotangent)
        return to_data, to_weight[None]

    out_specs = (product.data_spec if floating else None, PartitionSpec(one.axes))
    weight_spec = PartitionSpec() if product.keeps else product.weight_spec(weight.ndim)
    run = product.where.shard_map(local, one.axes, (product.data_spec, weight_spec, product.out_spec), out_specs)
    to_data, summands = run(data, weight, cotangent)
    # Over axes that split the weight XLA partitions the product, but would gather its result for a sum inside the same
    # shard_map. This one is manual over all axes: where some are left to XLA, its CPU backend dies of 16-bit sums
    # ("Invalid binary instruction opcode copy").
    add = product.where.shard_map(
        lambda summand: sum_into_parts(summand[0], one.parts, one.axes),
        product.where.mesh.axis_names,
        (PartitionSpec(one.axes, *_spec(weight.ndim, one.kept)),),
        _spec(weight.ndim, one.kept, one.parts),
    )
    return to_data if floating else np.zeros(data.shape, jax.dtypes.float0), add(summands)


multiply.defvjp(_forward, _backward)


def _nothing(value: Any) -> Any:
    """A zero of which XLA cannot know that it is one: a number is not infinite and no number at once. Added to a stored
    weight, it ties the gather of the backward pass to that pass; XLA would keep what the forward pass gathered
    otherwise (an optimization barrier does not help on CPU: it is taken out before equal operations are merged). An
    empty cotangent ties nothing."""
    if not value.size:
        return jnp.zeros((), bool)
    one = value[(0,) * value.ndim]
    return jnp.isnan(one) & jnp.isinf(one)


def _spec(rank: int, *parts: Parts) -> PartitionSpec:
    entries: dict[int, tuple[str, ...]] = {}
    for dim, axes in itertools.chain(*parts):
        entries[dim] = (*entries.get(dim, ()), *axes)
    return PartitionSpec(*(entries.get(dim) for dim in range(rank)))


@dataclasses.dataclass(frozen=True)
class _Laid:
    """A bias or scale to be laid along the examples. It has the result's dims (1 for each that it lacks), and so have
    the parts of `one`."""

    one: Summed
    where: Where
    num_examples: int
    shape: tuple[int, ...]


def evaluate_summed(one: Summed, eqn: Any, operands: Sequence[Any], where: Where) -> list[Any]:
    """The results of an operation with its bias or scale laid along the examples, differentiated as planned."""
    value, out = operands[one.operand], eqn.outvars[0].aval.shape
    if eqn.primitive.name != "broadcast_in_dim":
        return _compat.bind_equation(
            eqn, [_laid(one, value, out, where) if k == one.operand else x for k, x in enumerate(operands)]
        )
    places = eqn.params["broadcast_dimensions"]
    value = lax.broadcast_in_dim(
        value, tuple(value.shape[places.index(d)] if d in places else 1 for d in range(len(out))), places
    )
    move = lambda parts: tuple((places[dim], axes) for dim, axes in parts)
    value = _laid(dataclasses.replace(one, parts=move(one.parts), kept=move(one.kept)), value, out, where)
    return [lax.broadcast_in_dim(value, out, tuple(range(len(out))))]


def _laid(one: Summed, value: Any, out: Sequence[int], where: Where) -> Any:
    with jax.named_scope(scope("spread", one.layer)):
        return along(_Laid(one, where, out[one.example_dim], value.shape), value)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def along(laid: _Laid, value: Any) -> Any:
    """[.., 1, ..] -> [.., examples, ..]"""
    one, rank = laid.one, len(laid.shape)
    num = laid.num_examples // math.prod(laid.where.mesh.shape[axis] for axis in one.axes)

    def local(value):
        return lax.broadcast_in_dim(
            value, (*value.shape[: one.example_dim], num, *value.shape[one.example_dim + 1 :]), tuple(range(rank))
        )

    specs = _spec(rank, one.kept), _spec(rank, one.kept, ((one.example_dim, one.axes),))
    return laid.where.shard_map(local, laid.where.mesh.axis_names, specs[:1], specs[1])(value)


def _along_forward(laid: _Laid, value: Any) -> tuple[Any, None]:
    return along(laid, value), None


def _along_backward(laid: _Laid, _: None, cotangent: Any) -> tuple[Any]:
    one, rank = laid.one, len(laid.shape)

    def local(cotangent):
        return sum_into_parts(cotangent.sum(one.example_dim, keepdims=True), one.parts, one.axes)

    specs = _spec(rank, one.kept, ((one.example_dim, one.axes),)), _spec(rank, one.kept, one.parts)
    return (laid.where.shard_map(local, laid.where.mesh.axis_names, specs[:1], specs[1])(cotangent),)


along.defvjp(_along_forward, _along_backward)
