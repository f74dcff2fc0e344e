"""Group communication: evaluates a product with a split weight as explicit collectives, forward and backward.

A gathered activation is kept as *copies*: one more leading dim, one entry per device of the group. Its values are those
of a replicated array, but its cotangent is not summed yet: every device keeps its own summand until one reduce-scatter
(or all-reduce) sums them on the way back, however many products read the copies (q, k and v, say).

Each piece is a `custom_vjp` of two `shard_map`s, so that what is sent backward is as explicit as what is sent forward.
Over axes that a surrounding `shard_map` already handles, nothing is sent: the caller sums over them once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from splitjax import _compat
from splitjax.lower.products.exchange import COPY, EXAMPLES, FEATURES, SCATTER, STAY, SWAP, Exchange

Copies = dict[Any, tuple[Any, Any]]  # gathered activations by `copies_key`: (what was gathered, its copies)


@dataclasses.dataclass(frozen=True)
class Where:
    """The mesh of an evaluation, and the axes of it that a surrounding `shard_map` handles."""

    mesh: Any
    manual: tuple[str, ...] = ()

    def left(self, axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis not in self.manual)

    def shard_map(self, fn: Callable, axes: Sequence[str], in_specs: Any, out_specs: Any) -> Callable:
        mesh = jax.sharding.get_abstract_mesh() if self.manual else self.mesh
        # check_vma=False: every sum is written out here.
        return jax.shard_map(
            fn,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=frozenset(self.left(axes)),
            check_vma=False,
        )


@dataclasses.dataclass(frozen=True)
class Product:
    """An exchange with its equation's geometry. All specs are of whole (global) values."""

    exchange: Exchange
    where: Where
    eqn: Any
    data_rank: int
    weight_rank: int

    def spec(self, rank: int, entries: dict[int, Sequence[str]], copies: bool = False) -> PartitionSpec:
        axes = {dim: self.where.left(names) for dim, names in entries.items()}
        inner = [axes.get(dim) or None for dim in range(rank)]
        return PartitionSpec(*([self.where.left(self.exchange.axes), *inner] if copies else inner))

    @property
    def data_outside(self) -> PartitionSpec:
        """The data as it comes."""
        one = self.exchange
        entries = {
            EXAMPLES: {one.example_dim: one.batch_axes},
            SWAP: {one.example_dim: one.batch_axes},
            COPY: {one.example_dim: one.rest},
        }.get(one.enter, {one.example_dim: one.rest, one.feature_dim: one.axes})
        return self.spec(self.data_rank, entries)

    @property
    def data_inside(self) -> PartitionSpec:
        """The data as the product reads it: copies for columns, a part of the features for rows."""
        one = self.exchange
        if one.leave == STAY:
            return self.spec(self.data_rank, {one.example_dim: one.rest}, copies=True)
        return self.spec(self.data_rank, {one.example_dim: one.rest, one.feature_dim: one.axes})

    @property
    def weight_spec(self) -> PartitionSpec:
        return self.spec(self.weight_rank, {self.exchange.weight_dim: self.exchange.axes})

    @property
    def gradient_spec(self) -> PartitionSpec:
        """The weight's gradient: its shard, or with sharded state a part of it."""
        entries: dict[int, tuple[str, ...]] = {self.exchange.weight_dim: self.exchange.axes}
        for dim, axes in self.exchange.scatter:
            entries[dim] = (*entries.get(dim, ()), *axes)
        return self.spec(self.weight_rank, entries)

    @property
    def out_spec(self) -> PartitionSpec:
        one, rank = self.exchange, len(self.eqn.outvars[0].aval.shape)
        if one.leave == STAY:
            return self.spec(rank, {one.out_example_dim: one.rest, self.out_feature_dim: one.axes})
        return self.spec(rank, {one.out_example_dim: one.batch_axes if one.leave == SCATTER else one.rest})

    @property
    def out_feature_dim(self) -> int:
        """Where the weight's split dim is in the result: a product's results are its batch dims, the left's free dims,
        the right's."""
        (contract, batch), ranks = self.eqn.params["dimension_numbers"], [self.data_rank, self.weight_rank]
        if self.exchange.weight == 0:
            ranks.reverse()
        free = [
            [d for d in range(rank) if d not in contract[side] and d not in batch[side]]
            for side, rank in enumerate(ranks)
        ]
        before = len(batch[0]) + (len(free[0]) if self.exchange.weight == 1 else 0)
        return before + free[self.exchange.weight].index(self.exchange.weight_dim)

    def local(self, data: Any, weight: Any) -> Any:
        operands = (weight, data) if self.exchange.weight == 0 else (data, weight)
        return _compat.bind_equation(self.eqn, operands)[0]


def fits(one: Exchange, eqn: Any, operands: Sequence[Any]) -> bool:
    """Whether an equation is the product that the exchange was planned for: the split weight dim is where its columns
    or rows are."""
    if eqn.primitive.name != "dot_general":
        return False
    contract, batch = eqn.params["dimension_numbers"]
    weight_contract, data_contract = contract[one.weight], contract[1 - one.weight]
    if one.weight_dim in batch[one.weight] or one.example_dim in (*batch[one.data], *data_contract):
        return False
    if one.leave == STAY:
        return one.weight_dim not in weight_contract and (one.enter != FEATURES or one.feature_dim in data_contract)
    return one.weight_dim in weight_contract and data_contract[weight_contract.index(one.weight_dim)] == one.feature_dim


