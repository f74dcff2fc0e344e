"""Error feedback for values that are rounded on the wire: what rounding takes away is added the next time the row is
touched.

After Seide et al. 2014 ("1-bit stochastic gradient descent") and Karimireddy et al., arXiv 1901.09847. Every worker
keeps one residual table. All residuals and all that was delivered add up to all gradients: nothing is lost, but parts
come later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax import Array

from splitjax.sync.costs.capacities import Capacities
from splitjax.sync.local import take_rows
from splitjax.sync.row_exchange import RowExchange
from splitjax.sync.rows import RowSparse
from splitjax.sync.running import Stats
from splitjax.sync.synchronising import finish_into
from splitjax.sync.wire import Axis


def synchronise_rounded(
    which: RowExchange,
    local: RowSparse,
    residual: Array,
    axis: Axis,
    capacities: Capacities,
    carry: Any,
    then: Callable[[RowSparse, Any], Any],
) -> tuple[Any, Array, Stats]:
    """Synchronises rows with a scheme that has a `wire_dtype`, with error feedback (`synchronising.synchronise_into`
    without).

    **Arguments:**

    - `which`: the scheme. `local`: this worker's rows. `axis`: the mesh axis or axes of the workers.
    - `residual`: f[num_rows, *row], this worker's own, zeros at first.
    - `capacities`: the room there is.
    - `carry`, `then`: as `synchronise_into` has them.

    **Returns:** as `synchronise_into`, and the new residual in the middle. Where the fallback runs nothing is
    rounded.
    """
    local, rest = with_residual(local, residual)
    attempt, errors = which.attempt_rounded(local, axis, capacities)
    out, stats = finish_into(attempt, local, axis, carry, then)
    return out, rest if errors is None else keep(rest, errors), stats


def with_residual(local: RowSparse, residual: Array) -> tuple[RowSparse, Array]:
    """Adds what was kept back of them to the rows `local`, and takes it from `residual`, f[num_rows, *row]."""
    kept = take_rows(residual, local.ids)
    # Taken away and not set to zero: what is written then follows from what was read, so that XLA makes no copy of the
    # table.
    rest = residual.at[local.ids].add(-kept, mode="drop")
    return dataclasses.replace(local, values=local.values + kept.astype(local.values.dtype)), rest


def keep(residual: Array, errors: RowSparse) -> Array:
    """Adds what rounding took away this time, `errors` (`RowExchange.exchange_values`), to the `residual`; ids may
    repeat."""
    return residual.at[errors.ids].add(errors.values.astype(residual.dtype), mode="drop")
