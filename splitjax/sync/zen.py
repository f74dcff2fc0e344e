"""`zen` (Wang et al., arXiv 2309.13254): balanced parallelism by hierarchical hashing, COO push, hash-bitmap pull."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from splitjax.errors import SyncError
from splitjax.sync.codes import BITMAP, NUMBERS, IdCode
from splitjax.sync.local import send_order, sum_rows, take_rows, unite
from splitjax.sync.owners import OwnerExchange, pair_and_owner_rooms
from splitjax.sync.partition import Partition
from splitjax.sync.profile import Sparsity, Table
from splitjax.sync.rows import RowSparse, merge
from splitjax.sync.scheme import Attempt, Capacities, Scheme, bucket, local_capacity, register_scheme, union_capacity
from splitjax.sync.wire import Axis

_ID_BYTES, _SERIAL_SHARE = 4, 10
GRANULARITIES = ("element", "row")


@register_scheme
@dataclasses.dataclass(frozen=True)
class Zen(Scheme):
    """(n-1)/n (2d + gamma d + 1/32) M words: (index, value) pairs to the owners, then sums and a bitmap of each
    partition back.

    h0 (`Partition("hashed")`) gives every index its owner, the same on all workers; both sides know the sorted indices
    of a partition, so the pull sends one bit for each instead of an index (section 3.2).

    **Attributes:**

    - `granularity`: `element`, as published: every value of a row has an index; `row`: a row has one.
    - `partition`: how a worker finds the place of each index in what it sends. `hash`, as published (section 3.1): k
      further hashes into the owner's r1 slots, what still collides to a serial memory of r1/10, then compaction;
      `pack`: running counts. The messages hold the same; where there are no atomics, running counts are faster.
    - `num_hashes`: k. `pattern`: how the push goes, `all_to_all`, `ppermute` or `auto`: see `wire.PATTERNS`.
    """

    name: ClassVar[str] = "zen"
    granularity: str = "element"
    partition: str = "hash"
    num_hashes: int = 3
    pattern: str = "auto"

    def __post_init__(self) -> None:
        for value, known in ((self.granularity, GRANULARITIES), (self.partition, ("hash", "pack"))):
            if value not in known:
                raise SyncError(
                    "no such way of Zen",
                    value=value,
                    place="Zen(granularity=..., partition=...)",
                    remedy=f"one of {', '.join(known)}",
                )

    def takes(self, table: Table) -> bool:
        """Tells whether the elements (or rows) of `table` can be told apart by 32-bit indices."""
        return table.num_rows * self._items_per_row(table.row_size) < np.iinfo(np.int32).max

    def plan(self, sparsity: Sparsity) -> Capacities:
        """Returns room for the items of a pair of workers and of an owner, by `sparsity`."""
        items, local, union = (
            self._items_per_row(sparsity.table.row_size),
            local_capacity(sparsity),
            union_capacity(sparsity),
        )
        n = sparsity.num_workers
        if items % n:
            push, pull = pair_and_owner_rooms(
                sparsity, Partition("hashed", sparsity.table.num_rows * items, n), items=items
            )
        else:
            # Owners share the values of every row evenly.
            push, pull = (bucket(rows * items / n, -(-sparsity.table.num_rows * items // n)) for rows in (local, union))
        return Capacities(local=local, union=union, push=push, pull=pull)

    def attempt(self, local: RowSparse, axis: Axis, capacities: Capacities) -> Attempt:
        """Sends items to hashed owners, which add them up and send the sums, with a bitmap of items, to all.

        `local` is this worker's rows, `axis` the mesh axis or axes of the workers, `capacities` the room there
        is; see `Scheme.attempt`.
        """
        row_size = local.row_size
        items = self._items_per_row(row_size)
        exchange = self._exchange(capacities, local.num_rows, items, lax.axis_size(axis))
        local = local.padded(min(capacities.local, local.capacity))
        num_items = exchange.partition.num_items
        ids = jnp.where(
            (local.ids < local.num_rows)[:, None],
            local.ids[:, None] * items + jnp.arange(items, dtype=jnp.int32),
            num_items,
        )
        ids, values, good = ids.reshape(-1), local.values.reshape(ids.size, -1), ~local.overflowed
        if self.partition == "hash":
            owners = exchange.partition.owner(ids)
            order, lost = hierarchical_order(
                owners, ids, exchange.partition.num_owners, capacities.push, self.num_hashes
            )
            ids = jnp.concatenate([ids, jnp.full((1,), num_items, jnp.int32)])[order]
            values, good = take_rows(values, order), good & ~lost
        owned = exchange.run(ids, values, good, axis)
        rows = _rows(owned.items, owned.values, items, local, capacities.union)
        return Attempt(rows, owned.fits & ~rows.overflowed, owned.sent_items // items)

    def predicted_bytes(self, capacities: Capacities, table: Table) -> int:
        """Returns the bytes that a worker sends for a `table` with these `capacities`, padding included."""
        items = self._items_per_row(table.row_size)
        return self._exchange(capacities, table.num_rows, items, table.num_workers).num_bytes(table.row_bytes // items)

    def formula_bytes(self, sparsity: Sparsity) -> float:
        """Returns the bytes that the class's formula gives for `sparsity`, without padding."""
        n, table = sparsity.num_workers, sparsity.table
        items = self._items_per_row(table.row_size)
        push = sparsity.rows * items * (table.row_bytes / items + _ID_BYTES)
        return (n - 1) / n * (push + sparsity.union(n) * table.row_bytes + table.num_rows * items / 8)

    def num_messages(self, capacities: Capacities, table: Table) -> int:
        """Returns how many messages a worker sends one after the other for a `table` with these `capacities`, on
        CPU."""
        items = self._items_per_row(table.row_size)
        return self._exchange(capacities, table.num_rows, items, table.num_workers).num_messages(
            table.row_bytes // items
        )

    def _items_per_row(self, row_size: int) -> int:
        return row_size if self.granularity == "element" else 1

    def _exchange(self, capacities: Capacities, num_rows: int, items: int, num_workers: int) -> OwnerExchange:
        if num_rows * items >= np.iinfo(np.int32).max:
            raise SyncError(
                "more elements than a 32-bit index can tell apart",
                value=num_rows * items,
                place="Zen(granularity='element')",
                remedy="use granularity='row'",
            )
        partition = Partition("hashed", num_rows * items, num_workers)
        push = IdCode(NUMBERS, capacities.push, partition.size)
        return OwnerExchange(partition, push, IdCode(BITMAP, capacities.pull, partition.size), self.pattern)


