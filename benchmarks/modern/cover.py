"""Chooses few rows of a table that have between them every pair of values that stand in one of its rows."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

Row = TypeVar("Row", bound=tuple[Hashable, ...])
Pair = tuple[tuple[int, Hashable], tuple[int, Hashable]]


def pairs_of(rows: Iterable[tuple[Hashable, ...]]) -> set[Pair]:
    """Returns every pair of values, each with its column, that some row has."""
    return {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}


def pairwise(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Returns a pairwise cover of `rows`: some of them, in their order, that have every pair of values that any has.

    Greedy: the row that has most pairs which no chosen row has is chosen next, of equals the first. What is chosen
    depends on nothing but the rows and their order."""
    new = {row: pairs_of([row]) for row in rows}
    gain = {row: len(pairs) for row, pairs in new.items()}
    had: set[Pair] = set()
    chosen: set[Row] = set()
    while gain:
        best, most = None, 0
        for row, known in gain.items():
            if known > most:  # gains only fall: a row whose last known gain is no more need not be counted again
                gain[row] = len(new[row] - had)
                if gain[row] > most:
                    best, most = row, gain[row]
        if best is None:
            break
        chosen.add(best)
        had |= new[best]
        del gain[best]
    return tuple(row for row in dict.fromkeys(rows) if row in chosen)
