"""Sums among some of the workers: the numbers that reach every worker."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from splitjax.lower.partial.allreduce import total_of_contributors
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
