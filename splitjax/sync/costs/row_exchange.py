"""What `row_exchange` costs: near the least that can be sent.

Every worker must send its rows to where they are added up, and get the sums: w (k + (1 - 2/n) U) bytes at least, for k
rows of w bytes on a worker and U in the union, if each row is added up by a worker that has it. `sync.row_exchange`
says how that is come near to.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from splitjax.cost.ring import all_reduce_bytes
from splitjax.errors import SyncError
from splitjax.sync.costs.capacities import (
    Capacities,
    bucket,
    local_capacity,
    odds_of,
    room,
    union_capacity,
    worker_rows,
)
from splitjax.sync.costs.codes import IdCode, shortest
from splitjax.sync.costs.contributors import ON_HOST, OWNERSHIPS, contributors, holders_on_host
from splitjax.sync.costs.messages import exchange_messages, gather_messages
from splitjax.sync.costs.partition import Partition
from splitjax.sync.costs.registry import register_costs
from splitjax.sync.costs.schemes import SchemeCosts
from splitjax.sync.profile import Sparsity, Table

_COUNT_BYTES = 4


@register_costs
@dataclasses.dataclass(frozen=True)
class RowExchangeCosts(SchemeCosts):
    """w (k + (1 - 2/n) U) bytes of values and (n-1) k bytes of gaps.

    **Attributes:**

    - `ownership`: who adds a row up. `contributor`: a worker that has it; `strided`: id % n; `hashed`.
    - `hot`: sum rows that all workers have by an all-reduce; up to as many of them as the profile found.
    - `pattern`: how rows are pushed: `ppermute`, `all_to_all`, `kernel` (on TPU, packed and sent by one kernel;
      elsewhere as `all_to_all`), or `auto`: see `wire.push_rows`.
    - `wire_dtype`: dtype of the values on the wire, such as "bfloat16". Changes the numbers: see `sync.feedback`. None:
      as they are.
    """

    name: ClassVar[str] = "row_exchange"
    ownership: str = "contributor"
    hot: bool = False
    pattern: str = "auto"
    wire_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.ownership not in OWNERSHIPS:
            raise SyncError(
                "unknown way to choose owners", value=self.ownership, place="RowExchange(ownership=...)",
                remedy=f"one of {', '.join(OWNERSHIPS)}",
            )  # fmt: skip

    def plan(self, sparsity: Sparsity) -> Capacities:
        """Returns room for the rows of a pair of workers and of an owner, and a code for ids, by `sparsity`."""
        table, n = sparsity.table, sparsity.num_workers
        row_bytes = self._row_bytes(table)
        # Of a worker's rows the ids alone are sent, in about a byte; of the union each owner sends its part to all.
        local = local_capacity(sparsity, n - 1)
        union = union_capacity(sparsity, (n - 1) / n * row_bytes)
        # No more than every step has: where there are fewer, the others would be more than owners have room for.
        least = min(map(_num_hot, sparsity.samples), default=0) if self.hot and n > 1 else 0
        hot = bucket(0.9 * least, least)
        code = shortest([ids for step in sparsity.samples for ids in step], local, table.num_rows)
        pull = -(-(union - hot) // n) if self.ownership == "contributor" else union
        found = [routed(step, table.num_rows, pull, hot, self.ownership) for step in sparsity.samples]
        odds = odds_of(sparsity, (n - 1) * row_bytes)
        if self.ownership != "contributor":
            pull = room([owned for _, owned in found], union, odds, worker_rows(sparsity))
        push = room([pairs for pairs, _ in found], local, odds, worker_rows(sparsity)) if n > 1 else 0
        return Capacities(local, union, push, pull, code.num_codes, code.bits, hot)

    def predicted_bytes(self, capacities: Capacities, table: Table) -> int:
        """Returns the bytes that a worker sends for a `table` with these `capacities`, padding included."""
        n = table.num_workers
        row_bytes = self._row_bytes(table)
        index_bytes = (n - 1) * (self._code(capacities, table.num_rows).num_bytes + _COUNT_BYTES)
        hot_bytes = all_reduce_bytes(n, capacities.hot * table.row_bytes)
        return index_bytes + (n - 1) * (capacities.push + capacities.pull) * row_bytes + hot_bytes

    def formula_bytes(self, sparsity: Sparsity) -> float:
        """Returns the bytes that the class's formula gives for `sparsity`, without padding."""
        n = sparsity.num_workers
        index_bytes = (n - 1) * self._code(self.plan(sparsity), sparsity.table.num_rows).num_bytes
        if self.ownership == "contributor":
            return sparsity.bound_bytes() + index_bytes
        return (n - 1) / n * sparsity.table.row_bytes * (sparsity.rows + sparsity.union(n)) + index_bytes

    def num_messages(self, capacities: Capacities, table: Table) -> int:
        """Returns how many messages a worker sends one after the other for a `table` with these `capacities`, on
        CPU."""
        n, row_bytes = table.num_workers, self._row_bytes(table)
        indices = gather_messages(n, self._code(capacities, table.num_rows).num_bytes + _COUNT_BYTES)
        push = exchange_messages(n, capacities.push * row_bytes, self.pattern) if capacities.push else 0
        hot = 2 * (n - 1) if capacities.hot else 0
        return indices + push + gather_messages(n, capacities.pull * row_bytes) + hot

    def _row_bytes(self, table: Table) -> int:
        """Returns the bytes of a row on the wire."""
        return table.row_size * (jnp.dtype(self.wire_dtype).itemsize if self.wire_dtype else table.itemsize)

    def _code(self, capacities: Capacities, num_rows: int) -> IdCode:
        return IdCode(capacities.code_bits, capacities.local, num_rows, capacities.codes)


def _num_hot(step: tuple[np.ndarray, ...]) -> int:
    """Rows that all workers have."""
    _, counts = np.unique(np.concatenate(step), return_counts=True)
    return int((counts == len(step)).sum())


def routed(
    step: tuple[np.ndarray, ...], num_rows: int, pull: int, hot: int, ownership: str
) -> tuple[list[int], list[int]]:
    """Counts the rows from each worker to each other owner, and those of each owner, in a profiled step.

    They are routed as `sync.routes.exchange_indices` routes them.

    **Arguments:**

    - `step`: the sorted unique ids of each worker. `num_rows`: of the table.
    - `pull`: the most rows of an owner. `hot`: rows that are summed densely, at most.
    - `ownership`: who adds a row up.

    **Returns:** n (n - 1) counts for n workers, and n counts.
    """
    n, union = len(step), np.unique(np.concatenate(step))
    slots = [np.searchsorted(union, ids) for ids in step]
    holders = holders_on_host(slots, union.size)
    is_hot = (np.bitwise_count(holders).sum(axis=0) == n) & (n > 1)
    is_hot &= np.cumsum(is_hot) <= hot
    owner = (
        contributors(holders, ~is_hot, n, pull, ON_HOST)[0]
        if ownership == "contributor"
        else Partition(ownership, num_rows, n).owner(union)
    )
    owner = np.where(is_hot, n, owner)
    pairs = [np.bincount(owner[rows], minlength=n)[:n] for rows in slots]
    others = [int(count) for worker, counts in enumerate(pairs) for count in np.delete(counts, worker)]
    return others, np.bincount(owner, minlength=n)[:n].tolist()
