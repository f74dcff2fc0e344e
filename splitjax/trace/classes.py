"""Atoms and dim classes: from the dim maps of all operations to three equivalence relations.

Every dim of every value starts as one atom of its size. A link says that two dims (or runs of dims) are the same thing;
linking a dim of 96 with dims (4, 8, 3) splits its atom in three, and with it every dim that shares the atom. When
nothing splits any more, atoms are united by the links' strengths: hard, hard + local, hard + local + soft.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import Protocol

DimRef = tuple[int, int]  # (value number, dim position)


class Strength(enum.IntEnum):
    """How binding a link is; see `trace.graph`."""

    HARD = 0
    LOCAL = 1
    SOFT = 2


class Runs(Protocol):
    """A link: two runs of dims, major first, that hold the same index."""

    left: tuple[DimRef, ...]
    right: tuple[DimRef, ...]


class Atoms:
    """A store of dims as lists of atoms that split on demand. Used while one graph is built."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.sizes: list[int] = []
        self._children: dict[int, tuple[int, int]] = {}
        self._dims: list[list[list[int]]] = []
        for shape in shapes:
            dims = []
            for size in shape:
                if size == 1:
                    dims.append([])
                else:
                    self.sizes.append(size)
                    dims.append([len(self.sizes) - 1])
            self._dims.append(dims)

    def dim(self, value: int, position: int) -> list[int]:
        """The atoms of one dim, split as far as known."""
        atoms = self._dims[value][position]
        if self._children and any(a in self._children for a in atoms):
            atoms = self._dims[value][position] = list(self._leaves(atoms))
        return atoms

    def _leaves(self, atoms: Iterable[int]) -> Iterable[int]:
        for atom in atoms:
            if atom in self._children:
                yield from self._leaves(self._children[atom])
            else:
                yield atom

    def run(self, refs: tuple[DimRef, ...]) -> list[int]:
        """The atoms of a run of dims, as a list of one's own."""
        return [atom for value, position in refs for atom in self.dim(value, position)]

    def split(self, atom: int, leading: int) -> None:
        self.sizes.extend((leading, self.sizes[atom] // leading))
        self._children[atom] = (len(self.sizes) - 2, len(self.sizes) - 1)

    def is_whole(self, pairs: Sequence[tuple[int, int]]) -> bool:
        """Whether none of these atoms has been split since."""
        children = self._children
        return not any(a in children or b in children for a, b in pairs)

    @property
    def num_splits(self) -> int:
        return len(self._children)

    def align(self, link: Runs) -> tuple[list[tuple[int, int]], bool]:
        """Pairs the atoms of both runs, splitting the larger where one divides the other, and whether all of both lined
        up. What stands behind a mismatch stays unlinked (a wrong link would be worse than none)."""
        left, right = self.run(link.left), self.run(link.right)
        pairs: list[tuple[int, int]] = []
        i = j = 0
        sizes = self.sizes
        while i < len(left) and j < len(right):
            a, b = left[i], right[j]
            if a == b or sizes[a] == sizes[b]:
                if a != b:
                    pairs.append((a, b))
                i, j = i + 1, j + 1
                continue
            small, large = (a, b) if sizes[a] < sizes[b] else (b, a)
            if sizes[small] == 0 or sizes[large] % sizes[small]:
                break
            self.split(large, sizes[small])
            if large == a:
                left[i : i + 1] = self._children[a]
            else:
                right[j : j + 1] = self._children[b]
        return pairs, i == len(left) and j == len(right)


class _Union:
    def __init__(self, size: int) -> None:
        self.parent = list(range(size))

    def find(self, a: int) -> int:
        parent = self.parent
        while parent[a] != a:
            parent[a] = parent[parent[a]]
            a = parent[a]
        return a

    def unite(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self.parent[max(a, b)] = min(a, b)

    def labels(self) -> tuple[int, ...]:
        # Parents have smaller numbers, so that one pass in order finds every root.
        roots = self.parent
        for a, parent in enumerate(roots):
            roots[a] = roots[parent]
        return tuple(roots)


@dataclasses.dataclass(frozen=True)
class Classes:
    """One label per atom and strength (labels are atom numbers); dims in final atoms through `dims(value)`."""

    atoms: Atoms
    labels: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # hard, local, soft

    def dims(self, value: int, rank: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(self.atoms.dim(value, position)) for position in range(rank))

    def hard(self, atom: int) -> int:
        return self.labels[Strength.HARD][atom]

    def local(self, atom: int) -> int:
        return self.labels[Strength.LOCAL][atom]

    def soft(self, atom: int) -> int:
        return self.labels[Strength.SOFT][atom]


Pairs = list[list[tuple[int, int]]]


def refine(shapes: Sequence[tuple[int, ...]], links: Sequence[Runs]) -> tuple[Atoms, Pairs]:
    """Splits atoms until every link lines up; returns the atoms and, per link, its pairs of atoms."""
    atoms = Atoms(shapes)
    return atoms, align(atoms, links)


def align(atoms: Atoms, links: Sequence[Runs]) -> Pairs:
    """Per link its pairs of atoms, splitting atoms further where a link asks for it."""
    pairs: Pairs = []
    open_ends = []  # links with a mismatch, which a later split may mend
    for index, link in enumerate(links):
        found, complete = atoms.align(link)
        pairs.append(found)
        if not complete:
            open_ends.append(index)
    # A split made by a later link can reach an earlier one: look again until nothing splits any more.
    seen = 0
    while seen != atoms.num_splits:
        seen = atoms.num_splits
        stale = [index for index, found in enumerate(pairs) if found and not atoms.is_whole(found)]
        for index in dict.fromkeys([*stale, *open_ends]):
            pairs[index], _ = atoms.align(links[index])
    return pairs


def unite(atoms: Atoms, pairs: Pairs) -> tuple[int, ...]:
    """One label per atom: equal for atoms that any pairs connect."""
    union = _Union(len(atoms.sizes))
    for atom_pairs in pairs:
        for a, b in atom_pairs:
            union.unite(a, b)
    return union.labels()


def classify(atoms: Atoms, pairs: Pairs, strengths: Sequence[Strength]) -> Classes:
    """Unites linked atoms, once per strength; `strengths` has one per entry of `pairs`."""
    union = _Union(len(atoms.sizes))
    labels = []
    for strength in Strength:
        for own, atom_pairs in zip(strengths, pairs, strict=True):
            if own is strength:
                for a, b in atom_pairs:
                    union.unite(a, b)
        labels.append(union.labels())
    return Classes(atoms, tuple(labels))