def evaluate_product(one: Exchange, eqn: Any, operands: Sequence[Any], where: Where, copies: Copies) -> list[Any]:
    """The results of a product with a split weight. `copies` remembers gathered activations by value: products that
    read the same ones (q, k and v) gather them once."""
    data, weight = operands[one.data], operands[one.weight]
    product = Product(one, where, eqn, data.ndim, weight.ndim)
    if one.leave == STAY:
        key = copies_key(one, data)
        if key not in copies:
            with jax.named_scope(scope("enter", one.layer)):
                copies[key] = data, enter(product, data)
        data = copies[key][1]
    elif one.enter == SWAP:
        with jax.named_scope(scope("enter", one.layer)):
            data = swap(product, data)
    with jax.named_scope(scope("product", one.layer)):
        return [multiply(product, data, weight)]


def copies_key(one: Exchange, data: Any) -> Any:
    """By what gathered activations are found again: the value that is gathered, and how."""
    return id(data), one.enter, one.axes, one.example_dim, one.feature_dim


def scope(what: str, layer: str) -> str:
    """The name scope of an exchange, by which a compiled collective is found again."""
    return f"splitjax:{what}:{layer.replace('/', '.')}"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def enter(product: Product, data: Any) -> Any:
    """Activations as copies, gathered if need be."""
    one = product.exchange
    axes = product.where.left(one.axes)

    def local(part):
        if one.enter == EXAMPLES:
            part = lax.all_gather(part, axes, axis=one.example_dim, tiled=True)
        elif one.enter == FEATURES:
            part = lax.all_gather(part, axes, axis=one.feature_dim, tiled=True)
        return part[None]

    return product.where.shard_map(local, one.batch_axes, product.data_outside, product.data_inside)(data)


def _enter_forward(product: Product, data: Any) -> tuple[Any, None]:
    return enter(product, data), None


def leave(product: Product, cotangent: Any) -> Any:
    """The cotangents of copies, summed back to where the activations came from."""
    one = product.exchange
    axes = product.where.left(one.axes)

    def local(summand):
        if one.enter == COPY:
            return lax.psum(summand[0], axes)
        dim = one.example_dim if one.enter == EXAMPLES else one.feature_dim
        return lax.psum_scatter(summand[0], axes, scatter_dimension=dim, tiled=True)

    return product.where.shard_map(local, one.batch_axes, product.data_inside, product.data_outside)(cotangent)


enter.defvjp(_enter_forward, lambda product, _, cotangent: (leave(product, cotangent),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def swap(product: Product, data: Any) -> Any:
    """Each worker's examples with all features -> the group's examples with a part of the features."""
    one = product.exchange
    return _all_to_all(product, data, one.feature_dim, one.example_dim, (product.data_outside, product.data_inside))


def _all_to_all(
    product: Product, value: Any, split_dim: int, join_dim: int, specs: tuple[PartitionSpec, PartitionSpec]
) -> Any:
    one = product.exchange
    axes = product.where.left(one.axes)
    run = lambda part: lax.all_to_all(part, axes, split_axis=split_dim, concat_axis=join_dim, tiled=True)
    return product.where.shard_map(run, one.batch_axes, *specs)(value)


def _swap_forward(product: Product, data: Any) -> tuple[Any, None]:
    return swap(product, data), None


def _swap_backward(product: Product, _: None, cotangent: Any) -> tuple[Any]:
    one = product.exchange
    return (
        _all_to_all(product, cotangent, one.example_dim, one.feature_dim, (product.data_inside, product.data_outside)),
    )


swap.defvjp(_swap_forward, _swap_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply(product: Product, data: Any, weight: Any) -> Any:
    """The product itself: columns of it on each device, or the sum of what each device's rows give."""
    return _multiply_forward(product, data, weight)[0]


def _multiply_forward(product: Product, data: Any, weight: Any) -> tuple[Any, tuple[Any, Any]]:
    one = product.exchange
    axes = product.where.left(one.axes)

    def local(data, weight):
        if one.leave == STAY:
            return product.local(data[0], weight)
        out = product.local(data, weight)
        if one.leave == SCATTER:
            return lax.psum_scatter(out, axes, scatter_dimension=one.out_example_dim, tiled=True)
        return lax.psum(out, axes)

    specs = (product.data_inside, product.weight_spec)
    return product.where.shard_map(local, one.batch_axes, specs, product.out_spec)(data, weight), (data, weight)


def _multiply_backward(product: Product, kept: tuple[Any, Any], cotangent: Any) -> tuple[Any, Any]:
    one = product.exchange
    axes, rest = product.where.left(one.axes), product.where.left(one.rest)

    def local(data, weight, cotangent):
        if one.leave == SCATTER:
            cotangent = lax.all_gather(cotangent, axes, axis=one.out_example_dim, tiled=True)
        _, pull = jax.vjp(product.local, data[0] if one.leave == STAY else data, weight)
        to_data, to_weight = pull(cotangent)
        # The copies of this shard are in the other groups.
        parts = tuple((dim, over) for dim, names in one.scatter if (over := product.where.left(names)))
        to_weight = sum_into_parts(to_weight, parts, rest)
        return to_data[None] if one.leave == STAY else to_data, to_weight

    specs = (product.data_inside, product.weight_spec)
    run = product.where.shard_map(
        local, one.batch_axes, (*specs, product.out_spec), (product.data_inside, product.gradient_spec)
    )
    return run(*kept, cotangent)


multiply.defvjp(_multiply_forward, _multiply_backward)


def sum_into_parts(value: Any, parts: Sequence[tuple[int, tuple[str, ...]]], axes: Sequence[str]) -> Any:
    """Inside a `shard_map`: the sum over `axes`, of which each device keeps a part; over axes that no part names, all
    of it."""
    for dim, over in parts:
        value = lax.psum_scatter(value, over, scatter_dimension=dim, tiled=True)
    left = tuple(axis for axis in axes if all(axis not in over for _, over in parts))
    return lax.psum(value, left) if left else value
