"""Unites dims into dim classes: from the links between dims of all operations to three equivalence relations of atoms.

Every dim of every value starts as one atom of its size. A link says that two dims (or runs of dims) are the same
thing; linking a dim of 96 with dims (4, 8, 3) splits its atom in three, and with it every dim that shares the atom.
When nothing splits any more, atoms are united by the links' strengths: hard, hard + local, hard + local + soft.
Shapes and links go in, one label per atom and strength comes out: equal labels are sharded alike.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Container, Iterable, Sequence
from typing import Protocol

DimRef = tuple[int, int]  # (value number, dim position)


class Strength(enum.IntEnum):
    """Says how binding a link is, the strongest first; `trace.graph` says what each strength means for a sharding."""

    HARD = 0
    LOCAL = 1
    SOFT = 2


class Runs(Protocol):
    """Links two runs of dims, major first, that hold the same index."""

    @property
    def left(self) -> tuple[DimRef, ...]:
        """The dims of the first run."""
        ...

    @property
    def right(self) -> tuple[DimRef, ...]:
        """The dims of the second run."""
        ...


class Atoms:
    """Stores dims as lists of atoms that split on demand. Used while one graph is built.

    - `sizes`: the size of every atom that ever was; those that were split keep theirs.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.sizes: list[int] = []
        self._children: dict[int, tuple[int, int]] = {}
        self._dims: list[list[list[int]]] = []
        for shape in shapes:
            dims: list[list[int]] = []
            for size in shape:
                if size == 1:
                    dims.append([])
                else:
                    self.sizes.append(size)
                    dims.append([len(self.sizes) - 1])
            self._dims.append(dims)

    def dim(self, value: int, position: int) -> list[int]:
        """Returns the atoms of the dim at `position` of value number `value`, split as far as known; none for a dim of
        size 1."""
        atoms = self._dims[value][position]
        if self._children and any(a in self._children for a in atoms):
            atoms = self._dims[value][position] = list(self._leaves(atoms))
        return atoms

    def _leaves(self, atoms: Iterable[int]) -> Iterable[int]:
        """Yields the atoms that given atoms were split into, or themselves."""
        for atom in atoms:
            if atom in self._children:
                yield from self._leaves(self._children[atom])
            else:
                yield atom

    def have_labels(self, labels: Sequence[int], wanted: Container[int]) -> list[bool]:
        """Tells per value whether the label of one of its atoms is `wanted`. `labels`: per atom its label."""
        has = [label in wanted for label in labels]
        for atom in sorted(self._children, reverse=True):  # of what was split, what its parts say
            first, second = self._children[atom]
            has[atom] = has[first] or has[second]
        return [any([has[atom] for dim in dims for atom in dim]) for dims in self._dims]

    def run(self, refs: tuple[DimRef, ...]) -> list[int]:
        """Returns the atoms of the dims `refs`, one after the other, in a new list."""
        return [atom for value, position in refs for atom in self.dim(value, position)]

    def split(self, atom: int, leading: int) -> None:
        """Splits `atom` into two: one of size `leading`, which has to divide it, and behind it the rest."""
        self.sizes.extend((leading, self.sizes[atom] // leading))
        self._children[atom] = (len(self.sizes) - 2, len(self.sizes) - 1)

    def is_whole(self, pairs: Sequence[tuple[int, int]]) -> bool:
        """Tells whether none of the atoms in `pairs` has been split since."""
        children = self._children
        return not any(a in children or b in children for a, b in pairs)

    @property
    def num_splits(self) -> int:
        """The number of splits so far."""
        return len(self._children)

    def align_all(self, links: Sequence[Runs]) -> tuple[list[list[tuple[int, int]]], list[int]]:
        """Pairs the atoms of each of `links` as `align` does. Returns the pairs of each, and which of them did not line
        up."""
        dims, children, sizes = self._dims, self._children, self.sizes
        pairs: list[list[tuple[int, int]]] = []
        open_ends: list[int] = []
        for index, link in enumerate(links):
            left, right = link.left, link.right
            if len(left) == 1 and len(right) == 1:
                # Nearly every link is of two dims that are a whole atom each, of the same size.
                one, other = dims[left[0][0]][left[0][1]], dims[right[0][0]][right[0][1]]
                if len(one) == 1 and len(other) == 1:
                    a, b = one[0], other[0]
                    if sizes[a] == sizes[b] and a not in children and b not in children:
                        pairs.append([(a, b)] if a != b else [])
                        continue
            link_pairs, complete = self.align(link)
            pairs.append(link_pairs)
            if not complete:
                open_ends.append(index)
        return pairs, open_ends

    def align(self, link: Runs) -> tuple[list[tuple[int, int]], bool]:
        """Pairs the atoms of both runs of a `link`, splitting the larger of two where the smaller divides it.

        Returns the pairs, and whether all atoms of both runs lined up. What stands behind a mismatch stays unlinked
        (a wrong link would be worse than none).
        """
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
    """Keeps disjoint sets of atoms (union-find), each labelled by its smallest atom."""

    def __init__(self, size: int) -> None:
        self.parent = list(range(size))

    def unite(self, pairs: Iterable[tuple[int, int]]) -> None:
        parent = self.parent
        for a, b in pairs:
            while parent[a] != a:
                parent[a] = a = parent[parent[a]]
            while parent[b] != b:
                parent[b] = b = parent[parent[b]]
            if a < b:
                parent[b] = a
            elif b < a:
                parent[a] = b

    def labels(self) -> tuple[int, ...]:
        # Parents have smaller numbers, so that one pass in order finds every root.
        roots = self.parent
        for a, parent in enumerate(roots):
            roots[a] = roots[parent]
        return tuple(roots)


@dataclasses.dataclass(frozen=True)
class Classes:
    """Labels every atom by its class, once per strength.

    - `atoms`: the store of atoms, in which no link splits anything any more.
    - `labels`: per strength (hard, local, soft) a label per atom; a label is the number of an atom of the class.
    """

    atoms: Atoms
    labels: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

    def dims(self, value: int, rank: int) -> tuple[tuple[int, ...], ...]:
        """Returns, per dim of value number `value` with `rank` dims, its atoms, major first."""
        return tuple(tuple(self.atoms.dim(value, position)) for position in range(rank))

    def hard(self, atom: int) -> int:
        """Returns the label of an `atom` among hard classes."""
        return self.labels[Strength.HARD][atom]

    def local(self, atom: int) -> int:
        """Returns the label of an `atom` among local classes."""
        return self.labels[Strength.LOCAL][atom]

    def soft(self, atom: int) -> int:
        """Returns the label of an `atom` among soft classes."""
        return self.labels[Strength.SOFT][atom]


Pairs = list[list[tuple[int, int]]]


def refine(shapes: Sequence[tuple[int, ...]], links: Sequence[Runs]) -> tuple[Atoms, Pairs]:
    """Splits the dims of values of these `shapes` into atoms until every one of `links` lines up.

    Returns the atoms and, per link, its pairs of atoms.
    """
    atoms = Atoms(shapes)
    return atoms, align(atoms, links)


def align(atoms: Atoms, links: Sequence[Runs]) -> Pairs:
    """Returns the pairs of atoms of each of `links`, splitting `atoms` further where a link asks for it."""
    pairs, open_ends = atoms.align_all(links)  # a later split may mend a link that does not line up
    # A split made by a later link can reach an earlier one: look again until nothing splits any more.
    seen = 0
    while seen != atoms.num_splits:
        seen = atoms.num_splits
        stale = [index for index, known in enumerate(pairs) if known and not atoms.is_whole(known)]
        for index in dict.fromkeys([*stale, *open_ends]):
            pairs[index], _ = atoms.align(links[index])
    return pairs


def unite(atoms: Atoms, pairs: Pairs) -> tuple[int, ...]:
    """Returns one label per atom of `atoms`: equal for atoms that any of `pairs` connect."""
    union = _Union(len(atoms.sizes))
    union.unite(itertools.chain.from_iterable(pairs))
    return union.labels()


def classify(atoms: Atoms, pairs: Pairs, strengths: Sequence[Strength]) -> Classes:
    """Unites linked atoms, once per strength.

    **Arguments:**

    - `atoms`: the store that the pairs are of.
    - `pairs`: per link its pairs of atoms.
    - `strengths`: per link its strength.
    """
    union = _Union(len(atoms.sizes))

    of_strength: dict[Strength, list[tuple[int, int]]] = {strength: [] for strength in Strength}
    for own, atom_pairs in zip(strengths, pairs, strict=True):
        of_strength[own] += atom_pairs

    def labels_with(strength: Strength) -> tuple[int, ...]:
        union.unite(of_strength[strength])
        return union.labels()

    # Each adds to the unions of those before it.
    return Classes(atoms, (labels_with(Strength.HARD), labels_with(Strength.LOCAL), labels_with(Strength.SOFT)))
