"""What a worker does alone: ranks in a set of ids, packing into send order, codes for sorted ids. Pure JAX, static shapes.

A set of ids below `size` is a *bitmap* (one bit an id, `u32` words) with running popcounts: the rank of an id is a table
look-up, the id of a rank a search inside one word (Jacobson 1989, "Space-efficient static trees and graphs"). So duplicates are
found and sets united without sorting, which on CPU is the costly part. Lists of ids are sorted, unique, and filled up with `size`.

Two codes send such a list: the bitmap itself (`size / 8` bytes), and gaps (`encode_gaps`: about one byte an id), which is shorter
where fewer than one id in eight is in the set.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

_WORD_BITS = 32
# With more ids than this for each id looked up, sorting is cheaper than a presence map of all.
_SPARSEST = 512


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ranked:
    """A set of ids as a bitmap with running popcounts. `words`: u32[w]; `before`: i32[w], ids in earlier words; `count`: i32[]."""

    words: Array
    before: Array
    count: Array

    def rank(self, ids: Array) -> Array:
        """How many ids of the set are smaller, for each of `ids` (any shape; ids past the bitmap give anything)."""
        word = ids // _WORD_BITS
        below = (jnp.uint32(1) << (ids % _WORD_BITS).astype(jnp.uint32)) - jnp.uint32(1)
        inside = lax.population_count(self.words.at[word].get(mode="clip") & below).astype(jnp.int32)
        return self.before.at[word].get(mode="clip") + inside


def num_words(size: int) -> int:
    """Words of a bitmap over `size` ids."""
    return -(-size // _WORD_BITS)


def ranked(words: Array) -> Ranked:
    """The popcount scan over a bitmap."""
    counts = lax.population_count(words).astype(jnp.int32)
    total = jnp.cumsum(counts)
    return Ranked(words, total - counts, total[-1] if words.size else jnp.int32(0))


def encode_bitmap(ids: Array, size: int) -> Array:
    """`ids` (any shape and order, duplicates allowed; those >= size are dropped) as u32[ceil(size / 32)]."""
    present = jnp.zeros((num_words(size) * _WORD_BITS,), jnp.bool_)
    present = present.at[jnp.where(ids < size, ids, present.size)].set(True, mode="drop")
    bits = present.reshape(-1, _WORD_BITS).astype(jnp.uint32) << jnp.arange(_WORD_BITS, dtype=jnp.uint32)
    return bits.sum(axis=1, dtype=jnp.uint32)


def decode_bitmap(found: Ranked, capacity: int, size: int) -> Array:
    """The first `capacity` ids of a bitmap, ascending, filled up with `size`: i32[capacity]."""
    if not found.words.size or not capacity:
        return jnp.full((capacity,), size, jnp.int32)
    index = jnp.arange(found.words.size, dtype=jnp.int32)
    starts = jnp.where(found.words != 0, found.before, capacity)
    word = lax.cummax(jnp.zeros((capacity,), jnp.int32).at[starts].max(index, mode="drop"))
    slots = jnp.arange(capacity, dtype=jnp.int32)
    bit = _select(found.words[word], slots - found.before[word])
    return jnp.where(slots < found.count, word * _WORD_BITS + bit, size)


def _select(words: Array, rank: Array) -> Array:
    """The position of the set bit that has `rank` set bits below it."""
    position = jnp.zeros(words.shape, jnp.int32)
    for width in (16, 8, 4, 2, 1):
        low = lax.population_count(words & jnp.uint32((1 << width) - 1)).astype(jnp.int32)
        above = rank >= low
        rank = jnp.where(above, rank - low, rank)
        position = jnp.where(above, position + width, position)
        words = jnp.where(above, words >> width, words)
    return position


def unite(ids: Array, size: int, capacity: int) -> tuple[Array, Array, Array]:
    """The set of `ids` (any shape and order, duplicates allowed, >= size: none).

    **Returns:** the sorted unique ids, i32[capacity]; the slot of each of `ids` in them (>= capacity: none); the exact number
    of unique ids, which may exceed `capacity`.
    """
    if size <= _SPARSEST * max(ids.size, 1):
        found = ranked(encode_bitmap(ids, size))
        slots = jnp.where(ids < size, found.rank(ids), capacity)
        return decode_bitmap(found, capacity, size), slots, found.count
    flat = ids.reshape(-1)
    order = jnp.argsort(flat)
    ascending = flat[order]
    first = (ascending < size) & (ascending != jnp.concatenate([jnp.full((1,), -1, ascending.dtype), ascending[:-1]]))
    rank = jnp.cumsum(first.astype(jnp.int32)) - 1
    unique = jnp.full((capacity,), size, jnp.int32).at[jnp.where(first, rank, capacity)].set(ascending, mode="drop")
    slots = jnp.zeros(flat.shape, jnp.int32).at[order].set(jnp.where(ascending < size, rank, capacity))
    return unique, slots.reshape(ids.shape), rank[-1] + 1


def sum_rows(values: Array, slots: Array, capacity: int, dtype: jnp.dtype | None = None) -> Array:
    """Rows added up by slot: values f[m, *row], slots i32[m] (>= capacity: dropped) -> f[capacity, *row]."""
    out = jnp.zeros((capacity, *values.shape[1:]), dtype or values.dtype)
    return out.at[slots].add(values.astype(out.dtype), mode="drop")


def take_rows(values: Array, slots: Array) -> Array:
    """The rows at `slots` (any shape); zeros where a slot is past the end."""
    return values.at[slots].get(mode="fill", fill_value=0)


def group_ranks(groups: Array, num_groups: int) -> tuple[Array, Array]:
    """How many earlier entries have the same group: `groups` i32[m] (>= num_groups: none, with any rank) -> i32[m].

    **Returns:** also the size of each group, i32[num_groups]. One bitmap for each group, so that the running counts are over words.
    """
    m = groups.size
    padded = jnp.concatenate([groups, jnp.full((-m % _WORD_BITS,), num_groups, groups.dtype)]).reshape(-1, _WORD_BITS)
    member = padded[None] == jnp.arange(num_groups, dtype=groups.dtype)[:, None, None]
    words = (member.astype(jnp.uint32) << jnp.arange(_WORD_BITS, dtype=jnp.uint32)).sum(axis=-1, dtype=jnp.uint32)
    counts = lax.population_count(words).astype(jnp.int32)
    total = jnp.cumsum(counts, axis=1)
    place, group = jnp.arange(m, dtype=jnp.int32), jnp.minimum(groups, num_groups - 1)
    below = (jnp.uint32(1) << (place % _WORD_BITS).astype(jnp.uint32)) - jnp.uint32(1)
    word = place // _WORD_BITS
    inside = lax.population_count(words[group, word] & below).astype(jnp.int32)
    return (total - counts)[group, word] + inside, counts.sum(axis=1)


def send_order(groups: Array, num_groups: int, capacity: int) -> tuple[Array, Array]:
    """Positions by group, in their order: `groups` i32[m] (>= num_groups: none) -> i32[num_groups, capacity], filled up with m.

    **Returns:** also the exact number in each group, i32[num_groups], which may exceed `capacity`.
    """
    rank, counts = group_ranks(groups, num_groups)
    order = jnp.full((num_groups, capacity), groups.size, jnp.int32)
    return order.at[groups, rank].set(jnp.arange(groups.size, dtype=jnp.int32), mode="drop"), counts


def encode_gaps(ids: Array, count: Array, num_codes: int, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Sorted unique ids as gaps of one code each; a code of all ones says "so many more, no id here".

    **Arguments:** `ids`: i32[k], of which the first `count` are sent; `dtype`: uint8 or uint16.

    **Returns:** the codes, filled up with ones (which decode to nothing), and the exact number of codes needed.
    """
    top = int(jnp.iinfo(dtype).max)
    gaps = jnp.diff(ids, prepend=jnp.full((1,), -1, ids.dtype)) - 1
    last = jnp.cumsum(gaps // top + 1) - 1
    valid = jnp.arange(ids.size) < count
    codes = jnp.full((num_codes,), top, dtype).at[jnp.where(valid, last, num_codes)].set((gaps % top).astype(dtype), mode="drop")
    return codes, jnp.max(jnp.where(valid, last + 1, 0), initial=0)


def decode_gaps(codes: Array, capacity: int, size: int) -> Array:
    """The first `capacity` ids that `encode_gaps` wrote, filled up with `size`: u[c] -> i32[capacity]."""
    wide = codes.astype(jnp.int32)
    ends = (codes != jnp.iinfo(codes.dtype).max).astype(jnp.int32)
    ids = jnp.cumsum(wide + ends) - 1
    slots = jnp.where(ends == 1, jnp.cumsum(ends) - 1, capacity)
    return jnp.full((capacity,), size, jnp.int32).at[slots].set(ids, mode="drop")