def hierarchical_order(owners: Array, ids: Array, num_owners: int, room: int, num_hashes: int) -> tuple[Array, Array]:
    """Finds a place in memory for every index, owner by owner: Zen's hierarchical hashing (Algorithm 1 of the
    paper).

    Every owner has r1 = 2 `room` slots and a serial memory of r1/10. Hash by hash, indices that have no place yet
    try the slot that it gives; of those that meet in one, the smallest position stays. (The published code lets
    them overwrite each other, and takes index 0 for an empty slot.) The rest goes into the serial memories in
    order.

    **Arguments:**

    - `owners`, `ids`: i32[m]; owner `num_owners` for no index.
    - `num_owners`: the number of owners.
    - `room`: half the number of an owner's slots.
    - `num_hashes`: how many hashes an index tries.

    **Returns:** positions i32[num_owners * (r1 + r1/10)] in the order of the memory, m for an empty slot; whether
    a serial memory was too small (bool[]), so that indices are missing.
    """
    slots, serial = 2 * room, max(2 * room // _SERIAL_SHARE, 1)
    m = ids.size
    positions = jnp.arange(m, dtype=jnp.int32)
    memory = jnp.full((num_owners * slots,), m, jnp.int32)
    waiting = owners < num_owners
    for seed in range(num_hashes):
        slot = jnp.where(waiting, owners * slots + _hash(ids, seed, slots), memory.size)
        slot = jnp.where(memory.at[slot].get(mode="fill", fill_value=0) == m, slot, memory.size)
        memory = memory.at[slot].min(positions, mode="drop")
        waiting &= memory.at[slot].get(mode="fill", fill_value=m) != positions
    rest, counts = send_order(jnp.where(waiting, owners, num_owners), num_owners, serial)
    return jnp.concatenate([memory.reshape(num_owners, slots), rest], axis=1).reshape(-1), (counts > serial).any()


def _hash(ids: Array, seed: int, slots: int) -> Array:
    h = (ids.astype(jnp.uint32) + jnp.uint32(seed * 0x9E3779B9 & 0xFFFFFFFF)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 15)) * jnp.uint32(0xC2B2AE35)
    return ((h ^ (h >> 13)) % jnp.uint32(slots)).astype(jnp.int32)


def _rows(items: Array, values: Array, items_per_row: int, local: RowSparse, capacity: int) -> RowSparse:
    """Items that came back, as rows."""
    if items_per_row == 1:
        return merge(items, values.reshape(*items.shape, *local.row_shape), local.num_rows, capacity)
    unique, slots, count = unite(items // items_per_row, local.num_rows, capacity)
    place = jnp.where(slots < capacity, slots * items_per_row + items % items_per_row, capacity * items_per_row)
    flat = sum_rows(values.reshape(-1), place.reshape(-1), capacity * items_per_row)
    return RowSparse(unique, flat.reshape(capacity, *local.row_shape), count, local.num_rows)
