"""Group communication: evaluates a product with a split weight as explicit collectives, forward and backward.

The equation of a product, its operands and its planned `Exchange` come in; its results come out, differentiable. It
exists so that what is sent is what was planned, whatever XLA's partitioner would choose.

A gathered activation is kept as *copies*: one more leading dim, one entry per device of the group. Its values are those
of a replicated array, but its cotangent is not summed yet: every device keeps its own summand until one reduce-scatter
(or all-reduce) sums them on the way back, however many products read the copies (q, k and v, say).

Each piece is a `custom_vjp` of two `shard_map`s, so that what is sent backward is as explicit as what is sent forward.
Over axes that a surrounding `shard_map` already handles, nothing is sent: the caller sums over them once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from splitjax import _compat
from splitjax.planning.sites.exchange import COPY, EXAMPLES, FEATURES, SCATTER, STAY, SWAP, Exchange
from splitjax.planning.sites.mesh_context import MeshContext
from splitjax.primitives.dims import DimMap
from splitjax.primitives.table import OPERATIONS

CopiesKey = tuple[int, str, tuple[str, ...], int, int]  # as `copies_key` makes it
Copies = dict[CopiesKey, tuple[jax.Array, jax.Array]]  # gathered activations: (what was gathered, its copies)


@dataclasses.dataclass(frozen=True)
class Product:
    """Joins an exchange with its equation's geometry. All specs are of whole (global) values.

    - `exchange`: as planned. `where`: the mesh of the evaluation.
    - `eqn`: the product's equation: a `dot_general`, or what a user teaches.
    - `data_rank`, `weight_rank`: the number of dims of the two operands.
    """

    exchange: Exchange
    where: MeshContext
    eqn: Any
    data_rank: int
    weight_rank: int

    def spec(self, rank: int, entries: Mapping[int, Sequence[str]], copies: bool = False) -> PartitionSpec:
        """Returns the spec of a value of `rank` dims.

        `entries` maps a dim to the axes that split it; `copies` puts a leading dim before, for the devices of a group.
        """
        manual = self.where.manual
        axes = {dim: tuple(axis for axis in names if axis not in manual) for dim, names in entries.items()}
        inner = [axes.get(dim) or None for dim in range(rank)]
        return PartitionSpec(*([self.where.left(self.exchange.axes), *inner] if copies else inner))

    @property
    def data_outside(self) -> PartitionSpec:
        """The data as it comes."""
        exchange = self.exchange
        entries = {
            EXAMPLES: {exchange.example_dim: exchange.batch_axes},
            SWAP: {exchange.example_dim: exchange.batch_axes},
            COPY: {exchange.example_dim: exchange.rest},
        }.get(exchange.enter, {exchange.example_dim: exchange.rest, exchange.feature_dim: exchange.axes})
        return self.spec(self.data_rank, entries)

    @property
    def data_inside(self) -> PartitionSpec:
        """The data as the product reads it: copies for columns, a part of the features for rows."""
        exchange = self.exchange
        if exchange.leave == STAY:
            return self.spec(self.data_rank, {exchange.example_dim: exchange.rest}, copies=True)
        return self.spec(self.data_rank, {exchange.example_dim: exchange.rest, exchange.feature_dim: exchange.axes})

    @property
    def weight_spec(self) -> PartitionSpec:
        """The weight as it is stored."""
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
        """The result as it leaves."""
        exchange, rank = self.exchange, len(self.eqn.outvars[0].aval.shape)
        if exchange.leave == STAY:
            return self.spec(rank, {exchange.out_example_dim: exchange.rest, self.out_feature_dim: exchange.axes})
        return self.spec(
            rank, {exchange.out_example_dim: exchange.batch_axes if exchange.leave == SCATTER else exchange.rest}
        )

    @functools.cached_property
    def out_feature_dim(self) -> int:
        """The dim of the result that the weight's split dim becomes."""
        dims = _labelled(self.eqn)
        assert dims is not None, "a product is evaluated that no labels describe"
        return dims.outputs[0].index(dims.inputs[self.exchange.weight][self.exchange.weight_dim])

    def local(self, data: jax.Array, weight: jax.Array) -> jax.Array:
        """Returns the product of a device's parts of `data` and `weight`."""
        operands = (weight, data) if self.exchange.weight == 0 else (data, weight)
        return _compat.bind_equation(self.eqn, operands)[0]


