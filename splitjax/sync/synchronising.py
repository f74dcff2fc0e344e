"""Synchronises rows by a scheme, whatever its capacities: where they do not suffice, all workers alike gather all rows.

Call it inside a `shard_map` over the data axis with `check_vma=False`: what all-gathers return is alike on all workers,
which the checker cannot know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from splitjax.sync import wire
from splitjax.sync.costs.capacities import Capacities
from splitjax.sync.rows import RowSparse, merge
from splitjax.sync.running import Attempt, Scheme, Stats
from splitjax.sync.wire import Axis


def synchronise(
    which: Scheme, local: RowSparse, axis: Axis, capacities: Capacities, then: Callable[[RowSparse], Any] | None = None
) -> tuple[Any, Stats]:
    """Adds up all workers' rows, whatever the capacities, and applies `then` to the sum.

    Where they do not suffice, all workers alike gather all rows instead. As that result has more room, what reads
    it runs inside the branch, once for each size: give it as `then`. To update tables in place,
    `synchronise_into`.

    **Arguments:**

    - `which`: the scheme. `local`: this worker's rows. `axis`: the mesh axis or axes of the workers.
    - `capacities`: the room there is.
    - `then`: the rows of the sum -> any pytree, whose shapes do not depend on their capacity (such as a norm). By
      default the rows themselves, padded to where every sum fits: `lossless_rows`.

    **Returns:** what `then` returns, the same on every worker, and `Stats`.
    """
    if _is_trivial(local, axis):
        return _alone(local, then)
    return finish(which.attempt(local, axis, capacities), local, axis, then)


def finish(
    attempt: Attempt, local: RowSparse, axis: Axis, then: Callable[[RowSparse], Any] | None = None
) -> tuple[Any, Stats]:
    """Does what `synchronise` does after the `attempt`: uses its rows, or all workers alike gather all.

    `local`, `axis` and `then` are those of `synchronise`.
    """
    room = max(lossless_rows(local, axis), attempt.rows.capacity)
    then = then or (lambda rows: rows.padded(room))
    if attempt.fits is True:
        return then(attempt.rows), _stats(attempt, attempt.rows.count, local, axis)
    out, union_rows = lax.cond(
        attempt.fits,
        lambda: (then(attempt.rows), attempt.rows.count),
        lambda: (lambda rows: (then(rows), rows.count))(gather_all(local, axis)),
    )
    return out, _stats(attempt, union_rows, local, axis)


def synchronise_into(
    which: Scheme,
    local: RowSparse,
    axis: Axis,
    capacities: Capacities,
    carry: Any,
    then: Callable[[RowSparse, Any], Any],
) -> tuple[Any, Stats]:
    """Synchronises what is updated in place, such as tables: XLA copies whole what a branch returns, but not what a
    loop carries.

    **Arguments:**

    - `which`, `local`, `axis`, `capacities`: as `synchronise`.
    - `carry`: any pytree.
    - `then`: (the rows of the sum, carry) -> the new carry, of the same shapes and dtypes.

    **Returns:** the new carry, and `Stats`.
    """
    if _is_trivial(local, axis):
        return _alone(local, lambda rows: then(rows, carry))
    return finish_into(which.attempt(local, axis, capacities), local, axis, carry, then)


def finish_into(
    attempt: Attempt, local: RowSparse, axis: Axis, carry: Any, then: Callable[[RowSparse, Any], Any]
) -> tuple[Any, Stats]:
    """Does what `synchronise_into` does after the `attempt`.

    `local`, `axis`, `carry` and `then` are those of `synchronise_into`.
    """
    if attempt.fits is True:
        return then(attempt.rows, carry), _stats(attempt, attempt.rows.count, local, axis)

    def whole(state: tuple[Any, Array]) -> tuple[Any, Array]:
        rows = gather_all(local, axis)
        return then(rows, state[0]), rows.count

    fits = jnp.asarray(attempt.fits)
    carry = once(fits, lambda carry: then(attempt.rows, carry), carry)
    carry, union_rows = once(~fits, whole, (carry, attempt.rows.count))
    return carry, _stats(attempt, union_rows, local, axis)


def once(condition: Array, function: Callable[[Any], Any], carry: Any) -> Any:
    """Evaluates `function(carry)` where the `condition` (bool[], alike on all workers) holds, else returns the
    carry: a loop of one turn or none."""
    return lax.while_loop(
        lambda state: state[0], lambda state: (jnp.bool_(False), function(state[1])), (condition, carry)
    )[1]


def _stats(attempt: Attempt, union_rows: Array, local: RowSparse, axis: Axis) -> Stats:
    fell_back = jnp.logical_not(attempt.fits)
    sent = jnp.where(fell_back, local.capacity * (lax.axis_size(axis) - 1), 0) + attempt.sent_rows
    incomplete = lax.pmax(local.overflowed.astype(jnp.int32), axis) > 0
    return Stats(local.count, union_rows, sent.astype(jnp.int32), fell_back, incomplete)


def _is_trivial(local: RowSparse, axis: Axis) -> bool:
    """One worker alone, or room for no rows, which is alike on all workers."""
    return lax.axis_size(axis) == 1 or not local.capacity


def _alone(local: RowSparse, then: Callable[[RowSparse], Any] | None) -> tuple[Any, Stats]:
    """This worker's rows are the sum."""
    return then(local) if then else local, Stats(
        local.count, local.count, jnp.int32(0), jnp.bool_(False), local.overflowed
    )


def lossless_rows(local: RowSparse, axis: Axis) -> int:
    """Returns the capacity that always suffices for the sum of rows such as `local` over the workers of `axis`."""
    return min(local.capacity * lax.axis_size(axis), local.num_rows)


def gather_all(local: RowSparse, axis: Axis) -> RowSparse:
    """Gathers the rows `local` of every worker of `axis` on all workers, at full capacity: the fallback."""
    ids, values = wire.gather([local.ids, local.values], axis)
    return merge(ids, values, local.num_rows, lossless_rows(local, axis))
