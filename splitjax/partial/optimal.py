"""Chooses how many workers contribute to each segment: the least variance of the gradient for the time to be spent.

The noise and the cost of every segment go in, a number of contributors per segment comes out. Minimises sum_j noise_j /
n_j under sum_j n_j cost_j <= budget, where n_j never falls towards the loss (who differentiates a segment
differentiates all behind it): n_j is in proportion to sqrt(noise_j / cost_j) (Neyman's allocation), segments that would
violate the order are pooled (isotonic regression, pool adjacent violators), and rounded to whole workers greedily.
Where there are few enough ways they are all compared instead: rounding can miss the best by a third where workers are
few.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from splitjax.errors import PartialError, Refusal

_ROUNDING = 1e-9  # of the budget, for sums of floating-point times
_FEW_WAYS = 20_000


def optimal_contributors(
    noise: Sequence[float], costs: Sequence[float], num_workers: int, budget: float, place: str
) -> tuple[int, ...] | Refusal:
    """Chooses the number of contributors per segment.

    **Arguments:**

    - `noise`: per segment, input side first, the variance of one worker's gradient.
    - `costs`: per segment the time that one worker spends; the last with the forward pass.
    - `num_workers`: the most that can contribute.
    - `budget`: the time of all workers over that of all differentiating everything.
    - `place`: what an error names as its place.

    Returns numbers from 1 to `num_workers` that never fall; the last segment has all workers, as each of them runs the
    forward pass; a refusal, a `PartialError`, for a budget below one contributor a segment. Source: Neyman, "On the two
    different aspects of the representative method" (1934), for the allocation.
    """
    allowed = budget * num_workers * sum(costs) * (1 + _ROUNDING)
    counts = [1] * (len(costs) - 1) + [num_workers]
    least = _spent(counts, costs)
    if least > allowed:
        return Refusal(
            "no depths keep the budget: with one worker at full depth they take"
            f" {least / (num_workers * sum(costs)):.3f} of full backpropagation",
            value=budget,
            place=place,
            remedy="raise the budget, or use a smaller batch with full backpropagation",
            kind=PartialError,
        )
    if math.comb(len(costs) + num_workers - 2, num_workers - 1) <= _FEW_WAYS:
        return _best(noise, costs, num_workers, allowed)
    wanted = _continuous(noise[:-1], costs[:-1], num_workers, allowed - num_workers * costs[-1])
    counts = [*(max(1, min(num_workers, math.floor(count + _ROUNDING))) for count in wanted), num_workers]
    # the next whole worker where it lowers the variance most for its time; a block that has to rise together rises
    # together
    while True:
        best, gain = None, 0.0
        for start in range(len(counts) - 1):
            end = start
            while end + 1 < len(counts) and counts[end + 1] <= counts[start]:
                end += 1
            if counts[start] >= num_workers:
                continue
            raised = [*counts[:start], *(counts[start] + 1 for _ in range(start, end + 1)), *counts[end + 1 :]]
            if _spent(raised, costs) > allowed:
                continue
            extra = _spent(raised, costs) - _spent(counts, costs)
            rate = (_variance(noise, counts) - _variance(noise, raised)) / max(extra, 1e-300)
            if best is None or rate > gain:
                best, gain = raised, rate
        if best is None:
            return tuple(counts)
        counts = best


def _best(noise: Sequence[float], costs: Sequence[float], num_workers: int, allowed: float) -> tuple[int, ...]:
    """Compares all ways that cost at most `allowed`. A way is given, per k, by the first segment that at least k
    workers contribute to."""
    numbers = range(len(costs))
    starts = np.array(list(itertools.combinations_with_replacement(numbers, num_workers - 1)), np.int32).reshape(
        -1, num_workers - 1
    )
    counts = 1 + sum(
        (starts[:, k, None] <= np.arange(len(costs)) for k in range(num_workers - 1)),
        np.zeros((len(starts), len(costs)), np.int32),
    )
    counts = counts[counts @ np.asarray(costs, float) <= allowed]
    variance = (np.asarray(noise, float) / counts).sum(1)
    return tuple(int(count) for count in counts[np.argmin(variance)])


def _spent(counts: Sequence[int], costs: Sequence[float]) -> float:
    return sum(count * cost for count, cost in zip(counts, costs, strict=True))


def _variance(noise: Sequence[float], counts: Sequence[int]) -> float:
    return sum(variance / count for variance, count in zip(noise, counts, strict=True))


def _continuous(noise: Sequence[float], costs: Sequence[float], num_workers: int, allowed: float) -> list[float]:
    """Gives the numbers of contributors without rounding, each within 1 and `num_workers`."""
    blocks: list[tuple[float, float, int]] = []  # (noise, cost, segments)
    for variance, cost in zip(noise, costs, strict=True):
        blocks.append((variance, max(cost, 1e-300), 1))
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            (a, b, k), (c, d, m) = blocks[-2:]
            blocks[-2:] = [(a + c, b + d, k + m)]
    rates = [(math.sqrt(variance / cost), cost, count) for variance, cost, count in blocks]
    clip = lambda scale: [min(max(scale * rate, 1.0), float(num_workers)) for rate, _, _ in rates]
    spent = lambda scale: sum(n * cost for n, (_, cost, _) in zip(clip(scale), rates, strict=True))
    low, high = 0.0, num_workers / max(min((rate for rate, _, _ in rates if rate > 0), default=1.0), 1e-300)
    if spent(high) <= allowed:
        low = high
    for _ in range(100):  # the time grows with the scale
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) <= allowed else (low, middle)
    return [n for n, (_, _, count) in zip(clip(low), rates, strict=True) for _ in range(count)]
