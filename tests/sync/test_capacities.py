"""Room for counts: where padding and fallbacks together cost least."""

from __future__ import annotations

import numpy as np
import pytest

from splitjax import sync
from splitjax.planning.observing import MOST_FALLBACKS, TableObserver
from splitjax.sync.costs.capacities import odds_of, room

MOST = 1 << 20


def clumped(rng, mean, ratio, shape):
    """Counts whose variance is `ratio` times their mean: clumps of `ratio` that come by chance."""
    return ratio * rng.poisson(mean / ratio, shape)


@pytest.mark.parametrize("odds", [1e-5, 1e-4])
@pytest.mark.parametrize("ratio", [1, 8])
def test_with_many_steps_seen_room_costs_what_the_best_room_costs(odds, ratio):
    rng = np.random.default_rng(0)
    seen, unseen = (clumped(rng, 4000, ratio, (steps, 4)) for steps in (200, 50_000))
    cost = lambda capacity: odds * capacity + np.mean(unseen.max(axis=1) > capacity)
    best = min(map(cost, range(4000, 6000, 5)))
    chosen = room(seen, MOST, odds)
    # A capacity is of a series half a percent apart.
    assert cost(chosen) <= best + odds * (0.006 * chosen + 10)


def test_room_follows_from_what_it_costs_and_what_its_lack_costs():
    seen = clumped(np.random.default_rng(1), 700, 1, (3, 12))
    rooms = [room(seen, MOST, odds) for odds in (1e-6, 1e-4, 1e-2, 1.0, float("inf"))]
    assert rooms == sorted(rooms, reverse=True) and rooms[0] > rooms[2] > rooms[3]
    assert rooms[-1] >= seen.max(), "what was seen fits"
    assert room(seen, 720, 1e-6) == max(720, 1) and room(np.zeros((3, 4), int), MOST, 1e-4) == 1


def test_counts_that_vary_together_have_more_room_and_a_union_learns_it_from_the_workers():
    rng = np.random.default_rng(2)
    calm, clumps = (clumped(rng, 6000, ratio, (3, 4)) for ratio in (1, 10))
    union = [[17_000], [17_010], [16_990]]  # three that happen to be alike
    alone, by_calm, by_clumps = (room(union, MOST, 1e-5, alike) for alike in (None, calm, clumps))
    assert room(clumps, MOST, 1e-5) > room(calm, MOST, 1e-5)
    assert by_clumps - 17_000 > 2 * (by_calm - 17_000) and alone >= 17_010


def test_a_count_that_is_always_the_largest_is_no_sign_of_chance():
    """One of four owners has most rows, step after step."""
    counts = np.array([[5000, 300, 100, 90], [5030, 290, 110, 95], [4980, 310, 95, 100]])
    assert 5030 <= room(counts, MOST, 1e-5) < 5700
    exchangeable = np.array([[735, 728, 741, 733], [752, 729, 722, 738], [730, 744, 726, 731]])
    assert 752 <= room(exchangeable, MOST, 1e-4) < 900


def test_a_fallback_costs_all_lookups_of_all_workers():
    ids = [[np.zeros(50, int), np.arange(10)], [np.arange(20), np.arange(30)]]
    sparsity = sync.measure(ids, 1000, 8)
    assert sparsity.lookups == 50 and sparsity.fallback_bytes == 1 * 50 * (32 + 4)
    assert odds_of(sparsity, 36) == pytest.approx(1 / 50)
    small = sync.measure(ids, 40, 8)
    assert small.fallback_bytes == 40 * 36, "no worker has more rows than the table"
    again = sync.Sparsity.from_json(sparsity.to_json())
    assert again == sparsity and again.lookups == 0 and again.fallback_bytes == 30 * 36
    assert odds_of(sync.measure([[np.arange(3)]], 10, 8), 36) == float("inf"), "one worker never falls back"


def test_steps_are_observed_again_when_fallbacks_have_cost_as_much():
    observer = TableObserver()
    fell = lambda did: observer.note({"a": {"fell_back": np.bool_(did)}, "b": {"fell_back": np.bool_(False)}})
    for _ in range(MOST_FALLBACKS - 1):
        fell(True)
    assert not observer.overflows() and observer.fell_back == {"a": MOST_FALLBACKS - 1, "b": 0}
    fell(False)
    assert not observer.overflows(), "what fell back before counts on"
    fell(True)
    assert observer.overflows() and not observer.overflows(), "and from then on counting begins anew"
