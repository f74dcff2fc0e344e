"""What `blocks` costs (OmniReduce, Fei et al., SIGCOMM'21): blocks with any non-zero value travel whole, to owners
and back.

A profile comes in; capacities, bytes and messages come out. `sync.blocks` runs it.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from splitjax.sync.costs.capacities import Capacities, local_capacity, odds_of, room, union_capacity, worker_rows
from splitjax.sync.costs.codes import NUMBERS, IdCode
from splitjax.sync.costs.owners import OwnerExchange, pair_and_owner_rooms, range_load
from splitjax.sync.costs.partition import Partition
from splitjax.sync.costs.registry import register_costs
from splitjax.sync.costs.schemes import SchemeCosts
from splitjax.sync.profile import Sparsity, Table

_ID_BYTES = 4


@register_costs
@dataclasses.dataclass(frozen=True)
class BlocksCosts(SchemeCosts):
    """About (n-1)/n s (b + B) (256 values + an id) bytes, b blocks on a worker, B in the union (Zen's formula for
    OmniReduce).

    A block is as many whole rows as `block_values` holds, at least one: rows longer than a block have no zero blocks
    inside. Rows whose sum is zero are not in the result, as nothing in a block tells them from rows that nobody
    touched.

    **Attributes:**

    - `block_values`: values of a block. `pattern`: how the push goes, `all_to_all`, `ppermute` or `auto`: see
      `costs.messages.PATTERNS`.
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
        blocks = [[np.unique(ids // block).size for ids in step] for step in sparsity.samples]
        levels = (room(blocks, partition.num_items, odds_of(sparsity, block * table.row_bytes), worker_rows(sparsity)),)
        return Capacities(
            local=local_capacity(sparsity), union=union_capacity(sparsity), push=push, pull=pull, levels=levels
        )

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
