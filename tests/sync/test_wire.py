"""Messages between workers, short and long, by every pattern."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from splitjax.mesh import MeshShape
from splitjax.report.hlo import compiled_collectives
from splitjax.sync import wire


def compiled(worker, num_workers, *arrays):
    mesh = Mesh(np.array(jax.devices()[:num_workers]), ("data",))
    spec = PartitionSpec("data")
    run = (
        jax.jit(jax.shard_map(worker, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
        .lower(*arrays)
        .compile()
    )
    return run, [one.op for one in compiled_collectives(run, MeshShape((("data", num_workers),)))]


@pytest.mark.parametrize("num_workers", [2, 3, pytest.param(8, marks=pytest.mark.one_version)])
@pytest.mark.parametrize("size", [5, pytest.param(20_000, marks=pytest.mark.one_version)])
def test_every_worker_gets_what_each_has(num_workers, size):
    def worker(values, flags):
        return [one[None] for one in wire.gather([values[0], flags[0]], "data")]

    values = np.random.default_rng(0).normal(size=(num_workers, size)).astype(np.float32)
    flags = np.arange(num_workers, dtype=np.int8)
    run, ops = compiled(worker, num_workers, values, flags)
    for found, expected in zip(run(values, flags), (values, flags), strict=True):
        np.testing.assert_array_equal(found, np.broadcast_to(expected, (num_workers, *expected.shape)))
    rounds = {3: 2, 8: 3}.get(num_workers) if size == 5 else None
    assert ops == (["all_gather"] if rounds is None else ["collective_permute"] * rounds)


@pytest.mark.parametrize(
    ("size", "pattern", "ops"),
    [
        (5, "auto", ["all_to_all"]),
        (20_000, "auto", ["collective_permute"] * 4),
        (5, "ppermute", ["collective_permute"] * 4),
        (20_000, "all_to_all", ["all_to_all"]),
    ],
)
def test_every_worker_gets_what_is_for_it(size, pattern, ops):
    n = 5

    def worker(values):
        (received,), sources = wire.exchange([values[0].astype(jnp.bfloat16)], "data", pattern)
        return received[None], sources[None]

    values = np.random.default_rng(0).integers(-8, 9, (n, n, size)).astype(np.float32)
    run, found_ops = compiled(worker, n, values)
    received, sources = run(values)
    for me in range(n):
        np.testing.assert_array_equal(np.asarray(received[me]).astype(np.float32), values[np.asarray(sources[me]), me])
    assert found_ops == ops


def test_messages_are_counted_as_they_are_sent():
    assert [wire.gather_messages(n, 7000) for n in (1, 2, 3, 4, 16, 17)] == [0, 1, 2, 2, 4, 5]
    assert [wire.gather_messages(n, 1 << 20) for n in (1, 2, 16)] == [0, 1, 15]
    assert [wire.exchange_messages(16, size, "auto") for size in (100, 100_000, 1 << 20)] == [8, 15, 18]
    assert [wire.exchange_messages(16, 100, pattern) for pattern in ("ppermute", "all_to_all")] == [15, 8]
    assert [wire.exchange_messages(n, 100, "auto") for n in (1, 2, 3)] == [0, 1, 1]
    assert wire.exchange_messages(16, 1 << 20, "kernel") == 8  # without a TPU, all at once whatever their size
    assert wire.shift_messages(2, 1, 1 << 40) == 512  # an operation each


def test_large_messages_that_two_workers_swap_go_in_parts():
    n = 4

    def worker(values):
        (swapped,) = wire.permute([values[0]], "data", [(i, i ^ 1) for i in range(n)])
        (shifted,) = wire.permute([values[0]], "data", [(i, (i + 1) % n) for i in range(n)])
        return swapped[None], shifted[None]

    values = np.random.default_rng(0).normal(size=(n, 70, 2001)).astype(np.float32)  # 560 kB
    run, ops = compiled(worker, n, values)
    swapped, shifted = run(values)
    np.testing.assert_array_equal(swapped, values[[1, 0, 3, 2]])
    np.testing.assert_array_equal(shifted, values[[3, 0, 1, 2]])
    assert ops == ["collective_permute"] * 4
    assert wire.shift_messages(2, 1, values[0].nbytes) == 3 and wire.shift_messages(4, 1, values[0].nbytes) == 1
    assert wire.exchange_messages(4, values[0].nbytes, "auto") == 5
