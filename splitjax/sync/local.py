"""Does what a worker does alone: ranks in a set of ids, packing into send order, codes for sorted ids. Static
shapes.

Bitmaps, sums of rows, and rows taken and put are `kernels`, which are plain JAX on CPU; the rest is plain JAX
everywhere.

A set of ids below `size` is a *bitmap* (one bit an id, `u32` words) with running popcounts: the rank of an id is
a table look-up, the id of a rank a search inside one word (Jacobson 1989, "Space-efficient static trees and
graphs"). So duplicates are found and sets united without sorting, which on CPU is the costly part. Lists of ids
are sorted, unique, and filled up with `size`.

Two codes send such a list: the bitmap itself (`size / 8` bytes), and gaps (`encode_gaps`: about one byte an id),
which is shorter where fewer than one id in eight is in the set.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from splitjax import kernels

_WORD_BITS = 32
# With more ids than this for each id looked up, sorting is cheaper than a presence map of all.
_SPARSEST = 512


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ranked:
    """Holds a set of ids as a bitmap with running popcounts.

    - `words`: u32[w], the bitmap.
    - `before`: i32[w], ids in earlier words.
    - `count`: i32[], ids in all.
    """

    words: Array
    before: Array
    count: Array

    def rank(self, ids: Array) -> Array:
        """Counts the ids of the set that are smaller, for each of `ids` (any shape; ids past the bitmap give
        anything)."""
        word, below = _word_and_below(ids)
        look = lambda table: table.at[word].get(mode="clip", wrap_negative_indices=False)
        return look(self.before) + lax.population_count(look(self.words) & below).astype(jnp.int32)


def ranked(words: Array) -> Ranked:
    """Counts the ids before each of the `words` of a bitmap."""
    return Ranked(words, *kernels.ranks(words))


def unite(ids: Array, size: int, capacity: int) -> tuple[Array, Array, Array]:
    """Unites ids into a set.

    **Arguments:**

    - `ids`: any shape and order, duplicates allowed.
    - `size`: ids from here on stand for none.
    - `capacity`: room for unique ids.

    **Returns:** the sorted unique ids, i32[capacity]; the slot of each of `ids` in them (>= capacity: none); the
    exact number of unique ids, which may exceed `capacity`.
    """
    if size <= _SPARSEST * max(ids.size, 1):
        known = ranked(kernels.encode_ids(ids.reshape(-1), size))
        slots = jnp.where(ids < size, known.rank(ids), capacity)
        by_slot = lambda ids, slots, *_: (
            jnp.full((capacity,), size, jnp.int32).at[slots].set(ids, mode="drop", wrap_negative_indices=False)
        )
        by_bits = lambda ids, slots, words, before, count: kernels.select(words, before, count, capacity, size)
        # Every id writes itself where it belongs; on TPU, where a scatter goes one by one, they are looked up in the
        # bitmap.
        operands = ids.astype(jnp.int32), slots, known.words, known.before, known.count
        return kernels.dispatch(by_slot, *operands, tpu=by_bits, gpu=None), slots, known.count
    flat = ids.reshape(-1)
    order = jnp.argsort(flat)
    ascending = flat[order]
    first = (ascending < size) & (ascending != jnp.concatenate([jnp.full((1,), -1, ascending.dtype), ascending[:-1]]))
    rank = jnp.cumsum(first.astype(jnp.int32)) - 1
    unique = (
        jnp.full((capacity,), size, jnp.int32)
        .at[jnp.where(first, rank, capacity)]
        .set(ascending, mode="drop", wrap_negative_indices=False)
    )
    slots = jnp.zeros(flat.shape, jnp.int32).at[order].set(jnp.where(ascending < size, rank, capacity))
    return unique, slots.reshape(ids.shape), first.sum(dtype=jnp.int32)


def sum_rows(
    values: Array, slots: Array, capacity: int, dtype: jnp.dtype | None = None, *, has_no_gaps: bool = False
) -> Array:
    """Adds up rows of any shape by slot (`kernels.sum_rows`).

    **Arguments:**

    - `values`: f[m, *row].
    - `slots`: i32[m].
    - `capacity`: the number of rows of the result, f[capacity, *row].
    - `dtype`: in which rows are added up; None: theirs.
    - `has_no_gaps`: whether every slot below the largest occurs.
    """
    rows = as_matrix(values.astype(dtype or values.dtype))
    return kernels.sum_rows(rows, slots, capacity, has_no_gaps).reshape(capacity, *values.shape[1:])


def take_rows(values: Array, slots: Array) -> Array:
    """Takes rows of any shape, `values[slots]` for `slots` of any shape: zeros where a slot is past the end."""
    return kernels.gather_rows(as_matrix(values), slots.reshape(-1)).reshape(*slots.shape, *values.shape[1:])


def rounded_away(values: Array, rounded: Array) -> Array:
    """Returns what a conversion of `values` to a shorter dtype, `rounded`, took away; zeros where that is not
    finite, which would stay for ever."""
    kind = jnp.finfo(rounded.dtype)
    # XLA may leave out a conversion there and back, but no `reduce_precision`.
    lost = values - lax.reduce_precision(rounded.astype(values.dtype), kind.nexp, kind.nmant)
    return jnp.where(jnp.isfinite(lost), lost, 0)


def set_rows(table: Array, rows: Array, values: Array, *, is_sorted: bool = True) -> Array:
    """Puts `values` of any shape at `rows` of a `table`.

    `rows` are i32[m], different and (`is_sorted`) ascending; past the end for none.
    """
    return kernels.scatter_rows(as_matrix(table), rows, as_matrix(values), is_sorted).reshape(table.shape)


def as_matrix(rows: Array) -> Array:
    """Returns `rows` of any shape as the rows of a matrix, which kernels take."""
    return rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))


def group_ranks(groups: Array, num_groups: int, first: Array | None = None) -> tuple[Array, Array]:
    """Counts, for each entry, the entries of the same group that come before.

    **Arguments:**

    - `groups`: i32[m]; `num_groups` or more: none, with any rank.
    - `first`: bool[m]: those entries of a group that come before its others; None: they come in their order.

    **Returns:** the ranks, i32[m], and the size of each group, i32[num_groups]. One bitmap for each group, so
    that the running counts are over words.
    """
    m = groups.size
    padded = jnp.concatenate([groups, jnp.full((-m % _WORD_BITS,), num_groups, groups.dtype)]).reshape(-1, _WORD_BITS)
    # The entries of a word stand one above the other: on CPU these are sums of vectors, and not within vectors.
    member = kernels.in_memory(padded.T) == jnp.arange(num_groups, dtype=groups.dtype)[:, None, None]
    bit = jnp.arange(_WORD_BITS, dtype=jnp.uint32)[:, None]
    words = (member.astype(jnp.uint32) << bit).sum(axis=1, dtype=jnp.uint32)
    group = jnp.minimum(groups, num_groups - 1)
    if first is None:
        before, counts = kernels.ranks(words)
    else:
        early = words & kernels.encode(first)
        words = jnp.concatenate([early, words & ~early])
        before, counts = kernels.ranks(words)
        # Many look-ups read it.
        before = kernels.in_memory(before.at[num_groups:].add(counts[:num_groups, None]))
        counts = counts[:num_groups] + counts[num_groups:]
        group = jnp.where(first, group, group + num_groups)
    word, below = _word_and_below(jnp.arange(m, dtype=jnp.int32))
    word += group * words.shape[1]
    look = lambda table: table.reshape(-1).at[word].get(mode="promise_in_bounds")
    return look(before) + lax.population_count(look(words) & below).astype(jnp.int32), counts


def _word_and_below(places: Array) -> tuple[Array, Array]:
    """Says in which word of a bitmap each of the `places` from 0 on has its bit, and which bits of that word are below
    it."""
    # Of numbers with a sign, `//` and `%` are many operations each on CPU.
    return places >> _WORD_BITS.bit_length() - 1, (
        jnp.uint32(1) << (places & _WORD_BITS - 1).astype(jnp.uint32)
    ) - jnp.uint32(1)


def send_order(groups: Array, num_groups: int, capacity: int) -> tuple[Array, Array]:
    """Orders positions by group, and in a group as they come.

    **Arguments:**

    - `groups`: i32[m]; `num_groups` or more: none.
    - `capacity`: room for positions of a group.

    **Returns:** positions i32[num_groups, capacity], filled up with m; the exact number in each group,
    i32[num_groups], which may exceed `capacity`.
    """
    rank, counts = group_ranks(groups, num_groups)
    # One flat index, and an entry for what has no place: on CPU faster than pairs of indices that may be outside.
    place = jnp.where((groups < num_groups) & (rank < capacity), groups * capacity + rank, num_groups * capacity)
    order = jnp.full((num_groups * capacity + 1,), groups.size, jnp.int32)
    order = order.at[place].set(jnp.arange(groups.size, dtype=jnp.int32), mode="promise_in_bounds")
    return order[:-1].reshape(num_groups, capacity), counts


def compact(ids: Array, capacity: int, size: int) -> Array:
    """Keeps the `ids` below `size` of i32[..., m], in their order: i32[..., capacity], filled up with `size`.

    `capacity` is the length of the result.
    """
    if ids.ndim == 2:
        return jax.vmap(lambda list_ids: compact(list_ids, capacity, size))(ids)
    slots = jnp.where(ids < size, kernels.running_sum((ids < size).astype(jnp.int32)) - 1, capacity)
    return jnp.full((capacity,), size, jnp.int32).at[slots].set(ids, mode="drop", wrap_negative_indices=False)


def encode_gaps(ids: Array, count: Array, num_codes: int, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Writes sorted unique ids as gaps of one code each; a code of all ones says "so many more, no id here".

    **Arguments:**

    - `ids`: i32[k], of which the first `count` are sent.
    - `num_codes`: room for codes.
    - `dtype`: uint8 or uint16.

    **Returns:** the codes, filled up with ones (which decode to nothing), and the exact number of codes needed.
    """
    top = int(jnp.iinfo(dtype).max)
    gaps = jnp.diff(ids, prepend=jnp.full((1,), -1, ids.dtype)) - 1
    last = jnp.cumsum(gaps // top + 1) - 1
    valid = jnp.arange(ids.size) < count
    codes = (
        jnp.full((num_codes,), top, dtype)
        .at[jnp.where(valid, last, num_codes)]
        .set((gaps % top).astype(dtype), mode="drop")
    )
    return codes, jnp.max(jnp.where(valid, last + 1, 0), initial=0)


def decode_gaps(codes: Array, capacity: int, size: int) -> Array:
    """Reads the first `capacity` ids of each list that `encode_gaps` wrote as `codes` u[m, c]: i32[m, capacity],
    filled up with `size`."""
    return compact(spread_gaps(codes, size), capacity, size)


def spread_gaps(codes: Array, size: int) -> Array:
    """Finds the id that each of the `codes` u[m, c] ends with: i32[m, c], `size` for codes of none."""
    ends = codes != jnp.iinfo(codes.dtype).max
    # Many passes read them.
    return kernels.in_memory(jnp.where(ends, kernels.running_sum(codes.astype(jnp.int32) + ends) - 1, size))
