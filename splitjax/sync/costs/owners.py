"""Counts what a push of items to their owners, and a pull of the sums, sends.

What differs between the schemes that use it is what an item is, who owns it (`partition`), and how ids are written
(`codes`). One message each way: ids, values and counts travel together. `sync.owners` runs it.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from splitjax.sync.costs.capacities import odds_of, room, worker_rows
from splitjax.sync.costs.codes import IdCode
from splitjax.sync.costs.messages import exchange_messages, gather_messages
from splitjax.sync.costs.partition import Partition
from splitjax.sync.profile import Sparsity, skewness

_COUNT_BYTES = 4


@dataclasses.dataclass(frozen=True)
class OwnerExchange:
    """A push to owners and a pull of the sums. `push`, `pull`: the codes of one pair's and of one owner's positions."""

    partition: Partition
    push: IdCode
    pull: IdCode
    pattern: str = "auto"

    def num_bytes(self, item_bytes: int) -> int:
        """Returns what a worker sends for items of `item_bytes` bytes, padding included."""
        return (self.partition.num_owners - 1) * sum(self._message_bytes(item_bytes))

    def num_messages(self, item_bytes: int) -> int:
        """Returns how many messages a worker sends one after the other, for items of `item_bytes` bytes."""
        n, (push, pull) = self.partition.num_owners, self._message_bytes(item_bytes)
        return exchange_messages(n, push, self.pattern) + gather_messages(n, pull)

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
    pairs, owned = [], []
    for step in sparsity.samples:
        sets = [(np.unique(ids // factor)[:, None] * np.int64(items) + np.arange(items)).reshape(-1) for ids in step]
        of_owners = [
            np.bincount(partition.owner(ids), minlength=partition.num_owners)
            for ids in (*sets, np.unique(np.concatenate(sets)))
        ]
        pairs.append(np.concatenate(of_owners[:-1]))
        owned.append(of_owners[-1])
    item_bytes = sparsity.table.row_bytes * factor / items
    odds = odds_of(sparsity, (sparsity.num_workers - 1) * item_bytes)
    return room(pairs, partition.size, odds, worker_rows(sparsity)), room(
        owned, partition.size, odds, worker_rows(sparsity)
    )


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
