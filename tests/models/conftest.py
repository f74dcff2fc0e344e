import jax
import pytest


@pytest.fixture(autouse=True)
def quick_compilation():
    """These tests compile many small programs and run each a few times: optimising them would take most of the time."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True)
def strictly(strict_promotion):
    """All of this folder runs under strict promotion, but for the tests that ask for `standard_promotion`."""


@pytest.fixture
def standard_promotion(strictly):
    """For what Flax itself does not do under strict promotion: normalisation in bfloat16."""
    with jax.numpy_dtype_promotion("standard"):
        yield
