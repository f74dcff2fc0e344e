"""Costs of a worker from figures by cut, worked out by hand."""

from __future__ import annotations

import pytest

from splitjax.measure.worker_costs import WorkerCosts, choose_cuts, next_cut
from splitjax.partial.stages import BackpropStages, Stage


def chain(*times):
    return BackpropStages(tuple(Stage(f"layer{k}", (k,), 4, float(time), 1, 4) for k, time in enumerate(times)), 1.0)


COSTS = WorkerCosts(8, 1.0, (0, 2, 3), (7.0, 3.0, 2.0), (700, 300, 200))


def test_bytes_are_those_of_the_nearest_program_that_goes_so_far():
    assert [COSTS.bytes_from(stage) for stage in range(4)] == [700, 700, 300, 200]


def test_time_between_two_cuts_is_divided_by_predicted_time():
    seconds, timed = COSTS.backward(chain(1, 3, 1, 1))
    assert seconds == pytest.approx((1.0, 3.0, 1.0, 1.0)) and timed == (False, False, True, True)


def test_the_next_cut_halves_what_takes_longest():
    assert next_cut(COSTS, chain(1, 3, 1, 1)) == 1
    assert next_cut(WorkerCosts(8, 1.0, (0, 1), (3.0, 2.0), (2, 1)), chain(1, 1)) is None
    assert choose_cuts(chain(*[1] * 9), 3) == (0, 4, 8) and choose_cuts(chain(1, 1), 3) == (0, 1)
