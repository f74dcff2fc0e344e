"""`all_gather` (AGsparse, as PyTorch DDP's sparse gradients): every worker's rows on all workers, each adds them up.

This worker's rows go in, the sum comes out. What that costs stands in `costs.all_gather`.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax

from splitjax.sync import wire
from splitjax.sync.costs.all_gather import AllGatherCosts
from splitjax.sync.costs.capacities import Capacities
from splitjax.sync.rows import RowSparse, merge
from splitjax.sync.running import Attempt, Scheme, register_scheme
from splitjax.sync.wire import Axis


@register_scheme
@dataclasses.dataclass(frozen=True)
class AllGather(AllGatherCosts, Scheme):
    """The scheme `all_gather` as it runs. Its options are those of `AllGatherCosts`, which says what it costs."""

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
