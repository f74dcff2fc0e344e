"""`parameter_server`: every worker serves one range of the rows; (id, row) pairs are pushed to it, and the sums
pulled.

This worker's rows go in, the sum comes out. What that costs stands in `costs.parameter_server`.
"""

from __future__ import annotations

import dataclasses

from jax import lax

from splitjax.sync.costs.capacities import Capacities
from splitjax.sync.costs.parameter_server import ParameterServerCosts
from splitjax.sync.owners import push_and_pull
from splitjax.sync.rows import RowSparse, merge
from splitjax.sync.running import Attempt, Scheme, register_scheme
from splitjax.sync.wire import Axis


@register_scheme
@dataclasses.dataclass(frozen=True)
class ParameterServer(ParameterServerCosts, Scheme):
    """The scheme `parameter_server` as it runs. Its options are those of `ParameterServerCosts`, which says what it
    costs."""

    def attempt(self, local: RowSparse, axis: Axis, capacities: Capacities) -> Attempt:
        """Sends rows to range owners, which add them up and send the sums to all.

        `local` is this worker's rows, `axis` the mesh axis or axes of the workers, `capacities` the room there
        is; see `Scheme.attempt`.
        """
        exchange = self._exchange(capacities, local.num_rows, lax.axis_size(axis))
        local = local.padded(min(capacities.local, local.capacity))
        owned = push_and_pull(exchange, local.ids, local.values, ~local.overflowed, axis)
        rows = merge(owned.items, owned.values, local.num_rows, capacities.union)
        return Attempt(rows, owned.fits & ~rows.overflowed, owned.sent_items)
