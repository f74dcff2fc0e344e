"""States onto the plan: copies that a step may consume, and no buffer twice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import splitjax
from splitjax.compile.placement import unshare


def test_a_placed_state_is_a_copy():
    step = splitjax.parallelize(
        lambda state, batch: (state - batch.mean(), batch.sum()), mesh={"data": 1}, rules="data_parallel"
    )
    example = (jax.ShapeDtypeStruct((4, 3), jnp.float32),)
    first = step.place(np.arange(3, dtype=np.float32), example=example)
    second = step.place(first, example=example)  # which is where it belongs already
    assert second.sharding.is_equivalent_to(first.sharding, 1)
    assert first.unsafe_buffer_pointer() != second.unsafe_buffer_pointer()


def test_an_array_that_stands_twice_is_copied_once():
    params, other = jnp.ones(3), jnp.zeros(2)
    state, batch = unshare(({"params": params, "average": params, "other": other}, params), (0,))
    assert state["average"] is params and state["other"] is other and batch is params  # in the order of the leaves
    assert state["params"] is not params and np.array_equal(state["params"], params)
