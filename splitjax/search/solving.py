"""Solves a problem: the cheapest assignment within a limit of work, and how far from the best it can be.

The problem is reduced; a small one is solved exactly; a large one by prices for memory over messages between neighbours
(`pricing`), which bound it from below, and local search from what they suggest (`descent`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from splitjax.display import registry
from splitjax.errors import SearchError
from splitjax.search import toulbar
from splitjax.search.climb import Climb
from splitjax.search.conflict import Conflict, explain_conflict
from splitjax.search.effort import Clock, Effort, Progress, Watch
from splitjax.search.exact import Exact, num_columns, solve_by_milp
from splitjax.search.network import CostNetwork, Ints
from splitjax.search.pricing import PriceSearch
from splitjax.search.reducing import ReducedNetwork, reduce_network

SOLVERS = ("auto", "messages", "milp", "toulbar2")
# Programs of at most so many numbers are solved exactly without being asked.
MAX_EXACT_COLUMNS = 3_000
MAX_EXACT_NODES = 2_000
ALL_NODES = 2**31 - 1
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

    def __str__(self) -> str:
        return registry.show(self)

    def _repr_html_(self) -> str:
        return registry.html(self)


def solve(
    network: CostNetwork,
    *,
    pins: Mapping[int, int] | None = None,
    solver: str = "auto",
    effort: Effort | None = None,
    watch: Watch | None = None,
) -> Solution:
    """Finds a cheap assignment that fits, and a lower bound of the cost of all that do.

    **Arguments:**

    - `network`: the problem. `pins`: variable -> value that is already decided; bound and gap are those of the problem
      so narrowed.
    - `solver`: `"messages"`, the package's own; `"milp"`, HiGHS; `"toulbar2"`, which the extra `planner` installs;
      `"auto"`: an exact one where the problem is small after reduction, toulbar2 before HiGHS, else the package's own.
    - `effort`: how much it may spend; None: `Effort()`.
    - `watch`: is told every better assignment as it is found.

    Raises `SearchError` for an unknown solver, one that is not installed, and pins that cannot be.
    """
    if solver not in SOLVERS:
        raise SearchError("there is no such solver", value=solver, place="solver", remedy=f"name one of {SOLVERS}")
    if solver == "toulbar2":
        toulbar.load()
    effort = effort or Effort()
    clock = Clock(effort)
    reduced = reduce_network(network, pins)
    if reduced.impossible or (reduced.timeline.limits < 0).any():
        return _nothing_fits(network, pins, clock, math.inf)
    if not reduced.costs:
        return _solution(network, reduced, np.zeros(0, dtype=np.int64), reduced.constant, "reduction", clock)
    bound = -math.inf
    if solver in ("milp", "toulbar2") or (solver == "auto" and num_columns(reduced) <= MAX_EXACT_COLUMNS):
        if solver == "auto":
            name, nodes = ("toulbar2" if toulbar.is_installed() else "milp"), MAX_EXACT_NODES
        else:
            name, nodes = solver, ALL_NODES
        exact = _solve_exactly(name, reduced, nodes, clock)
        bound = exact.bound
        if bound == math.inf:
            return _nothing_fits(network, pins, clock, math.inf)
        if exact.values is not None and network.fits(reduced.lift(exact.values)):
            if exact.finished or solver != "auto":
                return _solution(network, reduced, exact.values, bound, name, clock)
    return _Search(network, reduced, clock, effort, watch).run(pins, bound)


def _solve_exactly(solver: str, reduced: ReducedNetwork, max_nodes: int, clock: Clock) -> Exact:
    """Solves a reduced problem by an exact solver, "milp" or "toulbar2", within `max_nodes` nodes of its tree."""
    if solver == "toulbar2":
        exact = toulbar.solve_by_toulbar2(reduced, max_nodes, clock.left_seconds)
    else:
        exact = solve_by_milp(reduced, max_nodes, clock.left_seconds)
    clock.spend(exact.work * num_columns(reduced))
    return exact


class _Search:
    """Solves a reduced problem by prices and local search."""

    def __init__(
        self, network: CostNetwork, reduced: ReducedNetwork, clock: Clock, effort: Effort, watch: Watch | None
    ):
        self._network, self._reduced, self._clock, self._watch = network, reduced, clock, watch
        self._prices = PriceSearch(reduced)
        self._climb = Climb(network, reduced, np.random.default_rng(effort.seed))
        self._told, self._share = math.inf, effort.pricing_share
        self._bound = -math.inf

    def run(self, pins: Mapping[int, int] | None, bound: float) -> Solution:
        """Searches until the work or the time is spent; `bound`: what is proven already."""
        network, reduced, clock, prices, climb = self._network, self._reduced, self._clock, self._prices, self._climb
        self._bound = bound
        self._price()
        if clock.spend(0) and not self._closed:
            clock.spend(climb.start(prices.candidates()))
        while climb.best is not None and not climb.exhausted and not self._closed:
            if not clock.spend(climb.improve(prices.best_prices)):
                break
            self._tell()
        climb.finish()
        if climb.best is None:
            return _nothing_fits(network, pins, clock, self._bound)
        return _solution(network, reduced, climb.best, self._bound, "messages", clock)

    def _price(self) -> None:
        """Finds prices for memory, and begins to climb from what they suggest."""
        clock, prices, climb, reduced = self._clock, self._prices, self._climb, self._reduced
        pass_work = 4 * prices.num_entries + 2_000 * len(reduced.costs) + 10 * reduced.timeline.limits.size
        next_start, going = FIRST_START, True
        while going and not prices.settled:
            known = climb.best_cost if climb.best is not None else _guess(prices.bound)
            prices.step(known)
            self._bound = max(self._bound, prices.bound)
            going = clock.spend(pass_work, self._share)
            if prices.num_passes >= next_start:
                next_start = next_start * 3 // 2
                going = clock.spend(climb.start(prices.candidates()[:2]), self._share) and not self._closed
                self._tell()

    @property
    def _closed(self) -> bool:
        return self._climb.best_cost <= self._bound + PRECISION * abs(self._bound)

    def _tell(self) -> None:
        """Tells who watches about a better assignment."""
        climb, reduced = self._climb, self._reduced
        if self._watch is None or climb.best is None or not climb.best_cost < self._told:
            return
        self._told, best = climb.best_cost, climb.best.copy()
        self._watch(Progress(climb.best_cost, self._bound, lambda: reduced.lift(best)))


def _guess(bound: float) -> float:
    """Returns a cost that the best assignment may have, before any is known."""
    return bound + max(0.3 * abs(bound), 1.0) if math.isfinite(bound) else 1.0


def _solution(
    network: CostNetwork, reduced: ReducedNetwork, values: Ints, bound: float, solver: str, clock: Clock
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


def _nothing_fits(network: CostNetwork, pins: Mapping[int, int] | None, clock: Clock, bound: float) -> Solution:
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
