"""Balanced and other parallelism with owners: push items to their owners, which add them up, and pull the sums.

Zen's point-to-point, one-shot, parallel corner of the design space (Wang et al., arXiv 2309.13254, section 3). What
differs between the schemes that use it is what an item is, who owns it (`partition`), and how ids are written
(`codes`). One message each way: ids, values and counts travel together.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from splitjax.sync import wire
from splitjax.sync.codes import IdCode
from splitjax.sync.local import send_order, sum_rows, take_rows, unite
from splitjax.sync.partition import Partition
from splitjax.sync.profile import Sparsity, skewness
from splitjax.sync.scheme import roomy
from splitjax.sync.wire import Axis

_COUNT_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Owned:
    """Holds what owners sent back, alike on all workers.

    - `items`: i32[n, pull] (`num_items`: none), and `values`: [n, pull, ...], their sums.
    - `fits`: bool[], alike on all workers.
    - `sent_items`: i32[], items that this worker sent, gathers counted n-1 times.
    """

    items: Array
    values: Array
    fits: Array
    sent_items: Array


@dataclasses.dataclass(frozen=True)
class OwnerExchange:
    """A push to owners and a pull of the sums. `push`, `pull`: the codes of one pair's and of one owner's positions."""

    partition: Partition
    push: IdCode
    pull: IdCode
    pattern: str = "auto"

    def run(self, items: Array, values: Array, good: Array, axis: Axis) -> Owned:
        """Pushes items to their owners and pulls the sums.

        **Arguments:**

        - `items`: i32[m], unique, ascending; `num_items` for none. `values`: [m, ...].
        - `good`: bool[], False where this worker had no room before: then nothing fits.
        - `axis`: the mesh axis or axes of the workers.
        """
        n, me = self.partition.num_owners, lax.axis_index(axis)
        order, counts = send_order(self.partition.owner(items), n, self.push.capacity)
        positions = jnp.concatenate([self.partition.position(items), jnp.full((1,), self.partition.size, jnp.int32)])[
            order
        ]
        codes, fitted = self.push.encode(positions, counts)
        (codes, values), sources = wire.exchange([codes, take_rows(values, order)], axis, self.pattern)
        del sources  # whose they were does not matter to a sum
        owned, slots, count = unite(self.push.decode(codes), self.partition.size, self.pull.capacity)
        sums = sum_rows(values.reshape(-1, *values.shape[2:]), slots.reshape(-1), self.pull.capacity, has_no_gaps=True)
        codes, pulled = self.pull.encode(owned[None], count[None])
        verdict = jnp.where(good & fitted.all() & pulled[0], count, -1)
        codes, sums, counts_of = wire.gather([codes[0], sums, verdict], axis)
        owners = jnp.arange(n, dtype=jnp.int32)[:, None]
        sent = (
            jnp.minimum(counts, self.push.capacity).sum()
            - jnp.minimum(counts[me], self.push.capacity)
            + (n - 1) * count
        )
        return Owned(self.partition.item(owners, self.pull.decode(codes)), sums, (counts_of >= 0).all(), sent)

    def num_bytes(self, item_bytes: int) -> int:
        """Returns what a worker sends for items of `item_bytes` bytes, padding included."""
        return (self.partition.num_owners - 1) * sum(self._message_bytes(item_bytes))

    def num_messages(self, item_bytes: int) -> int:
        """Returns how many messages a worker sends one after the other, for items of `item_bytes` bytes."""
        n, (push, pull) = self.partition.num_owners, self._message_bytes(item_bytes)
        return wire.exchange_messages(n, push, self.pattern) + wire.gather_messages(n, pull)

    def _message_bytes(self, item_bytes: int) -> tuple[int, int]:
        """Returns the bytes of the message to one owner, and of the one that an owner sends to all."""
        push, pull = (code.num_bytes + code.capacity * item_bytes for code in (self.push, self.pull))
        return push, pull + _COUNT_BYTES


def pair_and_owner_rooms(sparsity: Sparsity, partition: Partition, factor: int = 1, items: int = 1) -> tuple[int, int]:
    """Returns for how many items a pair of workers, and an owner, must have room, by the samples of `sparsity`.

    **Arguments:**

    - `sparsity`: the profile. `partition`: who owns which item.
    - `factor`: so many rows of the samples are one item.
    - `items`: each of these is so many.
    """
    pair = owned = 0
    for step in sparsity.samples:
        sets = [(np.unique(ids // factor)[:, None] * np.int64(items) + np.arange(items)).reshape(-1) for ids in step]
        pair = max(
            pair,
            *(int(np.bincount(partition.owner(ids), minlength=partition.num_owners).max(initial=0)) for ids in sets),
        )
        union = np.unique(np.concatenate(sets))
        owned = max(owned, int(np.bincount(partition.owner(union), minlength=partition.num_owners).max(initial=0)))
    return roomy(pair, partition.size), roomy(owned, partition.size)


def range_load(sparsity: Sparsity, factor: int = 1) -> float:
    """Returns the items that the busiest owner of equal ranges takes from all workers, and sends back, over the
    number of workers.

    s (k + U): rows (or blocks of `factor`) of a worker and of the union in `sparsity`, each with the skewness s
    that it has.
    """
    n, size = sparsity.num_workers, -(-sparsity.table.num_rows // factor)
    local = [np.unique(ids // factor) for step in sparsity.samples for ids in step]
    union = [np.unique(np.concatenate(step) // factor) for step in sparsity.samples]
    return float(sum(np.mean([ids.size for ids in sets]) * skewness(sets, size, n) for sets in (local, union)))
