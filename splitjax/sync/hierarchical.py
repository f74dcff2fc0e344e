"""`hierarchical`: partial sums of ever more workers, gathered level by level.

Hierarchical centralisation in Zen's design space (Wang et al., arXiv 2309.13254, section 3). At each level, groups of
workers that hold the sums of different parts gather them and add them up. Groups of two are SparCML's shape.

This worker's rows go in, the sum comes out. What that costs stands in `costs.hierarchical`.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax

from splitjax.sync import wire
from splitjax.sync.costs.capacities import Capacities
from splitjax.sync.costs.hierarchical import HierarchicalCosts
from splitjax.sync.rows import RowSparse, merge
from splitjax.sync.running import Attempt, Scheme, check_levels, register_scheme
from splitjax.sync.wire import Axis


@register_scheme
@dataclasses.dataclass(frozen=True)
class Hierarchical(HierarchicalCosts, Scheme):
    """The scheme `hierarchical` as it runs. Its options are those of `HierarchicalCosts`, which says what it costs."""

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
