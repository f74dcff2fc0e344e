"""Who owns and who sends which row, known to all workers alike from one exchange of index sets: the plan of a row exchange.

Ids are known from the batch, before the forward pass, so this can run while the forward pass computes. All that follows is
arithmetic on the same numbers everywhere: no further agreement is needed, and capacities are checked without communication.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from splitjax.kernels import running_sum
from splitjax.sync import wire
from splitjax.sync.codes import IdCode
from splitjax.sync.local import group_ranks, unite
from splitjax.sync.partition import Partition
from splitjax.sync.wire import Axis

# How often rows ask for an owner: with the third time, nearly all have one (measured on word counts, 4 to 16 workers).
_ASKED = 3
OWNERSHIPS = ("contributor", "strided", "hashed")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routes:
    """The exchange of one step, for n workers, u rows of room in the union, k on each worker.

    **Attributes:**

    - `ids`: i32[u], the union, sorted, filled up with the number of rows; `count`: i32[], its exact size.
    - `slots`: i32[n, c], where in the union each worker's rows stand, in their order (u: no row, between them too; there are never more
      than k). `counts`: i32[n], rows of each worker.
    - `owner`: i32[u], the row's owner; n for a row that is summed densely, or none.
    - `place`: i32[u], where among its owner's rows, or among the densely summed ones, it stands.
    - `fits`: bool[], alike on all workers: everything has room.
    """

    ids: Array
    count: Array
    slots: Array
    counts: Array
    owner: Array
    place: Array
    fits: Array


def exchange_indices(
    ids: Array, count: Array, axis: Axis, code: IdCode, *, union: int, push: int, pull: int, hot: int, ownership: str
) -> Routes:
    """Every worker's index set on all workers, and the routes that follow.

    **Arguments:**

    - `ids`: i32[k], this worker's rows, sorted, filled up with the number of rows; `count`: i32[] of them (more than k: they do not fit).
    - `code`: how a set is written; its `size` is the number of rows.
    - `union`, `push`, `pull`, `hot`: room for rows of the union, from one worker to one owner, of one owner, summed densely.
    - `ownership`: one of `OWNERSHIPS`: a row's owner is one of the workers that have it, as far as all own equally many; or id % n; or
      by a hash of the id.
    """
    n = lax.axis_size(axis)
    codes, fitted = code.encode(ids[None], count[None])
    codes, counts = wire.gather([codes[0], jnp.where(fitted[0], count, -1)], axis)
    ids, num_rows = code.spread(codes), code.size
    unique, slots, count = unite(ids, num_rows, union)
    workers = jnp.arange(n, dtype=jnp.int32)[:, None]
    held = jnp.zeros((n, union), jnp.bool_).at[workers, slots].set(True, mode="drop", wrap_negative_indices=False)
    holders = held.sum(axis=0, dtype=jnp.int32)
    is_hot, hot_rank = jnp.zeros((union,), jnp.bool_), jnp.zeros((union,), jnp.int32)
    if hot and n > 1:
        is_hot = holders == n
        hot_rank = running_sum(is_hot.astype(jnp.int32)) - 1
        is_hot &= hot_rank < hot
    cold = (holders > 0) & ~is_hot
    if ownership == "contributor":
        owner = contributors(held, cold, pull)
    else:
        owner = jnp.where(cold, Partition(ownership, num_rows, n).owner(unique), n)
    rank, owned = group_ranks(owner, n)
    place = jnp.where(is_hot, hot_rank, rank)
    # One flat index, and a column for rows without an owner: twice as fast on CPU as pairs of indices that may be outside.
    target = workers * (n + 1) + owner.at[slots].get(mode="fill", fill_value=n)
    pairs = jnp.zeros((n * (n + 1),), jnp.int32).at[target].add(1, mode="promise_in_bounds").reshape(n, n + 1)[:, :n]
    pairs = jnp.where(workers == workers.T, 0, pairs)
    fits = (counts >= 0).all() & (count <= union) & (pairs.max() <= push) & (owned.max() <= pull)
    fits &= (cold & (owner == n)).sum() == 0  # more rows than all owners have room for
    return Routes(unique, count, slots, counts, owner, place, fits)


def contributors(held: Array, cold: Array, quota: int, xp: Any = jnp) -> Array:
    """An owner for each row, of at most `quota` rows each: one that holds the row, as far as that goes.

    Rows that one worker holds stay with it. The others ask their holders, each row in an order of its own, so that every pair of
    workers gets about as many; who is full sends the rest on. What is left over goes to whoever has room.

    **Arguments:** `held`: bool[n, u], who holds which row; `cold`: bool[u], rows that need an owner; `xp`: `jax.numpy` or `numpy`.

    **Returns:** i32[u]; n for rows that need none, or for which there is no room.
    """
    n, union = held.shape
    ranks = _ranks_on_host if xp is np else group_ranks
    workers = xp.arange(n, dtype=xp.int32)[:, None]
    mixed = (xp.arange(union, dtype=xp.uint32) * xp.uint32(n) + workers.astype(xp.uint32)) * xp.uint32(0x9E3779B9)
    mixed = (mixed ^ (mixed >> 15)) * xp.uint32(0x85EBCA6B)
    turn = ((mixed ^ (mixed >> 13)) >> 1).astype(xp.int32) // n * n + workers  # no two alike in a row
    never = np.iinfo(np.int32).max

    def ask(_: int, state: tuple[Array, Array]) -> tuple[Array, Array]:
        owner, load = state
        first = xp.where(held & ((load < quota)[:, None]), turn, never).min(axis=0)
        return settle(xp.where((owner == n) & cold & (first != never), first % n, n), owner, load)

    def settle(asked: Array, owner: Array, load: Array) -> tuple[Array, Array]:
        """Of the rows that ask a worker (n: none), the first ones get it, as far as it has room."""
        rank, counts = ranks(asked, n)
        room = quota - load
        taken = (asked < n) & (rank < room[xp.minimum(asked, n - 1)])
        return xp.where(taken, asked, owner).astype(xp.int32), load + xp.minimum(counts, room).astype(xp.int32)

    alone = xp.where(cold & (held.sum(axis=0) == 1), xp.where(held, workers, 0).sum(axis=0), n)
    state = settle(alone, xp.full((union,), n, dtype=xp.int32), xp.zeros((n,), dtype=xp.int32))
    if xp is np:
        for _ in range(_ASKED):
            state = ask(_, state)
    else:
        state = lax.fori_loop(0, _ASKED, ask, state)
    owner, load = state
    left = cold & (owner == n)
    room = xp.cumsum(quota - load)
    if xp is np:
        other = np.searchsorted(room, np.cumsum(left) - 1, side="right").astype(np.int32)
    else:
        other = jnp.searchsorted(room, running_sum(left.astype(jnp.int32)) - 1, side="right", method="compare_all")
    return xp.where(left, other, owner)


def _ranks_on_host(groups: np.ndarray, num_groups: int) -> tuple[np.ndarray, np.ndarray]:
    """`local.group_ranks` in numpy."""
    order = np.argsort(groups, kind="stable")
    counts = np.bincount(groups, minlength=num_groups + 1)
    ranks = np.empty(groups.size, np.int32)
    ranks[order] = np.arange(groups.size) - np.repeat(np.cumsum(counts) - counts, counts)
    return ranks, counts[:num_groups]
