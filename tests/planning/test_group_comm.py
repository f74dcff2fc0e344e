"""Whether examples cross at once or in turns, by the memory that turns save."""

from __future__ import annotations

import dataclasses
import types

import pytest

from splitjax.errors import PlanError, Refusal
from splitjax.lower.strategies import CHOOSER
from splitjax.mesh import MeshShape
from splitjax.plan import Memory
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


def memory(peak_bytes, bound_bytes=None):
    return Memory(100, peak_bytes - 100, peak_bytes, bound_bytes)


def summed(in_turns_bytes):
    return lambda draft: memory(1000 if draft.group_comm == "gather" else in_turns_bytes)


@pytest.mark.parametrize(("peak_bytes", "kind"), [(899, "modulo"), (901, "gather"), (1100, "gather")])
def test_turns_are_chosen_where_they_save_a_tenth_of_the_peak(draft, peak_bytes, kind):
    chosen = group_comm.choose("auto", draft, lambda kind: {(0,): kind}, summed(peak_bytes))
    assert chosen.group_comm == kind and chosen.in_turns == ({} if kind == "gather" else {(0,): kind})
    chosen = group_comm.choose("turns", draft, lambda kind: {(0,): kind}, summed(peak_bytes))
    assert chosen.group_comm == "turns" and chosen.in_turns == {(0,): "turns"}, "asked for"


@pytest.mark.parametrize(
    ("by_lifetimes", "bound", "kind"), [(1990, 2500, "gather"), (600, 2500, "modulo"), (1990, None, "modulo")]
)
def test_lifetimes_confirm_what_the_sum_says(draft, by_lifetimes, bound, kind):
    """By the sum turns save enough; the simulator may say otherwise, and what has no bound is no simulation."""
    asked = []

    def simulator(draft):
        asked.append(draft.group_comm)
        return memory(2000, 2500) if draft.group_comm == "gather" else memory(by_lifetimes, bound)

    draft = dataclasses.replace(draft, simulator=simulator)
    chosen = group_comm.choose("auto", draft, lambda kind: {(0,): kind}, summed(850))
    assert chosen.group_comm == kind and asked == ["gather", "modulo"]
    refused = group_comm.choose("auto", draft, lambda kind: Refusal("its batch is odd"), summed(850))
    assert refused.group_comm == "gather" and len(asked) == 2, "what cannot run in turns is not simulated"
    little = group_comm.choose("auto", draft, lambda kind: pytest.fail("prepared"), summed(950))
    assert little.group_comm == "gather" and len(asked) == 2, "nor what saves too little by the sum"


def test_a_refusal_is_noted_or_raised(draft):
    refuse = lambda kind: Refusal("its batch is odd")
    chosen = group_comm.choose("auto", draft, refuse, summed(100))
    assert chosen.group_comm == "gather" and not chosen.in_turns
    assert chosen.notes[-1].endswith("gather, not modulo: its batch is odd")
    with pytest.raises(PlanError, match="its batch is odd"):
        group_comm.choose("modulo", draft, refuse, summed(100))
