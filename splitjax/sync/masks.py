"""Counts which units (rows of a table, elements of another tensor) are not zero on which worker, with packed bits on
the host.

One bit a unit, most significant first (`numpy.packbits`): 1/32 of a float32 gradient of elements, 1/32 of one
column of a table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def pack(nonzero: np.ndarray) -> np.ndarray:
    """Packs `nonzero`, bool `[..., units]`, into u8 `[..., ceil(units / 8)]`; the last bits of the last byte are 0."""
    return np.packbits(nonzero, axis=-1)


def full(num_units: int) -> np.ndarray:
    """Returns the mask of all of `num_units` units."""
    mask = np.full(-(-num_units // 8), 0xFF, np.uint8)
    if num_units % 8:
        mask[-1] = 0xFF << (8 - num_units % 8) & 0xFF
    return mask


def units_of(mask: np.ndarray) -> np.ndarray:
    """Returns ascending i32 numbers of the units in a `mask`."""
    return np.flatnonzero(np.unpackbits(mask)).astype(np.int32)


def count(mask: np.ndarray) -> int:
    """Counts the units in a `mask`."""
    return int(np.bitwise_count(mask).sum(dtype=np.int64))


def group_sizes(num_workers: int) -> list[int]:
    """Returns 1, 2, 4, ... and `num_workers` itself."""
    return sorted({num_workers, *(1 << i for i in range(num_workers.bit_length()) if 1 << i <= num_workers)})


def union_counts(masks: Sequence[np.ndarray]) -> tuple[tuple[int, float], ...]:
    """Counts the units in unions of workers' `masks`: pairs (m, units in the union of m workers), for the
    `group_sizes`.

    The counts are means over the disjoint groups of m neighbours.
    """
    n = len(masks)

    def mean(m: int) -> float:
        groups = [masks[i : i + m] for i in range(0, n - m + 1, m)]
        return float(np.mean([count(group[0] if m == 1 else np.bitwise_or.reduce(group)) for group in groups]))

    return tuple((m, mean(m)) for m in group_sizes(n))


def overlaps(masks: Sequence[np.ndarray]) -> np.ndarray:
    """Returns f64 `[n, n]`: |I1 and I2| / min(|I1|, |I2|) of the `masks` of every two workers (Zen's overlap).

    It is nan where either has nothing.
    """
    n, sizes = len(masks), [count(mask) for mask in masks]
    matrix = np.full((n, n), np.nan)
    for i in range(n):
        for j in range(i, n):
            if sizes[i] and sizes[j]:
                same = masks[i] is masks[j]  # all of a tensor, say
                matrix[i, j] = matrix[j, i] = 1.0 if same else count(masks[i] & masks[j]) / min(sizes[i], sizes[j])
    return matrix


def mean_overlap(matrix: np.ndarray) -> float | None:
    """Averages a `matrix` of `overlaps` over pairs of different workers that both have something; None where no pair
    has."""
    pairs = matrix[np.triu_indices(len(matrix), 1)]
    pairs = pairs[~np.isnan(pairs)]
    return float(pairs.mean()) if pairs.size else None


def skewness(mask: np.ndarray, num_units: int, num_ranges: int) -> float | None:
    """Returns the units of a `mask` in the fullest of `num_ranges` equal ranges of `num_units` units, over their
    mean number.

    That is Zen's skewness; None for an empty mask.
    """
    total, size = count(mask), max(-(-num_units // num_ranges), 1)
    if not total:
        return None
    most = max(
        _count_between(mask, i * size, min((i + 1) * size, num_units))
        for i in range(num_ranges)
        if i * size < num_units
    )
    return most * num_ranges / total


def _count_between(mask: np.ndarray, start: int, stop: int) -> int:
    """Units from `start` up to `stop`, which need not be whole bytes."""
    first, last = start // 8, -(-stop // 8)
    part = mask[first:last].copy()
    part[0] &= 0xFF >> (start % 8)
    if stop % 8:
        part[-1] &= 0xFF << (8 - stop % 8) & 0xFF
    return count(part)
