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

from splitjax import kernels, sync
from splitjax.errors import SyncError
from splitjax.mesh import MeshShape
from splitjax.report.hlo import compiled_collectives

NUM_ROWS, WIDTH, LOOKUPS = 41, 3, 9
SCHEMES = {
    "dense": sync.Dense(),
    "all_gather": sync.AllGather(),
    "recursive_doubling": sync.RecursiveDoubling(),
    "recursive_doubling filling": sync.RecursiveDoubling(dense_above=0.25),
    "blocks": sync.Blocks(block_values=8),
    "parameter_server": sync.ParameterServer("ppermute"),
    "hierarchical": sync.Hierarchical(),
    "zen": sync.Zen(),
    "zen by row": sync.Zen(granularity="row", partition="pack", pattern="all_to_all"),
    "row_exchange": sync.RowExchange(hot=True),
    "row_exchange strided": sync.RowExchange(ownership="strided", pattern="all_to_all"),
}
# Compiling is what takes the time: by default all schemes on 5 workers, and on others those whose program depends most
# on it.
_MORE = {
    1: ("row_exchange",),
    2: ("row_exchange",),
    3: ("recursive_doubling",),
    8: ("recursive_doubling", "hierarchical", "row_exchange"),
}
CASES = [
    pytest.param(name, n, marks=[] if n == 5 else pytest.mark.one_version if name in _MORE[n] else pytest.mark.slow)
    for n in (1, 2, 3, 5, 8)
    for name in SCHEMES
]
few = settings(max_examples=12, deadline=None, derandomize=True, database=None)


def mesh_of(num_workers):
    return Mesh(np.array(jax.devices()[:num_workers]), ("data",))


def profile(num_workers):
    """Half the rows that there is room for: so that some batches fit, and some do not."""
    rng = np.random.default_rng(0)
    return sync.measure([[rng.permutation(12)[:3] * 3 for _ in range(num_workers)]], NUM_ROWS, WIDTH)


@functools.cache
def compiled(name, num_workers):
    capacities = SCHEMES[name].plan(profile(num_workers))

    def worker(ids, values):
        local = sync.from_lookups(ids[0], values[0], NUM_ROWS)
        rows, stats = sync.synchronise(SCHEMES[name], local, "data", capacities)
        return jax.tree.map(lambda x: x[None], (rows.to_dense(), rows.ids, rows.count, stats))

    spec = PartitionSpec("data")
    run = jax.shard_map(worker, mesh=mesh_of(num_workers), in_specs=spec, out_specs=spec, check_vma=False)
    shapes = (
        jax.ShapeDtypeStruct((num_workers, LOOKUPS), jnp.int32),
        jax.ShapeDtypeStruct((num_workers, LOOKUPS, WIDTH), jnp.float32),
    )
    return jax.jit(run).lower(*shapes).compile()


def ids_of(num_workers):
    """Ids from below the table to past it, often equal, 0 and last ones, and workers without any."""
    one = st.one_of(
        st.integers(-NUM_ROWS - 2, NUM_ROWS + 2), st.sampled_from([0, NUM_ROWS - 1, -1, -NUM_ROWS, 7, 7, 7])
    )
    some = st.lists(one, min_size=LOOKUPS, max_size=LOOKUPS)
    nothing, equal = st.just([NUM_ROWS] * LOOKUPS), one.map(lambda i: [i] * LOOKUPS)
    return st.lists(st.one_of(some, some, nothing, equal), min_size=num_workers, max_size=num_workers)


