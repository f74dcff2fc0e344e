"""Profiles as defined, predictions by the formulas, and another scheme in another regime."""

from __future__ import annotations

import numpy as np
import pytest

from splitjax import sync
from splitjax.errors import SyncError
from splitjax.sync.choose import candidates, choose
from splitjax.sync.costs.partition import Partition


def profile(num_rows, rows, workers, row_size, seed=0, power=0.0, steps=2):
    rng = np.random.default_rng(seed)
    weights = (1.0 + np.arange(num_rows)) ** -power
    draw = lambda: rng.choice(num_rows, rows, replace=False, p=weights / weights.sum())
    return sync.measure([[draw() for _ in range(workers)] for _ in range(steps)], num_rows, row_size)


def test_measures():
    step = [np.array([0, 1, 2, 2, -1]), np.array([2, 3]), np.array([2, 9, 12]), np.array([], np.int64)]
    found = sync.measure([step], 10, 4)
    assert (found.rows, found.rows_max, found.hot_rows) == (7 / 4, 3, 0)
    assert dict(found.unions) == {1: 7 / 4, 2: (4 + 2) / 2, 4: 5}
    assert found.overlap == pytest.approx((1 / 2 + 1 / 2) / 2)
    # ranges of 3 rows: the fullest holds 3 of 3, 1 of 2, 1 of 2 rows; evenly it would be a quarter
    assert found.skewness == pytest.approx((4 + 2 + 2) / 3)
    assert found.densification(4) == pytest.approx(5 / (7 / 4))
    assert found.bound_bytes() == 16 * (7 / 4 + 5 / 2)
    assert found.to_json()["density"] == 0.175


def test_profiles_without_steps_or_uneven_ones_are_errors():
    for bad in ([], [[]], [[np.array([1])], [np.array([1]), np.array([2])]]):
        with pytest.raises(SyncError, match="at least one step"):
            sync.measure(bad, 10, 4)


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        (sync.Dense(), lambda k, u, n, m: 2 * (n - 1) / n * m * 128),
        (sync.AllGather(), lambda k, u, n, m: (n - 1) * k * 132),
        (sync.Hierarchical(), lambda k, u, n, m: 132 * (k + u[2] + u[4])),
        (sync.RecursiveDoubling(), lambda k, u, n, m: 132 * (k + u[2] + u[4])),
        (sync.Zen(), lambda k, u, n, m: (n - 1) / n * (2 * k * 128 + u[n] * 128 + m * 128 / 32)),
        (sync.RowExchange(), lambda k, u, n, m: 128 * (k + (1 - 2 / n) * u[n]) + (n - 1) * k),
    ],
)
def test_predictions_are_within_a_tenth_of_the_formulas(which, expected):
    found = profile(100_000, 3000, 8, 32)
    formula = expected(found.rows, dict(found.unions), 8, 100_000)
    assert which.formula_bytes(found) == pytest.approx(formula, rel=0.02)
    assert which.predicted_bytes(which.plan(found), found.table) == pytest.approx(formula, rel=0.1)


def test_every_prediction_covers_its_formula():
    found = profile(20_000, 800, 6, 8, power=0.7)
    for which in candidates():
        assert 0.97 * which.formula_bytes(found) <= which.predicted_bytes(which.plan(found), found.table), which


SLOW, FAR, FAST = sync.Link(1e-4, 12.5e6), sync.Link(5e-2, 1e9), sync.Link(1e-6, 10e9)


@pytest.mark.parametrize(
    ("regime", "link", "name"),
    [
        (dict(num_rows=500, rows=480, workers=4, row_size=64), SLOW, "dense"),
        (dict(num_rows=50_000, rows=2000, workers=8, row_size=64, power=0.8), SLOW, "row_exchange"),
        (dict(num_rows=50_000, rows=2000, workers=8, row_size=4), FAR, "recursive_doubling"),
        # short: gathered in as few messages
        (dict(num_rows=50_000, rows=100, workers=8, row_size=4), FAR, "all_gather"),
        (dict(num_rows=50_000, rows=100, workers=2, row_size=4), FAR, "all_gather"),
    ],
)
def test_another_regime_another_scheme(regime, link, name):
    found = profile(**regime)
    chosen = choose(found, link)
    assert chosen.scheme.name == name
    assert f"{chosen.best.sent_bytes:,} bytes" in chosen.reason
    assert chosen.table[0].seconds <= chosen.best.seconds <= 1.03 * chosen.table[0].seconds
    assert {one.scheme.name for one in chosen.table} == set(sync.SCHEMES)


