"""The order in which candidates are lowered, with those in microbatches."""

from __future__ import annotations

import math

import pytest

from splitjax.choosing import Candidate, Choice, in_turn, may_fit
from splitjax.mesh import MeshShape
from splitjax.plan import BlockRemat
from splitjax.rules.ruleset import RuleSet

MESH = MeshShape.of({"data": 8})


AGAIN = (BlockRemat("params/block*", "nothing_saveable"),)


def candidate(name, seconds, *, bound=None, parts=1, states=10, remat=()):
    return Candidate(RuleSet(name, ()), MESH, seconds, states, 1000, bound, microbatches=parts, remat=remat)


def test_what_fits_in_fewer_microbatches_needs_no_more():
    lowered = [candidate("a", 1.0, bound=90), candidate("a", 1.1, bound=60, parts=2)]
    assert not may_fit(candidate("a", 1.2, parts=4), lowered, 60)
    assert may_fit(candidate("a", 1.2, parts=4), lowered, 59)
    # Nothing is known of another layout.
    assert not may_fit(candidate("b", 1.2, parts=4), lowered, 59)


def test_what_is_beside_the_states_is_at_most_divided():
    lowered = [candidate("a", 1.0, bound=90)]
    assert may_fit(candidate("a", 1.1, parts=2), lowered, 50) and not may_fit(candidate("a", 1.1, parts=2), lowered, 49)
    # In 2 and in 4 microbatches it is 50 and 40: half of what is left beyond 30 goes with each doubling.
    known = [candidate("a", 1.1, bound=50, parts=2), candidate("a", 1.2, bound=40, parts=4)]
    assert may_fit(candidate("a", 1.3, parts=8), known, 35) and not may_fit(candidate("a", 1.3, parts=8), known, 34)
    # The step without the loop is another program, which may need less than that in two microbatches.
    other = [candidate("a", 1.0, bound=48), candidate("a", 1.1, bound=50, parts=2)]
    assert may_fit(candidate("a", 1.2, parts=4), other, 31)


@pytest.mark.parametrize("parts", [1, 4])
def test_the_first_with_blocks_computed_again_has_the_microbatches_of_its_layout(parts):
    lowered = [candidate("a", 1.0, bound=90, parts=parts)]
    again = candidate("a", 1.1, parts=parts, remat=AGAIN)
    assert may_fit(again, lowered, 10) and not may_fit(again, lowered, 9) and not may_fit(again, lowered, 90)
    # What is not lowered in any number says nothing of more.
    assert not may_fit(candidate("a", 1.2, parts=2 * parts, remat=AGAIN), lowered, 50)
    lowered.append(candidate("a", 1.1, bound=60, parts=parts, remat=AGAIN))
    assert may_fit(candidate("a", 1.2, parts=2 * parts, remat=AGAIN), lowered, 50)
    assert not may_fit(candidate("a", 1.2, parts=2 * parts, remat=AGAIN), lowered, 30)


def lowered_in_turn(bounds, budget, most=None):
    """The names and microbatches of what is lowered, in order. `bounds`: by (name, microbatches), what each needs; the
    seconds are 1, 2, ... by name, and a tenth more for each microbatch."""
    names = list(dict.fromkeys(name for name, _ in bounds))
    make = lambda name, parts: candidate(name, names.index(name) + 1 + 0.4 * (parts - 1), parts=parts)
    bases = tuple(make(name, 1) for name in names)
    choice = Choice(bases[0], bases, (), (), (MESH,), budget_bytes=budget)
    lowered = []
    in_parts = lambda each: [make(name, parts) for name, parts in bounds if name == each.rules.name and parts > 1]
    for each in in_turn(choice, lowered, most, in_parts):
        key = each.rules.name, each.microbatches
        program = None if most is None else each.seconds
        lowered.append(
            Candidate(each.rules, MESH, each.seconds, 10, 1000, bounds[key], program, microbatches=each.microbatches)
        )
    return [(each.rules.name, each.microbatches) for each in lowered]


def test_microbatches_come_in_the_order_of_all_seconds():
    bounds = {("a", 1): 90, ("a", 2): 60, ("a", 4): 45, ("b", 1): 80, ("b", 2): 50, ("c", 1): 40}
    # In 4 microbatches the first takes 2.2, the second in one 2.
    assert lowered_in_turn(bounds, 45) == [("a", 1), ("b", 1), ("a", 4)]
    assert lowered_in_turn(bounds, 50) == [("a", 1), ("a", 2), ("b", 1), ("a", 4)]
    assert lowered_in_turn(bounds, 90) == [("a", 1)] and lowered_in_turn(bounds, math.inf) == [("a", 1)]
    # What is left when all has been lowered in one is tried before it is said that nothing fits.
    few = {("a", 1): 90, ("a", 8): 25, ("b", 1): 80}
    assert lowered_in_turn(few, 30) == [("a", 1), ("b", 1), ("a", 8)]
    assert lowered_in_turn(few, 15) == [("a", 1), ("b", 1)]


def test_where_programs_are_timed_no_more_is_tried_than_fits():
    bounds = {("a", 1): 40, ("a", 2): 30, ("b", 1): 80, ("b", 2): 40, ("b", 4): 30, ("c", 1): 40}
    assert lowered_in_turn(bounds, 45, most=16) == [("a", 1), ("b", 1), ("b", 2), ("c", 1)]
