"""Values that a verified step runs on: drawn by leaf, alike in every process."""

from __future__ import annotations

import jax
import numpy as np

from splitjax.plan import LeafPlan
from splitjax.verify.values import draw_values

SHAPE = jax.ShapeDtypeStruct((4, 3), np.float64)


def leaf(path, role="param"):
    return LeafPlan(path, SHAPE.shape, "float64", role, role != "batch", (), "", "", 0)


def drawn(*leaves, seed=0, given=SHAPE, own_values=False):
    return draw_values([given] * len(leaves), [SHAPE] * len(leaves), leaves, 8, own_values, seed)


def test_leaves_have_numbers_of_their_own_that_do_not_change():
    first, second = drawn(leaf("params/a"), leaf("params/b"))
    assert not np.array_equal(first, second)
    (alone,) = drawn(leaf("params/b"))
    assert np.array_equal(alone, second), "whatever other leaves there are"
    assert not np.array_equal(*(drawn(leaf("params/a"), seed=seed)[0] for seed in (0, 1)))


def test_what_may_be_a_variance_is_positive_and_own_values_are_kept():
    (variance,) = drawn(leaf("opt/nu", "optimizer"))
    assert variance.min() > 0
    own = np.arange(12.0).reshape(4, 3)
    assert np.array_equal(drawn(leaf("params/a"), given=own, own_values=True)[0], own)
