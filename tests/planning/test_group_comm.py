"""Whether examples cross at once or in turns, by the memory that turns save."""

from __future__ import annotations

import dataclasses
import types

import pytest

from splitjax.errors import PlanError, Refusal
from splitjax.mesh import MeshShape
from splitjax.plan import Memory, Plan
from splitjax.planning import group_comm

PLAN = Plan(
    MeshShape((("data", 2), ("model", 4))), "splitbrain", "all", ("data", "model"), (), (), memory=Memory(0, 0, 1000)
)
GRAPH = types.SimpleNamespace(num_boundaries=1)


@pytest.fixture
def peak_in_turns(monkeypatch):
    """Sets the peak that is predicted for turns."""

    def set_peak(peak_bytes):
        in_turns = lambda plan, graph, kind: dataclasses.replace(plan, group_comm=kind, memory=Memory(0, 0, peak_bytes))
        monkeypatch.setattr(group_comm, "with_kind", in_turns)

    return set_peak


@pytest.mark.parametrize(("peak_bytes", "kind"), [(899, "modulo"), (901, "gather"), (1100, "gather")])
def test_turns_are_chosen_where_they_save_a_tenth_of_the_peak(peak_in_turns, peak_bytes, kind):
    peak_in_turns(peak_bytes)
    chosen, ways = group_comm.choose("auto", PLAN, GRAPH, lambda kind: {(0,): kind}, True)
    assert chosen.group_comm == kind and ways == ({} if kind == "gather" else {(0,): kind})
    chosen, ways = group_comm.choose("turns", PLAN, GRAPH, lambda kind: {(0,): kind}, True)
    assert chosen.group_comm == "turns" and ways == {(0,): "turns"}, "asked for"


def test_a_refusal_is_noted_or_raised(peak_in_turns):
    peak_in_turns(100)

    refuse = lambda kind: Refusal("its batch is odd")
    chosen, ways = group_comm.choose("auto", PLAN, GRAPH, refuse, True)
    assert (
        chosen.group_comm == "gather" and not ways and chosen.notes[-1].endswith("gather, not modulo: its batch is odd")
    )
    with pytest.raises(PlanError, match="its batch is odd"):
        group_comm.choose("modulo", PLAN, GRAPH, refuse, True)
