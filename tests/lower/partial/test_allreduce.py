"""Sums among some of the workers: the numbers that reach every worker, and the bytes that are said to be sent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from splitjax.lower.partial.allreduce import handing, sent_bytes, total_of_contributors
from splitjax.mesh import make_mesh

NUM_WORKERS = 4


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("contributors", [(3,), (1, 3), (0, 2, 3), (0, 1, 2, 3)], ids=str)
def test_the_sum_reaches_every_worker(contributors, platform):
    mesh = make_mesh({"data": NUM_WORKERS})
    values = np.arange(1.0, 1.0 + 2 * NUM_WORKERS, dtype=np.float32).reshape(NUM_WORKERS, 2)
    held = np.where(np.isin(np.arange(NUM_WORKERS), contributors)[:, None], values, 0)

    def total(part):
        (whole,) = total_of_contributors([part], contributors, ("data",), NUM_WORKERS, platform)
        return whole

    spec = PartitionSpec("data")
    run = jax.jit(jax.shard_map(total, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    wanted = np.broadcast_to(values[list(contributors)].sum(axis=0), values.shape)
    np.testing.assert_array_equal(run(jnp.asarray(held)), wanted)


@pytest.mark.parametrize("contributors", [(0,), (1, 3), (0, 1, 2)], ids=str)
def test_bytes_are_those_of_the_contributors(contributors):
    num_bytes, num_workers, count = 1024, 8, len(contributors)
    ring = 2 * (count - 1) / count * num_bytes  # what each contributor sends in a ring of its own
    handed = sum(len(pairs) for pairs in handing(contributors, num_workers)) * num_bytes
    assert sent_bytes(num_bytes, count, num_workers) == (ring * count / num_workers, handed / num_workers)


def test_a_worker_hands_the_sum_on_only_once_it_has_it():
    have = {1, 3}
    for pairs in handing((1, 3), 8):
        assert {source for source, _ in pairs} <= have and len({source for source, _ in pairs}) == len(pairs)
        have |= {target for _, target in pairs}
    assert have == set(range(8)) and len(handing((1, 3), 8)) == 2
