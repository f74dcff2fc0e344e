"""Decides who owns and who sends which row, known to all workers alike from one exchange of index sets.

Ids are known from the batch, before the forward pass, so this can run while the forward pass computes. All that
follows is arithmetic on the same numbers everywhere: no further agreement is needed, and capacities are checked
without communication.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from splitjax import kernels
from splitjax.kernels import running_sum
from splitjax.sync import wire
from splitjax.sync.codes import IdCode
from splitjax.sync.local import compact, group_ranks, unite
from splitjax.sync.partition import Items, Partition
from splitjax.sync.scheme import Capacities
from splitjax.sync.wire import Axis

_WORD_BITS = 32
# How often rows ask for an owner: with the third time, nearly all have one (measured on word counts, 4 to 16 workers).
# One row in so many may ask more than once; the first time leaves fewer than one in a hundred there.
_ASKED, _AGAIN = 3, 8
OWNERSHIPS: tuple[str, ...] = ("contributor", "strided", "hashed")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routes:
    """The exchange of one step, for n workers, u rows of room in the union, k on each worker.

    **Attributes:**

    - `ids`: i32[u], the union, sorted, filled up with the number of rows; `count`: i32[], its exact size.
    - `held`: u32[n, ceil(u / 32)], for each worker the bitmap of its rows over the union.
    - `owner`: i32[u], the row's owner; n for a row that is summed densely, or none.
    - `place`: i32[u], where among its owner's rows, or among the densely summed ones, it stands.
    - `fits`: bool[], alike on all workers: everything has room.
    """

    ids: Array
    count: Array
    held: Array
    owner: Array
    place: Array
    fits: Array


def exchange_indices(
    ids: Array, count: Array, axis: Axis, code: IdCode, capacities: Capacities, ownership: str
) -> Routes:
    """Gathers every worker's index set on all workers, and derives the routes that follow.

    **Arguments:**

    - `ids`: i32[k], this worker's rows, sorted, filled up with the number of rows; `count`: i32[] of them (more
      than k: they do not fit).
    - `axis`: the mesh axis or axes of the workers.
    - `code`: how a set is written; its `size` is the number of rows.
    - `capacities`: the room for rows of the union, from one worker to one owner, of one owner, and summed densely.
    - `ownership`: one of `OWNERSHIPS`: a row's owner is one of the workers that have it, as far as all own
      equally many; or id % n; or by a hash of the id.
    """
    n = lax.axis_size(axis)
    union, push, pull, hot = capacities.union, capacities.push, capacities.pull, capacities.hot
    codes, fitted = code.encode(ids[None], count[None])
    codes, counts = wire.gather([codes[0], jnp.where(fitted[0], count, -1)], axis)
    ids, num_rows = code.spread(codes), code.size
    unique, slots, count = unite(ids, num_rows, union)
    workers = jnp.arange(n, dtype=jnp.int32)[:, None]
    holders = _holders(slots, union)
    num_holders = _population(holders, jnp)
    is_hot, hot_rank = jnp.zeros((union,), jnp.bool_), jnp.zeros((union,), jnp.int32)
    if hot and n > 1:
        is_hot = num_holders == n
        hot_rank = running_sum(is_hot.astype(jnp.int32)) - 1
        is_hot &= hot_rank < hot
    cold = (num_holders > 0) & ~is_hot
    if ownership == "contributor":
        owner, rank = contributors(holders, cold, n, pull)
        has_room = True
    else:
        owner = jnp.where(cold, Partition(ownership, num_rows, n).owner(unique), n)
        rank, owned = group_ranks(owner, n)
        has_room = owned.max() <= pull
    # One flat index, and a column for rows without an owner: twice as fast on CPU as pairs of indices that may be
    # outside.
    target = workers * (n + 1) + owner.at[slots].get(mode="fill", fill_value=n, wrap_negative_indices=False)
    pairs = jnp.zeros((n * (n + 1),), jnp.int32).at[target].add(1, mode="promise_in_bounds").reshape(n, n + 1)[:, :n]
    pairs = jnp.where(workers == workers.T, 0, pairs)
    fits = (counts >= 0).all() & (count <= union) & (pairs.max() <= push) & has_room
    fits &= (cold & (owner == n)).sum() == 0  # more rows than all owners have room for
    return Routes(unique, count, _by_worker(holders, n), owner, jnp.where(is_hot, hot_rank, rank), fits)


def contributors(holders: Items, cold: Items, n: int, quota: int, xp: Any = jnp) -> tuple[Items, Items]:
    """Chooses an owner for each row, of at most `quota` rows each: a worker that holds the row, as far as that goes.

    Rows that one worker holds stay with it. The others ask one of their holders, each with equal probability, so
    that every pair of workers gets about as many; who is full sends the rest on. What is left over goes to
    whoever has room.

    **Arguments:**

    - `holders`: u32[ceil(n / 32), u], bit w % 32 of word w // 32 says whether worker w holds the row.
    - `cold`: bool[u], rows that need an owner.
    - `n`: the number of workers.
    - `quota`: the most rows of an owner.
    - `xp`: `jax.numpy` or `numpy`.

    **Returns:** the owners, i32[u], n for rows that need none, or for which there is no room; where among its
    owner's rows each stands that has one, i32[u], all different and below the quota.
    """
    union = cold.size
    ranks: Callable[..., tuple[Any, Any]] = _ranks_on_host if xp is np else group_ranks
    numbers = xp.arange(union, dtype=xp.int32)
    asked = xp.where(cold, _one_of(holders, numbers, 0, n, xp), n)
    # who alone has a row comes first: nobody else could keep it
    place, counts = ranks(asked, n, _population(holders, xp) == 1)
    taken = (asked < n) & (place < quota)
    owner, load = xp.where(taken, asked, n), xp.minimum(counts, quota)

    room = -(-union // _AGAIN)
    waiting = compact(xp.where(cold & ~taken, numbers, union), room, union)
    their = xp.concatenate([holders, xp.zeros((holders.shape[0], 1), holders.dtype)], axis=1)[:, waiting]
    settled, spot = xp.full((room,), n, dtype=xp.int32), xp.zeros((room,), dtype=xp.int32)
    for time in range(1, _ASKED):
        with_room = xp.pad(load < quota, (0, -n % _WORD_BITS)).reshape(-1, _WORD_BITS).astype(xp.uint32) << xp.arange(
            _WORD_BITS, dtype=xp.uint32
        )
        asked = _one_of(
            xp.where(settled == n, their & with_room.sum(axis=1, dtype=xp.uint32)[:, None], 0), waiting, time, n, xp
        )
        rank, counts = ranks(asked, n)
        rank += load[xp.minimum(asked, n - 1)]
        taken = (asked < n) & (rank < quota)
        settled, spot = xp.where(taken, asked, settled), xp.where(taken, rank, spot)
        load = xp.minimum(load + counts, quota)
    owner, place = _put(owner, waiting, settled, xp), _put(place, waiting, spot, xp)

    left = cold & (owner == n)
    number = (np.cumsum(left) if xp is np else running_sum(left.astype(jnp.int32))) - 1
    ends = xp.cumsum(quota - load)
    spare = (
        np.searchsorted(ends, number, side="right")
        if xp is np
        else jnp.searchsorted(ends, number, side="right", method="compare_all")
    )
    start = quota - ends  # place and number of an owner's rows differ by as much
    place = xp.where(left, start[xp.minimum(spare, n - 1)] + number, place)
    return xp.where(left, spare, owner).astype(xp.int32), place.astype(xp.int32)


def holders_on_host(slots: Sequence[np.ndarray], union: int) -> np.ndarray:
    """Packs who holds which row, as `contributors` wants it.

    `slots` has, of each worker, its rows' numbers in the union; `union` is the number of rows in that.
    """
    holders = np.zeros((-(-len(slots) // _WORD_BITS), union), np.uint32)
    for worker, rows in enumerate(slots):
        holders[worker // _WORD_BITS, rows] |= np.uint32(1 << worker % _WORD_BITS)
    return holders


def _holders(slots: Array, union: int) -> Array:
    """The same from i32[n, c], entries from `union` on being none. A worker has no row twice, so adding sets bits."""
    n = slots.shape[0]
    workers = jnp.arange(n, dtype=jnp.int32)[:, None]
    # A column for none, as above.
    target = workers // _WORD_BITS * (union + 1) + jnp.minimum(slots, union)
    bits = jnp.broadcast_to(jnp.uint32(1) << (workers % _WORD_BITS).astype(jnp.uint32), slots.shape)
    words = -(-n // _WORD_BITS)
    return (
        jnp.zeros((words * (union + 1),), jnp.uint32)
        .at[target]
        .add(bits, mode="promise_in_bounds")
        .reshape(words, union + 1)[:, :union]
    )


def _by_worker(holders: Array, n: int) -> Array:
    """u32[ceil(n / 32), u] -> u32[n, ceil(u / 32)]: a bitmap over the rows for each worker."""
    padded = jnp.pad(holders, ((0, 0), (0, -holders.shape[1] % _WORD_BITS)))
    workers = jnp.arange(n, dtype=jnp.uint32)
    bits = padded[workers // _WORD_BITS] >> (workers % _WORD_BITS)[:, None] & 1
    return kernels.encode((bits == 1).reshape(-1)).reshape(n, -1)


def _one_of(holders: Any, rows: Any, time: int, n: int, xp: Any) -> Any:
    """One holder of each row, by a hash of the row's number and of how often it has asked; n where there is none:
    u32[w, m] -> i32[m]."""
    mixed = (rows.astype(xp.uint32) + xp.uint32(time << 28)) * xp.uint32(0x9E3779B9)
    mixed = (mixed ^ (mixed >> 15)) * xp.uint32(0x85EBCA6B)
    total = _population(holders, xp)
    # The how-many-eth: the hash's upper 16 bits as a fraction of the total.
    rest = ((mixed >> 16) * total.astype(xp.uint32) >> 16).astype(xp.int32)
    bits, bit, start = holders[0], xp.zeros_like(rest), xp.zeros_like(rest)
    for word in range(1, holders.shape[0]):
        before = _population(holders[:word], xp)
        is_later = rest >= before
        bits, bit, start = (
            xp.where(is_later, new, old)
            for new, old in ((holders[word], bits), (word * _WORD_BITS, bit), (before, start))
        )
    rest = rest - start
    for width in (16, 8, 4, 2, 1):
        low = _population(bits[None] & xp.uint32(2**width - 1), xp)
        is_above = rest >= low
        rest, bit = xp.where(is_above, rest - low, rest), xp.where(is_above, bit + width, bit)
        bits = xp.where(is_above, bits >> width, bits)
    return xp.where(total > 0, bit, n).astype(xp.int32)


def _population(holders: Any, xp: Any) -> Array:
    """Counts the bits that are set in all words: u32[w, m] -> i32[m]."""
    counts = np.bitwise_count(holders) if xp is np else lax.population_count(holders)
    return counts.sum(axis=0, dtype=xp.int32) if holders.shape[0] != 1 else counts[0].astype(xp.int32)


def _put(array: Any, places: Any, values: Any, xp: Any) -> Any:
    """`array` with `values` at different places; places past the end are none."""
    if xp is not np:
        return array.at[places].set(values, mode="drop", wrap_negative_indices=False)
    out, inside = array.copy(), places < array.size
    out[places[inside]] = values[inside]
    return out


def _ranks_on_host(
    groups: np.ndarray, num_groups: int, first: np.ndarray | bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """`local.group_ranks` in numpy."""
    order = np.argsort(2 * groups + np.logical_not(first), kind="stable")
    counts = np.bincount(groups, minlength=num_groups + 1)
    ranks = np.empty(groups.size, np.int32)
    ranks[order] = np.arange(groups.size) - np.repeat(np.cumsum(counts) - counts, counts)
    return ranks, counts[:num_groups]
