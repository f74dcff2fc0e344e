"""`dense`: an all-reduce of the whole table, as data-parallel JAX does it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from splitjax.cost.ring import all_reduce_bytes
from splitjax.sync.profile import Sparsity, Table
from splitjax.sync.rows import RowSparse
from splitjax.sync.scheme import Attempt, Capacities, Scheme, register_scheme
from splitjax.sync.wire import Axis


@register_scheme
@dataclasses.dataclass(frozen=True)
class Dense(Scheme):
    """2(n-1)/n M bytes (Patarasuk and Yuan 2009). The result has every row, zero ones too."""

    name: ClassVar[str] = "dense"

    def plan(self, sparsity: Sparsity) -> Capacities:
        """Returns room for every row of the table that `sparsity` describes."""
        return Capacities(local=sparsity.table.num_rows, union=sparsity.table.num_rows)

    def attempt(self, local: RowSparse, axis: Axis, capacities: Capacities) -> Attempt:
        """Adds up the whole tables of all workers by an all-reduce.

        `local` is this worker's rows, `axis` the mesh axis or axes of the workers, `capacities` the room there
        is; see `Scheme.attempt`.
        """
        num_rows = local.num_rows
        values = lax.psum(local.to_dense(), axis)
        rows = RowSparse(jnp.arange(num_rows, dtype=jnp.int32), values, jnp.int32(num_rows), num_rows)
        n = lax.axis_size(axis)
        return Attempt(rows, True, jnp.int32(2 * (n - 1) * num_rows // n))

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