def check(name, num_workers, ids, values):
    """Returns whether the fallback ran."""
    found = compiled(name, num_workers)(jnp.asarray(ids, jnp.int32), jnp.asarray(values, jnp.float32))
    dense, row_ids, count, stats = jax.tree.map(np.asarray, found)
    expected, touched = np.zeros((NUM_ROWS, WIDTH)), set()
    for worker in range(num_workers):
        for i, v in zip(ids[worker], values[worker]):
            if -NUM_ROWS <= i < NUM_ROWS:
                expected[i] += v
                touched.add(i % NUM_ROWS)
    for worker in range(num_workers):
        np.testing.assert_array_equal(dense[worker], dense[0])
    if np.issubdtype(np.asarray(values).dtype, np.integer):
        np.testing.assert_array_equal(dense[0], expected)
    else:
        np.testing.assert_allclose(dense[0], expected, rtol=1e-6, atol=1e-6 * np.abs(values).max() * num_workers)
    listed = set(row_ids[0][row_ids[0] < NUM_ROWS].tolist())
    if name == "blocks" and num_workers > 1 and not stats.fell_back[0]:
        assert set(np.flatnonzero(dense[0].any(axis=1)).tolist()) == listed
    elif name != "dense" or num_workers == 1:
        assert listed == touched
        assert count[0] == stats.union_rows[0] == len(touched)
    assert not stats.incomplete.any()
    assert np.unique(stats.fell_back).size == 1
    return bool(stats.fell_back[0])


@pytest.mark.parametrize(("name", "num_workers"), CASES)
def test_equals_the_dense_sum_and_sends_what_is_predicted(name, num_workers):
    few_rows = [[3 * (i % 2) for i in range(LOOKUPS)]] * num_workers
    values = np.random.default_rng(1).integers(-9, 10, (num_workers, LOOKUPS, WIDTH))
    assert not check(name, num_workers, few_rows, values)
    many_rows = [[(LOOKUPS * worker + i) % NUM_ROWS for i in range(LOOKUPS)] for worker in range(num_workers)]
    assert check(name, num_workers, many_rows, values) == (name != "dense" and num_workers > 1)

    @few
    @given(ids_of(num_workers), st.integers(0, 2**32 - 1), st.booleans())
    def run(ids, seed, whole):
        rng = np.random.default_rng(seed)
        shape = (num_workers, LOOKUPS, WIDTH)
        check(name, num_workers, ids, rng.integers(-8, 9, shape) if whole else rng.normal(size=shape))

    run()
    # Here, so that the program is compiled once: it sends what is predicted, besides the flag that says whether rows
    # were cut off before.
    collectives = compiled_collectives(compiled(name, num_workers), MeshShape((("data", num_workers),)))
    sent = [
        one.bytes for one in collectives if not one.conditional and not (one.op == "all_reduce" and one.shape == ())
    ]
    scheme, found = SCHEMES[name], profile(num_workers)
    assert sum(sent) == (scheme.predicted_bytes(scheme.plan(found), found.table) if num_workers > 1 else 0)


@pytest.mark.parametrize(
    ("name", "num_sent"),
    [
        ("all_gather", 5 * 2 * 4),
        ("hierarchical", 5 * 2 * 4),  # 5 is prime: one group of all
        (
            "recursive_doubling",
            2 + 4 * 2 * 2 + 2,
        ),  # the fifth adds to the first, four double twice, and it gets the sum
        ("parameter_server", 2 * 4 + 2 * 4),  # a row has four workers that are no owner, and four that get its sum
        ("zen by row", 2 * 4 + 2 * 4),
        ("row_exchange", 2 * 4 + 2 * 4),
    ],
)
def test_rows_that_are_sent_are_counted(name, num_sent):
    """Over 5 workers, of which each has the same two rows."""
    ids = jnp.asarray([[3 * (i % 2) for i in range(LOOKUPS)]] * 5, jnp.int32)
    *_, stats = compiled(name, 5)(ids, jnp.ones((5, LOOKUPS, WIDTH), jnp.float32))
    assert not stats.fell_back.any() and stats.local_rows.tolist() == [2] * 5
    assert stats.sent_rows.sum() == num_sent


