"""Shrinks a problem without losing its best assignment.

Compilers state the same decision many times: in the problems of the contest most pairs of variables forbid everything
but a one-to-one relation. A `CostNetwork` goes in; a `ReducedNetwork` over the decisions that are left comes out, with
the way back. In order:

1. Pairs of the same two variables are added up; values without an allowed partner are dropped (arc consistency), and
   values whose memory alone is above a limit.
2. A variable whose value follows from another's becomes a part of it; one with a single value becomes a constant.
3. A table that is a sum of a row and a column becomes costs of values.
4. A value that another one can always replace, at no higher cost and no more memory, is dropped.
5. Points in time at which no more is alive than at another are dropped, and those at which any assignment fits.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from splitjax.errors import SearchError
from splitjax.search.network import Bools, CostNetwork, Floats, Ints
from splitjax.search.timeline import Timeline, Use

# A variable with more values has its dominated ones looked for among fewer pairs.
MAX_DOMINANCE_ENTRIES = 20_000_000


@dataclasses.dataclass(frozen=True, eq=False)
class ReducedNetwork:
    """Holds what is left to decide, and how an assignment of it is one of the original problem.

    **Attributes:**

    - `costs`: float[values] for each variable, all finite. `pairs`: (i, j) with i < j -> float[values of i, values of
      j], not constant; infinity forbids.
    - `timeline`: the memory in use, over the points in time that matter.
    - `constant`: the cost of what is decided. `impossible`: why no assignment is allowed at all; empty: some may be.
    - `sources`: for each original variable, (the reduced variable or -1, int[its values]: the original value).
    """

    costs: tuple[Floats, ...]
    pairs: Mapping[tuple[int, int], Floats]
    timeline: Timeline
    constant: float
    sources: tuple[tuple[int, Ints], ...]
    impossible: str = ""

    def lift(self, values: Ints) -> Ints:
        """Returns the assignment int[original variables] that `values`, int[reduced variables], stands for."""
        return np.array(
            [choices[values[source]] if source >= 0 else choices[0] for source, choices in self.sources], dtype=np.int64
        )

    def cost(self, values: Ints) -> float:
        """Returns the cost of an assignment of the original problem."""
        total = self.constant + sum(float(costs[value]) for costs, value in zip(self.costs, values))
        return total + sum(float(table[values[i], values[j]]) for (i, j), table in self.pairs.items())


class _Impossible(Exception):
    """Says that no assignment is allowed."""


class _Reducer:
    """Holds the problem while it shrinks; `kept[v]` are the original values that variable v still has."""

    def __init__(self, network: CostNetwork, pins: Mapping[int, int], at_least_bytes: bool):
        self.network = network
        self.costs: list[Floats] = [costs.copy() for costs in network.costs]
        self.kept: list[Ints] = [np.arange(costs.size) for costs in network.costs]
        self.tables: list[dict[int, Floats]] = [{} for _ in network.costs]  # both ways round, as views of each other
        self.parent: dict[int, tuple[int, Ints]] = {}  # variable -> (what it follows, its original value by its)
        self.order: list[int] = []  # in which they were merged
        self.constant = 0.0
        self.fixed: set[int] = set()
        self.changed: collections.deque[tuple[int, int]] = collections.deque()
        self.uses: list[list[tuple[int, int, int, Floats]]] = [[] for _ in network.costs]
        for number, memory in enumerate(network.memories):
            for use in memory.uses:
                if use.end > use.begin:
                    self.uses[use.variable].append((number, use.begin, use.end, use.usage_bytes))
        for pair in network.pairs:
            i, j, table = pair.first, pair.second, pair.costs
            if j in self.tables[i]:
                table = self.tables[i][j] + table
            self._set_table(i, j, table)
        for variable in range(len(self.costs)):
            keep = np.isfinite(self.costs[variable])
            for number, _, _, sizes in self.uses[variable]:
                if not at_least_bytes:
                    keep &= sizes <= network.memories[number].limit_bytes
            if variable in pins:
                keep &= self.kept[variable] == pins[variable]
            if not keep.all():
                self._keep(variable, keep)

    def _set_table(self, i: int, j: int, table: Floats) -> None:
        self.tables[i][j], self.tables[j][i] = table, table.T
        self.changed.append((i, j))

    def _drop_table(self, i: int, j: int) -> None:
        del self.tables[i][j], self.tables[j][i]

    def _keep(self, variable: int, keep: Bools) -> None:
        """Drops the values of a variable that `keep`, bool[values], does not name."""
        if not keep.any():
            raise _Impossible(f"no value of {self.network.name(variable)} is allowed")
        self.costs[variable], self.kept[variable] = self.costs[variable][keep], self.kept[variable][keep]
        for other, table in list(self.tables[variable].items()):
            self._set_table(variable, other, table[keep])

    def _add(self, variable: int, costs: Floats) -> None:
        """Adds costs to a variable's values; infinities drop values."""
        self.costs[variable] = self.costs[variable] + costs
        keep = np.isfinite(self.costs[variable])
        if not keep.all():
            self._keep(variable, keep)

    def settle(self) -> None:
        """Simplifies tables until none can be."""
        while self.changed:
            i, j = self.changed.popleft()
            if j not in self.tables[i] or i in self.parent or j in self.parent:
                continue
            table = self.tables[i][j]
            finite = np.isfinite(table)
            if not finite.all():
                rows: Bools = np.any(finite, axis=1)
                columns: Bools = np.any(finite, axis=0)
                if not rows.all():
                    self._keep(i, rows)
                    continue
                if not columns.all():
                    self._keep(j, columns)
                    continue
                if (finite.sum(1) == 1).all():
                    self._follow(j, i, finite.argmax(1))
                    continue
                if (finite.sum(0) == 1).all():
                    self._follow(i, j, finite.argmax(0))
                    continue
            if table.shape[0] == 1 or table.shape[1] == 1 or finite.all():
                row, column = table[0], table[:, 0] - (table[0, 0] if math.isfinite(table[0, 0]) else 0.0)
                if table.shape[0] == 1:
                    self._drop_table(i, j)
                    self._add(j, row)
                elif table.shape[1] == 1:
                    self._drop_table(i, j)
                    self._add(i, table[:, 0])
                elif (table == row[None, :] + column[:, None]).all():
                    self._drop_table(i, j)
                    self._add(i, column)
                    self._add(j, row)

    def _follow(self, variable: int, leader: int, values: Ints) -> None:
        """Makes `variable` a part of `leader`: `values`, int[values of leader], is the value that it takes."""
        self._add_merged(leader, self.tables[leader][variable][np.arange(values.size), values])
        self._drop_table(leader, variable)
        whole = np.full(self.network.costs[leader].size, -1)
        whole[self.kept[leader]] = self.kept[variable][values]
        self.parent[variable] = leader, whole
        self.order.append(variable)
        self._add_merged(leader, self.costs[variable][values])
        for other, table in list(self.tables[variable].items()):
            self._drop_table(variable, other)
            moved = table[values]
            if other in self.tables[leader]:
                moved = self.tables[leader][other] + moved
            self._set_table(leader, other, moved)
        keep = np.isfinite(self.costs[leader])
        if not keep.all():
            self._keep(leader, keep)

    def _add_merged(self, leader: int, costs: Floats) -> None:
        self.costs[leader] = self.costs[leader] + costs

    def gather_uses(self) -> None:
        """Hands the memory of every merged variable to the one that it follows, by that one's values."""
        resolved: dict[int, tuple[int, Ints]] = {}
        for variable in reversed(self.order):
            leader, whole = self.parent[variable]
            if leader in resolved:
                root, above = resolved[leader]
                whole, leader = np.where(above >= 0, whole[above], -1), root
            resolved[variable] = leader, whole
            moved = [(m, begin, end, sizes[whole]) for m, begin, end, sizes in self.uses[variable]]
            self.uses[leader].extend(moved)
            self.uses[variable] = []
        self.parent = resolved

    def drop_dominated(self, variable: int) -> bool:
        """Drops the values that another one can always replace; tells whether there were any."""
        costs, kept = self.costs[variable], self.kept[variable]
        size, tables = costs.size, self.tables[variable]
        entries = size * size * (sum(table.shape[1] for table in tables.values()) + len(self.uses[variable]))
        if size == 1 or entries > MAX_DOMINANCE_ENTRIES:
            return False
        # excess[a, b]: by how much b is at most dearer than a
        excess = costs[None, :] - costs[:, None]
        for table in tables.values():
            if not np.isfinite(table).all():
                return False
            excess = excess + (table[None, :, :] - table[:, None, :]).max(2)
        candidates = excess <= 0
        if self.uses[variable]:
            sizes = np.unique(np.stack([use[3][kept] for use in self.uses[variable]]), axis=0)
            candidates &= np.all(sizes[:, None, :] <= sizes[:, :, None], axis=0)
        np.fill_diagonal(candidates, False)
        # Of two that can replace each other the first stays.
        candidates &= ~(candidates.T & (np.arange(size)[None, :] > np.arange(size)[:, None]))
        keep: Bools = ~np.any(candidates, axis=1)
        if keep.all():
            return False
        self._keep(variable, keep)
        return True

    def left(self) -> list[int]:
        return [v for v in range(len(self.costs)) if v not in self.parent and self.costs[v].size > 1]


