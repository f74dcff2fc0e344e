"""The schemes on accelerators: their kernels' results beside plain JAX, and their compiled programs."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from splitjax import kernels, sync
from splitjax.errors import KernelError, SyncError
from splitjax.kernels.sum_rows import sum_by_sorting, sum_reference
from splitjax.sync import wire
from tests.kernels.interpreting import MODES, interpreting, tpu_mesh

WORKERS = 4


def batch(num_rows, lookups, width, seed=0, workers=WORKERS):
    """Ids of which some are frequent, and integers as values, so that no order of sums changes them."""
    rng = np.random.default_rng(seed)
    ids = (num_rows ** rng.random((workers, lookups))).astype(np.int32) - 1
    return ids, rng.integers(-8, 9, (workers, lookups, width)).astype(np.float32)


def step_of(scheme, num_rows, lookups, width, workers=WORKERS):
    """A whole synchronisation with a table's update, on each worker: (table, ids, values) -> (table, whether it fell
    back)."""
    samples = [list(batch(num_rows, lookups, width, seed, workers)[0]) for seed in range(3)]
    capacities = scheme.plan(sync.measure(samples, num_rows, width))

    def worker(table, ids, values):
        local = sync.from_lookups(ids[0], values[0], num_rows)
        descend = lambda rows, table: rows.update(table, lambda old, gradient: old - gradient)
        table, stats = sync.synchronise_into(scheme, local, "data", capacities, table, descend)
        return table, stats.fell_back

    return worker


def sharded(worker, mesh):
    spec, whole = PartitionSpec("data"), PartitionSpec()
    run = jax.shard_map(worker, mesh=mesh, in_specs=(whole, spec, spec), out_specs=(whole, whole), check_vma=False)
    return jax.jit(run, donate_argnums=0)


def cpu_mesh(workers=WORKERS):
    return Mesh(np.array(jax.devices()[:workers]), ("data",), axis_types=(AxisType.Auto,))


def compiled_for(mesh, scheme, num_rows, lookups, width):
    place = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))
    types = [
        jax.ShapeDtypeStruct((num_rows, width), jnp.float32, sharding=place()),
        jax.ShapeDtypeStruct((WORKERS, lookups), jnp.int32, sharding=place("data")),
        jax.ShapeDtypeStruct((WORKERS, lookups, width), jnp.float32, sharding=place("data")),
    ]
    return sharded(step_of(scheme, num_rows, lookups, width), mesh).lower(*types).compile()


@pytest.mark.tpu_aot
@pytest.mark.parametrize(
    ("scheme", "names"),
    [
        (
            sync.RowExchange(),
            {"exchange_rows", "gather_rows", "scatter_rows", "segment_sum", "bitmap_encode", "bitmap_ranks"},
        ),
        (
            sync.Zen(granularity="row", partition="pack"),
            {"gather_rows", "scatter_rows", "segment_sum", "bitmap_encode", "bitmap_ranks"},
        ),
    ],
)
def test_tpu_programs_of_whole_synchronisations_consist_of_kernels(scheme, names):
    num_rows, width = 20_000, 128
    mesh = Mesh(tpu_mesh("v5e:2x2", WORKERS).devices, ("data",), axis_types=(AxisType.Auto,))
    compiled = compiled_for(mesh, scheme, num_rows, 40, width)
    text = compiled.as_text()
    assert "tpu_custom_call" in text
    assert {name for name in names | {"exchange_rows"} if f"splitjax_{name}" in text} == names
    memory, table_bytes = compiled.memory_analysis(), 4 * num_rows * width
    assert memory.alias_size_in_bytes >= table_bytes
    assert memory.temp_size_in_bytes < table_bytes / 2  # the update is in place, in kernels too


def test_gpu_programs_of_whole_synchronisations_contain_kernels():
    types = ((300, 128), jnp.float32), ((WORKERS, 8), jnp.int32), ((WORKERS, 8, 128), jnp.float32)
    step = sharded(step_of(sync.AllGather(), 300, 8, 128), cpu_mesh())
    text = step.trace(*(jax.ShapeDtypeStruct(*one) for one in types)).lower(lowering_platforms=("cuda",)).as_text()
    assert "splitjax_gather_rows" in text and "splitjax_segment_sum" in text
    assert "mosaic_gpu" in text and "tpu_custom_call" not in text


@pytest.fixture
def as_on_tpu(monkeypatch):
    """Every operation takes its TPU kernel where it has one."""
    take = lambda reference, *operands, tpu, gpu: (tpu or reference)(*operands)
    for name in (
        "bitmap_decode",
        "bitmap_encode",
        "exchange_rows",
        "gather_rows",
        "scatter_rows",
        "segment_sum",
        "sum_rows",
    ):
        monkeypatch.setattr(sys.modules[f"splitjax.kernels.{name}"], "dispatch", take)
    monkeypatch.setattr(kernels, "dispatch", take)


@pytest.mark.one_version
def test_a_synchronisation_of_tpu_kernels_gives_the_same_table(as_on_tpu, request):
    """All of them in the interpreter, `row_exchange` with the kernel collective; the other program pushes by
    ppermute."""
    num_rows, lookups, width, workers = 30, 4, 16, 2
    ids, values = batch(num_rows, lookups, width, workers=workers)
    mesh, run = (
        cpu_mesh(workers),
        lambda pattern: step_of(sync.RowExchange(pattern=pattern), num_rows, lookups, width, workers),
    )
    table = np.random.default_rng(5).integers(-9, 10, (num_rows, width)).astype(np.float32)
    with interpreting("on_wait") as interpret, pltpu.force_tpu_interpret_mode(interpret):
        own, fell_back = sharded(run("kernel"), mesh)(table, ids, values)
        own = np.asarray(own)
    assert not fell_back
    request.getfixturevalue("monkeypatch").undo()
    plain, _ = sharded(run("ppermute"), mesh)(table, ids, values)
    assert (np.asarray(plain) != table).any()
    np.testing.assert_array_equal(own, plain)


@pytest.mark.parametrize("mode", MODES)
def test_the_kernel_pushes_what_ppermute_pushes(mode, as_on_tpu):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(WORKERS, 10, 2, 9)).astype(np.float32)
    counts = rng.integers(0, 4, (WORKERS, WORKERS)).astype(np.int32)
    order = np.where(np.arange(3) < counts[..., None], rng.integers(0, 10, (WORKERS, WORKERS, 3)), 10).astype(np.int32)

    def pushed(pattern):
        def worker(values, order, counts, incoming):
            blocks, sources = wire.push_rows(values[0], order[0], counts[0], incoming[0], "data", pattern)
            return blocks[jnp.argsort(sources)][None]

        run = jax.shard_map(
            worker, mesh=cpu_mesh(), in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"), check_vma=False
        )
        return np.asarray(jax.jit(run)(values, order, counts, counts.T))

    with interpreting(mode) as interpret, pltpu.force_tpu_interpret_mode(interpret):
        found = pushed("kernel")
        assert found.any()
        np.testing.assert_array_equal(found, pushed("ppermute"))


def test_kernels_step_back_where_an_axis_is_left_to_xla():
    """A TPU's compiler refuses them there."""
    mesh = Mesh(np.array(jax.devices()[:WORKERS]).reshape(2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    types = jax.ShapeDtypeStruct((16, 128), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32)

    def lowered(axes):
        spec = PartitionSpec("data")
        run = jax.shard_map(
            kernels.gather_rows, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=axes, check_vma=False
        )
        return jax.jit(run).trace(*types).lower(lowering_platforms=("tpu",)).as_text()

    assert "tpu_custom_call" in lowered({"data", "model"})
    assert "tpu_custom_call" not in lowered({"data"})


def test_patterns_that_cannot_be_are_refused():
    mesh = Mesh(np.array(jax.devices()[:WORKERS]).reshape(2, 2), ("data", "model"))

    def pushed(pattern, axis):
        run = lambda values: wire.push_rows(
            values, *[jnp.zeros(shape, jnp.int32) for shape in ((4, 3), (4,), (4,))], axis, pattern
        )[0]
        spec = PartitionSpec(("data", "model"))
        return jax.eval_shape(
            jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False), jnp.zeros((8, 4))
        )

    with pytest.raises(SyncError, match="along one mesh axis"):
        pushed("kernel", ("data", "model"))
    with pytest.raises(SyncError, match="no way to move messages"):
        pushed("pigeon", ("data", "model"))
    assert pushed("auto", ("data", "model")).shape == (16, 3, 4)


@pytest.mark.parametrize("has_no_gaps", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sums_by_sorting_are_those_of_a_scatter(has_no_gaps, dtype):
    rng = np.random.default_rng(0)
    slots = (
        np.append(rng.integers(-1, 9, 30), np.arange(7)) if has_no_gaps else rng.choice([-3, 0, 4, 5, 11, 12, 99], 37)
    )
    values = jnp.asarray(rng.integers(-8, 9, (37, 5)), dtype)
    found = jax.jit(sum_by_sorting, static_argnames=("capacity", "has_no_gaps"))(
        values, slots, capacity=12, has_no_gaps=has_no_gaps
    )
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, sum_reference(values, slots, capacity=12))


def test_sums_have_a_derivative_and_refuse_what_does_not_fit():
    slots, values = jnp.asarray([2, 0, 2, 7], jnp.int32), jnp.ones((4, 3))
    weights = jnp.arange(9.0).reshape(3, 3)
    grad = jax.grad(lambda values: (kernels.sum_rows(values, slots, 3) * weights).sum())(values)
    np.testing.assert_array_equal(grad, [weights[2], weights[0], weights[2], [0, 0, 0]])
    with pytest.raises(KernelError, match="one slot for each row"):
        kernels.sum_rows(values, slots[:3], 3)
    assert kernels.sum_rows(values[:0], slots[:0], 2).tolist() == [[0, 0, 0]] * 2
