"""What row_exchange decides, its two halves, two mesh axes, and rounded values."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from splitjax import sync
from splitjax.errors import SyncError
from splitjax.mesh import MeshShape
from splitjax.report.hlo import compiled_collectives
from splitjax.sync.costs.codes import BITMAP, NUMBERS, IdCode
from splitjax.sync.costs.contributors import ON_HOST, contributors, holders_on_host
from splitjax.sync.local import rounded_away
from splitjax.sync.routes import ON_DEVICES, _rows_of_pairs, _united

NUM_ROWS, WIDTH, LOOKUPS, WORKERS = 60, 4, 12, 4


@pytest.mark.parametrize("n", [8, 40])
def test_owners_hold_their_rows_and_own_equally_many(n):
    rng, rows = np.random.default_rng(0), 16_000
    held = rng.random((n, rows)) < (1.0 + np.arange(rows)) ** -0.3 * 8 / n
    held[rng.integers(0, n, rows), np.arange(rows)] = True
    cold = rng.random(rows) < 0.95
    quota = -(-int(cold.sum()) // n) + 10
    owner, place = found = owners_of(held, cold, quota)
    on_devices = jax.jit(contributors, static_argnums=(2, 3, 4))(holders_of(held), cold, n, quota, ON_DEVICES)
    for ours, theirs in zip(on_devices, found, strict=True):
        np.testing.assert_array_equal(ours[cold], theirs[cold])
    assert (owner[~cold] == n).all() and (owner[cold] < n).all()
    assert np.bincount(owner, minlength=n)[:n].max() <= quota
    assert np.unique(owner[cold] * quota + place[cold]).size == cold.sum() and place[cold].max() < quota
    holds = held[owner[cold], np.flatnonzero(cold)]
    assert holds.mean() > 0.97
    alone = cold & (held.sum(axis=0) == 1)
    assert held[owner[alone], np.flatnonzero(alone)].mean() > 0.97
    if n == 8:
        pairs = np.array(
            [[np.sum(held[worker] & (owner == other)) for other in range(n) if other != worker] for worker in range(n)]
        )
        # three standard deviations of chance, which the largest of 56 stays below
        assert pairs.max() < 1.2 * pairs.mean()


def test_pairs_of_workers_get_as_many_as_chance_gives():
    """Counts that vary as those of a Poisson process do, over several draws: a choice that favours some holders varies
    more."""
    spreads = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        held = rng.random((8, 4000)) < (1.0 + np.arange(4000)) ** -0.3
        held[rng.integers(0, 8, 4000), np.arange(4000)] = True
        owner, _ = owners_of(held, np.ones(4000, bool), 510)
        pairs = np.array(
            [np.sum(held[worker] & (owner == other)) for other in range(8) for worker in range(8) if other != worker]
        )
        spreads.append(pairs.std() / pairs.mean() ** 0.5)
    assert np.mean(spreads) < 1.1


def test_a_row_that_many_hold_goes_to_any_of_them_alike():
    held = np.zeros((40, 20_000), bool)
    held[[3, 4, 31, 32, 39]] = True
    owner, _ = owners_of(held, np.ones(20_000, bool), 20_000)
    counts = np.bincount(owner, minlength=41)
    assert counts[[3, 4, 31, 32, 39]].sum() == 20_000
    assert abs(counts[[3, 4, 31, 32, 39]] - 4000).max() < 5 * 4000**0.5


def test_rows_without_room_have_no_owner():
    owner, _ = owners_of(np.ones((2, 9), bool), np.ones(9, bool), 4)
    assert np.bincount(owner, minlength=3).tolist() == [4, 4, 1]


def test_rows_of_few_workers_go_to_others_that_have_room():
    """More than may ask again: half of the workers hold everything, so that half of it has to go elsewhere."""
    held = np.zeros((4, 4000), bool)
    held[:2] = True
    found = owners_of(held, np.ones(4000, bool), 1000)
    owner, place = found
    assert np.bincount(owner, minlength=5).tolist() == [1000, 1000, 1000, 1000, 0]
    assert np.unique(owner * 1000 + place).size == 4000 and place.max() == 999
    for ours, theirs in zip(
        jax.jit(contributors, static_argnums=(2, 3, 4))(holders_of(held), np.ones(4000, bool), 4, 1000, ON_DEVICES),
        found,
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)


def holders_of(held):
    return holders_on_host([np.flatnonzero(one) for one in held], held.shape[1])


def owners_of(held, cold, quota):
    return contributors(holders_of(held), cold, len(held), quota, ON_HOST)


def random_batch(seed):
    rng = np.random.default_rng(seed)
    return rng.integers(0, NUM_ROWS, (WORKERS, LOOKUPS)).astype(np.int32), rng.normal(
        size=(WORKERS, LOOKUPS, WIDTH)
    ).astype(np.float32)


def plan(scheme):
    return scheme.plan(sync.measure([list(random_batch(seed)[0]) for seed in range(3)], NUM_ROWS, WIDTH))


def dense_sum(ids, values):
    out = np.zeros((NUM_ROWS, WIDTH))
    np.add.at(out, ids.reshape(-1), values.reshape(-1, WIDTH))
    return out


def test_indices_may_go_first_and_over_two_axes():
    scheme = sync.RowExchange()
    capacities = plan(scheme)
    mesh = Mesh(np.array(jax.devices()[:WORKERS]).reshape(2, 2), ("data", "model"))
    spec = PartitionSpec(("data", "model"))

    def indices(ids):
        local = sync.from_lookups(ids[0], jnp.zeros((LOOKUPS, 0)), NUM_ROWS)
        return scheme.exchange_indices(local.ids, local.count, NUM_ROWS, ("data", "model"), capacities)

    def values(routes, ids, values):
        local = sync.from_lookups(ids[0], values[0], NUM_ROWS)
        rows, _, _ = scheme.exchange_values(local.values, routes, NUM_ROWS, ("data", "model"), capacities)
        return rows.to_dense()[None]

    def compile(run, in_specs, out_specs):
        return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))

    ids, weights = random_batch(0)
    routes = compile(indices, spec, PartitionSpec())(ids)
    assert routes.fits
    second = compile(values, (PartitionSpec(), spec, spec), spec).lower(routes, ids, weights).compile()
    np.testing.assert_allclose(second(routes, ids, weights)[3], dense_sum(ids, weights), rtol=1e-5, atol=1e-5)
    sent = {one.op: one.dtype for one in compiled_collectives(second, MeshShape((("data", 2), ("model", 2))))}
    assert set(sent.values()) == {"float32"}  # nothing but values


@pytest.mark.parametrize("hot", [0, pytest.param(3, marks=pytest.mark.one_version)])
def test_rounding_is_made_good_later(hot):
    scheme = sync.RowExchange(hot=bool(hot), wire_dtype="bfloat16")
    capacities = dataclasses.replace(plan(scheme), union=46, pull=12, hot=hot)

    def worker(ids, values, residual):
        local = sync.from_lookups(ids[0], values[0], NUM_ROWS)
        zeros = jnp.zeros((NUM_ROWS, WIDTH))
        add = lambda rows, table: rows.update(table, jnp.add)
        dense, residual, stats = sync.synchronise_rounded(scheme, local, residual[0], "data", capacities, zeros, add)
        return dense[None], residual[None], stats.fell_back

    spec = PartitionSpec("data")
    mesh = Mesh(np.array(jax.devices()[:WORKERS]), ("data",))
    run = jax.jit(
        jax.shard_map(worker, mesh=mesh, in_specs=spec, out_specs=(spec, spec, PartitionSpec()), check_vma=False)
    )
    batches = [random_batch(seed) for seed in range(6)]
    for ids, _ in batches:
        ids[:, :hot] = np.arange(hot)  # on all workers
    # more rows than there is room for: nothing is rounded
    crowded = np.arange(WORKERS * LOOKUPS, dtype=np.int32).reshape(WORKERS, LOOKUPS)
    batches = [*batches[:3], (crowded, batches[0][1]), *batches[3:]]
    step = run.lower(*batches[0], jnp.zeros((WORKERS, NUM_ROWS, WIDTH))).compile()
    collectives = [one for one in compiled_collectives(step, MeshShape((("data", WORKERS),))) if not one.conditional]
    assert {one.dtype for one in collectives if one.shape[-1:] == (WIDTH,) and one.op != "all_reduce"} == {"uint16"}
    residual, delivered, exact = jnp.zeros((WORKERS, NUM_ROWS, WIDTH)), 0.0, 0.0
    for ids, values in batches:
        dense, residual, fell_back = step(ids, values, residual)
        assert fell_back == (ids is crowded)
        delivered, exact = delivered + np.asarray(dense[0], np.float64), exact + dense_sum(ids, values)
    assert np.abs(delivered - exact).max() > 1e-3  # it does round
    np.testing.assert_allclose(delivered + np.asarray(residual).sum(axis=0), exact, atol=1e-5)


@pytest.mark.parametrize("push", [0, 4])
def test_one_worker_rounds_nothing(push):
    scheme = sync.RowExchange(wire_dtype="bfloat16")
    capacities = dataclasses.replace(plan(scheme), push=push)

    def worker(ids, values, residual):
        local = sync.from_lookups(ids, values, NUM_ROWS)
        add = lambda rows, table: rows.update(table, jnp.add)
        return sync.synchronise_rounded(scheme, local, residual, "data", capacities, jnp.zeros((NUM_ROWS, WIDTH)), add)[
            :2
        ]

    mesh, spec = Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec("data")
    run = jax.jit(jax.shard_map(worker, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    ids, values = (one[0] for one in random_batch(0))
    dense, residual = run(ids, values, jnp.zeros((NUM_ROWS, WIDTH)))
    np.testing.assert_allclose(dense, dense_sum(ids, values), rtol=1e-6, atol=1e-6)
    assert not np.asarray(residual).any()


def test_what_is_not_finite_is_not_kept():
    values = jnp.array([jnp.inf, jnp.nan, 1.01, -3.0])
    lost = np.asarray(jax.jit(lambda x: rounded_away(x, x.astype(jnp.bfloat16)))(values))
    np.testing.assert_array_equal(lost, [0, 0, np.float32(1.01) - np.float32(1.0078125), 0])


def test_the_residual_is_updated_in_place():
    """Nothing of the table's size is made besides it."""
    num_rows, width = 500_000, 8
    capacities = sync.Capacities(local=8, union=16, push=8, pull=8, codes=8, code_bits=16)
    scheme = sync.RowExchange(wire_dtype="bfloat16")

    def worker(residual, ids, values):
        local = sync.from_lookups(ids, values, num_rows)
        total = lambda rows, carry: carry + rows.values.sum()
        out, residual, _ = sync.synchronise_rounded(scheme, local, residual, "data", capacities, jnp.zeros(()), total)
        return residual, out[None]

    mesh, spec = Mesh(np.array(jax.devices()[:2]), ("data",)), PartitionSpec("data")
    run = jax.shard_map(worker, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    shape = lambda *dims, dtype=jnp.float32: jax.ShapeDtypeStruct(dims, dtype)
    arguments = (shape(2 * num_rows, width), shape(2 * 8, dtype=jnp.int32), shape(2 * 8, width))
    memory = jax.jit(run, donate_argnums=0).lower(*arguments).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= num_rows * width * 4
    assert memory.temp_size_in_bytes < num_rows * width


def test_unknown_ownership_is_an_error():
    with pytest.raises(SyncError, match="unknown way to choose owners"):
        sync.RowExchange(ownership="nobody")


@pytest.mark.parametrize("n", [5, 40])
def test_rows_of_pairs_are_counted_whether_or_not_workers_fit_into_a_word(n):
    rng, union = np.random.default_rng(0), 70
    has, owner = rng.random((n, union)) < 0.4, rng.integers(0, n + 1, union)  # n: no owner
    slots = np.full((n, union), union, np.int32)
    for worker in range(n):
        rows = np.flatnonzero(has[worker])
        slots[worker, : rows.size] = rows
    words = np.packbits(np.pad(has, ((0, 0), (0, -union % 32))), axis=1, bitorder="little").view(np.uint32)
    found = _rows_of_pairs(jnp.asarray(words), jnp.asarray(slots), jnp.asarray(owner, jnp.int32))
    np.testing.assert_array_equal(
        found, [[np.sum(has[worker] & (owner == one)) for one in range(n)] for worker in range(n)]
    )


@pytest.mark.parametrize(("n", "size"), [(1, 64), (5, 100), (32, 96), (40, 100)])
@pytest.mark.parametrize("union", [40, 110])
def test_sets_that_come_as_bitmaps_are_united_like_lists(n, size, union):
    """Up to 32 workers' bitmaps are not read into lists; what comes out is the same, also where it has no room."""
    rng = np.random.default_rng(n)
    has = rng.random((n, size)) < 1 / np.arange(1, size + 1) ** 0.4
    lists = np.full((n, size), size, np.int32)
    for worker in range(n):
        rows = np.flatnonzero(has[worker])
        lists[worker, : rows.size] = rows
    words = np.packbits(np.pad(has, ((0, 0), (0, -size % 32))), axis=1, bitorder="little").view(np.uint32)
    unite = jax.jit(lambda code, written: dataclasses.astuple(_united(code, written, union))[:3], static_argnums=0)
    of_bits = unite(IdCode(BITMAP, size, size), jnp.asarray(words))
    of_lists = unite(IdCode(NUMBERS, size, size), jnp.asarray(lists))
    for ours, theirs in zip(of_bits, of_lists, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    expected = np.flatnonzero(has.any(axis=0))
    assert of_bits[1] == expected.size
    np.testing.assert_array_equal(of_bits[0][: expected.size], expected[:union])
    np.testing.assert_array_equal(
        np.asarray(of_bits[2])[np.arange(n) // 32, :1] >> (np.arange(n) % 32)[:, None] & 1, has[:, expected[:1]]
    )
