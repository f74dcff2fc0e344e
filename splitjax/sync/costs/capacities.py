"""Gives exchanges their static sizes: room for what the first steps had, and some for chance.

A `Sparsity` with samples comes in, numbers and `Capacities` come out.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from splitjax.sync.profile import Sparsity

# Capacities are factors of 2^(1/128) apart: half a percent too much at most, and sizes that drift meet few recompiles.
_PER_OCTAVE = 128


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


def roomy(largest: float, most: int) -> int:
    """Returns a capacity for a count of which `largest` was the largest seen, at most `most`: 1.5 standard
    deviations of a Poisson count above it.

    Less would let more steps overflow, and a step that falls back sends many times as much; more would be padding
    in every message. A table that overflows often, as where examples vary together, is observed again, and gets
    the room of all that was seen.
    """
    return max(bucket(largest + 1.5 * math.sqrt(largest), most), 1)


def union_capacity(sparsity: Sparsity) -> int:
    """Returns room for the union of all workers' rows, by `sparsity`."""
    return partial_capacity(sparsity, sparsity.num_workers)


def local_capacity(sparsity: Sparsity) -> int:
    """Returns room for a worker's rows, by `sparsity`."""
    return partial_capacity(sparsity, 1)


def partial_capacity(sparsity: Sparsity, num_workers: int) -> int:
    """Returns room for the union of any `num_workers` neighbouring workers' rows, from a multiple of that number on,
    by `sparsity`."""
    unions = (
        np.unique(np.concatenate(step[first : first + num_workers])).size
        for step in sparsity.samples
        for first in range(0, len(step), num_workers)
    )
    return roomy(max(unions, default=0), sparsity.table.num_rows)
