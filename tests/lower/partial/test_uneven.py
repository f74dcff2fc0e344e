"""Workers with different numbers of examples: what each takes of the whole batch, and what it divides by."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from splitjax.lower.partial.uneven import UnevenSplit
from splitjax.mesh import MeshShape
from splitjax.planning.workers import Workers
from splitjax.primitives.example_relation import ExampleDim

SHARES = (5, 2, 1)


def splits():
    """The split of every worker, in their order."""
    offsets = np.cumsum([0, *SHARES[:-1]])
    for share, offset in zip(SHARES, offsets, strict=True):
        workers = Workers(MeshShape((("data", 3),)), ("data",), ("data",))
        yield UnevenSplit(1, workers, None, share, sum(SHARES), jnp.int32(offset), ("data",))


def test_the_divisors_of_a_common_value_share_it_out():
    parts = [1 / split.num_contributions for split in splits()]
    assert parts == pytest.approx([share / sum(SHARES) for share in SHARES])


def test_the_ranges_are_the_whole_batch_in_order():
    layout = ExampleDim(1)
    whole = jnp.arange(16.0).reshape(2, 8)
    parts = [split.part(whole, layout) for split in splits()]
    assert [part.shape[1] for part in parts] == list(SHARES)
    np.testing.assert_array_equal(jnp.concatenate(parts, axis=1), whole)
    placed = [split.uncut_local(part, layout, 8) for split, part in zip(splits(), parts, strict=True)]
    np.testing.assert_array_equal(sum(placed), whole)
