"""States and a full disk for tests of checkpoints. Imports no pytest: processes that are killed start faster."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np

LIKE = {"w": jnp.zeros(1000), "position": np.zeros(3)}


def state_at(step):
    return {"w": jnp.arange(1000.0) * step, "position": np.full(3, float(step))}


def filled(shape, value=0):
    """An array that is known by its value."""
    return jnp.full(shape, value, jnp.float32)


def assert_same(found, expected):
    """Equal bit for bit: structure, kinds of leaves, dtypes (weak or not), shardings, values."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(expected)[0]]
    for path, one, other in zip(paths, jax.tree.leaves(found), jax.tree.leaves(expected)):
        assert type(one) is type(other), path
        if not hasattr(other, "dtype"):
            assert one == other, path
            continue
        assert one.dtype == other.dtype and one.shape == other.shape, path
        if isinstance(other, jax.Array):
            assert one.sharding == other.sharding and one.committed == other.committed, path
            assert getattr(one, "weak_type", False) == getattr(other, "weak_type", False), path
        if jax.dtypes.issubdtype(other.dtype, jax.dtypes.prng_key):
            assert jax.random.key_impl(one) == jax.random.key_impl(other), path
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), path


@contextlib.contextmanager
def no_file_beyond(num_bytes):
    """As a disk that is full: longer writes fail (EFBIG)."""
    import resource  # not on Windows

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
