"""Lays out areas that are stacked over moments as an SVG file of its own, which a browser, a page or a slide shows.

It is the picture that HTML has of them (`areas`), with the words that HTML writes around it. It has colours for light
and for dark pages, between which the reader's browser chooses.
"""

from __future__ import annotations

from splitjax.display.areas import band_colours, num_moments, panel_picture, strip_colours, strip_word
from splitjax.display.document import Areas, Panel
from splitjax.display.markup import safe

_WIDTH, _LEFT, _RIGHT, _PLOT, _STRIP = 860, 84, 16, 190, 15
_ACROSS = _WIDTH - _LEFT - _RIGHT
# From the top of a panel: where its title is written, where its plot begins; below that the strip and the axis' words.
_TITLE, _HEAD, _BELOW, _GAP = 14, 22, 15, 14
_KEY, _CHARACTER, _SQUARE = 20, 7, 12  # the height of a row of keys, about the width of a character, of a colour
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:currentColor}.title{font-weight:bold}.small{font-size:11px;opacity:.8}"
    "svg{color:#1f2328}.page{fill:#fff}"
    "@media(prefers-color-scheme:dark){svg{color:#e6edf3}.page{fill:#0d1117}}"
)


def areas_svg(areas: Areas, title: str) -> str:
    """Returns `areas` as the text of an SVG file under a `title`: the panels with their ticks, strips and axes, then
    which colour is which band's."""
    parts, y = [_text(10, 20, title, "title")], 36
    for panel in areas.panels:
        parts += _panel(areas, panel, y)
        y += _HEAD + _PLOT + (_STRIP + 1 if panel.strip else 0) + _BELOW + _GAP
    keys, height = _keys(areas, y)
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img"'
            f' aria-label="{safe(title)}">',
            f"<style>{_STYLE}</style>",
            f'<path d="M0 0H{_WIDTH}V{height}H0Z" class="page"/>',
            *parts,
            *keys,
            "</svg>\n",
        )
    )


def _panel(areas: Areas, panel: Panel, y: int) -> list[str]:
    """Returns the elements of a panel whose top is at `y`."""
    num, shapes = panel_picture(areas, panel)
    top, total = y + _HEAD, num_moments(panel)
    parts = [
        _text(_LEFT, y + _TITLE, panel.title),
        f'<svg x="{_LEFT}" y="{top}" width="{_ACROSS}" height="{_PLOT}" viewBox="0 0 {num} 100"'
        f' preserveAspectRatio="none" overflow="visible">{shapes}</svg>',
    ]
    for amount, label in areas.ticks:
        at = top + _PLOT - _PLOT * amount / areas.top
        parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end" class="small">{safe(label)}</text>')
    below, colours = top + _PLOT + 1, strip_colours(areas)
    for each in panel.strip:
        start, width = _LEFT + _ACROSS * each.start / total, _ACROSS * (each.end - each.start) / total
        parts.append(
            f'<rect x="{start:.2f}" y="{below}" width="{width:.2f}" height="{_STRIP}"'
            f' style="fill: {colours[each.keys[0]]}"><title>{safe(each.note or each.keys[0])}</title></rect>'
        )
        if word := strip_word(panel, each):
            at = f'x="{start + width / 2:.1f}" y="{below + 11}"'
            parts.append(f'<text {at} text-anchor="middle" class="small">{safe(word)}</text>')
    if panel.axis:
        parts.append(_text(_LEFT, below + (_STRIP if panel.strip else 0) + 13, panel.axis, "small"))
    return parts


def _keys(areas: Areas, y: int) -> tuple[list[str], int]:
    """Returns the elements that say which colour is which band's, in rows from `y` on, and where the picture ends."""
    parts, x = [], _LEFT
    for title, colour in band_colours(areas).items():
        width = _SQUARE + 6 + _CHARACTER * len(title) + 16
        if x > _LEFT and x + width > _WIDTH - _RIGHT:
            x, y = _LEFT, y + _KEY
        parts.append(f'<rect x="{x}" y="{y}" width="{_SQUARE}" height="{_SQUARE}" style="fill: {colour}"/>')
        parts.append(_text(x + _SQUARE + 6, y + 10, title))
        x += width
    return parts, y + _KEY + 6


def _text(x: int, y: int, words: str, kind: str = "") -> str:
    look = f' class="{kind}"' if kind else ""
    return f'<text x="{x}" y="{y}"{look}>{safe(words)}</text>'
