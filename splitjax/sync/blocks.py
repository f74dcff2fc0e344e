"""`blocks` (OmniReduce, Fei et al., SIGCOMM'21): blocks of 256 values with any non-zero one travel whole, to range
owners and back."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax

from splitjax.sync.codes import NUMBERS, IdCode
from splitjax.sync.local import sum_rows, unite
from splitjax.sync.owners import OwnerExchange, pair_and_owner_rooms, range_load
from splitjax.sync.partition import Partition
from splitjax.sync.profile import Sparsity, Table
from splitjax.sync.rows import RowSparse
from splitjax.sync.scheme import (
    Attempt,
    Capacities,
    Scheme,
    check_levels,
    local_capacity,
    register_scheme,
    roomy,
    union_capacity,
)
from splitjax.sync.wire import Axis

_ID_BYTES = 4


@register_scheme
@dataclasses.dataclass(frozen=True)
class Blocks(Scheme):
    """About (n-1)/n s (b + B) (256 values + an id) bytes, b blocks on a worker, B in the union (Zen's formula for
    OmniReduce).

    A block is as many whole rows as `block_values` holds, at least one: rows longer than a block have no zero blocks
    inside. Rows whose sum is zero are not in the result, as nothing in a block tells them from rows that nobody
    touched.

    **Attributes:**

    - `block_values`: values of a block. `pattern`: how the push goes, `all_to_all`, `ppermute` or `auto`: see
      `wire.PATTERNS`.
    """

    name: ClassVar[str] = "blocks"
    needs_whole_rows: ClassVar[bool] = True
    block_values: int = 256
    pattern: str = "auto"

    def plan(self, sparsity: Sparsity) -> Capacities:
        """Returns room for a worker's blocks, and for those of a pair of workers and of an owner, by `sparsity`."""
        table = sparsity.table
        block = self._block_rows(table.row_size)
        partition = self._partition(table.num_rows, table.row_size, table.num_workers)
        push, pull = pair_and_owner_rooms(sparsity, partition, block)
        blocks = max((np.unique(ids // block).size for step in sparsity.samples for ids in step), default=0)
        levels = (roomy(blocks, partition.num_items),)
        return Capacities(
            local=local_capacity(sparsity), union=union_capacity(sparsity), push=push, pull=pull, levels=levels
        )

    def attempt(self, local: RowSparse, axis: Axis, capacities: Capacities) -> Attempt:
        """Sends the blocks that are not zero to range owners, which add them up and send the sums to all.

        `local` is this worker's rows, `axis` the mesh axis or axes of the workers, `capacities` the room there
        is; see `Scheme.attempt`.
        """
        local, row_size = local.padded(min(capacities.local, local.capacity)), local.row_size
        block, n = self._block_rows(row_size), lax.axis_size(axis)
        check_levels(self, capacities, 1)
        exchange = self._exchange(capacities, local.num_rows, row_size, n)
        num_blocks = exchange.partition.num_items
        ids, slots, count = unite(
            jnp.where(local.ids < local.num_rows, local.ids // block, num_blocks), num_blocks, capacities.levels[0]
        )
        place = jnp.where(slots < capacities.levels[0], slots * block + local.ids % block, capacities.levels[0] * block)
        rows = local.values.reshape(local.capacity, row_size)
        values = sum_rows(rows, place, capacities.levels[0] * block).reshape(capacities.levels[0], block, row_size)
        owned = exchange.run(ids, values, ~local.overflowed & (count <= capacities.levels[0]), axis)
        out = self._rows(owned.items, owned.values, local, capacities.union, block)
        return Attempt(out, owned.fits & ~out.overflowed, owned.sent_items * block)

    def _rows(self, items: jnp.ndarray, values: jnp.ndarray, local: RowSparse, capacity: int, block: int) -> RowSparse:
        """The rows of the blocks that came back that are not zero."""
        row_ids = items[..., None] * block + jnp.arange(block, dtype=jnp.int32)
        row_ids = jnp.where((values != 0).any(axis=-1) & (row_ids < local.num_rows), row_ids, local.num_rows)
        unique, slots, count = unite(row_ids, local.num_rows, capacity)
        rows = values.reshape(-1, *local.row_shape)
        return RowSparse(unique, sum_rows(rows, slots.reshape(-1), capacity, has_no_gaps=True), count, local.num_rows)

    def predicted_bytes(self, capacities: Capacities, table: Table) -> int:
        """Returns the bytes that a worker sends for a `table` with these `capacities`, padding included."""
        block_bytes = self._block_rows(table.row_size) * table.row_bytes
        return self._exchange(capacities, table.num_rows, table.row_size, table.num_workers).num_bytes(block_bytes)

    def formula_bytes(self, sparsity: Sparsity) -> float:
        """Returns the bytes that the class's formula gives for `sparsity`, without padding."""
        n, block = sparsity.num_workers, self._block_rows(sparsity.table.row_size)
        return (n - 1) / n * range_load(sparsity, block) * (block * sparsity.table.row_bytes + _ID_BYTES)

    def num_messages(self, capacities: Capacities, table: Table) -> int:
        """Returns how many messages a worker sends one after the other for a `table` with these `capacities`, on
        CPU."""
        block_bytes = self._block_rows(table.row_size) * table.row_bytes
        return self._exchange(capacities, table.num_rows, table.row_size, table.num_workers).num_messages(block_bytes)

    def _block_rows(self, row_size: int) -> int:
        return max(1, self.block_values // max(row_size, 1))

    def _partition(self, num_rows: int, row_size: int, num_workers: int) -> Partition:
        return Partition("range", -(-num_rows // self._block_rows(row_size)), num_workers)

    def _exchange(self, capacities: Capacities, num_rows: int, row_size: int, num_workers: int) -> OwnerExchange:
        partition = self._partition(num_rows, row_size, num_workers)
        push, pull = (IdCode(NUMBERS, capacity, partition.size) for capacity in (capacities.push, capacities.pull))
        return OwnerExchange(partition, push, pull, self.pattern)
