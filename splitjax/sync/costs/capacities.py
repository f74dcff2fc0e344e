"""Gives exchanges their static sizes: room for what the first steps had, and some for chance.

A `Sparsity` with samples comes in, numbers and `Capacities` come out.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import ArrayLike

from splitjax.sync.profile import Sparsity

# Capacities are factors of 2^(1/128) apart: half a percent too much at most, and sizes that drift meet few recompiles.
_PER_OCTAVE = 128
# That a count's variance is its mean, as a Poisson's is, is believed as if two more counts had told so: chosen on words
# drawn by their counts (`benchmarks sparse --only overflow`), and kept for everything else.
_POISSON_COUNTS = 2


@dataclasses.dataclass(frozen=True)
class Capacities:
    """Static sizes of an exchange; which ones count is the scheme's matter, others are 0.

    **Attributes:**

    - `local`: rows of one worker. `union`: rows of the sum.
    - `push`: items from one worker to one owner. `pull`: items of one owner.
    - `codes`: codes of one worker's list of ids; `code_bits`: bits of one (1: a bitmap).
    - `hot`: rows summed by a dense all-reduce.
    - `levels`: rows of the partial sums that are sent, round by round; of `blocks`, the blocks of one worker.
    """

    local: int = 0
    union: int = 0
    push: int = 0
    pull: int = 0
    codes: int = 0
    code_bits: int = 0
    hot: int = 0
    levels: tuple[int, ...] = ()


def bucket(size: float, most: int | None = None) -> int:
    """Returns the next `size` of the series 1, 2, ... 128, and on in steps of 2^(1/128), but not more than `most`."""
    size = max(math.ceil(size), 0)
    capacity = (
        size if size <= _PER_OCTAVE else math.ceil(2 ** (math.ceil(math.log2(size) * _PER_OCTAVE - 1e-9) / _PER_OCTAVE))
    )
    return capacity if most is None else min(capacity, most)


def room(counts: ArrayLike, most: int, odds: float, alike: ArrayLike | None = None) -> int:
    """Returns the capacity at which padding and fallbacks together cost least, for counts such as these.

    More room is padding in the messages of every step; less lets more steps overflow, each of which sends all rows
    once more. With a count's distribution known, the best capacity is where its density, times the counts of a step,
    has fallen to `odds` (the critical ratio of a newsvendor: Arrow, Harris and Marschak, "Optimal inventory policy",
    1951). As few steps were seen, that distribution is a Student's t: the mean is as uncertain as those steps leave it,
    and the variance over the mean is pooled from all counts, and a little from a Poisson count's, which is 1.

    **Arguments:**

    - `counts`: integers [steps, counts of a step], as seen; the same place is the same count, such as that of a worker.
    - `most`: the most that there can be.
    - `odds`: what room for one more costs a step, over what a step costs that lacks room.
    - `alike`: other counts, [steps, any], whose variance over the mean is about the same: the rows of each worker tell
      how much their union varies, of which there is only one a step.
    """
    seen = np.asarray(counts, np.float64)
    if not seen.any():
        return max(bucket(0, most), 1)
    (steps, chances), mean = seen.shape, float(seen.mean())
    squares, freedom = float(_POISSON_COUNTS), _POISSON_COUNTS
    for known in (seen,) if alike is None else (seen, np.asarray(alike, np.float64)):
        known = known[:, known.any(axis=0)]
        squares += float((known.var(axis=0) * steps / known.mean(axis=0)).sum())
        freedom += (steps - 1) * known.shape[1]
    ratio, means = squares / freedom, seen.mean(axis=0)
    # Whether one of the counts is larger than the others, or was so by chance (the shrinkage of James and Stein, 1961).
    between = float(means.var(ddof=1)) if chances > 1 else 0.0
    own = max(0.0, 1 - ratio * mean / steps / between) if between else 0.0
    top = mean + own * (float(means.max()) - mean)
    scale = math.sqrt(ratio * top * (1 + 1 / steps))
    above = _density_falls_to(odds * scale / chances, freedom)
    return max(bucket(max(top + above * scale, float(seen.max())), most), 1)


def _density_falls_to(density: float, freedom: int) -> float:
    """Returns from which point above 0 on Student's t distribution of `freedom` degrees has less than this density."""
    if density <= 0:
        return math.inf
    top = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    return math.sqrt(freedom * max((top / density) ** (2 / (freedom + 1)) - 1, 0.0))


def odds_of(sparsity: Sparsity, num_bytes: float) -> float:
    """Returns what room costs over what its lack costs: `num_bytes` bytes, which one more row, or another item, of
    room adds to what a worker sends in a step, over the bytes of a fallback in steps such as those of `sparsity`."""
    return num_bytes / sparsity.fallback_bytes if sparsity.fallback_bytes else math.inf


def union_capacity(sparsity: Sparsity, num_bytes: float | None = None) -> int:
    """Returns room for the union of all workers' rows, by `sparsity`. `num_bytes`: as of `partial_capacity`."""
    return partial_capacity(sparsity, sparsity.num_workers, num_bytes)


def local_capacity(sparsity: Sparsity, num_bytes: float | None = None) -> int:
    """Returns room for a worker's rows, by `sparsity`. `num_bytes`: as of `partial_capacity`."""
    return partial_capacity(sparsity, 1, num_bytes)


def partial_capacity(sparsity: Sparsity, num_workers: int, num_bytes: float | None = None) -> int:
    """Returns room for the union of any `num_workers` neighbouring workers' rows, from a multiple of that number on.

    **Arguments:**

    - `sparsity`: the profile of the first steps, with its samples.
    - `num_workers`: workers whose rows are united.
    - `num_bytes`: what a worker sends more in a step for one more row of room; None: the row, once.
    """
    unions = [
        [
            np.unique(np.concatenate(step[first : first + num_workers])).size
            for first in range(0, len(step), num_workers)
        ]
        for step in sparsity.samples
    ]
    price = sparsity.table.row_bytes if num_bytes is None else num_bytes
    alike = None if num_workers == 1 else worker_rows(sparsity)
    return room(unions, sparsity.table.num_rows, odds_of(sparsity, price), alike)


def worker_rows(sparsity: Sparsity) -> list[list[int]]:
    """Returns the rows of each worker in each step of `sparsity`: [steps, workers]."""
    return [[ids.size for ids in step] for step in sparsity.samples]
