"""Solves a problem: the cheapest assignment within a limit of work, and how far from the best it can be.

The problem is reduced; a small one is solved exactly; a large one by prices for memory over messages between neighbours
(`pricing`), which bound it from below, and local search from what they suggest (`descent`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping

import numpy as np

from splitjax.errors import SearchError
from splitjax.search.climb import Climb
from splitjax.search.conflict import Conflict, explain_conflict
from splitjax.search.exact import num_columns, solve_by_milp
from splitjax.search.network import CostNetwork, Ints
from splitjax.search.pricing import PriceSearch
from splitjax.search.reducing import ReducedNetwork, reduce_network

SOLVERS = ("auto", "messages", "milp")
# Programs of at most so many numbers are solved exactly without being asked.
MAX_EXACT_COLUMNS = 3_000
MAX_EXACT_NODES = 2_000
ALL_NODES = 2**31 - 1
DEFAULT_WORK = 2_000_000_000
# Of work and time, what prices may take before local search has the rest.
PRICING_SHARE = 0.4
FIRST_START = 16
# A gap below this is rounding of float64 sums, and counts as none.
PRECISION = 1e-9


@dataclasses.dataclass(frozen=True, eq=False)
class Solution:
    """Holds the best assignment, and what is proven about any.

    **Attributes:**

    - `values`: int[variables of the problem]. Without one that fits, the one that came nearest; None where no
      assignment is allowed even with unlimited memory.
    - `cost`: of `values`; infinity without. `peaks_bytes`: the most bytes alive, for each memory.
    - `feasible`: whether `values` keeps every limit.
    - `bound`: no assignment that keeps the limits costs less; infinity: none keeps them.
    - `solver`: what found it. `work`: table entries looked at. `clock_struck`: whether the clock ended the search
      before the limit of work did: another run may then end elsewhere.
    - `conflict`: what stands against each other where nothing fits; None: something does.
    """

    values: Ints | None
    cost: float
    bound: float
    feasible: bool
    peaks_bytes: tuple[float, ...]
    solver: str
    work: int
    clock_struck: bool
    conflict: Conflict | None = None

    @property
    def gap(self) -> float:
        """How much cheaper the best assignment could be, relative to `cost`: 0 is proven best; infinity: nothing
        fits."""
        if not self.feasible:
            return math.inf
        return max(0.0, (self.cost - self.bound) / max(abs(self.cost), 1e-300)) if self.cost > self.bound else 0.0


class _Clock:
    """Says when to stop: by work, which is the same on every machine, or by the clock."""

    def __init__(self, max_work: int, seconds: float | None):
        self.work, self.max_work, self.seconds = 0, max_work, seconds
        self.begin = time.monotonic()
        self.struck = False

    def spend(self, work: int, share: float = 1.0) -> bool:
        """Adds work that was done; tells whether less than `share` of the work and of the time is used up. Where the
        time is, even a share of it, what comes out hangs on the clock from then on, and `struck` says so."""
        self.work += work
        if self.seconds is not None and time.monotonic() - self.begin > share * self.seconds:
            self.struck = True
            return False
        return self.work < share * self.max_work

    @property
    def left_seconds(self) -> float:
        """What the clock leaves; infinity without."""
        return math.inf if self.seconds is None else max(0.0, self.begin + self.seconds - time.monotonic())


def solve(
    network: CostNetwork,
    *,
    pins: Mapping[int, int] | None = None,
    solver: str = "auto",
    max_work: int = DEFAULT_WORK,
    seconds: float | None = None,
    seed: int = 0,
) -> Solution:
    """Finds a cheap assignment that fits, and a lower bound of the cost of all that do.

    **Arguments:**

    - `network`: the problem. `pins`: variable -> value that is already decided; bound and gap are those of the problem
      so narrowed.
    - `solver`: `"messages"`, the package's own; `"milp"`, HiGHS;
      `"auto"`: an exact one where the problem is small after reduction, else the package's own.
    - `max_work`: table entries to look at, about 2 * 10**8 a second on one core. `seconds`: a guard; None: none. What
      is decided within `max_work` is the same in every run.
    - `seed`: of the draws of the local search.

    Raises `SearchError` for an unknown solver, one that is not installed, and pins or limits that cannot be.
    """
    if solver not in SOLVERS:
        raise SearchError("there is no such solver", value=solver, place="solver", remedy=f"name one of {SOLVERS}")
    if max_work <= 0 or (seconds is not None and not seconds > 0):
        raise SearchError("a search needs some work and time", value=(max_work, seconds), place="max_work, seconds")
    clock = _Clock(max_work, seconds)
    reduced = reduce_network(network, pins)
    if reduced.impossible or (reduced.timeline.limits < 0).any():
        return _nothing_fits(network, pins, clock, math.inf)
    if not reduced.costs:
        return _solution(network, reduced, np.zeros(0, dtype=np.int64), reduced.constant, "reduction", clock)
    bound = -math.inf
    if solver == "milp" or (solver == "auto" and num_columns(reduced) <= MAX_EXACT_COLUMNS):
        exact = solve_by_milp(reduced, MAX_EXACT_NODES if solver == "auto" else ALL_NODES, clock.left_seconds)
        clock.spend(exact.work * num_columns(reduced))
        bound = exact.bound
        if bound == math.inf:
            return _nothing_fits(network, pins, clock, math.inf)
        if exact.values is not None and network.fits(reduced.lift(exact.values)):
            if exact.finished or solver == "milp":
                return _solution(network, reduced, exact.values, bound, "milp", clock)
    return _search(network, reduced, pins, clock, seed, bound)


def _search(
    network: CostNetwork,
    reduced: ReducedNetwork,
    pins: Mapping[int, int] | None,
    clock: _Clock,
    seed: int,
    bound: float,
) -> Solution:
    """Solves a reduced problem by prices and local search; `bound`: what is proven already."""
    prices = PriceSearch(reduced)
    pass_work = 4 * prices.num_entries + 2_000 * len(reduced.costs) + 10 * reduced.timeline.limits.size
    climb = Climb(network, reduced, np.random.default_rng(seed))
    next_start, going = FIRST_START, True
    while going and not prices.settled:
        known = climb.best_cost if climb.best is not None else _guess(prices.bound)
        prices.step(known)
        bound = max(bound, prices.bound)
        going = clock.spend(pass_work, PRICING_SHARE)
        if prices.num_passes >= next_start:
            next_start = next_start * 3 // 2
            going = clock.spend(climb.start(prices.candidates()[:2]), PRICING_SHARE) and not _closed(climb, bound)
    if clock.spend(0) and not _closed(climb, bound):
        clock.spend(climb.start(prices.candidates()))
    while climb.best is not None and not climb.exhausted and not _closed(climb, bound):
        if not clock.spend(climb.improve(prices.best_prices)):
            break
    climb.finish()
    if climb.best is None:
        return _nothing_fits(network, pins, clock, bound)
    return _solution(network, reduced, climb.best, bound, "messages", clock)


def _guess(bound: float) -> float:
    """Returns a cost that the best assignment may have, before any is known."""
    return bound + max(0.3 * abs(bound), 1.0) if math.isfinite(bound) else 1.0


def _closed(climb: Climb, bound: float) -> bool:
    return climb.best_cost <= bound + PRECISION * abs(bound)


def _solution(
    network: CostNetwork, reduced: ReducedNetwork, values: Ints, bound: float, solver: str, clock: _Clock
) -> Solution:
    """Returns the solution that an assignment of the reduced problem is, with its bound made safe."""
    lifted = reduced.lift(values)
    cost = network.cost(lifted)
    if network.whole:  # the next whole number is a bound too
        bound = math.ceil(bound - 1e-3) if math.isfinite(bound) else bound
    bound = min(bound, cost)
    if cost - bound <= PRECISION * abs(cost):
        bound = cost
    return Solution(lifted, cost, bound, True, network.peaks_bytes(lifted), solver, clock.work, clock.struck)


def _nothing_fits(network: CostNetwork, pins: Mapping[int, int] | None, clock: _Clock, bound: float) -> Solution:
    """Returns the solution where nothing fits, or nothing was found that does: why, and what came nearest."""
    conflict, values = explain_conflict(network, pins)
    if values is None:
        return Solution(None, math.inf, math.inf, False, (), "none", clock.work, clock.struck, conflict)
    cost, peaks = network.cost(values), network.peaks_bytes(values)
    feasible = network.fits(values)  # what asks for least memory may fit where the search found nothing
    if conflict.proven:
        bound = math.inf
    return Solution(
        values,
        cost,
        min(bound, cost) if feasible else bound,
        feasible,
        peaks,
        "least memory",
        clock.work,
        clock.struck,
        None if feasible else conflict,
    )
