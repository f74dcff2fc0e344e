"""What `zen` costs (Wang et al., arXiv 2309.13254): balanced parallelism, COO push, hash-bitmap pull.

A profile comes in; capacities, bytes and messages come out. `sync.zen` runs it.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from splitjax.errors import SyncError
from splitjax.sync.costs.capacities import Capacities, bucket, local_capacity, union_capacity
from splitjax.sync.costs.codes import BITMAP, NUMBERS, IdCode
from splitjax.sync.costs.owners import OwnerExchange, pair_and_owner_rooms
from splitjax.sync.costs.partition import Partition
from splitjax.sync.costs.registry import register_costs
from splitjax.sync.costs.schemes import SchemeCosts
from splitjax.sync.profile import Sparsity, Table

_ID_BYTES = 4
GRANULARITIES = ("element", "row")


@register_costs
@dataclasses.dataclass(frozen=True)
class ZenCosts(SchemeCosts):
    """(n-1)/n (2d + gamma d + 1/32) M words: (index, value) pairs to the owners, then sums and a bitmap of each
    partition back.

    h0 (`Partition("hashed")`) gives every index its owner, the same on all workers; both sides know the sorted indices
    of a partition, so the pull sends one bit for each instead of an index (section 3.2).

    **Attributes:**

    - `granularity`: `element`, as published: every value of a row has an index; `row`: a row has one.
    - `partition`: how a worker finds the place of each index in what it sends. `hash`, as published (section 3.1): k
      further hashes into the owner's r1 slots, what still collides to a serial memory of r1/10, then compaction;
      `pack`: running counts. The messages hold the same; where there are no atomics, running counts are faster.
    - `num_hashes`: k. `pattern`: how the push goes, `all_to_all`, `ppermute` or `auto`: see `costs.messages.PATTERNS`.
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
