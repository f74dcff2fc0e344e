"""Atoms and dim classes: from the dim maps of all operations to three equivalence relations.

Every dim of every value starts as one atom of its size. A link says that two dims (or runs of dims) are the same thing;
linking a dim of 96 with dims (4, 8, 3) splits its atom in three, and with it every dim that shares the atom. When nothing
splits any more, atoms are united by the links' strengths: hard, hard + local, hard + local + soft.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence

DimRef = tuple[int, int]  # (value number, dim position)


class Strength(enum.IntEnum):
    """How binding a link is; see `trace.graph`."""

    HARD = 0
    LOCAL = 1
    SOFT = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """Two runs of dims, major first, that hold the same index."""

    left: tuple[DimRef, ...]
    right: tuple[DimRef, ...]
    strength: Strength


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
        return [atom for value, position in refs for atom in self.dim(value, position)]

    def split(self, atom: int, leading: int) -> None:
        self.sizes.extend((leading, self.sizes[atom] // leading))
        self._children[atom] = (len(self.sizes) - 2, len(self.sizes) - 1)

    @property
    def num_splits(self) -> int:
        return len(self._children)

    def align(self, link: Link) -> list[tuple[int, int]]:
        """Pairs the atoms of both runs, splitting the larger where one divides the other. What does not line up behind a
        mismatch stays unlinked (a wrong link would be worse than none)."""
        left, right = self.run(link.left), self.run(link.right)
        pairs: list[tuple[int, int]] = []
        i = j = 0
        left, right = list(left), list(right)
        while i < len(left) and j < len(right):
            a, b = left[i], right[j]
            if a == b or self.sizes[a] == self.sizes[b]:
                if a != b:
                    pairs.append((a, b))
                i, j = i + 1, j + 1
                continue
            small, large = (a, b) if self.sizes[a] < self.sizes[b] else (b, a)
            if self.sizes[small] == 0 or self.sizes[large] % self.sizes[small]:
                break
            self.split(large, self.sizes[small])
            if large == a:
                left[i : i + 1] = self._children[a]
            else:
                right[j : j + 1] = self._children[b]
        return pairs


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


def refine(shapes: Sequence[tuple[int, ...]], links: Sequence[Link]) -> tuple[Atoms, list[list[tuple[int, int]]]]:
    """Splits atoms until every link lines up; returns the atoms and, per link, its pairs of atoms."""
    atoms = Atoms(shapes)
    pairs = [atoms.align(link) for link in links]
    # A split made by a later link can reach an earlier one; each round only looks again when something split.
    seen = -1
    while seen != atoms.num_splits:
        seen = atoms.num_splits
        if seen:
            pairs = [atoms.align(link) for link in links]
    return atoms, pairs


def classify(atoms: Atoms, links: Sequence[Link], pairs: Sequence[Sequence[tuple[int, int]]]) -> Classes:
    """Unites linked atoms, once per strength."""
    union = _Union(len(atoms.sizes))
    labels = []
    for strength in Strength:
        for link, atom_pairs in zip(links, pairs, strict=True):
            if link.strength == strength:
                for a, b in atom_pairs:
                    union.unite(a, b)
        labels.append(tuple(union.find(a) for a in range(len(atoms.sizes))))
    return Classes(atoms, tuple(labels))
