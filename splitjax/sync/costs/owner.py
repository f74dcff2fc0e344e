"""What an owner-sharded table costs: rows are pulled from the workers that own them, gradients pushed to them.

The least that can be sent: (n-1)/n k (w + ids) bytes each way for k rows of w bytes. `sync.owner` runs it.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from splitjax.sync.costs.capacities import Capacities, local_capacity, odds_of, room, worker_rows
from splitjax.sync.costs.codes import always
from splitjax.sync.costs.partition import Partition
from splitjax.sync.profile import Sparsity, Table

_FLAG_BYTES = 4


@dataclasses.dataclass(frozen=True)
class OwnerShardedCosts:
    """The exchange of one owner-sharded table of `num_rows` rows over an axis.

    **Attributes:**

    - `num_rows`: of the logical table. `capacities`: `push`, `pull` and `local` (0: room for all) count; see
      `plan_owner`.
    - `ownership`: `strided`, which balances ids that are sorted by frequency, or `range`, in which an array that is cut
      into equal parts already lies.
    - `pattern`: `all_to_all`, `ppermute` or `auto`: see `costs.messages.PATTERNS`. `wire_dtype`: dtype of rows on the
      wire; None: as they are. A smaller one changes the numbers.
    """

    num_rows: int
    capacities: Capacities
    pattern: str = "auto"
    wire_dtype: str | None = None
    ownership: str = "strided"

    def predicted_bytes(self, table: Table) -> int:
        """Returns what a worker of `table` sends in a request, a pull and a push that fit, padding included."""
        code = always(self.capacities.push, Partition(self.ownership, table.num_rows, table.num_workers).size)
        return (table.num_workers - 1) * (code.num_bytes + 2 * _FLAG_BYTES) + self.row_bytes(table)

    def row_bytes(self, table: Table) -> int:
        """Returns what the rows of `table` are of that: all that a worker sends for a table whose rows travel with
        those of another, which is looked up by the same ids."""
        row_bytes = table.row_size * (jnp.dtype(self.wire_dtype).itemsize if self.wire_dtype else table.itemsize)
        return (table.num_workers - 1) * 2 * self.capacities.push * row_bytes


def plan_owner(sparsity: Sparsity, ownership: str = "strided") -> Capacities:
    """Returns capacities for steps such as those of `sparsity`, with some room for chance; `ownership` is
    `OwnerSharded`'s."""
    partition = Partition(ownership, sparsity.table.num_rows, sparsity.num_workers)
    pairs, owned = [], []
    for step in sparsity.samples:
        counts = [
            np.bincount(partition.owner(ids), minlength=partition.num_owners)
            for ids in (*step, np.unique(np.concatenate(step)))
        ]
        pairs.append(np.concatenate(counts[:-1]))
        owned.append(counts[-1])
    # Rows are pulled and pushed by pairs.
    odds = odds_of(sparsity, 2 * (sparsity.num_workers - 1) * sparsity.table.row_bytes)
    push, pull = (room(counts, partition.size, odds, worker_rows(sparsity)) for counts in (pairs, owned))
    return Capacities(local=local_capacity(sparsity), push=push, pull=pull)