def reduce_network(
    network: CostNetwork, pins: Mapping[int, int] | None = None, *, at_least_bytes: bool = False
) -> ReducedNetwork:
    """Returns the reduced form of `network`, with the variables of `pins` (variable -> value) fixed.

    With `at_least_bytes` every limit is the least peak that uses alone imply instead, for who asks how much memory is
    needed: no value is dropped for its size.

    Raises `SearchError` for a pin that names no variable or no value.
    """
    pins = dict(pins or {})
    for variable, value in pins.items():
        if not (0 <= variable < len(network.costs) and 0 <= value < network.costs[variable].size):
            raise SearchError(
                "a pin names no value of a variable",
                value=(variable, value),
                place="pins",
                remedy="pin a variable by its number to the number of a value that it has",
            )
    try:
        reducer = _Reducer(network, pins, at_least_bytes)
        reducer.settle()
        reducer.gather_uses()
        todo = reducer.left()
        while todo:
            again: set[int] = set()
            for variable in todo:
                if variable not in reducer.parent and reducer.drop_dominated(variable):
                    again.add(variable)
                    again.update(reducer.tables[variable])
            before = len(reducer.order)
            reducer.settle()
            if len(reducer.order) > before:  # only tables with infinities merge anything after this
                reducer.order = reducer.order[before:]
                _regather(reducer)
            todo = sorted(again & set(reducer.left()))
    except _Impossible as reason:
        empty = Timeline.of((), [], tuple(memory.limit_bytes for memory in network.memories))
        return ReducedNetwork((), {}, empty, 0.0, (), str(reason))
    return _finish(reducer, at_least_bytes)