@pytest.mark.parametrize("width", [1, 32])
@pytest.mark.parametrize("room", [1, 20, 21, 22, 38, 39, 40, NUM_ROWS])
def test_partial_sums_turn_dense_where_that_is_fewer_bytes(width, room):
    """SparCML's threshold: rows of one value, whose index is as long, are worth it up to half of them, long rows nearly
    to the last."""
    table, scheme = sync.Table(NUM_ROWS, width, 4, 2), sync.RecursiveDoubling()
    capacities = sync.Capacities(local=room, union=NUM_ROWS, levels=(room,))
    whole = table.num_bytes + 4 * kernels.num_words(NUM_ROWS) + 4
    assert scheme.predicted_bytes(capacities, table) == min(whole, room * (table.row_bytes + 4) + 8)

    def worker(ids, values):
        rows = sync.RowSparse(ids[0], values[0], jnp.int32(0), NUM_ROWS)
        return jax.tree.map(lambda x: x[None], scheme.attempt(rows, "data", capacities).rows)

    run = jax.shard_map(
        worker, mesh=mesh_of(2), in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"), check_vma=False
    )
    shapes = jax.ShapeDtypeStruct((2, room), jnp.int32), jax.ShapeDtypeStruct((2, room, width), jnp.float32)
    assert sent_in(jax.make_jaxpr(run)(*shapes).jaxpr) == scheme.predicted_bytes(capacities, table)


def sent_in(jaxpr):
    """Bytes of all permutations, those of inner programs among them."""
    sent = sum(
        v.aval.size * v.aval.dtype.itemsize
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "ppermute"
        for v in eqn.invars
    )
    inner = [
        getattr(value, "jaxpr", value) for eqn in jaxpr.eqns for value in jax.tree.leaves(list(eqn.params.values()))
    ]
    return sent + sum(sent_in(one) for one in inner if hasattr(one, "eqns"))


@pytest.mark.parametrize("share", [-0.1, 1.5, "half"])
def test_a_share_of_the_rows_is_checked(share):
    with pytest.raises(SyncError, match="not a share of the rows"):
        sync.RecursiveDoubling(dense_above=share)


def in_order(*rows):
    """Added up one after the other in float32, from zero."""
    total = np.zeros(WIDTH, np.float32)
    for row in rows:
        total += row
    return total


@pytest.mark.parametrize("name", ["all_gather", "parameter_server", "zen by row", "row_exchange strided"])
def test_the_order_of_sums_on_cpu_is_fixed(name):
    """To the last bit: a worker adds up its own in the order of the batch, an owner what came in in the order of
    arrival."""
    n = 5
    ids = np.random.default_rng(3).choice([0, 3, 9, 12], (n, LOOKUPS)).astype(np.int32)
    values = np.random.default_rng(4).normal(size=(n, LOOKUPS, WIDTH)).astype(np.float32)
    found = compiled(name, n)(ids, values)
    assert not found[3].fell_back.any()
    for row in np.unique(ids):
        parts = {
            worker: in_order(*values[worker][ids[worker] == row]) for worker in range(n) if (ids[worker] == row).any()
        }
        if name == "all_gather" or name == "zen by row":
            expected = in_order(*parts.values())
        elif name == "parameter_server":
            owner = row // -(-NUM_ROWS // n)
            expected = in_order(*(parts[(owner - i) % n] for i in range(n) if (owner - i) % n in parts))
        else:
            owner = row % n
            expected = in_order(parts.pop(owner, np.float32(0)), in_order(*parts.values()))
        np.testing.assert_array_equal(np.asarray(found[0])[:, row], np.broadcast_to(expected, (n, WIDTH)))


def test_rows_cut_off_before_are_told():
    def worker(ids):
        local = sync.from_lookups(ids[0], jnp.ones((LOOKUPS, WIDTH)), NUM_ROWS, 4)
        return sync.synchronise(sync.AllGather(), local, "data", sync.Capacities(local=4, union=8))[1].incomplete[None]

    spec = PartitionSpec("data")
    run = jax.jit(jax.shard_map(worker, mesh=mesh_of(2), in_specs=spec, out_specs=spec, check_vma=False))
    assert run(jnp.array([range(LOOKUPS), [1] * LOOKUPS])).all()
    assert not run(jnp.array([[2] * LOOKUPS, [1] * LOOKUPS])).any()


