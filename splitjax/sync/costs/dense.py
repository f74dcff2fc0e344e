"""What `dense` costs: an all-reduce of the whole table, as data-parallel JAX does it.

A profile comes in; capacities, bytes and messages come out. `sync.dense` runs it.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from splitjax.cost.ring import all_reduce_bytes
from splitjax.sync.costs.capacities import Capacities
from splitjax.sync.costs.registry import register_costs
from splitjax.sync.costs.schemes import SchemeCosts
from splitjax.sync.profile import Sparsity, Table


@register_costs
@dataclasses.dataclass(frozen=True)
class DenseCosts(SchemeCosts):
    """2(n-1)/n M bytes (Patarasuk and Yuan 2009). The result has every row, zero ones too."""

    name: ClassVar[str] = "dense"

    def plan(self, sparsity: Sparsity) -> Capacities:
        """Returns room for every row of the table that `sparsity` describes."""
        return Capacities(local=sparsity.table.num_rows, union=sparsity.table.num_rows)

    def predicted_bytes(self, capacities: Capacities, table: Table) -> int:
        """Returns the bytes that a worker sends for a `table` with these `capacities`, padding included."""
        return all_reduce_bytes(table.num_workers, table.num_bytes)

    def formula_bytes(self, sparsity: Sparsity) -> float:
        """Returns the bytes that the class's formula gives for `sparsity`, without padding."""
        n = sparsity.num_workers
        return 2 * (n - 1) / n * sparsity.table.num_bytes

    def num_messages(self, capacities: Capacities, table: Table) -> int:
        """Returns how many messages a worker sends one after the other for a `table` with these `capacities`, on
        CPU."""
        return 2 * (table.num_workers - 1)
