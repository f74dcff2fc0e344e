"""How activations that cross into split layers come in turns: fetched one turn ahead, their cotangents sent back turn
by turn.

`modulo`: turn k takes slice k of every worker's examples: an all-gather forward, a reduce-scatter backward, every link
in use. `turns`: turn k takes worker k's examples, broadcast to its group (a masked all-reduce, as the sender changes
from turn to turn), their cotangents summed and kept by worker k. Krizhevsky, "One weird trick" (arXiv 1404.5997,
section 4.1, schemes b and c).

A loop over turns carries what the next turn needs, so that its transfer does not wait for this turn's compute.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from splitjax.lower.microbatch.batch_split import Split
from splitjax.lower.microbatch.example_relation import Layout
from splitjax.lower.products.exchange import EXAMPLES
from splitjax.lower.products.groups import Copies, Product, Where, copies_key, enter, leave, scope


@dataclasses.dataclass(frozen=True, eq=False)
class _Fetch:
    """One crossing value: how it is cut into turns (`split`, `layout`), and the products that read it."""

    split: Split
    layout: Layout
    whole_size: int  # of the dim that holds the examples
    products: tuple[Product, ...]
    copies: Copies

    @property
    def where(self) -> Where:
        return self.products[0].where

    def hand_over(self, part: Any, entered: Any) -> Any:
        """Lets the products that read `part` find it gathered."""
        for product in self.products:
            if product.exchange.enter == EXAMPLES:
                self.copies[copies_key(product.exchange, part)] = part, entered
        return part

    def join(self, rows: Any) -> Any:
        """The cotangents of all turns as one array, examples in their original order."""
        return self.split.join(rows, self.layout, self.whole_size)

    def spec(self, rank: int) -> PartitionSpec:
        """The spec of the cut value (and of its cotangents) over the axes that a surrounding `shard_map` handles."""
        return self.split.cut_spec(rank, self.layout)

    def zeros(self, cut: Any) -> Any:
        return jnp.zeros_like(cut)


class Modulo(_Fetch):
    """Slice k of every worker's examples in turn k."""

    def cut(self, value: Any) -> Any:
        """The value with turns leading."""
        return self.split.cut(value, self.layout)

    def fetch(self, cut: Any, turn: Any) -> tuple[Any, Any]:
        """A turn's slice, on its workers and gathered. Differentiable values: cotangents of both go to `add`."""
        part = self.split.part(lax.dynamic_index_in_dim(cut, turn, keepdims=False), self.layout)
        with jax.named_scope(scope("enter", self.products[0].exchange.layer)):
            return part, enter(self.products[0], part)

    def part(self, fetched: tuple[Any, Any]) -> Any:
        return self.hand_over(*fetched)

    def add(self, rows: Any, cotangent: tuple[Any, Any], turn: Any) -> Any:
        """The cotangents of a turn put with those of the others."""
        with jax.named_scope(scope("enter", self.products[0].exchange.layer)):
            own = cotangent[0] + leave(self.products[0], cotangent[1])
        own = self.split.uncut_local(own, self.layout, self.whole_size)
        return lax.dynamic_update_index_in_dim(rows, own.astype(rows.dtype), turn, 0)


class Turns(_Fetch):
    """All examples of worker k in turn k: `split` counts the workers of a group as slices."""

    @property
    def axes(self) -> tuple[str, ...]:
        return self.products[0].exchange.axes

    @property
    def moved(self) -> Layout:
        """The layout behind the dim of the copies."""
        return dataclasses.replace(self.layout, dim=self.layout.dim + 1)

    def _stacked(self, rank: int) -> PartitionSpec:
        """A cut value, one worker's examples on each device."""
        entries: list[Any] = [None] * rank
        entries[0] = self.axes
        for i, (name, _) in enumerate(self.split.axes):
            entries[1 + self.layout.dim + 1 + i] = self.where.left((name,)) or None
        return PartitionSpec(*entries)

    def cut(self, value: Any) -> Any:
        cut = self.split.cut(value, self.layout)
        spec = list(self._stacked(cut.ndim))
        for i, (name, _) in enumerate(self.split.axes):
            spec[1 + self.layout.dim + 1 + i] = name
        return lax.with_sharding_constraint(cut, NamedSharding(self.where.mesh, PartitionSpec(*spec)))

    def fetch(self, cut: Any, turn: Any) -> Any:
        """Worker `turn`'s examples on all workers of its group."""

        def local(part, place, turn):
            return lax.psum(jnp.where(place[0] == turn, part, jnp.zeros_like(part)), self.axes)

        spec = self._stacked(cut.ndim)
        with jax.named_scope(scope("enter", self.products[0].exchange.layer)):
            copies = self._island(local, (spec, PartitionSpec(self.axes), PartitionSpec()), spec)(
                cut, self._places(), turn
            )
        return self.split.part(copies, self.moved)

    def part(self, fetched: Any) -> Any:
        return self.hand_over(_uncopy(self, fetched), fetched)

    def add(self, rows: Any, cotangent: Any, turn: Any) -> Any:
        cotangent = self.split.uncut_local(cotangent, self.moved, self.whole_size)

        def local(rows, summand, place, turn):
            return jnp.where(place[0] == turn, lax.psum(summand, self.axes), rows)

        spec = self._stacked(rows.ndim)
        with jax.named_scope(scope("enter", self.products[0].exchange.layer)):
            run = self._island(local, (spec, spec, PartitionSpec(self.axes), PartitionSpec()), spec)
            return run(rows, cotangent.astype(rows.dtype), self._places(), turn)

    def _places(self) -> Any:
        """Every worker's number in its group; inside a `shard_map` that leaves other axes to XLA there is no other way
        to know it."""
        return jnp.arange(self.split.num_microbatches, dtype=jnp.int32)

    def _island(self, fn: Any, in_specs: Any, out_specs: Any) -> Any:
        return self.where.shard_map(fn, self.products[0].exchange.batch_axes, in_specs, out_specs)


def _uncopy(fetch: Turns, copies: Any) -> Any:
    """Copies as an ordinary value, for what is no product with a split weight. Its cotangent belongs to one of the
    copies only."""
    product = fetch.products[0]
    one = product.exchange
    inside = product.spec(copies.ndim - 1, {one.example_dim: one.rest}, copies=True)
    plain = product.spec(copies.ndim - 1, {one.example_dim: one.rest})

    @jax.custom_vjp
    def uncopy(copies):
        return fetch._island(lambda part: part[0], inside, plain)(copies)

    def backward(_, cotangent):
        def local(cotangent, place):
            return jnp.where(place[0] == 0, cotangent, jnp.zeros_like(cotangent))[None]

        return (fetch._island(local, (plain, PartitionSpec(fetch.axes)), inside)(cotangent, fetch._places()),)

    uncopy.defvjp(lambda copies: (uncopy(copies), None), backward)
    return uncopy(copies)


FETCHES = {"modulo": Modulo, "turns": Turns}
