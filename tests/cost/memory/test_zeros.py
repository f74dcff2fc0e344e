"""Zeros that are stored, of an update of a table."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from tests.cost.memory.on_a_gpu import compiled, temporaries

TABLE = jax.ShapeDtypeStruct((4096, 128), jnp.float32)
ROWS = jax.ShapeDtypeStruct((64, 128), jnp.float32)
IDS = jax.ShapeDtypeStruct((64,), jnp.int32)
SIZE = 4096 * 128 * 4


def update(table, sums, ids, rows):
    """Adagrad's, with a gradient that is added into zeros."""
    gradient = jnp.zeros_like(table).at[ids].add(rows)
    rates = jnp.where(sums > 0, jax.lax.rsqrt(sums + 1e-7), 0.0)
    return table - 0.1 * rates * gradient


def plain(table, sums, ids, rows):
    return table - 0.1 * jnp.zeros_like(table).at[ids].add(rows)


def test_zeros_that_are_added_into_and_read_are_stored_twice():
    result = SIZE
    assert temporaries(plain, TABLE, TABLE, IDS, ROWS, platform="gpu") < result + 0.5 * SIZE
    found = temporaries(update, TABLE, TABLE, IDS, ROWS, platform="gpu")
    assert 2 * SIZE <= found < 2.5 * SIZE
    assert temporaries(update, TABLE, TABLE, IDS, ROWS, platform="cpu") < result + 0.5 * SIZE


def test_zeros_of_several_tables_are_made_together():
    def two(table, sums, ids, rows):
        once = jnp.zeros_like(table).at[ids].add(rows)
        again = jnp.zeros_like(table).at[ids + 1].add(2 * rows)
        return table - once * again

    assert 2 * SIZE <= temporaries(two, TABLE, TABLE, IDS, ROWS, platform="gpu") < 3 * SIZE


@pytest.mark.gpu_aot
def test_the_compiler_fills_both_in_one_kernel():
    text = compiled("table_update")
    assert re.search(r"\(f32\[4096,128\]\S*, f32\[4096,128\]\S*\) fusion\(\), kind=kLoop", text)
