"""Atoms split until every link lines up; labels get coarser with weaker links."""

from __future__ import annotations

import dataclasses
import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from splitjax.trace.classes import Strength, align, classify, refine, unite


@dataclasses.dataclass(frozen=True)
class Link:
    left: tuple[tuple[int, int], ...]
    right: tuple[tuple[int, int], ...]


def sizes(atoms, value, position=0):
    return [atoms.sizes[a] for a in atoms.dim(value, position)]


def test_a_dim_splits_into_the_dims_it_is_linked_to():
    atoms, pairs = refine([(96,), (4, 8, 3)], [Link(((0, 0),), ((1, 0), (1, 1), (1, 2)))])
    assert sizes(atoms, 0) == [4, 8, 3]
    assert [len(found) for found in pairs] == [3]
    labels = unite(atoms, pairs)
    assert [labels[a] for a in atoms.dim(0, 0)] == [labels[atoms.dim(1, k)[0]] for k in range(3)]


def test_a_split_reaches_everything_that_shares_the_dim():
    """The link that splits comes last; the earlier ones are lined up again."""
    links = [Link(((0, 0),), ((1, 0),)), Link(((1, 0),), ((2, 0),)), Link(((2, 0),), ((3, 0), (3, 1)))]
    atoms, pairs = refine([(12,), (12,), (12,), (3, 4)], links)
    assert [sizes(atoms, v) for v in range(3)] == [[3, 4]] * 3
    labels = unite(atoms, pairs)
    assert len({tuple(labels[a] for a in atoms.dim(v, 0)) for v in range(3)}) == 1


def test_two_ways_of_splitting_meet_in_the_middle():
    links = [Link(((0, 0),), ((1, 0), (1, 1))), Link(((0, 0),), ((2, 0), (2, 1)))]
    atoms, _ = refine([(24,), (2, 12), (6, 4)], links)
    assert sizes(atoms, 0) == [2, 3, 4]
    assert sizes(atoms, 1, 1) == [3, 4] and sizes(atoms, 2, 0) == [2, 3]


def test_what_stands_behind_a_mismatch_stays_alone():
    atoms, pairs = refine([(6, 4), (4, 6)], [Link(((0, 0), (0, 1)), ((1, 0), (1, 1)))])
    assert pairs == [[]]
    assert [sizes(atoms, v, d) for v in (0, 1) for d in (0, 1)] == [[6], [4], [4], [6]]


def test_a_later_split_mends_a_mismatch():
    links = [
        Link(((0, 0), (0, 1)), ((1, 0), (1, 1))),
        Link(((0, 0),), ((2, 0), (2, 1))),
        Link(((1, 0),), ((3, 0), (3, 1))),
    ]
    atoms, pairs = refine([(6, 4), (4, 6), (2, 3), (2, 2)], links)
    assert len(pairs[0]) == 1  # the common factor 2 at the front
    assert sizes(atoms, 1, 0) == [2, 2]


def test_dims_of_size_one_have_no_atoms_and_zero_is_a_size():
    atoms, pairs = refine([(1, 5), (5,), (0,), (0,)], [Link(((0, 0), (0, 1)), ((1, 0),)), Link(((2, 0),), ((3, 0),))])
    assert atoms.dim(0, 0) == [] and pairs[0] == [(0, 1)]
    assert len(pairs[1]) == 1


def test_strengths_nest():
    links = [Link(((0, 0),), ((1, 0),)), Link(((1, 0),), ((2, 0),)), Link(((2, 0),), ((3, 0),))]
    atoms, pairs = refine([(8,)] * 4, links)
    classes = classify(atoms, pairs, [Strength.HARD, Strength.LOCAL, Strength.SOFT])
    a, b, c, d = (atoms.dim(v, 0)[0] for v in range(4))
    assert classes.hard(a) == classes.hard(b) != classes.hard(c)
    assert classes.local(a) == classes.local(c) != classes.local(d)
    assert classes.soft(a) == classes.soft(d)
    assert classes.labels[Strength.SOFT] == unite(atoms, pairs)


def test_links_can_be_added_later():
    shapes, first = [(12,), (12,), (3, 4)], [Link(((0, 0),), ((1, 0),))]
    atoms, _ = refine(shapes, first)
    both = [*first, Link(((1, 0),), ((2, 0), (2, 1)))]
    pairs = align(atoms, both)
    assert pairs == align(refine(shapes, both)[0], both)
    assert sizes(atoms, 0) == [3, 4]


@st.composite
def problems(draw):
    """Reshapes of one array into random factorisations, linked in random order."""
    size = draw(st.sampled_from([8, 12, 24, 36, 60]))
    shapes = []
    for _ in range(draw(st.integers(2, 5))):
        rest, shape = size, []
        while rest > 1:
            factor = draw(st.sampled_from([d for d in range(2, rest + 1) if rest % d == 0]))
            shape.append(factor)
            rest //= factor
        shapes.append(tuple(shape))
    values = range(len(shapes))
    edges = draw(st.lists(st.tuples(st.sampled_from(values), st.sampled_from(values)), min_size=1, max_size=6))
    run = lambda v: tuple((v, d) for d in range(len(shapes[v])))  # noqa: E731
    return shapes, [Link(run(a), run(b)) for a, b in edges]


@given(problems())
@settings(max_examples=150, deadline=None)
def test_refinement_holds_its_promises(problem):
    """Dims multiply up; what is paired has one size; the result does not depend on being asked again."""
    shapes, links = problem
    atoms, pairs = refine(shapes, links)
    for value, shape in enumerate(shapes):
        for position, size in enumerate(shape):
            assert math.prod(sizes(atoms, value, position)) == size
    for link, found in zip(links, pairs, strict=True):
        left, right = atoms.run(link.left), atoms.run(link.right)
        front = itertools.takewhile(lambda p: atoms.sizes[p[0]] == atoms.sizes[p[1]], zip(left, right, strict=False))
        assert found == [pair for pair in front if pair[0] != pair[1]]
    assert align(atoms, links) == pairs
    labels = unite(atoms, pairs)
    assert all(atoms.sizes[a] == atoms.sizes[labels[a]] for found in pairs for pair in found for a in pair)
