"""Dots over two logarithmic axes: where they stand, in HTML and in text."""

from __future__ import annotations

import re

from splitjax.display.document import Document, Dot, Scatter, is_empty
from splitjax.display.html_layout import render
from splitjax.display.scatter import scatter_text
from splitjax.display.text_layout import render as render_text

PLOT = Scatter(
    (("<one>", (Dot(10.0, 1.0, note="a & b"), Dot(1000.0, 100.0, is_filled=False))), ("two", (Dot(100.0, 10.0),))),
    "size",
    "time",
    ((10.0, "ten"), (1000.0, "thousand"), (1e9, "far")),
    ((1.0, "1 s"), (100.0, "100 s")),
    ((0, 1), (0,)),
    limit=100.0,
    filled="fits",
    ring="does not fit",
    joined="joined: best",
)


def test_dots_stand_by_their_logarithms():
    markup = render(Document("", (PLOT,)))
    places = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', markup)]
    (low_x, low_y), (high_x, high_y), (x, y) = places
    assert abs((low_x + high_x) / 2 - x) < 0.11 and abs((low_y + high_y) / 2 - y) < 0.11 and low_y > high_y
    assert markup.count('fill="transparent"') == 1 and "a &amp; b" in markup and "&lt;one&gt;" in markup
    assert (
        "far" not in markup
        and "stroke-dasharray" in markup
        and "filled: fits; a ring: does not fit; joined: best" in markup
    )


def test_text_has_a_letter_for_each_series():
    lines = scatter_text(PLOT, 60)
    assert max(map(len, lines)) <= 60 and lines[0] == "time"
    columns = {letter: next(line.index(letter, 8) for line in lines[1:15] if letter in line[8:]) for letter in "AaB"}
    assert columns["A"] < columns["B"] < columns["a"]
    assert (
        "A <one>" in lines
        and "B two" in lines
        and lines[-2:] == ["a capital letter: fits", "a small letter: does not fit"]
    )
    assert "thousand" in "\n".join(lines) and "far" not in "\n".join(lines)
    assert "B two" in render_text(Document("", (PLOT,)), 60)


def test_a_plot_without_dots_is_not_shown():
    assert is_empty(Scatter((("none", ()),), "x", "y", (), ()))
