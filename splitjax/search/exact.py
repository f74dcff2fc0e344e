"""Solves small problems to proven optimality as mixed-integer programs, by HiGHS (`scipy.optimize.milp`).

A value is a number between 0 and 1, whole at the end; so is every pair of values that costs something together, tied
to its two values (the local polytope). Each point in time is a row that keeps the limit.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy.optimize import Bounds, milp
from scipy.sparse import csr_array, diags_array, vstack

from splitjax.search.network import Floats, Ints
from splitjax.search.reducing import ReducedNetwork
from splitjax.search.timeline import Timeline


@dataclasses.dataclass(frozen=True, eq=False)
class Exact:
    """Holds what an exact solver found.

    **Attributes:** `values`: int[variables]; None: nothing that fits. `bound`: no assignment that fits costs less;
    infinity: none fits. `work`: nodes of its tree. `finished`: whether it ended by itself.
    """

    values: Ints | None
    bound: float
    work: int
    finished: bool


def num_columns(network: ReducedNetwork) -> int:
    """Returns how many numbers the program of `network` has."""
    return int(network.timeline.starts[-1]) + sum(table.size for table in network.pairs.values())


def solve_by_milp(network: ReducedNetwork, max_nodes: int, seconds: float) -> Exact:
    """Solves `network`, which has at least one variable, within `max_nodes` nodes of the tree and `seconds`."""
    timeline = network.timeline
    starts, count = timeline.starts, int(timeline.starts[-1])
    objective = [np.concatenate(network.costs)]
    rows: list[Ints] = [np.repeat(np.arange(len(network.costs)), np.diff(starts))]
    columns: list[Ints] = [np.arange(count)]
    entries: list[Floats] = [np.ones(count)]
    right: list[Floats] = [np.ones(len(network.costs))]
    row, column = len(network.costs), count
    for (i, j), table in network.pairs.items():
        size_i, size_j = table.shape
        first, second = np.nonzero(np.isfinite(table))  # what is forbidden has no number
        objective.append(table[first, second])
        numbers = column + np.arange(first.size)
        rows += [row + first, row + np.arange(size_i), row + size_i + second, row + size_i + np.arange(size_j)]
        columns += [numbers, starts[i] + np.arange(size_i), numbers, starts[j] + np.arange(size_j)]
        entries += [np.ones(first.size), -np.ones(size_i), np.ones(first.size), -np.ones(size_j)]
        right.append(np.zeros(size_i + size_j))
        row, column = row + size_i + size_j, column + first.size
    places = np.concatenate(rows), np.concatenate(columns)
    matrix = csr_array((np.concatenate(entries), places), shape=(row, column))
    high = np.concatenate(right)
    low = high
    if timeline.limits.size:
        memory, room = _memory_rows(timeline, column)
        matrix = csr_array(vstack([matrix, memory]))
        low, high = np.concatenate([low, np.full(room.size, -np.inf)]), np.concatenate([high, room])
    costs = np.concatenate(objective)
    scale = float(np.abs(costs).max(initial=0.0)) or 1.0
    answer = milp(
        costs / scale,
        integrality=np.concatenate([np.ones(count), np.zeros(column - count)]),
        bounds=Bounds(0, 1),
        constraints=(matrix, low, high),
        options={"node_limit": max_nodes, "time_limit": seconds, "mip_rel_gap": 0.0},
    )
    work = int(getattr(answer, "mip_node_count", 0) or 0)
    if answer.status == 2:
        return Exact(None, math.inf, work, True)
    dual = getattr(answer, "mip_dual_bound", None)
    bound = network.constant + dual * scale if dual is not None and math.isfinite(dual) else -math.inf
    if answer.x is None:
        return Exact(None, bound, work, False)
    values = np.array([answer.x[starts[v] : starts[v + 1]].argmax() for v in range(len(network.costs))])
    return Exact(values, bound, work, answer.status == 0)


def _memory_rows(timeline: Timeline, num_columns: int) -> tuple[csr_array, Floats]:
    """Returns the rows that keep the limits, each divided by the largest size in it, and their right sides."""
    spans = (timeline.ends - timeline.begins)[timeline.use_of_size]
    first = np.repeat(timeline.begins[timeline.use_of_size] - (np.cumsum(spans) - spans), spans)
    points = first + np.arange(int(spans.sum()))
    sizes, columns = np.repeat(timeline.sizes, spans), np.repeat(timeline.value_of_size, spans)
    used = sizes > 0
    matrix = csr_array((sizes[used], (points[used], columns[used])), shape=(timeline.limits.size, num_columns))
    largest = np.ones(timeline.limits.size)
    np.maximum.at(largest, points, sizes)
    return csr_array(diags_array(1.0 / largest) @ matrix), timeline.limits / largest
