"""What two changes of a layout make of each other, against the prediction of the step with both."""

from __future__ import annotations

import random

import pytest

from benchmarks._changes import dims_by_class, draw_change
from splitjax.cost.interplay import Meeting, ways
from splitjax.planning.predict import dense_prediction
from tests.cost.test_prediction import draft_of

OF_LEAVES = ("weights", "sent_by_leaf", "bytes_by_leaf")
OF_USES = ("sent_by_use", "bytes_by_use", "split_by_use")


def put_together(name, base, first, second, met):
    """A field of the prediction with both changes, by what each of them makes of it and what they make of each other:
    `met`, by position."""
    found = list(getattr(base, name))
    ours, theirs = getattr(first.renewed, name), getattr(second.renewed, name)
    for i in range(len(found)):
        if i in met:
            found[i] = met[i]
        else:
            # What only one of them reaches is as that one has it.
            values = {id(side[i]): side[i] for side in (ours, theirs) if i in side and side[i] != found[i]}
            assert len(values) < 2, (name, i)
            found[i] = next(iter(values.values()), found[i])
    return tuple(found)


@pytest.mark.parametrize("model, rules", [("vgg16", "splitbrain"), ("transformer", "megatron"), ("lstm", "splitbrain")])
def test_two_changes_and_their_meeting_are_the_step_with_both(model, rules):
    base, draws, num_met = dense_prediction(draft_of(model, rules)), random.Random(0), 0
    assert base.structure.adds_up
    classes = dims_by_class(base.structure.graph)
    for _ in range(150):
        changes = [base.laid_out(draw_change(base, classes, draws)) for _ in range(2)]
        first, second = map(base.difference, changes)
        meeting = Meeting.of(base, first, second)
        at_leaves = meeting.at_leaves(first, second)
        both = base.changed(changes[0]).changed(changes[1])
        for met, names in ((meeting.at_uses, OF_USES), (at_leaves, OF_LEAVES)):
            for name in names:
                made = put_together(name, base, first, second, getattr(met, name))
                assert made == getattr(both, name), (name, changes)
        num_met += bool(meeting.at_uses.sent_by_use or at_leaves.sent_by_leaf)
    assert 10 < num_met < 150, "the drawn changes hardly meet, or always do"


@pytest.mark.parametrize("model, rules", [("transformer", "megatron"), ("lstm", "splitbrain")])
def test_changes_of_equal_ways_meet_alike(model, rules):
    base, draws = dense_prediction(draft_of(model, rules)), random.Random(0)
    classes = dims_by_class(base.structure.graph)
    met, num_alike = {}, 0
    for _ in range(300):
        first, second = (base.difference(base.laid_out(draw_change(base, classes, draws))) for _ in range(2))
        found = Meeting.of(base, first, second)
        before = met.setdefault((ways(base, first), ways(base, second)), found)
        assert (found.flows, found.reweighed) == (before.flows, before.reweighed)
        for name in OF_USES:
            assert getattr(found.at_uses, name) == getattr(before.at_uses, name), name
        # Of the leaves it is asked with the changes themselves, whichever two with these ways it was made of.
        ours, theirs = found.at_leaves(first, second), before.at_leaves(first, second)
        for name in OF_LEAVES:
            assert getattr(ours, name) == getattr(theirs, name), name
        num_alike += before is not found and bool(found.at_uses.sent_by_use or ours.sent_by_leaf)
    assert num_alike > 5, "no two pairs that meet have equal ways"
