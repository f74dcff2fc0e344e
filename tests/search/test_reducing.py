"""Reduction keeps the best assignment, and the way back."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from splitjax.search.network import CostNetwork, Memory, MemoryUse, Pair
from splitjax.search.reducing import reduce_network
from tests.search.networks import best_by_trying, drawn_network


@pytest.mark.parametrize("seed", range(24))
def test_the_best_assignment_is_kept(seed):
    network = drawn_network(seed, limit_share=0.1 + 0.1 * (seed % 8))
    reduced = reduce_network(network)
    best = math.inf
    assert len(reduced.costs) < len(network.costs) or reduced.impossible  # one follows from another
    if not reduced.impossible and not (reduced.timeline.limits < 0).any():
        for values in itertools.product(*(range(costs.size) for costs in reduced.costs)):
            chosen = np.array(values, dtype=np.int64)
            lifted = reduced.lift(chosen)
            assert reduced.cost(chosen) == network.cost(lifted)
            fits = bool((reduced.timeline.in_use(chosen) <= reduced.timeline.limits).all())
            assert fits == (max(network.peaks_bytes(lifted)) <= network.memories[0].limit_bytes)
            if fits:
                best = min(best, reduced.cost(chosen))
    assert best == best_by_trying(network)


def test_a_chain_of_one_to_one_relations_is_one_variable_with_all_its_memory():
    swap = np.array([[math.inf, 3.0], [0.0, math.inf]])
    network = CostNetwork(
        tuple(np.array([0.0, 10.0]) for _ in range(4)),
        tuple(Pair(v, v + 1, swap) for v in range(3)),
        (Memory("HBM", 5.0, tuple(MemoryUse(v, v, v + 1, np.array([0.0, 1.0 + v])) for v in range(4))),),
    )
    reduced = reduce_network(network, at_least_bytes=True)
    assert len(reduced.costs) == 1
    assert sorted(reduced.lift(np.array([value])).tolist() for value in (0, 1)) == [[0, 1, 0, 1], [1, 0, 1, 0]]


def test_a_dominated_value_is_dropped_only_without_more_memory():
    costs = (np.array([1.0, 2.0]), np.array([0.0, 7.0]))
    table = np.array([[1.0, 5.0], [2.0, 6.5]])
    use = Memory("HBM", 3.0, (MemoryUse(0, 0, 1, np.array([4.0, 2.0])), MemoryUse(1, 0, 1, np.array([1.0, 0.0]))))
    assert not reduce_network(CostNetwork(costs, (Pair(0, 1, table),))).costs
    loose = reduce_network(CostNetwork(costs, (Pair(0, 1, table),), (use,)))
    assert loose.lift(np.zeros(len(loose.costs), dtype=np.int64))[0] == 1  # 4 bytes alone are too many
    roomy = Memory("HBM", 4.0, use.uses)
    assert [c.size for c in reduce_network(CostNetwork(costs, (Pair(0, 1, table),), (roomy,))).costs] == [2, 2]


def test_what_costs_the_same_either_way_keeps_one_value():
    reduced = reduce_network(CostNetwork((np.zeros(5),)))
    assert not reduced.costs
    assert reduced.constant == 0
