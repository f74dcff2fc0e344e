"""Who differentiates what: fractions, slots that move on, estimators, the best allocation, and what may not be asked
for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from splitjax import PartialBackprop
from splitjax.errors import BatchError, PartialError, Refusal
from splitjax.partial import Measured, optimal
from splitjax.partial.balance import balanced_examples
from splitjax.partial.depths import choose_depths
from splitjax.partial.optimal import optimal_contributors
from splitjax.partial.stages import BackpropStages, Stage


def stages(*times, forward=None):
    found = tuple(Stage(f"l{k}", (k,), 100, float(time), 1, 100) for k, time in enumerate(times))
    return BackpropStages(found, float(sum(times) / 2 if forward is None else forward))


def first_stages(depths):
    return [depths.segments[first].stages[0].name for first in depths.first]


def test_linear_depths_are_parts_of_the_time_rounded_up():
    depths = choose_depths(stages(4, 2, 2), PartialBackprop(), 4, "here")
    assert first_stages(depths) == ["l2", "l1", "l0", "l0"]
    assert [len(depths.contributors(number)) for number in range(3)] == [2, 3, 4]
    assert depths.device_time == pytest.approx((4 * 4 + 2 + 4 + 8 + 8) / (4 * 12))
    even = choose_depths(stages(*[1] * 8), PartialBackprop(), 4, "here")
    assert even.device_time == pytest.approx(0.75), "with forward : backward = 1 : 2, as published"
    assert choose_depths(stages(*[1] * 8), PartialBackprop(), 8, "here").device_time == pytest.approx(0.7083, abs=1e-4)


def test_given_fractions_are_one_for_each_worker():
    depths = choose_depths(stages(1, 1, 1, 1), PartialBackprop(depths=(1.0, 0.25, 0.5)), 3, "here")
    assert first_stages(depths) == ["l3", "l2", "l0"]
    nobody = choose_depths(stages(1, 1, 1, 1), PartialBackprop(depths=(0.25, 0.5)), 2, "here")
    assert [len(nobody.contributors(number)) for number in range(len(nobody.segments))] == [0, 1, 2]
    assert nobody.scale(0) == 0.0


def test_full_depth_has_the_layers_that_take_no_time():
    assert first_stages(choose_depths(stages(0, 0, 1, 1), PartialBackprop(), 2, "here")) == ["l3", "l0"]


@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=6), st.lists(st.floats(0.01, 1), min_size=2, max_size=5))
def test_every_worker_counts_alike_over_the_turns(times, fractions):
    """The estimator `count` is unbiased: over the rotations every worker's part of every gradient comes with factors
    that add up to their number."""
    depths = choose_depths(stages(*times), PartialBackprop(depths=tuple(fractions)), len(fractions), "here")
    assert depths.num_cycle_steps == len(fractions)
    for segment in range(len(depths.segments)):
        slots = set(depths.contributors(segment))
        for worker in range(len(fractions)):
            factors = [
                depths.scale(segment) * (depths.slot(worker, cycle_step) in slots)
                for cycle_step in range(depths.num_cycle_steps)
            ]
            assert sum(factors) == pytest.approx(len(factors) if slots else 0)
    for cycle_step in range(depths.num_cycle_steps):
        assert sorted(depths.slot(worker, cycle_step) for worker in range(len(fractions))) == list(
            range(len(fractions))
        )


def variance(noise, counts):
    return sum(one / count for one, count in zip(noise, counts, strict=True))


@settings(max_examples=60)
@given(st.data(), st.booleans())
def test_optimal_contributors_against_all_ways(data, rounded):
    """Exact where all ways are compared; by rounding of the square-root rule never better, and never over the
    budget."""
    size, workers = data.draw(st.integers(2, 5)), data.draw(st.integers(2, 5))
    positive = st.lists(st.floats(0.01, 100), min_size=size, max_size=size)
    noise, costs = data.draw(positive), data.draw(positive)
    least = (sum(costs[:-1]) + workers * costs[-1]) / (workers * sum(costs))
    budget = data.draw(st.floats(least, 1.0))
    spent = lambda counts: sum(count * cost for count, cost in zip(counts, costs, strict=True)) / (workers * sum(costs))
    ways = [(*way, workers) for way in itertools.combinations_with_replacement(range(1, workers + 1), size - 1)]
    best = min(variance(noise, way) for way in ways if spent(way) <= budget * (1 + 1e-9))
    with pytest.MonkeyPatch.context() as patch:
        if rounded:
            patch.setattr(optimal, "_FEW_WAYS", 0)
        found = optimal_contributors(noise, costs, workers, budget, "here")
    assert found in ways and spent(found) <= budget * (1 + 1e-8)
    assert variance(noise, found) >= best * (1 - 1e-12)
    assert rounded or variance(noise, found) <= best * (1 + 1e-12)


def test_with_the_forward_pass_to_pay_even_noise_goes_to_the_last_layers():
    measured = Measured(("l0", "l1", "l2"), (1.0, 1.0, 1.0), 1.5, (1.0, 1.0, 1.0))
    request = PartialBackprop(depths="optimal", measured=measured, budget=0.8)
    depths = choose_depths(stages(1, 1, 1, forward=1.5), request, 4, "here")
    assert [len(depths.contributors(number)) for number in range(len(depths.segments))] == [
        2,
        4,
    ] and depths.device_time <= 0.8
    assert [len(segment.stages) for segment in depths.segments] in ([1, 2], [2, 1])
    free = choose_depths(stages(1, 1, 1, forward=1.5), PartialBackprop(depths="optimal", measured=measured), 4, "here")
    assert (
        free.device_time
        <= choose_depths(stages(1, 1, 1, forward=1.5), PartialBackprop(), 4, "here").device_time + 1e-12
    )


def test_a_budget_that_no_depths_keep_is_an_error():
    refusal = optimal_contributors([1.0, 1.0], [1.0, 3.0], 4, 0.5, "here")
    assert isinstance(refusal, Refusal) and "smaller batch" in refusal.remedy
    measured = Measured(("l0", "l1"), (1.0, 2.0), 1.0, (1.0, 1.0))
    request = PartialBackprop(depths="optimal", measured=measured, budget=0.5)
    with pytest.raises(PartialError, match="no depths keep the budget") as caught:
        choose_depths(stages(1, 2, forward=1), request, 4, "here")
    assert "0.812" in str(caught.value) and "smaller batch" in caught.value.remedy
    other = Measured(("x",), (1.0,), 1.0, (1.0,))
    with pytest.raises(PartialError, match="another step"):
        choose_depths(stages(1, 1), PartialBackprop(depths="optimal", measured=other), 2, "here")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"depths": "square"}, "depths has no such value"),
        ({"depths": ()}, "depths has no such value"),
        ({"depths": 3}, "depths has no such value"),
        ({"depths": (0.5, 0.0)}, "share of the backward pass"),
        ({"depths": (0.5, 1.5)}, "share of the backward pass"),
        ({"depths": (True,)}, "share of the backward"),
        ({"depths": (float("nan"), 1.0)}, "share of the backward pass"),
        ({"assignment": "random"}, "assignment has no such value"),
        ({"estimator": "sum"}, "estimator has no such value"),
        ({"execution": "switch"}, "execution has no such value"),
        ({"statistics": "none"}, "statistics has no such value"),
        ({"rotate": 1}, "rotate is true or false"),
        ({"rebalance": "yes"}, "rebalance is true or false"),
        ({"warmup_steps": -1}, "counts steps"),
        ({"warmup_steps": 2.0}, "counts steps"),
        ({"warmup_steps": True}, "counts steps"),
        ({"budget": 0.5}, "belongs to depths"),
        ({"budget": 0.0, "depths": "optimal"}, "share of the time"),
        ({"depths": "optimal"}, "need the noise"),
        ({"measured": {}}, "what step.advise found"),
        ({"rebalance": True, "assignment": "temporal"}, "nothing to balance"),
    ],
)
def test_values_that_are_none_of_the_documented_ones(options, words):
    with pytest.raises(PartialError, match=words) as caught:
        PartialBackprop(**options)
    assert caught.value.place.startswith("PartialBackprop") and caught.value.remedy


def test_values_of_numpy_are_values():
    assert PartialBackprop(depths=[np.float32(0.5), 1], warmup_steps=np.int64(3)).depths == (0.5, 1.0)


@given(st.integers(2, 6), st.integers(1, 4), st.integers(0, 40), st.floats(0.1, 10))
@settings(max_examples=100, deadline=None)
@example(5, 1, 0, 0.125)
def test_shares_finish_together_in_whole_units(num_workers, unit, more, forward):
    depths = choose_depths(stages(*[1] * 8, forward=forward), PartialBackprop(), num_workers, "here")
    num_examples = unit * (num_workers + more)
    shares = balanced_examples(depths, num_examples, "here", unit)
    assert sum(shares) == num_examples and min(shares) >= unit and all(share % unit == 0 for share in shares)
    rates = [1 / (depths.forward + depths.backward(slot)) for slot in range(num_workers)]
    if min(rates) / sum(rates) * num_examples >= unit:
        assert all(
            abs(share - num_examples * rate / sum(rates)) <= unit for share, rate in zip(shares, rates, strict=True)
        )
    with pytest.raises(BatchError):
        balanced_examples(depths, unit * (num_workers - 1), "here", unit)
