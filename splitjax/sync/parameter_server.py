"""`parameter_server`: every worker serves one range of the rows; (id, row) pairs are pushed to it, and the sums
pulled."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jax import lax

from splitjax.sync.codes import NUMBERS, IdCode
from splitjax.sync.owners import OwnerExchange, pair_and_owner_rooms, range_load
from splitjax.sync.partition import Partition
from splitjax.sync.profile import Sparsity, Table
from splitjax.sync.rows import RowSparse, merge
from splitjax.sync.scheme import Attempt, Capacities, Scheme, local_capacity, register_scheme, union_capacity
from splitjax.sync.wire import Axis

_ID_BYTES = 4


@register_scheme
@dataclasses.dataclass(frozen=True)
class ParameterServer(Scheme):
    """(n-1)/n s (k + U) (w + 4) bytes: Zen's 2(n-1)(d + d_n) s M / n with an index a row (arXiv 2309.13254), s the
    skewness.

    **Attributes:** `pattern`: how the push goes, `all_to_all`, `ppermute` or `auto`: see `wire.PATTERNS`.
    """

    name: ClassVar[str] = "parameter_server"
    pattern: str = "auto"

    def plan(self, sparsity: Sparsity) -> Capacities:
        """Returns room for the rows of a pair of workers and of an owner, by `sparsity`."""
        push, pull = pair_and_owner_rooms(sparsity, Partition("range", sparsity.table.num_rows, sparsity.num_workers))
        return Capacities(local=local_capacity(sparsity), union=union_capacity(sparsity), push=push, pull=pull)

    def attempt(self, local: RowSparse, axis: Axis, capacities: Capacities) -> Attempt:
        """Sends rows to range owners, which add them up and send the sums to all.

        `local` is this worker's rows, `axis` the mesh axis or axes of the workers, `capacities` the room there
        is; see `Scheme.attempt`.
        """
        exchange = self._exchange(capacities, local.num_rows, lax.axis_size(axis))
        local = local.padded(min(capacities.local, local.capacity))
        owned = exchange.run(local.ids, local.values, ~local.overflowed, axis)
        rows = merge(owned.items, owned.values, local.num_rows, capacities.union)
        return Attempt(rows, owned.fits & ~rows.overflowed, owned.sent_items)

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
