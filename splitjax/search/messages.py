"""Bounds a network of costs from below by messages between neighbours, and reads good assignments off them.

This is sequential tree-reweighted message passing (TRW-S; Kolmogorov, PAMI 2006) over the reduced problem: variables
are visited in order and back, each hands what it knows to the neighbours that come after it. Every pass gives a lower
bound of all assignments' cost that no pass lowers, and an assignment. Messages survive a change of the costs of single
values, such as new prices of memory, and the next pass starts from them.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from splitjax.search.network import Floats, Ints
from splitjax.search.reducing import ReducedNetwork


@dataclasses.dataclass(frozen=True, eq=False)
class Neighbours:
    """Holds the tables between a variable and some of its neighbours side by side, a column a value of a neighbour.

    **Attributes:** `table`: float[values, columns]. `columns`: int[columns]: the neighbour's value, among all values.
    `edge`: int[columns]: the position of the neighbour. `sent`, `received`: where messages to these values stand, and
    the starts of those from each of these neighbours.
    """

    table: Floats
    columns: Ints
    edge: Ints
    sent: Ints
    received: Ints


class Messages:
    """Holds the messages of a network between passes.

    **Arguments:** `network`: the problem. `order`: int[variables]: in which they are visited; None: as they stand.
    """

    def __init__(self, network: ReducedNetwork, order: Ints | None = None):
        count = len(network.costs)
        self.starts: Ints = network.timeline.starts
        self.order: Ints = np.arange(count) if order is None else order
        rank = np.empty(count, dtype=np.int64)
        rank[self.order] = np.arange(count)
        lists: tuple[list[list[tuple[int, Floats, int, int]]], ...] = (
            [[] for _ in range(count)],
            [[] for _ in range(count)],
        )
        position = 0
        for (i, j), table in network.pairs.items():
            if rank[i] > rank[j]:
                i, j, table = j, i, table.T
            to_j, to_i = position, position + table.shape[1]
            position = to_i + table.shape[0]
            lists[0][i].append((j, table, to_j, to_i))
            lists[1][j].append((i, table.T, to_i, to_j))
        self.forward: list[Neighbours | None] = [self._side(entries) for entries in lists[0]]
        self.backward: list[Neighbours | None] = [self._side(entries) for entries in lists[1]]
        self.num_forward: Ints = np.array([len(entries) for entries in lists[0]], dtype=np.int64)
        self.num_backward: Ints = np.array([len(entries) for entries in lists[1]], dtype=np.int64)
        self.values: Floats = np.zeros(position)
        self.sums: Floats = np.zeros(int(self.starts[-1]))  # of messages to each value

    def _side(self, entries: list[tuple[int, Floats, int, int]]) -> Neighbours | None:
        if not entries:
            return None
        sizes = [table.shape[1] for _, table, _, _ in entries]
        return Neighbours(
            table=np.concatenate([table for _, table, _, _ in entries], axis=1),
            columns=np.concatenate([np.arange(self.starts[j], self.starts[j + 1]) for j, _, _, _ in entries]),
            edge=np.repeat(np.arange(len(entries)), sizes),
            sent=np.concatenate([np.arange(to, to + size) for (_, _, to, _), size in zip(entries, sizes)]),
            received=np.array([back for _, _, _, back in entries], dtype=np.int64)[None, :]
            + np.arange(entries[0][1].shape[0])[:, None],
        )

    def sweep(self, costs: Floats, backwards: bool = False) -> tuple[float, Ints]:
        """Visits all variables once.

        **Arguments:** `costs`: float[values of all variables]. `backwards`: from the last variable to the first.

        Returns a lower bound of any assignment's cost, and an assignment, int[variables].
        """
        sides = self.backward if backwards else self.forward
        ahead, behind = (self.num_backward, self.num_forward) if backwards else (self.num_forward, self.num_backward)
        order = self.order[::-1] if backwards else self.order
        bound, chosen = 0.0, np.zeros(len(sides), dtype=np.int64)
        decided = np.zeros_like(self.sums)  # what the chosen values cost their neighbours, instead of their messages
        starts, messages, sums = self.starts.tolist(), self.values, self.sums
        shares = (1.0 / np.maximum(1, np.maximum(ahead, behind))).tolist()
        rests = (1.0 - ahead * np.array(shares)).tolist()
        for v in order.tolist():
            low, high = starts[v], starts[v + 1]
            known = costs[low:high] + sums[low:high]
            value = int((known + decided[low:high]).argmin())
            chosen[v] = value
            if rests[v] > 1e-12:
                bound += rests[v] * float(known.min())
            side = sides[v]
            if side is None:
                continue
            shared = (shares[v] * known)[:, None] - messages[side.received]
            fresh = (side.table + shared[:, side.edge]).min(0)
            sums[side.columns] += fresh - messages[side.sent]
            messages[side.sent] = fresh
            decided[side.columns] += side.table[value] - fresh
        return bound, chosen
