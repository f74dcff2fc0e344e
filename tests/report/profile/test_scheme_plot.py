"""Pictures of schemes: bytes in order, and the fastest of each link."""

from __future__ import annotations

import pytest

from splitjax.report.profile.scheme_plot import draw_bytes, draw_seconds

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.one_version


def test_bytes_stand_in_order_beside_those_of_the_plan():
    axes = draw_bytes({"dense": 4000, "rows": 1100}, {"dense": 4000, "rows": 1000}, 900.0, "a table").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rows", "dense"]
    assert [patch.get_width() for patch in axes.patches] == [1.1, 4.0, 1.0, 4.0]
    assert "1.0 kB, 1/4.0" in [text.get_text() for text in axes.texts]


def test_the_fastest_scheme_changes_with_the_link():
    """Where 8 (4e6 - 1e6) bits take as long as two messages of 1 ms: at 12 Gbit/s."""
    axes = draw_seconds({"a table": {"few bytes": (1e6, 3), "few messages": (4e6, 1)}}, 1e-3).axes[0]
    few_bytes, few_messages, *fastest = axes.lines
    assert few_bytes.get_label() == "few bytes" and len(fastest) == 2
    assert fastest[0].get_color() == few_bytes.get_color() and fastest[1].get_color() == few_messages.get_color()
    assert fastest[0].get_xdata()[1] == pytest.approx(12e9, rel=0.06)


def test_a_scheme_has_the_colour_of_the_legend_in_every_panel():
    """Tables come in the order of their own choice, the best first."""
    tables = {"one": {"rows": (1e6, 3), "dense": (4e6, 1)}, "other": {"dense": (1e6, 1), "rows": (2e6, 3)}}
    panels = draw_seconds(tables, 1e-3).axes
    colours = [{line.get_label(): line.get_color() for line in axes.lines[:2]} for axes in panels]
    assert colours[0] == colours[1] and len(set(colours[0].values())) == 2
    assert panels[1].lines[2].get_color() == colours[1]["dense"], "which is the fastest there on every link"
