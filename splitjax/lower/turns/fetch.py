"""Brings activations that cross into split layers in turn by turn, a turn ahead, and sends their cotangents back.

`modulo`: turn k takes slice k of every worker's examples: an all-gather forward, a reduce-scatter backward, every link
in use. `turns`: turn k takes worker k's examples, broadcast to its group (a masked all-reduce, as the sender changes
from turn to turn), their cotangents summed and kept by worker k. Krizhevsky, "One weird trick" (arXiv 1404.5997,
section 4.1, schemes b and c).

A loop over turns carries what the next turn needs, so that its transfer does not wait for this turn's compute. Both
classes here are `worker_loop.OperandFetch`es: the loop calls them with the whole crossing value, and they hand the
products that read it its gathered copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from splitjax.lower.microbatch.batch_split import Split
from splitjax.lower.products.groups import Copies, Product, copies_key, enter, leave, scope
from splitjax.planning.sites.exchange import EXAMPLES
from splitjax.planning.sites.mesh_context import MeshContext
from splitjax.primitives.example_relation import ExampleDim


@dataclasses.dataclass(frozen=True, eq=False)
class _CrossingFetch:
    """Brings in one crossing value.

    - `split`, `layout`: how it is cut into turns, and where it holds examples.
    - `whole_size`: the size of the dim that holds the examples.
    - `products`: the products with split weights that read it; the first decides how it is gathered.
    - `copies`: gathered activations that these products find there.
    """

    split: Split
    layout: ExampleDim
    whole_size: int
    products: tuple[Product, ...]
    copies: Copies

    @property
    def where(self) -> MeshContext:
        """The mesh, and the axes of it that the loop handles."""
        return self.products[0].where

    def hand_over(self, part: Any, entered: Any) -> Any:
        """Lets the products that read `part` find it gathered, as `entered`; returns `part`."""
        for product in self.products:
            if product.exchange.enter == EXAMPLES:
                self.copies[copies_key(product.exchange, part)] = part, entered
        return part

    def join(self, rows: Any) -> Any:
        """Returns the cotangents of all turns, `rows`, as one array, examples in their original order."""
        return self.split.join(rows, self.layout, self.whole_size)

    def spec(self, rank: int) -> PartitionSpec:
        """Returns the spec of the cut value of `rank` dims, and of its cotangents.

        Over the axes that a surrounding `shard_map` handles."""
        return self.split.cut_spec(rank, self.layout)

    def zeros(self, cut: Any) -> Any:
        """Returns the rows into which cotangents of the `cut` value are added."""
        return jnp.zeros_like(cut)


class SliceFetch(_CrossingFetch):
    """Fetches slice k of every worker's examples in turn k (`group_comm="modulo"`)."""

    def cut(self, value: Any) -> Any:
        """Returns the whole `value` with turns leading."""
        return self.split.cut(value, self.layout)

    def fetch(self, cut: Any, turn: Any) -> tuple[Any, Any]:
        """Returns the slice of `turn` (i32[]) of the `cut` value, on its workers and gathered.

        These are differentiable values: cotangents of both go to `add`."""
        part = self.split.part(lax.dynamic_index_in_dim(cut, turn, keepdims=False), self.layout)
        with jax.named_scope(scope("enter", self.products[0].exchange.layer)):
            return part, enter(self.products[0], part)

    def part(self, fetched: tuple[Any, Any]) -> Any:
        """Returns the slice that was `fetched`, on its workers; products that read it find it gathered."""
        return self.hand_over(*fetched)

    def add(self, rows: Any, cotangent: tuple[Any, Any], turn: Any) -> Any:
        """Returns `rows` with the `cotangent` of what was fetched for `turn` put in its place, exchanged."""
        with jax.named_scope(scope("enter", self.products[0].exchange.layer)):
            own = cotangent[0] + leave(self.products[0], cotangent[1])
        own = self.split.uncut_local(own, self.layout, self.whole_size)
        return lax.dynamic_update_index_in_dim(rows, own.astype(rows.dtype), turn, 0)


