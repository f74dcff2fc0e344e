"""What `hierarchical` costs: partial sums of ever more workers, gathered level by level.

Hierarchical centralisation in Zen's design space (Wang et al., arXiv 2309.13254, section 3). At each level, groups of
workers that hold the sums of different parts gather them and add them up. Groups of two are SparCML's shape.

A profile comes in; capacities, bytes and messages come out. `sync.hierarchical` runs it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from splitjax.errors import SyncError
from splitjax.sync.costs.capacities import Capacities, local_capacity, partial_capacity, union_capacity
from splitjax.sync.costs.messages import shift_messages
from splitjax.sync.costs.registry import register_costs
from splitjax.sync.costs.schemes import SchemeCosts
from splitjax.sync.profile import Sparsity, Table

_ID_BYTES = 4


@register_costs
@dataclasses.dataclass(frozen=True)
class HierarchicalCosts(SchemeCosts):
    """Sum over levels of (g-1) U_m (w + 4) bytes: groups of g gather sums of m workers, m the product of the levels
    before.

    **Attributes:**

    - `factors`: group sizes from the inside out, such as (devices of a host, hosts); their product is the number of
      workers. By default its prime factors.
    """

    name: ClassVar[str] = "hierarchical"
    factors: tuple[int, ...] = ()

    def plan(self, sparsity: Sparsity) -> Capacities:
        """Returns room for the partial sums of every level in steps such as those of `sparsity`."""
        levels, m = [], 1
        for factor in self._factors(sparsity.num_workers):
            levels.append(partial_capacity(sparsity, m))
            m *= factor
        return Capacities(local=local_capacity(sparsity), union=union_capacity(sparsity), levels=tuple(levels))

    def predicted_bytes(self, capacities: Capacities, table: Table) -> int:
        """Returns the bytes that a worker sends for a `table` with these `capacities`, padding included."""
        factors = self._factors(table.num_workers)
        return sum(
            (factor - 1) * self._message_bytes(capacity, table) for factor, capacity in zip(factors, capacities.levels)
        )

    def formula_bytes(self, sparsity: Sparsity) -> float:
        """Returns the bytes that the class's formula gives for `sparsity`, without padding."""
        total, m = 0.0, 1
        for factor in self._factors(sparsity.num_workers):
            total += (factor - 1) * sparsity.union(m) * (sparsity.table.row_bytes + _ID_BYTES)
            m *= factor
        return total

    def num_messages(self, capacities: Capacities, table: Table) -> int:
        """Returns how many messages a worker sends one after the other for a `table` with these `capacities`, on
        CPU."""
        factors = self._factors(table.num_workers)
        return sum(
            shift_messages(factor, shift, self._message_bytes(capacity, table))
            for factor, capacity in zip(factors, capacities.levels) for shift in range(1, factor)
        )  # fmt: skip

    @staticmethod
    def _message_bytes(capacity: int, table: Table) -> int:
        return capacity * (table.row_bytes + _ID_BYTES) + 4

    def _factors(self, num_workers: int) -> tuple[int, ...]:
        if self.factors and math.prod(self.factors) != num_workers:
            raise SyncError(
                f"the groups of the hierarchy make {math.prod(self.factors)} workers, not {num_workers}",
                value=self.factors,
                place="Hierarchical(factors=...)",
                remedy="give group sizes whose product is the number of workers",
            )
        return self.factors or _prime_factors(num_workers)


def _prime_factors(number: int) -> tuple[int, ...]:
    factors, factor = [], 2
    while number > 1:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return tuple(factors)
