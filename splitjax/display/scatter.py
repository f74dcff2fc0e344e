"""Lays out dots over two logarithmic axes, such as seconds against bytes: as HTML and as text."""

from __future__ import annotations

import math
import string

from rich.cells import cell_len

from splitjax.display.document import Dot, Scatter
from splitjax.display.figures import clean
from splitjax.display.markup import line, safe

# The style sheet of `html_layout` takes these in; ROOT stands for its root.
RULES = """
ROOT .scatter { max-width: 760px; margin: 0 0 10px 0; }
ROOT .scatter svg { display: block; width: 100%; height: auto; overflow: visible; }
ROOT .scatter text { fill: currentColor; font-size: 12px; font-variant-numeric: tabular-nums; }
ROOT .scatter .dots span { border-radius: 5px; }
"""
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 330, 74, 16, 12, 46
_ROWS, _LEAST_COLUMNS = 14, 24
_LETTERS = string.ascii_uppercase
_ROOM = 0.06  # of an axis, beyond the outermost dots


def _span(places: list[float]) -> tuple[float, float]:
    """Returns the logarithms between which an axis goes."""
    low, high = math.log(min(places)), math.log(max(places))
    room = _ROOM * (high - low) or 0.5
    return low - room, high + room


def _spans(scatter: Scatter) -> tuple[tuple[float, float], tuple[float, float]]:
    dots = [dot for _, dots in scatter.series for dot in dots]
    limits = [] if scatter.limit is None else [scatter.limit]
    return _span([*(dot.x for dot in dots), *limits]), _span([dot.y for dot in dots])


def _share(place: float, span: tuple[float, float]) -> float:
    return (math.log(place) - span[0]) / (span[1] - span[0])


def scatter_html(scatter: Scatter) -> str:
    """Returns `scatter` as HTML: a picture, then which colour is which series."""
    across, up = _spans(scatter)
    x_of = lambda x: _LEFT + _share(x, across) * (_WIDTH - _LEFT - _RIGHT)
    y_of = lambda y: _HEIGHT - _BOTTOM - _share(y, up) * (_HEIGHT - _TOP - _BOTTOM)
    drawn = []
    for place, label in scatter.x_ticks:
        if 0 <= _share(place, across) <= 1:
            x = x_of(place)
            drawn.append(line((x, _TOP), (x, _HEIGHT - _BOTTOM), 'stroke-opacity="0.15"'))
            drawn.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{safe(label)}</text>')
    for place, label in scatter.y_ticks:
        if 0 <= _share(place, up) <= 1:
            y = y_of(place)
            drawn.append(line((_LEFT, y), (_WIDTH - _RIGHT, y), 'stroke-opacity="0.15"'))
            drawn.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{safe(label)}</text>')
    if scatter.limit is not None:
        x = x_of(scatter.limit)
        drawn.append(line((x, _TOP), (x, _HEIGHT - _BOTTOM), 'stroke-dasharray="5 4"'))
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    drawn.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{safe(scatter.x_title)}</text>')
    y_middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    drawn.append(
        f'<text x="12" y="{y_middle}" text-anchor="middle" transform="rotate(-90 12 {y_middle})">'
        f"{safe(scatter.y_title)}</text>"
    )
    for number, (title, dots) in enumerate(scatter.series):
        colour = _colour(number)
        front = scatter.fronts[number] if number < len(scatter.fronts) else ()
        joined = " ".join(f"{x_of(dots[k].x):.1f},{y_of(dots[k].y):.1f}" for k in front)
        drawn.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-opacity="0.6"/>')
        drawn += [_dot(dot, (x_of(dot.x), y_of(dot.y)), colour, title) for dot in dots]
    keys = "".join(
        f'<span class="key"><span style="background: {_colour(number)}"></span>{safe(title)}</span>'
        for number, (title, _) in enumerate(scatter.series)
    )
    told = "; ".join([*_said("filled", "a ring", scatter), *([scatter.joined] if scatter.joined else [])])
    label = f"{scatter.y_title} against {scatter.x_title}"
    return (
        f'<div class="scatter"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{safe(label)}">'
        f'{"".join(drawn)}</svg><p class="dots">{keys}{safe(told)}</p></div>'
    )


def _colour(number: int) -> str:
    return f"hsl({(210 + 137.508 * number) % 360:.0f}, 62%, 52%)"


def _dot(dot: Dot, place: tuple[float, float], colour: str, title: str) -> str:
    look = f'fill="{colour}"' if dot.is_filled else 'fill="transparent"'
    return (
        f'<circle cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="5" stroke="{colour}" stroke-width="2" {look}>'
        f"<title>{safe(dot.note or title)}</title></circle>"
    )


def scatter_text(scatter: Scatter, width: int) -> list[str]:
    """Returns `scatter` as lines of at most `width` columns: a letter for each series, small for a ring."""
    across, up = _spans(scatter)
    labels = max([cell_len(label) for _, label in scatter.y_ticks] + [4])
    room = max(width - labels - 2, _LEAST_COLUMNS)
    cells = [[" "] * room for _ in range(_ROWS)]
    column = lambda x: min(int(_share(x, across) * room), room - 1)
    row = lambda y: _ROWS - 1 - min(int(_share(y, up) * _ROWS), _ROWS - 1)
    if scatter.limit is not None:
        for across_all in cells:
            across_all[column(scatter.limit)] = ":"
    for number, (_, dots) in enumerate(scatter.series):
        letter = _LETTERS[number % len(_LETTERS)]
        for dot in dots:
            cells[row(dot.y)][column(dot.x)] = letter if dot.is_filled else letter.lower()
    at = {row(place): label for place, label in scatter.y_ticks if 0 <= _share(place, up) <= 1}
    lines = [clean(scatter.y_title)]
    lines += [f"{clean(at.get(k, '')):>{labels}} |{''.join(shown)}".rstrip() for k, shown in enumerate(cells)]
    lines.append(f"{'':>{labels}} +{'-' * room}")
    below = [" "] * (labels + 2 + room)
    for place, label in scatter.x_ticks:
        if 0 <= _share(place, across) <= 1:
            start = min(labels + 2 + column(place), len(below) - cell_len(label))
            if all(cell == " " for cell in below[max(start - 1, 0) : start + cell_len(label) + 1]):
                below[start : start + cell_len(label)] = clean(label)
    lines.append("".join(below).rstrip())
    lines.append(f"{'':>{labels}}  {clean(scatter.x_title)}")
    lines += [f"{_LETTERS[number % len(_LETTERS)]} {clean(title)}" for number, (title, _) in enumerate(scatter.series)]
    return [*lines, *_said("a capital letter", "a small letter", scatter)]


def _said(filled: str, ring: str, scatter: Scatter) -> list[str]:
    """Returns what the two kinds of dots are, as a layout shows them."""
    kinds = ((filled, scatter.filled), (ring, scatter.ring))
    return [f"{shown}: {clean(meaning)}" for shown, meaning in kinds if meaning]
