"""Searches from assignment to assignment: trees are improved in turn, and where that ends, a small region is shaken.

This is iterated local search over `Descent`. What it keeps fits the memory of the original problem exactly.
"""

from __future__ import annotations

import math

import numpy as np

from splitjax.search.descent import Descent
from splitjax.search.network import CostNetwork, Floats, Ints
from splitjax.search.reducing import ReducedNetwork

MAX_REPAIRS = 400
# Table entries that the fixed cost of handling a variable in a tree is worth.
HANDLING = 4_000
LARGEST_TREE = 128
TREES_IN_TURN = 16
# Trees for each variable without any gain before a region is shaken.
PATIENCE = 0.3
LARGEST_SHAKE = 12
# Shakes for each variable, and at least, without any gain before the search gives up.
MAX_SHAKES = 40
MIN_SHAKES = 400


class Climb:
    """Holds the best assignment, and the one that is being improved.

    **Arguments:** `network`: the original problem. `reduced`: what is left of it. `generator`: draws trees and shakes.
    """

    def __init__(self, network: CostNetwork, reduced: ReducedNetwork, generator: np.random.Generator):
        self._network, self._reduced, self._generator = network, reduced, generator
        self._descent = Descent(reduced, np.zeros(len(reduced.costs), dtype=np.int64))
        self.best: Ints | None = None
        self.best_cost = math.inf
        self._idle = 0  # trees without gain
        self._shakes = 0  # without gain
        self._base: tuple[float, Ints] | None = None  # before the shake

    @property
    def exhausted(self) -> bool:
        """Whether shaking has long been of no use."""
        return self._shakes > max(MIN_SHAKES, MAX_SHAKES * len(self._reduced.costs))

    def start(self, candidates: list[Ints]) -> int:
        """Repairs and improves each of `candidates`, int[variables], and goes on from the best. Returns the work."""
        descent, before = self._descent, self._descent.work
        for values in candidates:
            descent.begin(values)
            if descent.repair(MAX_REPAIRS):
                self._flip()
                self._record()
        if self.best is not None:
            descent.begin(self.best)
            self._base, self._idle, self._shakes = None, 0, 0
        return descent.work - before + len(candidates) * HANDLING * len(self._reduced.costs)

    def improve(self, prices: Floats) -> int:
        """Improves some trees, with memory at `prices`, float[points], to begin with; shakes a region where that has
        ended. Returns the work."""
        descent, generator, before = self._descent, self._generator, self._descent.work
        count = len(self._reduced.costs)
        handled = 0
        largest = math.log2(min(LARGEST_TREE, max(2, count)))
        for _ in range(TREES_IN_TURN):
            members, hangs = descent.region(generator, max(1, int(2 ** generator.uniform(0.5, largest))))
            scale = (0.0, 0.5, 1.0, 1.0)[int(generator.integers(4))]
            gained = descent.improve_tree(members, hangs, scale * prices)
            handled += len(members) + self._reduced.timeline.limits.size // 500
            self._idle = 0 if gained > 0 else self._idle + 1
        patience = max(8.0, PATIENCE * count) if self._base is None else 8 * TREES_IN_TURN
        if self._idle >= patience:
            self._flip()
            self._record()
            handled += self._shake()
        return descent.work - before + HANDLING * handled

    def finish(self) -> None:
        """Takes what is under way into account."""
        if self.best is not None:
            self._flip()
            self._record()

    def _flip(self) -> None:
        while self._descent.flip():
            pass

    def _record(self) -> bool:
        """Remembers the present assignment if it is the best that fits; tells whether it is."""
        descent = self._descent
        if not descent.fits or not descent.cost < self.best_cost:
            return False
        cost = self._reduced.cost(descent.values)  # anew: what changes add up to is rounded
        if not cost < self.best_cost or not self._network.fits(self._reduced.lift(descent.values)):
            return False
        self.best, self.best_cost, self._shakes = descent.values.copy(), cost, 0
        return True

    def _shake(self) -> int:
        """Goes back to the best assignment unless the present one is as good, and gives a region random values."""
        descent, generator = self._descent, self._generator
        if self._base is not None and descent.cost > self._base[0]:
            descent.begin(self._base[1])
        self._base = descent.cost, descent.values.copy()
        self._shakes += 1
        self._idle = 0
        members, _ = descent.region(generator, int(generator.integers(1, LARGEST_SHAKE + 1)))
        for variable in members:
            value = int(generator.integers(self._reduced.costs[variable].size))
            descent.move(variable, value)
        if not descent.repair(MAX_REPAIRS):
            descent.begin(self._base[1])
        return len(self._reduced.costs)