class BroadcastFetch(_CrossingFetch):
    """Fetches all examples of worker k in turn k (`group_comm="turns"`): `split` counts a group's workers as slices."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of the group."""
        return self.products[0].exchange.axes

    @property
    def moved(self) -> ExampleDim:
        """The layout of the fetched copies, which have one more leading dim."""
        return dataclasses.replace(self.layout, dim=self.layout.dim + 1)

    def _stacked(self, rank: int) -> PartitionSpec:
        """Returns the spec of a cut value of `rank` dims, one worker's examples on each device."""
        entries: list[Any] = [None] * rank
        entries[0] = self.axes
        for i, (name, _) in enumerate(self.split.axes):
            entries[1 + self.layout.dim + 1 + i] = self.where.left((name,)) or None
        return PartitionSpec(*entries)

    def cut(self, value: Any) -> Any:
        """Returns the whole `value` with turns leading, each worker's examples where they are."""
        cut = self.split.cut(value, self.layout)
        spec = list(self._stacked(cut.ndim))
        for i, (name, _) in enumerate(self.split.axes):
            spec[1 + self.layout.dim + 1 + i] = name
        return lax.with_sharding_constraint(cut, NamedSharding(self.where.mesh, PartitionSpec(*spec)))

    def fetch(self, cut: Any, turn: Any) -> Any:
        """Returns the examples of worker number `turn` (i32[]) on all workers of its group, from the `cut` value."""

        def local(part, place, turn):
            return lax.psum(jnp.where(place[0] == turn, part, jnp.zeros_like(part)), self.axes)

        spec = self._stacked(cut.ndim)
        with jax.named_scope(scope("enter", self.products[0].exchange.layer)):
            copies = self._over_batch_axes(local, (spec, PartitionSpec(self.axes), PartitionSpec()), spec)(
                cut, self._numbers(), turn
            )
        return self.split.part(copies, self.moved)

    def part(self, fetched: Any) -> Any:
        """Returns the copies that were `fetched` as an ordinary value; products that read it find the copies."""
        return self.hand_over(_uncopy(self, fetched), fetched)

    def add(self, rows: Any, cotangent: Any, turn: Any) -> Any:
        """Returns `rows`, to whose worker number `turn` the `cotangent` was added up."""
        cotangent = self.split.uncut_local(cotangent, self.moved, self.whole_size)

        def local(rows, summand, place, turn):
            return jnp.where(place[0] == turn, lax.psum(summand, self.axes), rows)

        spec = self._stacked(rows.ndim)
        with jax.named_scope(scope("enter", self.products[0].exchange.layer)):
            run = self._over_batch_axes(local, (spec, spec, PartitionSpec(self.axes), PartitionSpec()), spec)
            return run(rows, cotangent.astype(rows.dtype), self._numbers(), turn)

    def _numbers(self) -> Any:
        """Returns every worker's number in its group, i32[workers].

        Inside a `shard_map` that leaves other axes to XLA there is no other way to know it."""
        return jnp.arange(self.split.num_microbatches, dtype=jnp.int32)

    def _over_batch_axes(self, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Returns `fn` as a `shard_map` over the axes that split the batch of the split layers."""
        return self.where.shard_map(fn, self.products[0].exchange.batch_axes, in_specs, out_specs)


def _uncopy(fetch: BroadcastFetch, copies: Any) -> Any:
    """Returns copies as an ordinary value, for what is no product with a split weight. Its cotangent belongs to one of
    the copies only."""
    product = fetch.products[0]
    split_dims: dict[int, Sequence[str]] = {product.exchange.example_dim: product.exchange.rest}
    inside = product.spec(copies.ndim - 1, split_dims, copies=True)
    plain = product.spec(copies.ndim - 1, split_dims)

    @jax.custom_vjp
    def uncopy(copies):
        return fetch._over_batch_axes(lambda part: part[0], inside, plain)(copies)

    def backward(_, cotangent):
        def local(cotangent, place):
            return jnp.where(place[0] == 0, cotangent, jnp.zeros_like(cotangent))[None]

        return (fetch._over_batch_axes(local, (plain, PartitionSpec(fetch.axes)), inside)(cotangent, fetch._numbers()),)

    uncopy.defvjp(lambda copies: (uncopy(copies), None), backward)
    return uncopy(copies)


# By `group_comm`: (split, layout, whole_size, products, copies) -> the fetch of a crossing value.
FETCHES: Mapping[str, type[SliceFetch] | type[BroadcastFetch]] = {"modulo": SliceFetch, "turns": BroadcastFetch}
