"""Zen's hierarchical hashing: no index is lost without a word."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from splitjax.sync.zen import hierarchical_order

ROOM, NUM_HASHES = 8, 2  # an owner has 16 slots and a serial memory of one index


def held(order: np.ndarray, num_indices: int) -> set[int]:
    """The positions that a memory holds."""
    return {int(position) for position in order if position < num_indices}


@pytest.mark.parametrize("num_owners", [1, 3])
@pytest.mark.parametrize("seed", range(20))
def test_an_index_without_a_place_is_reported(num_owners, seed):
    """As many indices as an owner has slots cannot all find one by two hashes: those left over go into its serial
    memory, and where that is too small the order says that rows are missing, so that the exchange falls back."""
    rng = np.random.default_rng(seed)
    num_indices = 2 * ROOM * num_owners
    ids = jnp.asarray(rng.choice(10_000, num_indices, replace=False), jnp.int32)
    owners = jnp.asarray(np.arange(num_indices) % num_owners, jnp.int32)
    order, lost = hierarchical_order(owners, ids, num_owners, ROOM, NUM_HASHES)
    assert len(held(np.asarray(order), num_indices)) == num_indices or bool(lost)


def test_a_serial_memory_that_suffices_loses_nothing_and_says_so():
    """Three indices that meet in one slot under every hash: the third is in the serial memory, which has room for
    one."""
    ids = jnp.full((3,), 7, jnp.int32)
    order, lost = hierarchical_order(jnp.zeros(3, jnp.int32), ids, 1, ROOM, NUM_HASHES)
    assert held(np.asarray(order), 3) == {0, 1, 2} and not bool(lost)


PLACES = NUM_HASHES + 1  # of equal indices: a slot by each hash, and the serial memory


@pytest.mark.parametrize("num_twins", [PLACES + 1, 12])
def test_a_serial_memory_that_overflows_is_reported(num_twins):
    """All but three of these have no place at all."""
    ids = jnp.full((num_twins,), 7, jnp.int32)
    order, lost = hierarchical_order(jnp.zeros(num_twins, jnp.int32), ids, 1, ROOM, NUM_HASHES)
    assert len(held(np.asarray(order), num_twins)) == PLACES and bool(lost)


def test_only_the_owner_that_overflows_is_short():
    """Owner 0 has four twins, owner 1 a single index, which keeps its place."""
    owners, ids = jnp.asarray([0, 0, 0, 0, 1], jnp.int32), jnp.asarray([7, 7, 7, 7, 9], jnp.int32)
    order, lost = hierarchical_order(owners, ids, 2, ROOM, NUM_HASHES)
    per_owner = np.asarray(order).reshape(2, -1)
    assert len(held(per_owner[0], 5)) == PLACES and held(per_owner[1], 5) == {4} and bool(lost)
