"""Planning time cannot grow by an order unnoticed: the gate of `benchmarks.planning_time`, with a generous factor."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import planning_time

FACTOR = 5.0  # of the limits, for machines that are slower or busy; times are of the processor


@pytest.mark.parametrize(
    ("model", "rules"), [("vgg16", "splitbrain"), pytest.param("transformer-7b", "megatron", marks=pytest.mark.slow)]
)
def test_planning_stays_within_its_limits(model, rules):
    planned = planning_time.measure(model, rules, repeats=1, num_changes=20)
    assert planned.within(FACTOR), planning_time._line(planned)
    assert all(seconds > 0 for seconds in planned.parts.values())


def test_a_figure_beyond_its_limit_is_a_miss():
    figures = {part: 0.001 for part in planning_time.PARTS}
    planned = planning_time.Planned("vgg16", "splitbrain", 1, 0.2, figures, 0.0005, 0.001, 20, 0.3)
    assert planned.ok
    for slow in ({"seconds": 0.3}, {"parts": figures | {"prediction": 0.03}}, {"slowest_change_seconds": 0.003}):
        missed = dataclasses.replace(planned, **slow)
        assert not missed.ok and missed.within(2.0)
        assert "(missed)" in "\n".join(planning_time.section([missed]))
