"""Finds what memory is worth at every point in time, and with it a lower bound that holds under the limits.

Each point gets a price for what is used above its limit (a Lagrange multiplier). At any prices, the least cost with
memory paid for, minus what the limits are worth, is at most the cost of every assignment that fits. Prices follow the
memory that passes of messages would use (a subgradient, averaged as in the volume algorithm of Barahona and Anbil,
2000), in steps of Polyak's length. Assignments come off every pass, and those near the limits are where local search
begins.
"""

from __future__ import annotations

import numpy as np

from splitjax.search.messages import Messages
from splitjax.search.network import Floats, Ints
from splitjax.search.reducing import ReducedNetwork

FIRST_PASSES = 10  # before memory has a price
PATIENCE = 30  # passes without a better bound before steps get shorter
AVERAGING = 0.2  # the share of the latest pass in the average memory
STEP = 0.1
SHORTENING = 0.7
MIN_STEP = 1e-7
CANDIDATES = 6
# What is taken off a bound for the rounding of the sums behind it, relative to what was added up.
ROUNDING = 1e-14


def _tables(network: ReducedNetwork) -> list[Floats]:
    return [*network.costs, *network.pairs.values()]


class PriceSearch:
    """Holds prices, messages, the best bound, and the assignments seen on the way.

    **Arguments:** `network`: the problem, with at least one variable.
    """

    def __init__(self, network: ReducedNetwork):
        self.network, self.timeline = network, network.timeline
        self.messages = Messages(network)
        self.costs: Floats = np.concatenate(network.costs)
        self.prices: Floats = np.zeros(self.timeline.limits.size)
        self.best_prices: Floats = self.prices
        self.bound = -np.inf
        self.num_passes = 0
        largest = [float(np.abs(costs[np.isfinite(costs)]).max(initial=0.0)) for costs in _tables(network)]
        self._largest = max(largest, default=0.0) * len(network.costs)
        self.num_entries = sum(table.size for table in network.pairs.values()) + self.timeline.sizes.size
        self.best_fitting: tuple[float, Ints] | None = None
        self._near: list[tuple[float, int, Ints]] = []  # (penalised cost, pass, assignment)
        self._average: Floats | None = None
        self._length, self._since = 1.0, 0

    @property
    def settled(self) -> bool:
        """Whether steps have become too short to change anything."""
        return self._length < MIN_STEP

    def step(self, target: float) -> float:
        """Makes one pass, and moves the prices; `target`: a cost that some assignment has, or is guessed to have.

        Returns the lower bound that the pass proves, at the prices before it."""
        priced = self.costs + self.timeline.price(self.prices) if self.prices.any() else self.costs
        bound, values = self.messages.sweep(priced, self.num_passes % 2 == 1)
        paid = float(self.prices @ self.timeline.limits)
        bound += self.network.constant - paid
        bound -= ROUNDING * (self._largest + abs(paid) + abs(bound))
        over = self.timeline.in_use(values) - self.timeline.limits
        self._keep(values, over)
        if bound > self.bound + 1e-4 * abs(self.bound) or not np.isfinite(self.bound):
            self._since = 0
        else:
            self._since += 1
            if self._since > PATIENCE:
                self._length, self._since = self._length * SHORTENING, 0
        if bound > self.bound:
            self.bound, self.best_prices = bound, self.prices
        self._average = over if self._average is None else (1 - AVERAGING) * self._average + AVERAGING * over
        self.num_passes += 1
        if self.num_passes > FIRST_PASSES:
            direction = np.where((self.prices > 0) | (self._average > 0), self._average, 0.0)
            length = float(direction @ direction)
            if length > 0:
                gap = max(target - bound, 0.01 * abs(target))
                self.prices = np.maximum(0.0, self.prices + self._length * STEP * gap / length * direction)
        return bound

    def _keep(self, values: Ints, over: Floats) -> None:
        """Remembers an assignment that fits, or that would be cheap if what is over cost ten times its price."""
        cost = self.network.cost(values)
        excess = np.maximum(over, 0.0)
        if np.isfinite(cost) and not excess.any() and (self.best_fitting is None or cost < self.best_fitting[0]):
            self.best_fitting = cost, values
        if self.prices.any() or not excess.any():
            self._near.append((cost + 10.0 * float(self.prices @ excess), self.num_passes, values))
        if len(self._near) > 8 * CANDIDATES:
            self._near = self._distinct()

    def _distinct(self) -> list[tuple[float, int, Ints]]:
        kept: list[tuple[float, int, Ints]] = []
        for entry in sorted(self._near, key=lambda entry: entry[:2]):
            if all(entry[0] != other[0] for other in kept):
                kept.append(entry)
        return kept[:CANDIDATES]

    def candidates(self) -> list[Ints]:
        """Returns the most promising assignments, the best that fits first."""
        fitting = [self.best_fitting[1]] if self.best_fitting is not None else []
        return fitting + [values for _, _, values in self._distinct()]
