"""What is said where nothing fits."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from splitjax.search.network import CostNetwork, Memory, MemoryUse, Pair
from splitjax.search.solving import solve
from tests.search.networks import drawn_network, peak

INFINITY = np.inf


@pytest.mark.parametrize("seed", range(12))
def test_the_memory_that_is_needed_is_bounded_from_both_sides(seed):
    network = drawn_network(seed)
    uses = list(network.memories[0].uses)
    least = min(
        max(peak(uses, values))
        for values in itertools.product(*(range(costs.size) for costs in network.costs))
        if all(np.isfinite(pair.costs[values[pair.first], values[pair.second]]) for pair in network.pairs)
    )
    short = dataclasses.replace(network, memories=(Memory("HBM", least - 1, tuple(uses)),))
    solution = solve(short)
    assert not solution.feasible
    assert solution.gap == INFINITY
    assert solution.conflict.memory == "HBM"
    assert solution.conflict.needed_bytes <= least <= solution.conflict.enough_bytes
    assert solution.conflict.enough_bytes <= 1.3 * least + 1
    assert solution.peaks_bytes[0] == solution.conflict.enough_bytes
    enough = dataclasses.replace(network, memories=(Memory("HBM", solution.conflict.enough_bytes, tuple(uses)),))
    assert solve(enough).feasible


def test_who_holds_the_memory_at_the_peak_is_named():
    uses = (MemoryUse(0, 0, 9, np.array([30.0, 40.0])), MemoryUse(1, 3, 5, np.array([90.0])))
    network = CostNetwork((np.zeros(2), np.zeros(1)), (), (Memory("HBM", 100.0, uses),), ("embedding", "logits"))
    conflict = solve(network).conflict
    assert conflict.proven
    assert conflict.needed_bytes == conflict.enough_bytes == 120
    assert 3 <= conflict.time < 5
    assert conflict.holders == (("logits", 90.0), ("embedding", 30.0))
    assert "120 bytes" in conflict.message


def test_pins_that_forbid_each_other_are_named():
    equal = np.where(np.eye(2) > 0, 0.0, INFINITY)
    network = CostNetwork((np.zeros(2), np.zeros(2)), (Pair(0, 1, equal),))
    solution = solve(network, pins={0: 0, 1: 1})
    assert solution.values is None and not solution.feasible
    assert "pins" in solution.conflict.message
    assert solution.conflict.proven


def test_a_variable_without_an_allowed_value_is_named():
    network = CostNetwork((np.full(2, INFINITY),), names=("crossing",))
    assert "crossing" in solve(network).conflict.message