def fits(exchange: Exchange, eqn: Any) -> bool:
    """Returns whether the equation `eqn` is the product that `exchange` was planned for: the split weight dim is where
    its columns or rows are."""
    dims = _labelled(eqn)
    if dims is None:
        return False
    weight, data, out = dims.inputs[exchange.weight], dims.inputs[exchange.data], dims.outputs[0]
    split, examples, features = weight[exchange.weight_dim], data[exchange.example_dim], data[exchange.feature_dim]
    if (split in data and split in out) or examples in weight or examples not in out:
        return False
    if exchange.leave == STAY:
        return split in out and (exchange.enter != FEATURES or features not in out)
    return split not in out and features == split


def _labelled(eqn: Any) -> DimMap | None:
    """Returns the labels of the dims of `eqn`, a product that they say how to split; None for any other equation."""
    facts = OPERATIONS.of(eqn.primitive.name, eqn.params)
    if facts.weights is None or not facts.weights.by_labels or facts.dims is None:
        return None
    inputs, outputs = ([v.aval.shape for v in side] for side in (eqn.invars, eqn.outvars))
    return facts.dims(inputs, outputs, eqn.params)


def evaluate_product(
    exchange: Exchange, eqn: Any, operands: Sequence[jax.Array], where: MeshContext, copies: Copies
) -> list[jax.Array]:
    """Evaluates a product with a split weight, and returns its result in a list.

    **Arguments:**

    - `exchange`: as planned for the equation `eqn`, which it `fits`.
    - `operands`: of the equation.
    - `where`: the mesh, and the axes of it that are handled already.
    - `copies`: remembers gathered activations by value, and is added to: products that read the same ones (q, k and v)
      gather them once.
    """
    data, weight = operands[exchange.data], operands[exchange.weight]
    product = Product(exchange, where, eqn, data.ndim, weight.ndim)
    if exchange.leave == STAY:
        key = copies_key(exchange, data)
        if key not in copies:
            with jax.named_scope(scope("enter", exchange.layer)):
                copies[key] = data, enter(product, data)
        data = copies[key][1]
    elif exchange.enter == SWAP:
        with jax.named_scope(scope("enter", exchange.layer)):
            data = swap(product, data)
    with jax.named_scope(scope("product", exchange.layer)):
        return [multiply(product, data, weight)]


def copies_key(exchange: Exchange, data: jax.Array) -> CopiesKey:
    """Returns the key by which gathered activations are looked up: what `data` is gathered, and how `exchange` gathers
    it. It holds the value's `id`, so that the value must be kept beside its copies."""
    return id(data), exchange.enter, exchange.axes, exchange.example_dim, exchange.feature_dim


def scope(what: str, layer: str) -> str:
    """Returns the name scope of an exchange, by which a compiled collective is recognised.

    `what` says which part of the work it is, such as "enter" or "product", and `layer` whose.
    """
    return f"splitjax:{what}:{layer.replace('/', '.')}"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def enter(product: Product, data: jax.Array) -> jax.Array:
    """Returns the activations `data` as copies, gathered as `product` needs them: one more leading dim, an entry per
    device of the group."""
    exchange = product.exchange
    axes = product.where.left(exchange.axes)

    def local(part: jax.Array) -> jax.Array:
        if exchange.enter == EXAMPLES:
            part = lax.all_gather(part, axes, axis=exchange.example_dim, tiled=True)
        elif exchange.enter == FEATURES:
            part = lax.all_gather(part, axes, axis=exchange.feature_dim, tiled=True)
        return part[None]

    return product.where.shard_map(local, exchange.batch_axes, product.data_outside, product.data_inside)(data)


def _enter_forward(product: Product, data: jax.Array) -> tuple[jax.Array, None]:
    return enter(product, data), None


def leave(product: Product, cotangent: jax.Array) -> jax.Array:
    """Sums the cotangents of copies back to where the activations of `product` came from.

    `cotangent` has the leading dim of copies; the result has it no more.
    """
    exchange = product.exchange
    axes = product.where.left(exchange.axes)

    def local(summand: jax.Array) -> jax.Array:
        if exchange.enter == COPY:
            return lax.psum(summand[0], axes)
        dim = exchange.example_dim if exchange.enter == EXAMPLES else exchange.feature_dim
        return lax.psum_scatter(summand[0], axes, scatter_dimension=dim, tiled=True)

    return product.where.shard_map(local, exchange.batch_axes, product.data_inside, product.data_outside)(cotangent)


