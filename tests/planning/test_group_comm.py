"""Whether examples cross at once or in turns, by the memory that turns save."""

from __future__ import annotations

import types

import pytest

from splitjax.errors import PlanError, Refusal
from splitjax.lower.strategies import CHOOSER
from splitjax.mesh import MeshShape
from splitjax.planning import group_comm
from splitjax.planning.draft import Draft
from splitjax.rules import load_rules


@pytest.fixture
def draft(monkeypatch):
    """A step whose examples cross in a gradient boundary."""
    monkeypatch.setattr(group_comm, "crosses", lambda draft: True)
    traced = types.SimpleNamespace(graph=types.SimpleNamespace(num_boundaries=1))
    request = types.SimpleNamespace(rules=load_rules("splitbrain"))
    shape = MeshShape((("data", 2), ("model", 4)))
    return Draft(traced, shape, request, CHOOSER, shape)


def peak(in_turns_bytes):
    return lambda draft: 1000 if draft.group_comm == "gather" else in_turns_bytes


@pytest.mark.parametrize(("peak_bytes", "kind"), [(899, "modulo"), (901, "gather"), (1100, "gather")])
def test_turns_are_chosen_where_they_save_a_tenth_of_the_peak(draft, peak_bytes, kind):
    chosen = group_comm.choose("auto", draft, lambda kind: {(0,): kind}, peak(peak_bytes))
    assert chosen.group_comm == kind and chosen.in_turns == ({} if kind == "gather" else {(0,): kind})
    chosen = group_comm.choose("turns", draft, lambda kind: {(0,): kind}, peak(peak_bytes))
    assert chosen.group_comm == "turns" and chosen.in_turns == {(0,): "turns"}, "asked for"


def test_a_refusal_is_noted_or_raised(draft):
    refuse = lambda kind: Refusal("its batch is odd")
    chosen = group_comm.choose("auto", draft, refuse, peak(100))
    assert chosen.group_comm == "gather" and not chosen.in_turns
    assert chosen.notes[-1].endswith("gather, not modulo: its batch is odd")
    with pytest.raises(PlanError, match="its batch is odd"):
        group_comm.choose("modulo", draft, refuse, peak(100))
