"""`dense`: an all-reduce of the whole table, as data-parallel JAX does it.

This worker's rows go in, the sum comes out. What that costs stands in `costs.dense`.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax

from splitjax.sync.costs.capacities import Capacities
from splitjax.sync.costs.dense import DenseCosts
from splitjax.sync.rows import RowSparse
from splitjax.sync.running import Attempt, Scheme, register_scheme
from splitjax.sync.wire import Axis


@register_scheme
@dataclasses.dataclass(frozen=True)
class Dense(DenseCosts, Scheme):
    """The scheme `dense` as it runs. Its options are those of `DenseCosts`, which says what it costs."""

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
