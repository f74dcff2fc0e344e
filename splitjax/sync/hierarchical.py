"""`hierarchical`: partial sums of ever more workers, gathered level by level.

Hierarchical centralisation in Zen's design space (Wang et al., arXiv 2309.13254, section 3). At each level, groups of
workers that hold the sums of different parts gather them and add them up. Groups of two are SparCML's shape.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from splitjax.errors import SyncError
from splitjax.sync import wire
from splitjax.sync.profile import Sparsity, Table
from splitjax.sync.rows import RowSparse, merge
from splitjax.sync.scheme import (
    Attempt,
    Capacities,
    Scheme,
    check_levels,
    local_capacity,
    partial_capacity,
    register_scheme,
    union_capacity,
)
from splitjax.sync.wire import Axis

_ID_BYTES = 4


@register_scheme
@dataclasses.dataclass(frozen=True)
class Hierarchical(Scheme):
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

    def attempt(self, local: RowSparse, axis: Axis, capacities: Capacities) -> Attempt:
        """Gathers and adds up partial sums in ever larger groups.

        `local` is this worker's rows, `axis` the mesh axis or axes of the workers, `capacities` the room there
        is; see `Scheme.attempt`.
        """
        n, me = lax.axis_size(axis), lax.axis_index(axis)
        check_levels(self, capacities, len(self._factors(n)))
        rooms = (*capacities.levels, capacities.union)
        rows, fits, sent, m = local.padded(rooms[0]), ~local.overflowed, jnp.int32(0), 1
        for factor, room in zip(self._factors(n), rooms[1:]):
            # From every peer of the group, in the order of their places, so that all of them add up alike.
            place = me // m % factor
            parts = [[rows.ids, rows.values, (fits & ~rows.overflowed).astype(jnp.int32)]]
            for shift in range(1, factor):
                pairs = [(i, i + ((i // m + shift) % factor - i // m % factor) * m) for i in range(n)]
                parts.append(wire.permute(parts[0], axis, pairs))
            order = (place - jnp.arange(factor)) % factor
            ids, values, good = (jnp.stack(part)[order] for part in zip(*parts))
            sent += jnp.minimum(rows.count, rows.capacity) * (factor - 1)
            fits, m = (good > 0).all(), m * factor
            rows = merge(ids, values, local.num_rows, room)
        return Attempt(rows, fits & ~rows.overflowed, sent)

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
            wire.shift_messages(factor, shift, self._message_bytes(capacity, table))
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
