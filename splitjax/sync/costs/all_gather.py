"""What `all_gather` costs (AGsparse, as PyTorch DDP's sparse gradients): every worker's rows on all workers.

A profile comes in; capacities, bytes and messages come out. `sync.all_gather` runs it.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from splitjax.sync.costs.capacities import Capacities, local_capacity, union_capacity
from splitjax.sync.costs.messages import gather_messages
from splitjax.sync.costs.registry import register_costs
from splitjax.sync.costs.schemes import SchemeCosts
from splitjax.sync.profile import Sparsity, Table

_ID_BYTES = 4


@register_costs
@dataclasses.dataclass(frozen=True)
class AllGatherCosts(SchemeCosts):
    """(n-1) k (w + 4) bytes, k rows of w bytes: Zen's 2(n-1)dM with an index a row instead of one a value (arXiv
    2309.13254)."""

    name: ClassVar[str] = "all_gather"

    def plan(self, sparsity: Sparsity) -> Capacities:
        """Returns room for the rows of a worker and of the sum in steps such as those of `sparsity`."""
        row_bytes = (sparsity.num_workers - 1) * (sparsity.table.row_bytes + _ID_BYTES)
        return Capacities(local=local_capacity(sparsity, row_bytes), union=union_capacity(sparsity))

    def predicted_bytes(self, capacities: Capacities, table: Table) -> int:
        """Returns the bytes that a worker sends for a `table` with these `capacities`, padding included."""
        return (table.num_workers - 1) * self._message_bytes(capacities, table)

    def formula_bytes(self, sparsity: Sparsity) -> float:
        """Returns the bytes that the class's formula gives for `sparsity`, without padding."""
        return (sparsity.num_workers - 1) * sparsity.rows * (sparsity.table.row_bytes + _ID_BYTES)

    def num_messages(self, capacities: Capacities, table: Table) -> int:
        """Returns how many messages a worker sends one after the other for a `table` with these `capacities`, on
        CPU."""
        return gather_messages(table.num_workers, self._message_bytes(capacities, table))

    def _message_bytes(self, capacities: Capacities, table: Table) -> int:
        return capacities.local * (table.row_bytes + _ID_BYTES) + _ID_BYTES
