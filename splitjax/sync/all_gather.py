"""`all_gather` (AGsparse, as PyTorch DDP's sparse gradients): every worker's rows on all workers, each adds them up."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from splitjax.sync import wire
from splitjax.sync.profile import Sparsity, Table
from splitjax.sync.rows import RowSparse, merge
from splitjax.sync.scheme import Attempt, Capacities, Scheme, local_capacity, register_scheme, union_capacity
from splitjax.sync.wire import Axis

_ID_BYTES = 4


@register_scheme
@dataclasses.dataclass(frozen=True)
class AllGather(Scheme):
    """(n-1) k (w + 4) bytes, k rows of w bytes: Zen's 2(n-1)dM with an index a row instead of one a value (arXiv
    2309.13254)."""

    name: ClassVar[str] = "all_gather"

    def plan(self, sparsity: Sparsity) -> Capacities:
        """Returns room for the rows of a worker and of the sum in steps such as those of `sparsity`."""
        return Capacities(local=local_capacity(sparsity), union=union_capacity(sparsity))

    def attempt(self, local: RowSparse, axis: Axis, capacities: Capacities) -> Attempt:
        """Gathers every worker's rows on all workers, each of which adds them up.

        `local` is this worker's rows, `axis` the mesh axis or axes of the workers, `capacities` the room there
        is; see `Scheme.attempt`.
        """
        n = lax.axis_size(axis)
        sent = local.padded(min(capacities.local, local.capacity))
        ids, values, counts = wire.gather([sent.ids, sent.values, local.count], axis)
        rows = merge(ids, values, local.num_rows, capacities.union)
        fits = (counts.max() <= sent.capacity) & ~rows.overflowed
        return Attempt(rows, fits, jnp.minimum(local.count, sent.capacity) * (n - 1))

    def predicted_bytes(self, capacities: Capacities, table: Table) -> int:
        """Returns the bytes that a worker sends for a `table` with these `capacities`, padding included."""
        return (table.num_workers - 1) * self._message_bytes(capacities, table)

    def formula_bytes(self, sparsity: Sparsity) -> float:
        """Returns the bytes that the class's formula gives for `sparsity`, without padding."""
        return (sparsity.num_workers - 1) * sparsity.rows * (sparsity.table.row_bytes + _ID_BYTES)

    def num_messages(self, capacities: Capacities, table: Table) -> int:
        """Returns how many messages a worker sends one after the other for a `table` with these `capacities`, on
        CPU."""
        return wire.gather_messages(table.num_workers, self._message_bytes(capacities, table))

    def _message_bytes(self, capacities: Capacities, table: Table) -> int:
        return capacities.local * (table.row_bytes + _ID_BYTES) + _ID_BYTES
