"""Draws small problems, and solves them by trying every assignment."""

from __future__ import annotations

import itertools
import math

import numpy as np

from splitjax.search.network import CostNetwork, Memory, MemoryUse, Pair


def drawn_network(seed: int, num_variables: int = 6, *, hard: bool = True, limit_share: float = 0.5) -> CostNetwork:
    """Draws a problem of whole costs; with `hard`, tables forbid some pairs, and one of them all but a one-to-one
    relation. `limit_share`: where the limit lies between the least and the most that can be in use."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(2, 5, num_variables)
    sizes[1] = sizes[0]
    costs = tuple(generator.integers(0, 40, size).astype(float) for size in sizes)
    pairs = []
    for i, j in itertools.combinations(range(num_variables), 2):
        if j != i + 1 and generator.random() > 0.4:
            continue
        table = generator.integers(0, 30, (sizes[i], sizes[j])).astype(float)
        if hard and (i, j) == (0, 1):
            table = np.where(np.eye(sizes[i])[generator.permutation(sizes[i])] > 0, table, math.inf)
        elif hard and generator.random() < 0.4:
            table[generator.random(table.shape) < 0.2] = math.inf
        pairs.append(Pair(i, j, table))
        if generator.random() < 0.2:
            pairs.append(Pair(j, i, generator.integers(0, 9, (sizes[j], sizes[i])).astype(float)))
    uses = []
    for variable, size in enumerate(sizes):
        for _ in range(int(generator.integers(1, 3))):
            begin, end = sorted(generator.integers(0, 12, 2).tolist())
            uses.append(MemoryUse(variable, begin, end, generator.integers(0, 100, size).astype(float)))
    peaks = [max(peak(uses, values)) for values in itertools.product(*(range(size) for size in sizes))]
    limit = round(min(peaks) + limit_share * (max(peaks) - min(peaks)))
    return CostNetwork(costs, tuple(pairs), (Memory("HBM", float(limit), tuple(uses)),))


def peak(uses: list[MemoryUse], values: tuple[int, ...]) -> list[float]:
    """What is alive at each time, written down as plainly as can be."""
    return [sum(use.usage_bytes[values[use.variable]] for use in uses if use.begin <= t < use.end) for t in range(13)]


def plain_cost(network: CostNetwork, values: tuple[int, ...]) -> float:
    alone = sum(costs[value] for costs, value in zip(network.costs, values))
    return alone + sum(pair.costs[values[pair.first], values[pair.second]] for pair in network.pairs)


def best_by_trying(network: CostNetwork, pins: dict[int, int] | None = None) -> float:
    """The least cost of all assignments that fit; infinity where none does."""
    best = math.inf
    for values in itertools.product(*(range(costs.size) for costs in network.costs)):
        if any(values[variable] != value for variable, value in (pins or {}).items()):
            continue
        if all(max(peak(list(memory.uses), values)) <= memory.limit_bytes for memory in network.memories):
            best = min(best, plain_cost(network, values))
    return best
