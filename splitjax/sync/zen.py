"""`zen` (Wang et al., arXiv 2309.13254): balanced parallelism by hierarchical hashing, COO push, hash-bitmap pull.

This worker's rows go in, the sum comes out. What that costs stands in `costs.zen`.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from splitjax.sync.costs.capacities import Capacities
from splitjax.sync.costs.zen import ZenCosts
from splitjax.sync.local import send_order, sum_rows, take_rows, unite
from splitjax.sync.owners import push_and_pull
from splitjax.sync.rows import RowSparse, merge
from splitjax.sync.running import Attempt, Scheme, register_scheme
from splitjax.sync.wire import Axis

_SERIAL_SHARE = 10


@register_scheme
@dataclasses.dataclass(frozen=True)
class Zen(ZenCosts, Scheme):
    """The scheme `zen` as it runs. Its options are those of `ZenCosts`, which says what it costs."""

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
        owned = push_and_pull(exchange, ids, values, good, axis)
        rows = _rows(owned.items, owned.values, items, local, capacities.union)
        return Attempt(rows, owned.fits & ~rows.overflowed, owned.sent_items // items)


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
