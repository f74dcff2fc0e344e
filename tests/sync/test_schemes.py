"""Every scheme gives the dense sum, on 1, 2, 3, 5 and 8 workers, whatever the ids, with room and without."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from splitjax import sync

NUM_ROWS, WIDTH, LOOKUPS = 41, 3, 9
WORKERS = (1, 2, 3, 5, 8)
SCHEMES = {
    "dense": sync.Dense(),
    "all_gather": sync.AllGather(),
    "recursive_doubling": sync.RecursiveDoubling(),
    "blocks": sync.Blocks(block_values=8),
    "parameter_server": sync.ParameterServer(),
    "hierarchical": sync.Hierarchical(),
    "zen": sync.Zen(),
    "zen by row": sync.Zen(granularity="row", partition="pack", pattern="all_to_all"),
    "row_exchange": sync.RowExchange(),
    "row_exchange strided, hot": sync.RowExchange(ownership="strided", hot=True, pattern="all_to_all"),
}


@functools.cache
def compiled(name: str, num_workers: int, capacities: sync.Capacities):
    mesh = Mesh(np.array(jax.devices()[:num_workers]), ("data",))

    def worker(ids, values):
        local = sync.from_lookups(ids[0], values[0], NUM_ROWS)
        rows, stats = sync.synchronise(SCHEMES[name], local, "data", capacities)
        out = rows.to_dense(), rows.ids, rows.count, stats
        return jax.tree.map(lambda x: x[None], out)

    run = jax.shard_map(worker, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"), check_vma=False)
    shapes = [(num_workers, LOOKUPS), (num_workers, LOOKUPS, WIDTH)]
    return jax.jit(run).lower(*[jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, (jnp.int32, jnp.float32))]).compile()


def ids_of(num_workers):
    """Ids from below the table to past it, often equal, 0 and last ones, and workers without any."""
    one = st.one_of(st.integers(-NUM_ROWS - 2, NUM_ROWS + 2), st.sampled_from([0, NUM_ROWS - 1, -1, -NUM_ROWS, 7, 7, 7]))
    some = st.lists(one, min_size=LOOKUPS, max_size=LOOKUPS)
    nothing, equal = st.just([NUM_ROWS] * LOOKUPS), one.map(lambda i: [i] * LOOKUPS)
    return st.lists(st.one_of(some, some, nothing, equal), min_size=num_workers, max_size=num_workers)


def check(name, num_workers, capacities, ids, values):
    dense, row_ids, count, stats = compiled(name, num_workers, capacities)(jnp.asarray(ids, jnp.int32), jnp.asarray(values, jnp.float32))
    expected = np.zeros((NUM_ROWS, WIDTH))
    touched = set()
    for worker in range(num_workers):
        for i, v in zip(ids[worker], values[worker]):
            if -NUM_ROWS <= i < NUM_ROWS:
                expected[i] += v
                touched.add(i % NUM_ROWS)
    for worker in range(num_workers):
        np.testing.assert_array_equal(dense[worker], dense[0])
        np.testing.assert_allclose(dense[worker], expected, rtol=1e-6, atol=1e-5)
    if name == "blocks":
        assert set(np.flatnonzero(expected.any(axis=1)).tolist()) >= set(row_ids[0][row_ids[0] < NUM_ROWS].tolist())
    elif name != "dense":
        assert set(row_ids[0][row_ids[0] < NUM_ROWS].tolist()) == touched
        assert int(count[0]) == int(stats.union_rows[0]) == len(touched)
    assert not stats.incomplete.any()
    assert np.unique(stats.fell_back).size == 1
    return bool(stats.fell_back[0])


def roomy(name, num_workers):
    """Capacities for a profile in which every worker touches all it can."""
    ids = [np.random.default_rng(w).permutation(NUM_ROWS)[:LOOKUPS] for w in range(num_workers)]
    return SCHEMES[name].plan(sync.measure([ids], NUM_ROWS, WIDTH))


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("name", SCHEMES)
def test_equals_the_dense_sum(name, num_workers):
    @settings(max_examples=8, deadline=None, derandomize=True, database=None)
    @given(ids_of(num_workers), st.integers(0, 2**32 - 1), st.booleans())
    def run(ids, seed, whole):
        rng = np.random.default_rng(seed)
        shape = (num_workers, LOOKUPS, WIDTH)
        check(name, num_workers, roomy(name, num_workers), ids, rng.integers(-8, 9, shape) if whole else rng.normal(size=shape))

    run()
