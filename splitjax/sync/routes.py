"""Decides who owns and who sends which row, known to all workers alike from one exchange of index sets.

Ids are known from the batch, before the forward pass, so this can run while the forward pass computes. All that
follows is arithmetic on the same numbers everywhere: no further agreement is needed, and capacities are checked
without communication.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from splitjax import kernels
from splitjax.kernels import running_sum
from splitjax.sync import codes, wire
from splitjax.sync.costs.capacities import Capacities
from splitjax.sync.costs.codes import BITMAP, IdCode
from splitjax.sync.costs.contributors import WORD_BITS, ArrayOperations, contributors, num_holders
from splitjax.sync.costs.partition import Partition
from splitjax.sync.local import compact, group_ranks, unite
from splitjax.sync.wire import Axis


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
    written, fitted = codes.encode(code, ids[None], count[None])
    written, counts = wire.gather([written[0], jnp.where(fitted[0], count, -1)], axis)
    num_rows = code.size
    sets = _united(code, written, union)
    unique, count, holders = sets.ids, sets.count, sets.holders
    workers = jnp.arange(n, dtype=jnp.int32)[:, None]
    how_many = num_holders(holders, ON_DEVICES)
    is_hot, hot_rank = jnp.zeros((union,), jnp.bool_), jnp.zeros((union,), jnp.int32)
    if hot and n > 1:
        is_hot = how_many == n
        hot_rank = running_sum(is_hot.astype(jnp.int32)) - 1
        is_hot &= hot_rank < hot
    cold = (how_many > 0) & ~is_hot
    if ownership == "contributor":
        owner, rank = contributors(holders, cold, n, pull, ON_DEVICES)
        has_room = True
    else:
        owner = jnp.where(cold, Partition(ownership, num_rows, n).owner(unique), n)
        rank, owned = group_ranks(owner, n)
        has_room = owned.max() <= pull
    held = _by_worker(holders, n)
    pairs = _rows_of_pairs(held, sets.slots, owner)
    pairs = jnp.where(workers == workers.T, 0, pairs)
    fits = (counts >= 0).all() & (count <= union) & (pairs.max() <= push) & has_room
    fits &= (cold & (owner == n)).sum() == 0  # more rows than all owners have room for
    return Routes(unique, count, held, owner, jnp.where(is_hot, hot_rank, rank), fits)


@dataclasses.dataclass(frozen=True)
class _United:
    """Holds the index sets of n workers, united.

    - `ids`: i32[u], sorted, filled up with the number of rows; `count`: i32[], how many there are, room or not.
    - `holders`: u32[ceil(n / 32), u], as `contributors` wants it.
    - `slots`: i32[n, c], for the entries of each worker's list their places among the ids; None where they were not
      needed.
    """

    ids: Array
    count: Array
    holders: Array
    slots: Array | None


def _united(code: IdCode, written: Array, union: int) -> _United:
    """Unites the index sets that all workers wrote by `code`, [n, length], with room for `union` ids.

    Bitmaps are not read into lists: a word a row says who holds it, and the rows that somebody holds are picked out of
    these. Of numbers and gaps every id is looked up in a bitmap of the union, and writes itself and its holder where it
    belongs; a word a row was no faster there (measured on word counts and Criteo, 16 workers).
    """
    n = written.shape[0]
    if code.bits == BITMAP and n <= WORD_BITS:
        by_row = _holders_by_row(written)
        words = kernels.encode(by_row != 0)
        before, count = kernels.ranks(words)
        # Many passes read both.
        ids = kernels.in_memory(kernels.select(words, before, count, union, code.size))
        held = kernels.in_memory(by_row.at[ids].get(mode="fill", fill_value=0, wrap_negative_indices=False))
        return _United(ids, count, held[None], None)
    ids, slots, count = unite(codes.spread(code, written), code.size, union)
    return _United(ids, count, _holders(slots, union), slots)


def _holders_by_row(bitmaps: Array) -> Array:
    """Says who holds each row of a table, u32[32 w], from the bitmaps u32[n, w] of at most 32 workers."""
    workers, bit = (jnp.arange(size, dtype=jnp.uint32) for size in (bitmaps.shape[0], WORD_BITS))
    # The rows of a word lie in a vector.
    bits = bitmaps[:, :, None] >> bit & 1
    return kernels.in_memory((bits << workers[:, None, None]).sum(axis=0, dtype=jnp.uint32).reshape(-1))


ON_DEVICES: ArrayOperations = ArrayOperations(
    jnp,
    group_ranks,
    lambda is_in: running_sum(is_in.astype(jnp.int32)),
    compact,
    lambda array, places, values: array.at[places].set(values, mode="drop", wrap_negative_indices=False),
    lax.population_count,
    lambda ends, numbers: jnp.searchsorted(ends, numbers, side="right", method="compare_all"),
)


def _holders(slots: Array, union: int) -> Array:
    """Says who holds which row of the union, as `contributors` wants it, from the places i32[n, c] of each worker's
    ids in it; those from `union` on are none. A worker has no row twice, so adding sets bits."""
    n = slots.shape[0]
    workers = jnp.arange(n, dtype=jnp.int32)[:, None]
    # A column for none.
    target = workers // WORD_BITS * (union + 1) + jnp.minimum(slots, union)
    bits = jnp.broadcast_to(jnp.uint32(1) << (workers % WORD_BITS).astype(jnp.uint32), slots.shape)
    words = -(-n // WORD_BITS)
    return (
        jnp.zeros((words * (union + 1),), jnp.uint32)
        .at[target]
        .add(bits, mode="promise_in_bounds")
        .reshape(words, union + 1)[:, :union]
    )


def _rows_of_pairs(held: Array, slots: Array | None, owner: Array) -> Array:
    """Counts the rows that each worker has of each owner, i32[n, n]: from who has which, as bitmaps by worker and, of
    more than 32 workers, as i32[n, c] slots, and the owner of each."""
    n = held.shape[0]
    if slots is None or n <= WORD_BITS:
        owners = jnp.where(owner < n, jnp.uint32(1) << jnp.minimum(owner, n).astype(jnp.uint32), 0)
        common = held[:, None] & _by_worker(owners[None], n)[None]
        return lax.population_count(common).astype(jnp.int32).sum(axis=-1)
    # The square of many workers is more than all rows that they have. One flat index, and a column for rows without an
    # owner: twice as fast on CPU as pairs of indices that may be outside.
    workers = jnp.arange(n, dtype=jnp.int32)[:, None]
    target = workers * (n + 1) + owner.at[slots].get(mode="fill", fill_value=n, wrap_negative_indices=False)
    return jnp.zeros((n * (n + 1),), jnp.int32).at[target].add(1, mode="promise_in_bounds").reshape(n, n + 1)[:, :n]


def _by_worker(holders: Array, n: int) -> Array:
    """u32[ceil(n / 32), u] -> u32[n, ceil(u / 32)]: a bitmap over the rows for each worker."""
    padded = jnp.pad(holders, ((0, 0), (0, -holders.shape[1] % WORD_BITS)))
    # The rows of a word stand one above the other: on CPU these are sums of vectors, and not within vectors.
    rows = kernels.in_memory(jnp.moveaxis(padded.reshape(holders.shape[0], -1, WORD_BITS), -1, 1))
    workers, bit = jnp.arange(n, dtype=jnp.uint32), jnp.arange(WORD_BITS, dtype=jnp.uint32)
    bits = rows[workers // WORD_BITS] >> (workers % WORD_BITS)[:, None, None] & 1
    return (bits << bit[:, None]).sum(axis=1, dtype=jnp.uint32)
