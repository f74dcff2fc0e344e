"""A worker's own operations against numpy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitjax.sync import local
from splitjax.sync.codes import decode, encode, spread
from splitjax.sync.costs.codes import BITMAP, GAPS8, GAPS16, NUMBERS, IdCode, num_gap_codes, shortest
from splitjax.sync.costs.partition import KINDS, Partition

SIZE, CAPACITY = 1000, 12
few = settings(max_examples=15, deadline=None, derandomize=True, database=None)
id_sets = st.sets(
    st.one_of(st.integers(0, SIZE - 1), st.sampled_from([0, 31, 32, 63, SIZE - 1])), max_size=CAPACITY + 4
)


@functools.cache
def unite(sparse):
    size = SIZE * 1000 if sparse else SIZE  # the larger one is sorted, the smaller one mapped
    return jax.jit(lambda ids: local.unite(ids, size, CAPACITY)), size


@pytest.mark.parametrize("sparse", [False, True])
def test_unite(sparse):
    run, size = unite(sparse)

    @few
    @given(
        st.lists(
            st.sampled_from([0, 5, 31, 32, 33, 500, size - 1, size]) | st.integers(0, size), min_size=20, max_size=20
        )
    )
    def check(ids):
        unique, slots, count = run(jnp.asarray(ids, jnp.int32))
        expected = np.unique([i for i in ids if i < size])
        assert count == expected.size
        shown = expected[:CAPACITY]
        np.testing.assert_array_equal(unique, np.append(shown, [size] * (CAPACITY - shown.size)))
        for i, slot in zip(ids, np.asarray(slots)):
            assert slot >= CAPACITY if i not in shown else unique[slot] == i

    check()


@pytest.mark.parametrize("size", [8, 1000])
def test_nothing_united_is_nothing(size):
    unique, slots, count = jax.jit(lambda ids: local.unite(ids, size, 3))(jnp.zeros((0,), jnp.int32))
    assert (list(unique), slots.shape, int(count)) == ([size] * 3, (0,), 0)


@pytest.mark.parametrize("bits", [NUMBERS, pytest.param(GAPS16, marks=pytest.mark.one_version), GAPS8, BITMAP])
def test_codes_are_inverted_or_say_that_they_do_not_fit(bits):
    code = IdCode(bits, CAPACITY, SIZE, 13)

    @jax.jit
    def there_and_back(ids, count):
        codes, fits = encode(code, ids[None], count[None])
        return decode(code, codes)[0], fits[0], codes

    @few
    @given(id_sets)
    def check(ids):
        ids = np.array(sorted(ids), np.int32)
        padded = np.append(ids[:CAPACITY], [SIZE] * max(CAPACITY - ids.size, 0)).astype(np.int32)
        back, fits, codes = there_and_back(jnp.asarray(padded), jnp.int32(ids.size))
        assert codes.nbytes == code.num_bytes
        enough = ids.size <= CAPACITY and (bits not in (GAPS8, GAPS16) or num_gap_codes(ids, bits) <= 13)
        assert bool(fits) == enough
        if enough:
            np.testing.assert_array_equal(back, padded)
            entries = np.asarray(spread(code, codes[None] if codes.ndim == 1 else codes))[0]
            np.testing.assert_array_equal(entries[entries < SIZE], ids)

    check()


def test_the_shortest_code_fits_the_density():
    rng = np.random.default_rng(0)
    sets = {k: [np.sort(rng.permutation(80_000)[:k]).astype(np.int32) for _ in range(3)] for k in (20, 1000, 40_000)}
    assert {k: shortest(one, k, 80_000).bits for k, one in sets.items()} == {20: GAPS16, 1000: GAPS8, 40_000: BITMAP}


@pytest.mark.parametrize("kind", KINDS)
def test_partitions_are_bijections_and_numpy_agrees_with_jax(kind):
    for num_items, n in ((41, 5), (3, 8)):
        partition = Partition(kind, num_items, n)
        items = np.arange(num_items + 2, dtype=np.int32)
        owner, position = partition.owner(items), partition.position(items)
        np.testing.assert_array_equal(owner, jax.jit(partition.owner)(items))
        np.testing.assert_array_equal(position, jax.jit(partition.position)(items))
        assert (owner[num_items:] == n).all() and (position[num_items:] == partition.size).all()
        assert (position[:num_items] < partition.size).all()
        np.testing.assert_array_equal(partition.item(owner[:num_items], position[:num_items]), items[:num_items])
        assert partition.item(np.int32(0), np.array([partition.size])) == num_items
        if kind != "range":
            assert np.ptp(np.bincount(owner[:num_items], minlength=n)) <= 1


def test_send_order_keeps_the_order_and_counts_what_does_not_fit():
    order, counts = local.send_order(jnp.array([2, 0, 2, 3, 2, 0]), 3, 2)
    np.testing.assert_array_equal(order, [[1, 5], [6, 6], [0, 2]])
    np.testing.assert_array_equal(counts, [2, 0, 3])


def test_what_is_left_of_lists_with_holes():
    holds = np.random.default_rng(0).random((3, 70)) < 0.2
    compacted = local.compact(jnp.where(holds, jnp.arange(70, dtype=jnp.int32), 99), 12, 99)
    for row in range(3):
        expected = np.flatnonzero(holds[row])
        np.testing.assert_array_equal(compacted[row], np.append(expected, [99] * 12)[:12])


def test_group_ranks_count_earlier_members():
    groups = np.random.default_rng(0).integers(0, 6, 100).astype(np.int32)
    rank, counts = jax.jit(local.group_ranks, static_argnums=1)(groups, 5)
    expected = [np.sum(groups[:i] == g) for i, g in enumerate(groups)]
    np.testing.assert_array_equal(np.asarray(rank)[groups < 5], np.array(expected)[groups < 5])
    np.testing.assert_array_equal(counts, np.bincount(groups, minlength=6)[:5])


def test_group_ranks_with_members_that_come_first():
    rng = np.random.default_rng(0)
    groups, first = rng.integers(0, 6, 100).astype(np.int32), rng.random(100) < 0.3
    rank, counts = jax.jit(local.group_ranks, static_argnums=1)(groups, 5, first)
    for group in range(5):
        order = [*np.flatnonzero((groups == group) & first), *np.flatnonzero((groups == group) & ~first)]
        assert counts[group] == len(order)
        np.testing.assert_array_equal(np.asarray(rank)[order], np.arange(len(order)))
