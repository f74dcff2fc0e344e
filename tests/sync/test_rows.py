"""Row-sparse gradients of lookups equal JAX's dense ones, in every mode."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from splitjax import sync
from splitjax.errors import SyncError

NUM_ROWS = 10
IDS = [[0, 9, -1, -10, 3, 3], [10, -11, 99, -99, 9, 0], [3, 3, 3, 3, 3, 3]]


@pytest.mark.parametrize("mode", ["fill", "clip", "drop", "promise_in_bounds"])
def test_rows_are_the_gradient_of_the_lookup(mode):
    table = jnp.zeros((NUM_ROWS, 2, 3))

    @jax.jit
    def both(ids, weights):
        dense = jax.grad(lambda t: (t.at[ids].get(mode=mode) * weights).sum())(table)
        rows = sync.from_lookups(ids, weights, NUM_ROWS, mode=mode)
        return dense, rows.to_dense(), rows

    for seed, ids in enumerate(IDS if mode != "promise_in_bounds" else [IDS[0], IDS[2]]):
        weights = np.random.default_rng(seed).integers(-5, 6, (6, 2, 3)).astype(np.float32)
        dense, sparse, rows = both(jnp.array(ids), weights)
        np.testing.assert_array_equal(sparse, dense)
        listed = np.asarray(rows.ids)[: int(rows.count)]
        assert (np.diff(listed) > 0).all() and (np.asarray(rows.ids)[int(rows.count) :] == NUM_ROWS).all()
        assert set(np.flatnonzero(np.asarray(dense).any(axis=(1, 2)))) <= set(listed)


def test_ids_that_jax_has_wrapped_are_not_wrapped_again():
    rows = sync.from_lookups(jnp.array([-1, 2]), jnp.ones((2, 3)), NUM_ROWS, wrap=False)
    assert rows.count == 1 and rows.ids[0] == 2


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int16"])
def test_narrow_and_unsigned_ids(dtype):
    num_rows = 300
    ids = np.array([3, 250 if dtype == "uint8" else 100, 3]).astype(dtype)
    rows = sync.from_lookups(jnp.asarray(ids), jnp.ones((3, 1)), num_rows)
    np.testing.assert_array_equal(rows.ids, [3, int(ids[1]), num_rows])
    np.testing.assert_array_equal(rows.values[:, 0], [2, 1, 0])


def test_empty_batch_and_overflow_are_told_exactly():
    empty = sync.from_lookups(jnp.zeros((0, 4), jnp.int32), jnp.zeros((0, 4, 3)), NUM_ROWS)
    assert empty.count == 0 and empty.to_dense().shape == (NUM_ROWS, 3)
    cut = sync.from_lookups(jnp.array([5, 1, 5, 7]), jnp.ones((4, 3)), NUM_ROWS, 2)
    assert cut.count == 3 and bool(cut.overflowed)
    np.testing.assert_array_equal(cut.ids, [1, 5])
    np.testing.assert_array_equal(cut.values[:, 0], [1, 2])


def test_update_leaves_other_rows_alone():
    table = {"w": jnp.arange(20.0).reshape(NUM_ROWS, 2), "seen": jnp.zeros(NUM_ROWS, jnp.int32)}
    rows = sync.from_lookups(jnp.array([9, 0, 9]), jnp.ones((3, 2)), NUM_ROWS)
    new = rows.update(table, lambda old, grad: {"w": old["w"] - grad, "seen": old["seen"] + 1})
    expected = np.arange(20.0).reshape(NUM_ROWS, 2)
    expected[0] -= 1
    expected[9] -= 2
    np.testing.assert_array_equal(new["w"], expected)
    np.testing.assert_array_equal(new["seen"], [1, 0, 0, 0, 0, 0, 0, 0, 0, 1])


def test_bad_input_is_named():
    with pytest.raises(SyncError, match="unknown mode"):
        sync.from_lookups(jnp.array([1]), jnp.ones((1, 2)), NUM_ROWS, mode="wrap")
    with pytest.raises(SyncError, match="must start with their shape"):
        sync.from_lookups(jnp.array([1, 2]), jnp.ones((3, 2)), NUM_ROWS)
    with pytest.raises(SyncError, match="no scheme of this name"):
        sync.by_name("zenn")
