"""Sums and maxima that XLA's CPU compiler gives to a library, which reads stored arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from splitjax.cost.memory.lifetimes import PlacedProgram, predict_program_memory

MEMORY_SCHEDULER = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def of_selected(x):
    return jnp.where(x > 0, x, 0.5).sum(0)


def of_products(x):
    return (x * x + x).max(0)


def predicted_bytes(fn, x, platform="cpu"):
    placed = PlacedProgram(jax.make_jaxpr(fn)(x), [((), ())], [None], {}, {"data": 1}, platform)
    return predict_program_memory(placed).temporary_bytes


@pytest.mark.parametrize("fn, stored", [(of_selected, True), (of_products, False)], ids=["selected", "arithmetic"])
def test_what_a_library_cannot_compute_is_stored_for_its_sums(fn, stored):
    x = jax.ShapeDtypeStruct((512, 128), jnp.float32)
    whole, result = 512 * 128 * 4, 128 * 4
    assert predicted_bytes(fn, x) == result + stored * whole
    found = jax.jit(fn).lower(x).compile(MEMORY_SCHEDULER).memory_analysis()
    assert (found.temp_size_in_bytes >= whole) == stored


def test_few_elements_and_other_platforms_need_no_library():
    result = 128 * 4
    assert predicted_bytes(of_selected, jax.ShapeDtypeStruct((64, 128), jnp.float32)) == result
    assert predicted_bytes(of_selected, jax.ShapeDtypeStruct((512, 128), jnp.float32), "tpu") == result
