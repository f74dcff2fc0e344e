"""Pictures of advices and of trainings side by side: what is drawn is what was given."""

from __future__ import annotations

import numpy as np
import pytest

from splitjax.errors import PartialError
from splitjax.report.advice.plot import draw_runs, draw_savings
from tests.report.advice.test_rows import ADVICE

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.one_version


def heights(axes):
    return [patch.get_height() for patch in axes.patches]


def test_an_advice_is_drawn_by_layer_and_by_way(tmp_path):
    layers, ways = ADVICE.plot(tmp_path / "advice.png").axes
    assert (tmp_path / "advice.png").read_bytes()[:4] == b"\x89PNG"
    count = len(ADVICE.stages)
    assert sum(heights(layers)[:count]) == pytest.approx(100) and sum(heights(layers)[count:]) == pytest.approx(100)
    shown = [row.name for row in ADVICE.rows if ADVICE.compute(row) is not None]
    assert [label.get_text() for label in ways.get_yticklabels()] == shown
    assert ways.patches[0].get_width() == pytest.approx(100), "full backpropagation, which the others are compared with"
    with pytest.raises(PartialError, match="cannot be written"):
        ADVICE.plot(tmp_path / "absent" / "advice.png")


def test_savings_have_a_panel_each_and_their_mean():
    time, sent = draw_savings({"time": [0.25, 0.75], "sent": [1.0, 2.0]}).axes
    assert heights(time) == [25.0, 75.0] and heights(sent) == [100.0, 200.0]
    assert time.get_legend().get_texts()[0].get_text() == "mean 50 %"
    assert sent.get_ylim()[1] > 200


def test_runs_are_points_with_a_bar_at_their_mean():
    axes = draw_runs({"full": {"loss": [1.0, 3.0]}, "smaller": {"loss": [2.0, 2.0]}}, "two seeds").axes[0]
    points, bar = axes.lines[:2]
    assert list(points.get_xdata()) == [1.0, 3.0] and set(points.get_ydata()) == {0}
    np.testing.assert_allclose(bar.get_xdata(), [2.0, 2.0])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["full", "smaller"]
