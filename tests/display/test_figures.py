"""Figures as they are written: three digits with their zeros, so that those of a column line up."""

from __future__ import annotations

import pytest

from splitjax.display.figures import ratio_text, seconds_text, share_text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(1, "1.00"), (0.998, "0.998"), (6.7, "6.70"), (12.34, "12.3"), (100, "100"), (1230.4, "1230"), (0, "0")],
)
def test_ratios_keep_their_zeros(ratio, text):
    assert ratio_text(ratio) == text and ratio_text(-ratio) == (f"-{text}" if ratio else text)


def test_shares_and_times_too():
    assert [share_text(share) for share in (0.0034, 0.96, 1, 0)] == ["0.340 %", "96.0 %", "100 %", "0 %"]
    times = ("1.20 s", "999 s", "1200 s", "3.20 ms", "45.0 ms", "812 us", "0 us")
    assert tuple(map(seconds_text, (1.2, 999, 1200, 3.2e-3, 45e-3, 812e-6, 0))) == times
