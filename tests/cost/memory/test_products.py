"""Into how many parts products are split, against modules for an H200, and what they store."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from splitjax.cost.memory.products import num_parts
from tests.cost.memory.on_a_gpu import compiled, temporaries


# Rows, columns and summed elements of products in modules of the steps of `benchmarks.planner` and
# `benchmarks.accelerator` for an H200, and the leading dim of what the compiler stores of them.
@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((512, 8, 512), 8), ((1024, 8, 512), 4), ((1024, 8, 784), 4), ((256, 32, 128), 4), ((128, 32, 256), 8),
        ((128, 128, 64), 4), ((256, 256, 512), 8), ((256, 256, 2048), 16), ((256, 1024, 2048), 8),
        ((768, 256, 512), 4), ((128, 32, 1024), 16), ((256, 10, 4096), 32), ((192, 256, 8192), 32),
        ((256, 2048, 4096), 4), ((256, 4096, 4096), 2), ((2048, 512, 5120), 2), ((2560, 256, 8192), 4),
        ((2048, 256, 256), 1), ((1024, 32, 128), 1), ((5120, 512, 2048), 1), ((4096, 2048, 4096), 1),
        ((2048, 1024, 32768), 1),
    ],
)  # fmt: skip
def test_parts_of_products(shape, parts):
    assert num_parts(*shape) == parts


def test_parts_are_stored_where_loops_read_them():
    a, b = (jax.ShapeDtypeStruct((512, 512), jnp.float32) for _ in range(2))
    whole = 512 * 512 * 4
    two = lambda a, b: a @ b + b @ a
    assert num_parts(512, 512, 512) == 4
    assert temporaries(two, a, b, platform="gpu") == (2 * 4 + 1) * whole  # both in parts, and the sum
    assert temporaries(two, a, b, platform="cpu") <= 2 * whole
    # A product of a product is not read in parts.
    assert temporaries(lambda a, b: (a @ b) @ a, a, b, platform="gpu") == 2 * whole


@pytest.mark.gpu_aot
def test_the_compiler_stores_parts():
    assert "f32[8,256,256]" in compiled("small_product")
