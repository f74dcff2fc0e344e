"""The ids in a bitmap, ascending: population counts, their running sum, and one bit picked for each id.

The work is in words and ids, not in bits: with 3 % of the bits set it is a tenth of what `jnp.nonzero` on the booleans
does. Word of slot j: the last whose running sum does not exceed j, so how many have begun by then; bit: the (j -
sum)-th that is set, by halving with population counts ("select" of succinct rank/select structures: Jacobson,
"Space-efficient static trees and graphs", FOCS 1989).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from splitjax._compat import result_type
from splitjax.kernels._common import FILLER, LANES, ceil_div, check_capacity, check_vector, dispatch, pad_rows
from splitjax.kernels._pallas import pl, pltpu
from splitjax.kernels.running_sum import running_sum

_BLOCK_ROWS = 256


def decode(words: jax.Array, capacity: int, filler: int = FILLER) -> tuple[jax.Array, jax.Array]:
    """Returns the ids whose bits are set, in one bitmap or each of several.

    **Arguments:**

    - `words`: uint32[w] or uint32[sets, w], as `encode_ids` makes them.
    - `capacity`: the number of slots of the result.
    - `filler`: what stands behind the last id.

    Returns the ids, int32[capacity], ascending, then the filler; and how many bits are set, int32[]. Where that exceeds
    the capacity, the ids are the first of them: compare the two. Of several bitmaps, int32[sets, capacity] and
    int32[sets]. Raises `KernelError` for another dtype or rank, or a capacity that is not an int from 0.
    """
    before, count = ranks(words)
    return select(words, before, count, capacity, filler), count


def ranks(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Counts how many bits are set before each word, of the shape of `words`, and in all of them, int32[] or
    int32[sets].

    The directory that makes ranks and ids of a set look-ups. Raises `KernelError` for other operands than those of
    `decode`.
    """
    check_vector("words", words, kinds="u", ranks=(1, 2))
    if 0 in words.shape:
        return jnp.zeros(words.shape, jnp.int32), jnp.zeros(words.shape[:-1], jnp.int32)
    return dispatch(ranks_reference, words, tpu=_ranks_tpu_of_sets, gpu=None)


def decode_reference(words: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Evaluates `decode` of `words` and `capacity` by `jnp.nonzero` over all bits."""
    bits = (words[:, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    (ids,), count = jnp.nonzero(bits.reshape(-1), size=capacity), bits.sum(dtype=jnp.int32)
    return jnp.where(jnp.arange(capacity) < count, ids.astype(jnp.int32), FILLER), count


def ranks_reference(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Evaluates `ranks` of `words` in plain JAX."""
    counts = lax.population_count(words).astype(jnp.int32)
    before = running_sum(counts, exclusive=True)
    return before, before[..., -1] + counts[..., -1]


def _ranks_tpu_of_sets(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """All sets in one pass."""
    before, count = ranks_tpu(words.reshape(-1))
    return of_each_set(before.reshape(words.shape), count)


def of_each_set(before: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the `ranks` of sets from `before` and `count`, those of all their words as if they were a single set:
    what the sets before hold is taken off again."""
    first = before[..., 0]
    return before - first[..., None], jnp.append(first.reshape(-1)[1:], count).reshape(first.shape) - first


def ranks_tpu(words: jax.Array, *, interpret: Any = False) -> tuple[jax.Array, jax.Array]:
    """Evaluates `ranks` of one set, `words` (at least one), as a TPU kernel in one pass.

    Running sums along lanes and rows are products with triangular matrices of ones, exact in float32 below 2^24 (a
    block has 2^20 bits); what earlier blocks hold is carried in scalar memory. `interpret`: as of `pallas_call`.
    """
    num_rows = ceil_div(words.shape[0], LANES)
    block_rows = min(num_rows, _BLOCK_ROWS)
    num_blocks = ceil_div(num_rows, block_rows)
    entries = pad_rows(lax.bitcast_convert_type(words, jnp.int32), num_blocks * block_rows * LANES).reshape(-1, LANES)
    before, count = pl.pallas_call(
        _kernel,
        out_shape=(result_type(entries.shape, jnp.int32, words), result_type((1, 1), jnp.int32, words)),
        grid=(num_blocks,),
        in_specs=[pl.BlockSpec((block_rows, LANES), lambda i: (i, 0))],
        out_specs=(pl.BlockSpec((block_rows, LANES), lambda i: (i, 0)), pl.BlockSpec(memory_space=pltpu.SMEM)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="splitjax_bitmap_ranks",
    )(entries)
    return before.reshape(-1)[: words.shape[0]], count[0, 0]


def _kernel(words, before, count):
    @pl.when(pl.program_id(0) == 0)
    def start():
        count[0, 0] = jnp.int32(0)

    counts = lax.population_count(words[...]).astype(jnp.float32)
    in_row = _product(counts, _ones_where(LANES, lambda i, j: i < j))
    of_row = _product(counts, jnp.ones((LANES, LANES), jnp.float32))  # in every lane
    in_rows_above = _product(_ones_where(words.shape[0], lambda i, j: j < i), of_row)
    before[...] = (in_row + in_rows_above).astype(jnp.int32) + count[0, 0]
    count[0, 0] += jnp.sum(counts).astype(jnp.int32)


def _product(left, right):
    return jnp.dot(left, right, preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST)


def _ones_where(size, holds):
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), dim) for dim in (0, 1))
    return jnp.where(holds(row, column), 1.0, 0.0)


def select(words: jax.Array, before: jax.Array, count: jax.Array, capacity: int, filler: int = FILLER) -> jax.Array:
    """Returns the ids of the first `capacity` slots, with `filler` behind the last: what `decode` returns, from the
    bitmaps `words` and the `before` and `count` that `ranks` says of them."""
    check_capacity(capacity)
    if 0 in words.shape or capacity == 0:
        return jnp.full((*words.shape[:-1], capacity), filler, jnp.int32)
    num_words = words.shape[-1]
    word_table, before_table = words.reshape(-1, num_words), before.reshape(-1, num_words)
    sets = jnp.arange(word_table.shape[0], dtype=jnp.int32)[:, None]
    # How many words begin at each slot, and a column for those past the end. Of words that begin at the same one only
    # the last has bits.
    start = jnp.minimum(before_table[:, 1:], capacity) + sets * (capacity + 1)
    begun = jnp.zeros((sets.size * (capacity + 1),), jnp.int32).at[start].add(1, mode="promise_in_bounds")
    word = running_sum(begun.reshape(-1, capacity + 1)[:, :capacity])
    look = lambda table: table.reshape(-1).at[word + sets * num_words].get(mode="promise_in_bounds")
    slot = jnp.arange(capacity, dtype=jnp.int32)
    rest, bits, bit = slot - look(before_table), look(word_table), jnp.zeros(word.shape, jnp.int32)
    for width in (16, 8, 4, 2, 1):
        low = lax.population_count(bits & jnp.uint32(2**width - 1)).astype(jnp.int32)
        is_above = rest >= low
        rest, bit = jnp.where(is_above, rest - low, rest), jnp.where(is_above, bit + width, bit)
        bits = jnp.where(is_above, bits >> width, bits)
    ids = jnp.where(slot < count.reshape(-1, 1), 32 * word + bit, filler)
    return ids.reshape(*words.shape[:-1], capacity)
