"""Chooses the worker that adds up each row, among those that hold it: on the host for capacities, on devices for the
exchange, by one algorithm.

Who holds which row goes in, owners and places come out; the arithmetic is that of integers, so that all agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

WORD_BITS = 32
# How often rows ask for an owner: with the third time, nearly all have one (measured on word counts, 4 to 16 workers).
# One row in so many may ask more than once; the first time leaves fewer than one in a hundred there.
_ASKED, _AGAIN = 3, 8
OWNERSHIPS: tuple[str, ...] = ("contributor", "strided", "hashed")


@dataclasses.dataclass(frozen=True)
class ArrayOperations:
    """Says how arrays are computed with, on the host (`ON_HOST`) or on devices (`sync.routes.ON_DEVICES`).

    **Attributes:**

    - `xp`: `numpy` or `jax.numpy`.
    - `ranks(groups, num_groups, first)`: as `sync.local.group_ranks`.
    - `running_count(is_in)`: how many of bool[m] hold up to each place, i32[m].
    - `compact(ids, capacity, size)`: as `sync.local.compact`.
    - `put(array, places, values)`: the array with the values at different places; places past the end are none.
    - `bit_counts(words)`: the bits that are set in each of the words.
    - `first_above(ends, numbers)`: for each number, the first place of the sorted `ends` that is above it.
    """

    xp: ModuleType
    ranks: Callable[..., tuple[Any, Any]]
    running_count: Callable[[Any], Any]
    compact: Callable[[Any, int, int], Any]
    put: Callable[[Any, Any, Any], Any]
    bit_counts: Callable[[Any], Any]
    first_above: Callable[[Any, Any], Any]


def contributors(holders: Any, cold: Any, n: int, quota: int, on: ArrayOperations) -> tuple[Any, Any]:
    """Chooses an owner for each row, of at most `quota` rows each: a worker that holds the row, as far as that goes.

    Rows that one worker holds stay with it. The others ask one of their holders, each with equal probability, so
    that every pair of workers gets about as many; who is full sends the rest on. What is left over goes to
    whoever has room.

    **Arguments:**

    - `holders`: u32[ceil(n / 32), u], bit w % 32 of word w // 32 says whether worker w holds the row.
    - `cold`: bool[u], rows that need an owner.
    - `n`: the number of workers.
    - `quota`: the most rows of an owner.
    - `on`: where these arrays are computed with.

    **Returns:** the owners, i32[u], n for rows that need none, or for which there is no room; where among its
    owner's rows each stands that has one, i32[u], all different and below the quota.
    """
    union, xp = cold.size, on.xp
    numbers = xp.arange(union, dtype=xp.int32)
    asked = xp.where(cold, _one_of(holders, numbers, 0, n, on), n)
    # who alone has a row comes first: nobody else could keep it
    place, counts = on.ranks(asked, n, num_holders(holders, on) == 1)
    taken = (asked < n) & (place < quota)
    owner, load = xp.where(taken, asked, n), xp.minimum(counts, quota)

    room = -(-union // _AGAIN)
    waiting = on.compact(xp.where(cold & ~taken, numbers, union), room, union)
    their = xp.concatenate([holders, xp.zeros((holders.shape[0], 1), holders.dtype)], axis=1)[:, waiting]
    settled, spot = xp.full((room,), n, dtype=xp.int32), xp.zeros((room,), dtype=xp.int32)
    for time in range(1, _ASKED):
        with_room = xp.pad(load < quota, (0, -n % WORD_BITS)).reshape(-1, WORD_BITS).astype(xp.uint32) << xp.arange(
            WORD_BITS, dtype=xp.uint32
        )
        asked = _one_of(
            xp.where(settled == n, their & with_room.sum(axis=1, dtype=xp.uint32)[:, None], 0), waiting, time, n, on
        )
        rank, counts = on.ranks(asked, n)
        rank += load[xp.minimum(asked, n - 1)]
        taken = (asked < n) & (rank < quota)
        settled, spot = xp.where(taken, asked, settled), xp.where(taken, rank, spot)
        load = xp.minimum(load + counts, quota)
    owner, place = on.put(owner, waiting, settled), on.put(place, waiting, spot)

    left = cold & (owner == n)
    number = on.running_count(left) - 1
    ends = xp.cumsum(quota - load)
    spare = on.first_above(ends, number)
    start = quota - ends  # place and number of an owner's rows differ by as much
    place = xp.where(left, start[xp.minimum(spare, n - 1)] + number, place)
    return xp.where(left, spare, owner).astype(xp.int32), place.astype(xp.int32)


def holders_on_host(slots: Sequence[np.ndarray], union: int) -> np.ndarray:
    """Packs who holds which row, as `contributors` wants it.

    `slots` has, of each worker, its rows' numbers in the union; `union` is the number of rows in that.
    """
    holders = np.zeros((-(-len(slots) // WORD_BITS), union), np.uint32)
    for worker, rows in enumerate(slots):
        holders[worker // WORD_BITS, rows] |= np.uint32(1 << worker % WORD_BITS)
    return holders


def _one_of(holders: Any, rows: Any, time: int, n: int, on: ArrayOperations) -> Any:
    """One holder of each row, by a hash of the row's number and of how often it has asked; n where there is none:
    u32[w, m] -> i32[m]."""
    xp = on.xp
    mixed = (rows.astype(xp.uint32) + xp.uint32(time << 28)) * xp.uint32(0x9E3779B9)
    mixed = (mixed ^ (mixed >> 15)) * xp.uint32(0x85EBCA6B)
    total = num_holders(holders, on)
    # The how-many-eth: the hash's upper 16 bits as a fraction of the total.
    rest = ((mixed >> 16) * total.astype(xp.uint32) >> 16).astype(xp.int32)
    bits, bit, start = holders[0], xp.zeros_like(rest), xp.zeros_like(rest)
    for word in range(1, holders.shape[0]):
        before = num_holders(holders[:word], on)
        is_later = rest >= before
        bits, bit, start = (
            xp.where(is_later, new, old)
            for new, old in ((holders[word], bits), (word * WORD_BITS, bit), (before, start))
        )
    rest = rest - start
    for width in (16, 8, 4, 2, 1):
        low = num_holders(bits[None] & xp.uint32(2**width - 1), on)
        is_above = rest >= low
        rest, bit = xp.where(is_above, rest - low, rest), xp.where(is_above, bit + width, bit)
        bits = xp.where(is_above, bits >> width, bits)
    return xp.where(total > 0, bit, n).astype(xp.int32)


def num_holders(holders: Any, on: ArrayOperations) -> Any:
    """Counts the bits that are set in all words of `holders`: u32[w, m] -> i32[m]. `on`: where they are computed
    with."""
    counts, xp = on.bit_counts(holders), on.xp
    return counts.sum(axis=0, dtype=xp.int32) if holders.shape[0] != 1 else counts[0].astype(xp.int32)


def _put_on_host(array: np.ndarray, places: np.ndarray, values: np.ndarray) -> np.ndarray:
    out, inside = array.copy(), places < array.size
    out[places[inside]] = values[inside]
    return out


def _compact_on_host(ids: np.ndarray, capacity: int, size: int) -> np.ndarray:
    """`sync.local.compact` in numpy, of a vector."""
    kept = ids[ids < size][:capacity]
    return np.pad(kept, (0, capacity - kept.size), constant_values=size)


def _ranks_on_host(
    groups: np.ndarray, num_groups: int, first: np.ndarray | bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """`sync.local.group_ranks` in numpy."""
    order = np.argsort(2 * groups + np.logical_not(first), kind="stable")
    counts = np.bincount(groups, minlength=num_groups + 1)
    ranks = np.empty(groups.size, np.int32)
    ranks[order] = np.arange(groups.size) - np.repeat(np.cumsum(counts) - counts, counts)
    return ranks, counts[:num_groups]


ON_HOST: ArrayOperations = ArrayOperations(
    np,
    _ranks_on_host,
    np.cumsum,
    _compact_on_host,
    _put_on_host,
    np.bitwise_count,
    lambda ends, numbers: np.searchsorted(ends, numbers, side="right"),
)