@pytest.mark.parametrize("name", ["recursive_doubling", "hierarchical"])
def test_capacities_for_other_workers_are_an_error(name):
    scheme = SCHEMES[name]

    def worker(ids):
        local = sync.from_lookups(ids[0], jnp.ones((LOOKUPS, WIDTH)), NUM_ROWS)
        return sync.synchronise(scheme, local, "data", scheme.plan(profile(2)))[1].incomplete[None]

    spec = PartitionSpec("data")
    run = jax.shard_map(worker, mesh=mesh_of(8), in_specs=spec, out_specs=spec, check_vma=False)
    with pytest.raises(SyncError, match="capacities for 3 rounds"):
        jax.eval_shape(run, jax.ShapeDtypeStruct((8, LOOKUPS), jnp.int32))


def test_names_are_those_of_the_design():
    names = (
        "dense",
        "all_gather",
        "recursive_doubling",
        "blocks",
        "parameter_server",
        "hierarchical",
        "zen",
        "row_exchange",
    )
    assert set(sync.SCHEMES) == set(names)
    assert all(sync.by_name(name).name == name for name in names)


def test_tables_are_updated_in_place_and_no_dense_gradient_exists():
    num_rows, width, lookups, n = 300_000, 16, 64, 4
    sparsity = sync.measure([[np.arange(lookups) * (worker + 1) for worker in range(n)]], num_rows, width)
    scheme = sync.RowExchange()
    capacities = scheme.plan(sparsity)

    def worker(table, ids, values):
        local = sync.from_lookups(ids[0], values[0], num_rows)
        descend = lambda rows, table: rows.update(table, lambda old, gradient: old - gradient)
        table, stats = sync.synchronise_into(scheme, local, "data", capacities, table, descend)
        return table, stats.fell_back

    spec, whole = PartitionSpec("data"), PartitionSpec()
    run = jax.shard_map(
        worker, mesh=mesh_of(n), in_specs=(whole, spec, spec), out_specs=(whole, whole), check_vma=False
    )
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (
        ((num_rows, width), jnp.float32), ((n, lookups), jnp.int32), ((n, lookups, width), jnp.float32)
    )]  # fmt: skip
    step = jax.jit(run, donate_argnums=0).lower(*shapes).compile()
    memory, table_bytes = step.memory_analysis(), num_rows * width * 4
    assert memory.alias_size_in_bytes == table_bytes
    assert memory.temp_size_in_bytes < table_bytes / 4
    few_rows, many_rows = (
        np.zeros((n, lookups), np.int32),
        np.arange(n * lookups, dtype=np.int32).reshape(n, lookups) * 100,
    )
    for ids in (few_rows, many_rows):
        table, fell_back = step(jnp.zeros((num_rows, width)), ids, np.ones((n, lookups, width), np.float32))
        assert fell_back == (ids is many_rows)
        np.testing.assert_array_equal(np.asarray(table)[:, 0], -np.bincount(ids.reshape(-1), minlength=num_rows))


@pytest.mark.parametrize("name", SCHEMES)
def test_batches_without_any_lookup(name):
    scheme = SCHEMES[name]

    def worker(table):
        local = sync.from_lookups(jnp.zeros((0,), jnp.int32), jnp.zeros((0, WIDTH)), NUM_ROWS)
        add = lambda rows, table: rows.update(table, jnp.add)
        return sync.synchronise_into(scheme, local, "data", scheme.plan(profile(2)), table, add)[0]

    run = jax.shard_map(worker, mesh=mesh_of(2), in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    assert jax.eval_shape(run, jnp.ones((NUM_ROWS, WIDTH))).shape == (NUM_ROWS, WIDTH)
    if name == "row_exchange":
        np.testing.assert_array_equal(jax.jit(run)(jnp.ones((NUM_ROWS, WIDTH))), 1)
