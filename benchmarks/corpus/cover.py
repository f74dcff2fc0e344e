"""Which cells are compiled: few that have between them every pair of values, then as many triples as there is room
for."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from benchmarks.corpus.cells import BRANCHES, PROGRAMS, Cell

# Of a cell: two or three positions of fields with their values.
Combination = tuple[tuple[int, str], ...]


def combinations(cell: Cell, strength: int) -> Iterable[Combination]:
    """The combinations of so many values that a cell has."""
    return itertools.combinations(enumerate(dataclasses.astuple(cell)), strength)


def cover(cells: Sequence[Cell], limit: int, kept: Sequence[Cell] = ()) -> tuple[Cell, ...]:
    """Cells with every pair of values that any of the cells has, and further ones with new triples until there are
    `limit`.

    Greedy, and the same for the same cells in whatever order: each cell taken has the most that is new for what it
    costs to compile, of equals the first in the order of their names. `kept`: cells that are taken in any case, and not
    given back.

    Raises `ValueError` where the pairs need more than `limit` cells."""
    taken = _greedy(sorted(cells), 2, kept, limit)
    if missed := pairs_of(cells) - pairs_of([*kept, *taken]):
        raise ValueError(f"{limit} cells cannot have all pairs of values; {len(missed)} are missed")
    return (*taken, *_greedy(sorted(cells), 3, [*kept, *taken], limit))


def pairs_of(cells: Iterable[Cell]) -> set[Combination]:
    """All pairs of values that any of the cells has."""
    return {pair for cell in cells for pair in combinations(cell, 2)}


def cost(cell: Cell) -> int:
    """About how long a cell compiles, in that of a plain one: tables are exchanged by two programs, of the first steps
    and of all others, and in partial backpropagation there is a backward pass for each depth."""
    return {BRANCHES: 3, PROGRAMS: 6}.get(cell.partial, 1) * (
        2 if cell.sync != "dense" or cell.rules == "embedding_owner" else 1
    )


def _greedy(cells: Sequence[Cell], strength: int, kept: Sequence[Cell], limit: int) -> tuple[Cell, ...]:
    """Gains only fall, so that a cell whose last known gain is no larger than the best one need not be counted anew."""
    had = {one for cell in kept for one in combinations(cell, strength)}
    new = {cell: frozenset(combinations(cell, strength)) for cell in cells if cell not in set(kept)}
    gain = {cell: len(mine) / cost(cell) for cell, mine in new.items()}
    taken: list[Cell] = []
    while gain and len(kept) + len(taken) < limit:
        best, most = None, 0.0
        for cell, known in gain.items():
            if known > most:
                gain[cell] = len(new[cell] - had) / cost(cell)
                if gain[cell] > most:
                    best, most = cell, gain[cell]
        if best is None:
            break
        taken.append(best)
        had |= new[best]
        del gain[best]
    return tuple(taken)
