"""Improves an assignment step by step while it stays within the memory.

Two kinds of moves: a single variable takes another value; and a *tree* of variables (a connected region without
circles, everything around it as it is) takes the values that are best together, found exactly by dynamic programming
with memory at a price. A tree whose best values do not fit is solved again with memory dearer where it overflowed.
"""

from __future__ import annotations

import numpy as np

from splitjax.search.network import Floats, Ints
from splitjax.search.reducing import ReducedNetwork

# How often a tree's memory is priced anew before the tree is left as it is.
MAX_PRICINGS = 5
# While it is repaired, one more of so many variables moves in the same round.
VARIABLES_A_MOVE = 400


class Descent:
    """Holds an assignment, with what every other value of a variable would cost, and the memory that is left.

    **Arguments:** `network`: the problem, with at least one variable. `values`: int[variables], where to begin.
    """

    def __init__(self, network: ReducedNetwork, values: Ints):
        self.network, self.timeline = network, network.timeline
        self.starts: list[int] = self.timeline.starts.tolist()
        count = len(network.costs)
        self.tables: list[dict[int, Floats]] = [{} for _ in range(count)]
        # What is forbidden costs more than everything else together, so that moves lead out of it.
        spans = [float(np.abs(table[np.isfinite(table)]).max(initial=0.0)) for table in network.pairs.values()]
        self.forbidden_cost: float = 4.0 * (1.0 + sum(spans) + sum(float(np.abs(c).max()) for c in network.costs))
        for (i, j), table in network.pairs.items():
            finite = np.where(np.isfinite(table), table, self.forbidden_cost)
            self.tables[i][j], self.tables[j][i] = finite, np.ascontiguousarray(finite.T)
        self.beside: list[Floats | None] = [
            np.concatenate(list(tables.values()), axis=1) if tables else None for tables in self.tables
        ]
        self.columns: list[Ints] = [
            np.concatenate([np.arange(self.starts[u], self.starts[u + 1]) for u in tables])
            if tables
            else np.zeros(0, dtype=np.int64)
            for tables in self.tables
        ]
        self.owner: Ints = np.repeat(np.arange(count), np.diff(self.timeline.starts))
        self.own_costs: Floats = np.concatenate(network.costs)
        self.limits: Floats = self.timeline.limits
        self.work = 0  # table entries looked at
        self.begin(values)

    def allow(self, limits: Floats) -> None:
        """Makes `limits`, float[points], those to keep from the next `begin` on."""
        self.limits = limits

    def begin(self, values: Ints) -> None:
        """Takes the assignment `values`, int[variables]."""
        self.values: Ints = np.array(values, dtype=np.int64)
        self.conditional: Floats = self.own_costs.copy()  # of each value, its neighbours as they are
        for variable, value in enumerate(self.values.tolist()):
            beside = self.beside[variable]
            if beside is not None:
                self.conditional[self.columns[variable]] += beside[value]
        self.free: Floats = self.limits - self.timeline.in_use(self.values)
        pairs = (self.tables[i][j][self.values[i], self.values[j]] for i, j in self.network.pairs)
        alone = self.own_costs[self.timeline.starts[:-1] + self.values]
        self.cost: float = self.network.constant + float(alone.sum()) + float(sum(pairs))

    @property
    def fits(self) -> bool:
        """Whether nothing is forbidden and every limit is kept."""
        return self.cost < 0.5 * self.forbidden_cost + self.network.constant and bool((self.free >= 0).all())

    def move(self, variable: int, value: int) -> None:
        """Gives a variable another value."""
        old, start = int(self.values[variable]), self.starts[variable]
        beside = self.beside[variable]
        self.cost += float(self.conditional[start + value] - self.conditional[start + old])
        if beside is not None:
            self.conditional[self.columns[variable]] += beside[value] - beside[old]
        low, high, added = self.timeline.change(variable, old, value)
        self.free[low:high] -= added
        self.values[variable] = value

    def _move_fits(self, variable: int, value: int) -> bool:
        low, high, added = self.timeline.change(variable, int(self.values[variable]), value)
        return bool(((added <= 0) | (self.free[low:high] >= added)).all())

    def flip(self) -> bool:
        """Lets single variables take cheaper values that fit, the most gain first; tells whether any did."""
        gains = self.conditional - self.conditional[self.timeline.starts[:-1] + self.values][self.owner]
        self.work += gains.size
        moved = False
        for position in np.argsort(gains, kind="stable")[: int((gains < -1e-9).sum())].tolist():
            variable = int(self.owner[position])
            start = self.starts[variable]
            gain = self.conditional[position] - self.conditional[start + self.values[variable]]
            if gain < -1e-9 and self._move_fits(variable, position - start):
                self.move(variable, position - start)
                moved = True
        return moved

    def repair(self, max_rounds: int = 2000) -> bool:
        """Moves single variables until everything fits, the least cost a byte first; tells whether it does. Of many
        variables several move in a round, before what memory they save is looked at anew."""
        at_once = 1 + len(self.tables) // VARIABLES_A_MOVE
        for _ in range(max_rounds):
            over = np.maximum(0.0, -self.free)
            if not over.any():
                return True
            needs = self.timeline.price(over / over.max())
            at = self.timeline.starts[:-1] + self.values
            saved = needs[at][self.owner] - needs
            dearer = self.conditional - self.conditional[at][self.owner]
            self.work += needs.size
            useful = saved > 1e-12
            if not useful.any():
                return False
            # What saves more than is over is worth what is over.
            worth = np.minimum(saved, float((over * over).sum() / over.max()))
            rates = np.where(useful, np.where(dearer > 0, dearer / np.where(useful, worth, 1.0), dearer), np.inf)
            if at_once == 1:
                best = np.array([rates.argmin()])
            else:
                best = np.argpartition(rates, min(at_once, rates.size - 1))[:at_once]
                best = best[np.argsort(rates[best], kind="stable")]
            moved: set[int] = set()
            for position in best[np.isfinite(rates[best])].tolist():
                variable = int(self.owner[position])
                if variable not in moved:
                    self.move(variable, position - self.starts[variable])
                    moved.add(variable)
                if len(moved) > 1 and bool((self.free >= 0).all()):
                    break
            if not moved:
                return False
        return False

    def region(self, generator: np.random.Generator, size: int) -> tuple[list[int], list[int]]:
        """Draws a region without circles, of at most `size` variables around a drawn one.

        Returns its variables, each after the one that it hangs on, and the position of that one (-1: the first).
        """
        seed = int(generator.integers(len(self.tables)))
        members, hangs, inside = [seed], [-1], {seed: 0}
        frontier = list(self.tables[seed])
        while frontier and len(members) < size:
            pick = int(generator.integers(len(frontier)))
            frontier[pick], frontier[-1] = frontier[-1], frontier[pick]
            variable = frontier.pop()
            if variable in inside:
                continue
            near = [other for other in self.tables[variable] if other in inside]
            if len(near) != 1:  # a circle closes
                continue
            inside[variable] = len(members)
            hangs.append(inside[near[0]])
            members.append(variable)
            frontier += [other for other in self.tables[variable] if other not in inside]
        return members, hangs

    def improve_tree(self, members: list[int], hangs: list[int], prices: Floats) -> float:
        """Gives a tree the best values that its memory allows, if there are better ones.

        **Arguments:** `members`, `hangs`: of `region`. `prices`: float[points], what memory costs to begin with.

        Returns by how much the cost fell; 0: nothing changed.
        """
        # The costs of each member without the other members.
        alone = [self.conditional[self.starts[v] : self.starts[v + 1]].copy() for v in members]
        tables: list[Floats] = []
        for position, hang in enumerate(hangs):
            if hang < 0:
                tables.append(np.zeros((0, 0)))
                continue
            table = self.tables[members[position]][members[hang]]
            tables.append(table)
            self.work += table.size
            alone[position] -= table[:, self.values[members[hang]]]
            alone[hang] -= table[self.values[members[position]]]
        now = self.values[members].tolist()
        before = self._tree_cost(alone, tables, hangs, now)
        for _ in range(MAX_PRICINGS):
            summed = np.concatenate([[0.0], np.cumsum(prices)])
            best = self._best_of_tree(members, hangs, alone, tables, summed)
            gain = before - self._tree_cost(alone, tables, hangs, best)
            changed = [(v, old, new) for v, old, new in zip(members, now, best) if old != new]
            if not changed or gain < -1e-9 * abs(self.cost):
                if not changed and not prices.any():
                    return 0.0
                if gain <= 0:
                    prices = prices * 0.4 if not changed or gain < 0 else prices
                    if not prices.any():
                        return 0.0
                    continue
            over = self._overflow(changed)
            if over is None:
                if gain <= 1e-9 * (1 + abs(before)):
                    if gain >= 0:
                        self._take(changed)
                    return 0.0
                self._take(changed)
                return gain
            low, amount = over
            prices = prices.copy()
            prices[low : low + amount.size] += max(gain, 1e-6 * abs(self.cost)) * 1.1 * amount / float(amount @ amount)
        return 0.0

    def _tree_cost(self, alone: list[Floats], tables: list[Floats], hangs: list[int], values: list[int]) -> float:
        total = sum(float(costs[value]) for costs, value in zip(alone, values))
        return total + sum(
            float(table[value, values[hang]]) for table, value, hang in zip(tables, values, hangs) if hang >= 0
        )

    def _best_of_tree(
        self, members: list[int], hangs: list[int], alone: list[Floats], tables: list[Floats], summed: Floats
    ) -> list[int]:
        """Returns the values of a tree that cost least with memory paid for; `summed`: prices up to each point."""
        known = [costs + self.timeline.price_of(variable, summed) for variable, costs in zip(members, alone)]
        for position in range(len(members) - 1, 0, -1):
            known[hangs[position]] += (tables[position] + known[position][:, None]).min(0)
        best = [int(known[0].argmin())]
        for position in range(1, len(members)):
            best.append(int((known[position] + tables[position][:, best[hangs[position]]]).argmin()))
        return best

    def _overflow(self, changed: list[tuple[int, int, int]]) -> tuple[int, Floats] | None:
        """Returns (first point, what does not fit from there on) if these changes are made; None: they fit."""
        changes = [self.timeline.change(*change) for change in changed]
        changes = [change for change in changes if change[1] > change[0]]
        if not changes:
            return None
        low, high = min(change[0] for change in changes), max(change[1] for change in changes)
        added = np.zeros(high - low)
        for first, last, sizes in changes:
            added[first - low : last - low] += sizes
        room = self.free[low:high]
        over = np.where(added > 0, added - np.maximum(room, 0.0), 0.0)
        return (low, over) if over.any() else None

    def _take(self, changed: list[tuple[int, int, int]]) -> None:
        for variable, _, new in changed:
            self.move(variable, new)
