"""`blocks` (OmniReduce, Fei et al., SIGCOMM'21): blocks of 256 values with any non-zero one travel whole, to range
owners and back.

This worker's rows go in, the sum comes out. What that costs stands in `costs.blocks`.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax

from splitjax.sync.costs.blocks import BlocksCosts
from splitjax.sync.costs.capacities import Capacities
from splitjax.sync.local import sum_rows, unite
from splitjax.sync.owners import push_and_pull
from splitjax.sync.rows import RowSparse
from splitjax.sync.running import Attempt, Scheme, check_levels, register_scheme
from splitjax.sync.wire import Axis


@register_scheme
@dataclasses.dataclass(frozen=True)
class Blocks(BlocksCosts, Scheme):
    """The scheme `blocks` as it runs. Its options are those of `BlocksCosts`, which says what it costs."""

    def attempt(self, local: RowSparse, axis: Axis, capacities: Capacities) -> Attempt:
        """Sends the blocks that are not zero to range owners, which add them up and send the sums to all.

        `local` is this worker's rows, `axis` the mesh axis or axes of the workers, `capacities` the room there
        is; see `Scheme.attempt`.
        """
        local, row_size = local.padded(min(capacities.local, local.capacity)), local.row_size
        block, n = self._block_rows(row_size), lax.axis_size(axis)
        check_levels(self, capacities, 1)
        exchange = self._exchange(capacities, local.num_rows, row_size, n)
        num_blocks = exchange.partition.num_items
        ids, slots, count = unite(
            jnp.where(local.ids < local.num_rows, local.ids // block, num_blocks), num_blocks, capacities.levels[0]
        )
        place = jnp.where(slots < capacities.levels[0], slots * block + local.ids % block, capacities.levels[0] * block)
        rows = local.values.reshape(local.capacity, row_size)
        values = sum_rows(rows, place, capacities.levels[0] * block).reshape(capacities.levels[0], block, row_size)
        owned = push_and_pull(exchange, ids, values, ~local.overflowed & (count <= capacities.levels[0]), axis)
        out = self._rows(owned.items, owned.values, local, capacities.union, block)
        return Attempt(out, owned.fits & ~out.overflowed, owned.sent_items * block)

    def _rows(self, items: jnp.ndarray, values: jnp.ndarray, local: RowSparse, capacity: int, block: int) -> RowSparse:
        """The rows of the blocks that came back that are not zero."""
        row_ids = items[..., None] * block + jnp.arange(block, dtype=jnp.int32)
        row_ids = jnp.where((values != 0).any(axis=-1) & (row_ids < local.num_rows), row_ids, local.num_rows)
        unique, slots, count = unite(row_ids, local.num_rows, capacity)
        rows = values.reshape(-1, *local.row_shape)
        return RowSparse(unique, sum_rows(rows, slots.reshape(-1), capacity, has_no_gaps=True), count, local.num_rows)
