"""Sparsity of numbers of workers that groups do not divide."""

from __future__ import annotations

import numpy as np
import pytest

from splitjax.sync.profile import measure


def test_groups_that_are_not_full_do_not_count():
    step = [np.array([0, 1]), np.array([1, 2]), np.array([3])]
    found = measure([step], 8, 2)
    assert dict(found.unions) == {1: 5 / 3, 2: 3.0, 3: 4.0}, "two workers are the first two; the third has no partner"
    assert found.union(2) == 3.0 and found.densification(3) == pytest.approx(4 / (5 / 3))
