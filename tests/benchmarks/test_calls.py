"""Calls under two checkouts are timed in turn, each in a process of its own."""

from __future__ import annotations

import pytest

from benchmarks import _calls
from benchmarks._calls import Against


def test_the_median_of_the_rounds_differences_is_held_to_the_limit():
    # The second round met other work on the machine, under both checkouts.
    within = Against(1, "alone", (20e-6, 90e-6, 21e-6), (21.5e-6, 91.5e-6, 22e-6))
    assert within.more[1] == pytest.approx(1.5e-6)
    assert within.ok
    assert not Against(1, "alone", (20e-6, 20e-6, 21e-6), (22.5e-6, 22.5e-6, 23.5e-6)).ok


def test_both_checkouts_answer_every_round(tmp_path):
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    (earlier / "splitjax").symlink_to(_calls.HERE / "splitjax")
    measured = _calls.compare(earlier, num_devices=1, num_rounds=2, num_calls=3)
    assert [one.kind for one in measured] == list(_calls.KINDS)
    alone = measured[1]
    assert len(alone.before) == len(alone.after) == 2
    assert all(0 < seconds < 0.1 for seconds in (*alone.before, *alone.after))


def test_a_checkout_without_splitjax_is_said(tmp_path):
    with pytest.raises(SystemExit, match="holds no splitjax"):
        _calls.compare(tmp_path / "none", num_devices=1, num_rounds=2, num_calls=1)
