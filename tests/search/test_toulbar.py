"""toulbar2 and HiGHS prove the same, and a solver that is missing is named."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from splitjax.errors import SearchError
from splitjax.search import toulbar
from splitjax.search.network import CostNetwork
from splitjax.search.reducing import reduce_network
from splitjax.search.solving import solve
from tests.search.networks import best_by_trying, drawn_network

needs_toulbar2 = pytest.mark.skipif(not toulbar.is_installed(), reason="pytoulbar2 is not installed")


def scaled(network: CostNetwork, factor: float) -> CostNetwork:
    """The same problem with costs that are no whole numbers, some of them below 0."""
    pairs = tuple(dataclasses.replace(pair, costs=pair.costs * factor) for pair in network.pairs)
    return dataclasses.replace(network, costs=tuple(costs * factor - 1.5 for costs in network.costs), pairs=pairs)


@needs_toulbar2
@pytest.mark.parametrize("seed", range(24))
def test_both_exact_solvers_give_the_certified_best(seed):
    network = drawn_network(seed, limit_share=0.1 + 0.1 * (seed % 7))
    if seed % 3 == 0:
        network = scaled(network, 0.37)
    best = best_by_trying(network)
    for solver in ("toulbar2", "milp"):
        solution = solve(network, solver=solver)
        assert solution.feasible == math.isfinite(best)
        if solution.feasible:
            assert solution.cost == pytest.approx(best, rel=1e-9)
            assert solution.gap < 1e-8
            assert network.fits(solution.values)


@needs_toulbar2
@pytest.mark.parametrize("seed", range(8))
def test_with_memory_at_a_price_the_bound_is_one_of_the_limited_problem(seed):
    network = drawn_network(seed, hard=False, limit_share=0.3)
    reduced = reduce_network(network)
    generator = np.random.default_rng(seed)
    for _ in range(3):
        prices = generator.random(reduced.timeline.limits.size) * 0.3
        answer = toulbar.solve_by_toulbar2(reduced, 10**6, math.inf, prices=prices)
        assert answer.finished
        assert answer.bound <= best_by_trying(network) + 1e-6
        paid = prices @ (reduced.timeline.in_use(answer.values) - reduced.timeline.limits)
        assert answer.bound == pytest.approx(reduced.cost(answer.values) + paid, rel=1e-6)


def test_a_solver_that_is_missing_is_a_typed_error(monkeypatch):
    monkeypatch.setattr(toulbar, "PACKAGE", "pytoulbar2_that_is_missing")
    with pytest.raises(SearchError, match="not installed") as caught:
        solve(drawn_network(0), solver="toulbar2")
    assert "planner" in caught.value.remedy
    assert solve(drawn_network(0)).solver in ("milp", "reduction")


SCRIPT = """
from splitjax.search.effort import Effort
from splitjax.search.solving import solve
from tests.search.networks import drawn_network
for solver in ("messages", "auto"):
    found = solve(drawn_network(3, 7, limit_share=0.3), solver=solver, effort=Effort(2_000_000))
    print(found.values.tolist(), found.cost, found.bound, found.work, found.clock_struck)
"""


def test_two_processes_answer_alike_whatever_their_hashes():
    def answer(seed: str) -> str:
        environment = os.environ | {"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    first = answer("1")
    assert first == answer("4711")
    assert first.count("False") == 2
