"""What steps of modules keep between their calls."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import splitjax.equinox
from splitjax.planning.carried import Carried


def test_what_a_filtered_step_carries_is_put_back():
    def train_step(state, batch):
        return state - batch.mean(), batch.sum()

    step = splitjax.equinox.parallelize(
        train_step, mesh={"data": 2}, rules="data_parallel", state_argnums=0, batch_argnums=1
    )
    step.resume(Carried(num_steps=5))
    assert step.carried().num_steps == 5
    state, total = step(jnp.zeros(3), np.ones((4, 3), np.float32))
    assert jax.device_get(total) == 12 and np.array_equal(state, -np.ones(3))
    step.resume(None)
    assert not step.carried()