def _regather(reducer: _Reducer) -> None:
    earlier, later = reducer.parent, {v: reducer.parent[v] for v in reducer.order}
    reducer.parent = later
    reducer.gather_uses()
    for variable, (leader, whole) in earlier.items():
        if leader in reducer.parent and variable not in later:
            root, above = reducer.parent[leader]
            earlier[variable] = root, np.where(above >= 0, whole[above], -1)
    reducer.parent = {**earlier, **reducer.parent}


def _finish(reducer: _Reducer, at_least_bytes: bool) -> ReducedNetwork:
    left = reducer.left()
    number = {variable: position for position, variable in enumerate(left)}
    constant, uses = 0.0, []
    for variable in range(len(reducer.costs)):
        if variable in reducer.parent:
            continue
        if variable not in number:
            constant += float(reducer.costs[variable][0])
        kept = reducer.kept[variable]
        uses += [Use(number.get(variable, -1), m, b, e, s[kept]) for m, b, e, s in reducer.uses[variable]]
    sources = []
    for variable in range(len(reducer.costs)):
        leader, whole = reducer.parent.get(variable, (variable, np.arange(reducer.network.costs[variable].size)))
        sources.append((number.get(leader, -1), whole[reducer.kept[leader]]))
    pairs = {
        (number[i], number[j]): np.ascontiguousarray(table)
        for i in left
        for j, table in sorted(reducer.tables[i].items())
        if i < j
    }
    limits = tuple(None if at_least_bytes else memory.limit_bytes for memory in reducer.network.memories)
    timeline = Timeline.of(tuple(reducer.costs[v].size for v in left), uses, limits)
    return ReducedNetwork(tuple(reducer.costs[v] for v in left), pairs, timeline, constant, tuple(sources))
