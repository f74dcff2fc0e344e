"""The solver against every assignment of small problems, and what it does with limits, pins and bad input."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from splitjax.errors import SearchError
from splitjax.search.effort import Effort
from splitjax.search.network import CostNetwork, Memory, MemoryUse, Pair
from splitjax.search.solving import solve
from tests.search.networks import best_by_trying, drawn_network

SEEDS = range(24)


@pytest.mark.parametrize("seed", SEEDS)
def test_exhaustive_search_agrees_and_the_gap_is_none(seed):
    network = drawn_network(seed, limit_share=0.15 + 0.1 * (seed % 6))
    best = best_by_trying(network)
    solution = solve(network)
    assert solution.feasible == math.isfinite(best)
    if solution.feasible:
        assert solution.cost == best
        assert solution.gap == 0
        assert network.fits(solution.values)


@pytest.mark.parametrize("seed", SEEDS)
def test_bounds_of_prices_hold_and_local_search_is_close(seed):
    network = drawn_network(seed, hard=seed % 2 == 0, limit_share=0.4)
    best = best_by_trying(network)
    solution = solve(network, solver="messages", effort=Effort(20_000_000))
    if math.isinf(best):
        assert not solution.feasible
        return
    assert solution.feasible and network.fits(solution.values)
    assert solution.bound <= best <= solution.cost
    assert solution.cost <= 1.1 * best
    assert solution.gap == pytest.approx((solution.cost - solution.bound) / solution.cost)


def test_the_budget_is_what_the_bound_is_about():
    """Without the limit this costs 2; under it 12, and that is proven."""
    costs = (np.array([1.0, 6.0]), np.array([1.0, 6.0]))
    uses = tuple(MemoryUse(v, 0, 4, np.array([10.0, 1.0])) for v in (0, 1))
    network = CostNetwork(costs, (), (Memory("HBM", 19.0, uses),))
    assert solve(network).cost == solve(network).bound == 7
    tight = dataclasses.replace(network, memories=(Memory("HBM", 10.0, uses),))
    assert solve(tight).cost == solve(tight).bound == 12


def test_several_memories_are_kept():
    costs = (np.array([0.0, 5.0, 9.0]),)
    memories = (
        Memory("HBM", 10.0, (MemoryUse(0, 0, 2, np.array([20.0, 5.0, 5.0])),)),
        Memory("VMEM", 3.0, (MemoryUse(0, 1, 2, np.array([1.0, 4.0, 2.0])),)),
    )
    solution = solve(CostNetwork(costs, (), memories))
    assert solution.values.tolist() == [2]
    assert solution.peaks_bytes == (5.0, 2.0)


@pytest.mark.parametrize("seed", range(6))
def test_pins_are_kept_and_solved_again(seed):
    network = drawn_network(seed, limit_share=0.6)
    free = solve(network)
    for variable in range(3):
        value = (int(free.values[variable]) + 1) % network.costs[variable].size
        best = best_by_trying(network, {variable: value})
        pinned = solve(network, pins={variable: value})
        assert pinned.feasible == math.isfinite(best)
        if pinned.feasible:
            assert pinned.values[variable] == value
            assert pinned.cost == best >= free.cost
            assert pinned.gap == 0


def test_the_same_work_gives_the_same_answer():
    network = drawn_network(3, 8, limit_share=0.3)
    first, second = (solve(network, solver="messages", effort=Effort(3_000_000)) for _ in range(2))
    assert first.values.tolist() == second.values.tolist()
    assert (first.cost, first.bound, first.work) == (second.cost, second.bound, second.work)
    assert not first.clock_struck


def test_a_search_that_runs_out_of_time_says_so_and_has_an_answer():
    generator = np.random.default_rng(0)
    count = 300
    costs = tuple(generator.integers(0, 1000, 6).astype(float) for _ in range(count))
    pairs = tuple(
        Pair(int(i), int(j), generator.integers(0, 1000, (6, 6)).astype(float))
        for i, j in generator.integers(0, count, (900, 2))
        if i != j
    )
    uses = tuple(MemoryUse(v, v, v + 20, generator.integers(1, 100, 6).astype(float)) for v in range(count))
    network = CostNetwork(costs, pairs, (Memory("HBM", 900.0, uses),))
    solution = solve(network, effort=Effort(10**12, seconds=0.3))
    assert solution.clock_struck
    assert solution.feasible and network.fits(solution.values)
    assert 0 < solution.bound <= solution.cost < math.inf
    longer = solve(network, effort=Effort(400_000_000))
    assert not longer.clock_struck
    assert longer.cost <= solution.cost
    assert longer.gap < 0.25


@pytest.mark.parametrize(
    "options, words",
    [
        ({"solver": "oracle"}, "no such solver"),
        ({"pins": {99: 0}}, "pin"),
        ({"pins": {0: 99}}, "pin"),
    ],
)
def test_bad_requests_are_typed_errors(options, words):
    with pytest.raises(SearchError, match=words):
        solve(drawn_network(0), **options)