enter.defvjp(_enter_forward, lambda product, _, cotangent: (leave(product, cotangent),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def swap(product: Product, data: jax.Array) -> jax.Array:
    """Exchanges examples for features: each worker gives its own examples of `data` with all features, and gets its
    group's examples with the part of the features that `product` reads on it."""
    exchange = product.exchange
    return _all_to_all(
        product, data, exchange.feature_dim, exchange.example_dim, (product.data_outside, product.data_inside)
    )


def _all_to_all(
    product: Product, value: jax.Array, split_dim: int, join_dim: int, specs: tuple[PartitionSpec, PartitionSpec]
) -> jax.Array:
    """Cuts a value along `split_dim`, and joins what all devices of the group send along `join_dim`. `specs`: of the
    value before and after."""
    exchange = product.exchange
    axes = product.where.left(exchange.axes)
    run = lambda part: lax.all_to_all(part, axes, split_axis=split_dim, concat_axis=join_dim, tiled=True)
    return product.where.shard_map(run, exchange.batch_axes, *specs)(value)


def _swap_forward(product: Product, data: jax.Array) -> tuple[jax.Array, None]:
    return swap(product, data), None


def _swap_backward(product: Product, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    exchange = product.exchange
    return (
        _all_to_all(
            product, cotangent, exchange.example_dim, exchange.feature_dim, (product.data_inside, product.data_outside)
        ),
    )


swap.defvjp(_swap_forward, _swap_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply(product: Product, data: jax.Array, weight: jax.Array) -> jax.Array:
    """Evaluates the product itself: columns of it on each device, or the sum of what each device's rows give.

    `data` and `weight` are the operands of `product`, the data as `Product.data_inside` says.
    """
    return _multiply_forward(product, data, weight)[0]


def _multiply_forward(
    product: Product, data: jax.Array, weight: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    exchange = product.exchange
    axes = product.where.left(exchange.axes)

    def local(data: jax.Array, weight: jax.Array) -> jax.Array:
        if exchange.leave == STAY:
            return product.local(data[0], weight)
        out = product.local(data, weight)
        if exchange.leave == SCATTER:
            return lax.psum_scatter(out, axes, scatter_dimension=exchange.out_example_dim, tiled=True)
        return lax.psum(out, axes)

    specs = (product.data_inside, product.weight_spec)
    return product.where.shard_map(local, exchange.batch_axes, specs, product.out_spec)(data, weight), (data, weight)


def _multiply_backward(
    product: Product, kept: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    exchange = product.exchange
    axes, rest = product.where.left(exchange.axes), product.where.left(exchange.rest)

    def local(data: jax.Array, weight: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        if exchange.leave == SCATTER:
            cotangent = lax.all_gather(cotangent, axes, axis=exchange.out_example_dim, tiled=True)
        _, pull = jax.vjp(product.local, data[0] if exchange.leave == STAY else data, weight)
        to_data, to_weight = pull(cotangent)
        # The copies of this shard are in the other groups.
        parts = tuple((dim, over) for dim, names in exchange.scatter if (over := product.where.left(names)))
        to_weight = sum_into_parts(to_weight, parts, rest)
        return to_data[None] if exchange.leave == STAY else to_data, to_weight

    specs = (product.data_inside, product.weight_spec)
    run = product.where.shard_map(
        local, exchange.batch_axes, (*specs, product.out_spec), (product.data_inside, product.gradient_spec)
    )
    return run(*kept, cotangent)


multiply.defvjp(_multiply_forward, _multiply_backward)


def sum_into_parts(value: jax.Array, parts: Sequence[tuple[int, tuple[str, ...]]], axes: Sequence[str]) -> jax.Array:
    """Sums `value` over `axes` inside a `shard_map`, and keeps a part of the sum on each device.

    `parts` pairs each dim that is cut with the axes over which it is; over axes that no part names, every device keeps
    all of the sum.
    """
    for dim, over in parts:
        value = lax.psum_scatter(value, over, scatter_dimension=dim, tiled=True)
    left = tuple(axis for axis in axes if all(axis not in over for _, over in parts))
    return lax.psum(value, left) if left else value