def test_a_choice_that_sends_more_than_dense_says_what_for():
    found = profile(24, 16, 8, 16)
    chosen = choose(found, sync.Link(4e-4, 1e9))
    dense = next(one for one in chosen.table if one.scheme.name == "dense")
    assert dense.sent_bytes < chosen.best.sent_bytes and dense.seconds > chosen.best.seconds
    said = (
        f"dense sends fewer bytes, but in more messages that wait for each other and takes longer: {dense.seconds:.3g}"
        f" s for {dense.sent_bytes:,} bytes in 14 messages"
    )
    assert said in chosen.reason
    slow = choose(found, sync.Link(1e-6, 1e6))
    assert slow.best.sent_bytes <= dense.sent_bytes and "dense sends fewer" not in slow.reason


def test_a_choice_that_is_slower_than_the_next_says_why_it_is_kept():
    found, kept = profile(10_000, 100, 8, 16), 0
    for latency in np.geomspace(1e-6, 1e-2, 9):
        chosen = choose(found, sync.Link(latency, 1e8))
        following = next(one for one in chosen.table if one.scheme.name != chosen.scheme.name)
        assert (
            f"next: {following.scheme.name}, {following.seconds:.3g} s for {following.sent_bytes:,} bytes in"
            f" {following.num_messages} messages" in chosen.reason
        )
        is_slower = following.seconds < chosen.best.seconds
        assert ("not 2 % faster: the simpler scheme is kept" in chosen.reason) == is_slower
        kept += is_slower
    assert kept


def test_one_worker_exchanges_nothing():
    chosen = choose(profile(100, 10, 1, 4), FAST)
    assert chosen.best.sent_bytes == 0 and "one worker" in chosen.reason
    assert chosen.scheme.name != "dense"  # whose gradient would have the table's size


def test_elements_that_a_number_cannot_tell_apart_are_no_choice():
    found = profile(20_000_000, 100, 2, 128, power=0.0)
    assert not sync.Zen().takes(found.table) and sync.Zen(granularity="row").takes(found.table)
    with pytest.raises(SyncError, match="32-bit index"):
        sync.Zen().predicted_bytes(sync.Zen("row").plan(found), found.table)
    shown = [one.scheme for one in choose(found, SLOW).table]
    assert len(shown) == len(candidates()) - 1 and not any(
        isinstance(one, sync.Zen) and one.granularity == "element" for one in shown
    )


@pytest.mark.parametrize("row_size", [3, 8, 24, 32])
def test_zen_has_room_for_the_elements_of_short_rows(row_size):
    """Owners have equal shares of a row only where these divide it; of many rows chance makes shares that differ."""
    num_rows, workers = 5000, 16
    room = sync.Zen().plan(profile(num_rows, 1000, workers, row_size, steps=3))
    partition = Partition("hashed", num_rows * row_size, workers)
    elements = lambda ids: (ids[:, None].astype(np.int64) * row_size + np.arange(row_size)).reshape(-1)
    most = lambda ids: np.bincount(partition.owner(elements(ids)), minlength=workers).max()
    fitted = 0
    for seed in range(1, 11):
        (step,) = profile(num_rows, 1000, workers, row_size, seed=seed, steps=1).samples
        fitted += max(map(most, step)) <= room.push and most(np.unique(np.concatenate(step))) <= room.pull
    assert fitted >= 8


def test_the_profiled_steps_fit_whatever_their_hot_rows():
    """Two steps whose workers have the same rows, and one in which nobody has another's."""
    shared, apart = [np.arange(400)] * 4, [np.arange(100) + 100 * worker for worker in range(4)]
    capacities = sync.RowExchange(hot=True).plan(sync.measure([shared, shared, apart], 1000, 8))
    assert capacities.hot + 4 * capacities.pull >= 400 and 4 * capacities.pull >= 400
    assert sync.RowExchange(hot=True).plan(sync.measure([shared, shared], 1000, 8)).hot > 300


def test_a_link_without_rate_is_an_error():
    with pytest.raises(SyncError, match="a link needs"):
        sync.Link(0.0, 0.0)
