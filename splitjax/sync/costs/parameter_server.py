"""What `parameter_server` costs: (id, row) pairs are pushed to the worker that serves their range, and the sums pulled.

A profile comes in; capacities, bytes and messages come out. `sync.parameter_server` runs it.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from splitjax.sync.costs.capacities import Capacities, local_capacity, union_capacity
from splitjax.sync.costs.codes import NUMBERS, IdCode
from splitjax.sync.costs.owners import OwnerExchange, pair_and_owner_rooms, range_load
from splitjax.sync.costs.partition import Partition
from splitjax.sync.costs.registry import register_costs
from splitjax.sync.costs.schemes import SchemeCosts
from splitjax.sync.profile import Sparsity, Table

_ID_BYTES = 4


@register_costs
@dataclasses.dataclass(frozen=True)
class ParameterServerCosts(SchemeCosts):
    """(n-1)/n s (k + U) (w + 4) bytes: Zen's 2(n-1)(d + d_n) s M / n with an index a row (arXiv 2309.13254), s the
    skewness.

    **Attributes:** `pattern`: how the push goes, `all_to_all`, `ppermute` or `auto`: see `costs.messages.PATTERNS`.
    """

    name: ClassVar[str] = "parameter_server"
    pattern: str = "auto"

    def plan(self, sparsity: Sparsity) -> Capacities:
        """Returns room for the rows of a pair of workers and of an owner, by `sparsity`."""
        push, pull = pair_and_owner_rooms(sparsity, Partition("range", sparsity.table.num_rows, sparsity.num_workers))
        return Capacities(local=local_capacity(sparsity), union=union_capacity(sparsity), push=push, pull=pull)

    def predicted_bytes(self, capacities: Capacities, table: Table) -> int:
        """Returns the bytes that a worker sends for a `table` with these `capacities`, padding included."""
        return self._exchange(capacities, table.num_rows, table.num_workers).num_bytes(table.row_bytes)

    def formula_bytes(self, sparsity: Sparsity) -> float:
        """Returns the bytes that the class's formula gives for `sparsity`, without padding."""
        n = sparsity.num_workers
        return (n - 1) / n * range_load(sparsity) * (sparsity.table.row_bytes + _ID_BYTES)

    def num_messages(self, capacities: Capacities, table: Table) -> int:
        """Returns how many messages a worker sends one after the other for a `table` with these `capacities`, on
        CPU."""
        return self._exchange(capacities, table.num_rows, table.num_workers).num_messages(table.row_bytes)

    def _exchange(self, capacities: Capacities, num_rows: int, num_workers: int) -> OwnerExchange:
        partition = Partition("range", num_rows, num_workers)
        push, pull = (IdCode(NUMBERS, capacity, partition.size) for capacity in (capacities.push, capacities.pull))
        return OwnerExchange(partition, push, pull, self.pattern)
