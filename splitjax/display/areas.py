"""Lays out areas that are stacked over moments, such as what is stored when: as HTML and as text.

All panels have the same axes, so that they compare: a height is the same amount in each, and the width of a panel is
all of its moments, however many they are.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

from rich.cells import cell_len

from splitjax.display.document import Areas, Panel, Stretch
from splitjax.display.figures import clean
from splitjax.display.markup import line, safe

# The style sheet of `html_layout` takes these in; ROOT stands for its root.
RULES = """
ROOT .panel { margin: 0 0 14px 0; }
ROOT .panel p { margin: 0 0 2px 0; }
ROOT .plot { position: relative; margin: 0 12px 0 74px; height: 190px; }
ROOT .plot svg { display: block; width: 100%; height: 100%; overflow: visible; }
ROOT .plot .tick { position: absolute; right: 100%; margin: 0 6px 0 0; transform: translateY(-50%);
  white-space: nowrap; font-size: 11px; font-variant-numeric: tabular-nums; }
ROOT .strip { position: relative; margin: 1px 12px 0 74px; height: 15px; overflow: hidden; }
ROOT .strip span { position: absolute; top: 0; bottom: 0; overflow: hidden; white-space: nowrap; font-size: 10px;
  line-height: 15px; text-align: center; }
ROOT .below { margin: 0 12px 0 74px; font-size: 11px; opacity: 0.8; }
"""
_MOST_COLUMNS = 400
# A share of the panel in which a word of a strip has room.
_WIDE = 0.09
_ROWS, _LEAST_COLUMNS = 12, 24
_LETTERS = string.ascii_uppercase + string.ascii_lowercase
_GREY = "rgba(128, 128, 128, 0.45)"
_STRIPS = (
    "rgba(66, 133, 214, 0.45)",
    "rgba(214, 126, 66, 0.5)",
    "rgba(110, 110, 110, 0.35)",
    "rgba(90, 160, 90, 0.45)",
)


def columns(panel: Panel, most: int) -> tuple[int, ...]:
    """Returns the moments of `panel` that are drawn in at most so many columns (`most`): of those that share a column
    the highest, so that no peak is lost."""
    totals = [sum(levels) for levels in zip(*(band.levels for band in panel.bands), strict=True)]
    count = min(most, len(totals))
    edges = [round(number * len(totals) / count) for number in range(count + 1)] if count else []
    return tuple(max(range(a, b), key=totals.__getitem__) for a, b in zip(edges, edges[1:], strict=False))


def areas_html(areas: Areas) -> str:
    """Returns `areas` as HTML: a picture a panel, then which colour is which band's."""
    colours = band_colours(areas)
    keys = "".join(
        f'<span class="key"><span style="background: {colour}"></span>{safe(title)}</span>'
        for title, colour in colours.items()
    )
    return "".join(_panel(areas, panel) for panel in areas.panels) + f"<p>{keys}</p>"


def band_colours(areas: Areas) -> dict[str, str]:
    """Returns the colour of every band by its title. The first band is what stays the same, in grey; the others have
    hues a golden angle apart."""
    titles = areas.titles
    return {
        title: f"hsl({(205 + 137.508 * number) % 360:.0f}, 60%, {50 + 7 * (number % 3)}%)" if number else _GREY
        for number, title in enumerate(titles)
    }


def strip_colours(areas: Areas) -> dict[str, str]:
    """Returns the colour of every stretch of a strip by its key."""
    keys = dict.fromkeys(stretch.keys[0] for panel in areas.panels for stretch in panel.strip)
    return {key: _STRIPS[number % len(_STRIPS)] for number, key in enumerate(keys)}


def strip_word(panel: Panel, stretch: Stretch) -> str:
    """Returns what stands on a `stretch` of the strip of `panel`: its key, where that has room."""
    return stretch.keys[0] if (stretch.end - stretch.start) / num_moments(panel) > _WIDE else ""


def num_moments(panel: Panel) -> int:
    """Returns how many moments a panel is wide, at least one."""
    return max(len(panel.bands[0].levels), 1)


def panel_picture(areas: Areas, panel: Panel) -> tuple[int, str]:
    """Returns (width, shapes) of the picture of a panel in SVG, without words: its bands, the lines of the ticks and
    the mark. It is 100 high, as `areas.top` is, and is stretched to any size."""
    colours, moments, top = band_colours(areas), columns(panel, _MOST_COLUMNS), areas.top
    num = max(len(moments), 1)
    below = [0.0] * len(moments)
    shapes = []
    for band in panel.bands:
        above = [low + band.levels[moment] for low, moment in zip(below, moments, strict=True)]
        outline = [f"{k},{100 - 100 * y / top:.2f} {k + 1},{100 - 100 * y / top:.2f}" for k, y in enumerate(above)]
        ground = [f"{k + 1},{100 - 100 * y / top:.2f} {k},{100 - 100 * y / top:.2f}" for k, y in enumerate(below)]
        points = " ".join([*outline, *reversed(ground)])
        shapes.append(
            f'<polygon points="{points}" style="fill: {colours[band.title]}">'
            f"<title>{safe(band.title)}</title></polygon>"
        )
        below = above
    shapes += [line((0.0, y), (num, y), 'stroke-opacity="0.25"') for y in (100 - 100 * y / top for y, _ in areas.ticks)]
    if panel.mark is not None:
        at = (panel.mark + 0.5) / num_moments(panel) * num
        shapes.append(line((at, 0.0), (at, 100.0), 'stroke-dasharray="4 3"'))
    return num, "".join(shapes)


def _panel(areas: Areas, panel: Panel) -> str:
    num, shapes = panel_picture(areas, panel)
    total, top = num_moments(panel), areas.top
    ticks = "".join(
        f'<span class="tick" style="top: {100 - 100 * y / top:.2f}%">{safe(label)}</span>' for y, label in areas.ticks
    )
    colours = strip_colours(areas)
    strip = "".join(
        f'<span style="left: {100 * each.start / total:.2f}%; width: {100 * (each.end - each.start) / total:.2f}%;'
        f' background: {colours[each.keys[0]]}" title="{safe(each.note or each.keys[0])}">'
        f"{safe(strip_word(panel, each))}</span>"
        for each in panel.strip
    )
    return (
        f'<div class="panel"><p>{safe(panel.title)}</p><div class="plot">{ticks}'
        f'<svg viewBox="0 0 {num} 100" preserveAspectRatio="none" role="img" aria-label="{safe(panel.title)}">'
        f'{shapes}</svg></div><div class="strip">{strip}</div>'
        f'<p class="below">{safe(panel.axis)}</p></div>'
    )


def areas_text(areas: Areas, width: int) -> list[str]:
    """Returns `areas` as lines of at most `width` columns: a letter for each band, with what they mean below."""
    letters = {title: _LETTERS[number % len(_LETTERS)] for number, title in enumerate(areas.titles)}
    labels = max([cell_len(label) for _, label in areas.ticks] + [4])
    room = max(width - labels - 2, _LEAST_COLUMNS)
    lines: list[str] = []
    for panel in areas.panels:
        total = len(panel.bands[0].levels)
        moments = columns(panel, room)
        wide = [moments[k * len(moments) // room] for k in range(room)] if len(moments) < room and moments else moments
        lines += [clean(panel.title)]
        for row in range(_ROWS, 0, -1):
            low, high = areas.top * (row - 1) / _ROWS, areas.top * row / _ROWS
            label = next((label for y, label in areas.ticks if low < y <= high), "")
            cells = "".join(_letter(panel, moment, (low + high) / 2, letters) for moment in wide)
            lines.append(f"{' ' * (labels - cell_len(label))}{label} |{cells}".rstrip())
        zero = next((label for y, label in areas.ticks if y == 0), "")
        lines.append(f"{' ' * (labels - cell_len(zero))}{zero} +{'-' * len(wide)}")
        if panel.strip:
            strip = "".join(_stretch(panel, (k + 0.5) / max(len(wide), 1) * total) for k in range(len(wide)))
            lines.append(" " * (labels + 2) + strip)
        if panel.mark is not None and wide:
            at = min(int((panel.mark + 0.5) / total * len(wide)), len(wide) - 1)
            words = "^ the peak" if at < len(wide) - 10 else "the peak ^"
            lines.append(" " * (labels + 2 + (at if words[0] == "^" else at - 9)) + words)
        lines += _wrapped([clean(panel.axis)], width, "")
        lines.append("")
    lines += _wrapped([f"{letter} {clean(title)}" for title, letter in letters.items()], width, ",")
    return lines


def _letter(panel: Panel, moment: int, height: float, letters: dict[str, str]) -> str:
    """The letter of the band that has this height at a moment; a blank above all of them."""
    below = 0.0
    for band in panel.bands:
        below += band.levels[moment]
        if height < below:
            return letters[band.title]
    return " "


def _stretch(panel: Panel, moment: float) -> str:
    return next((each.keys[0][0] for each in panel.strip if each.start <= moment < each.end), " ")


def _wrapped(texts: Sequence[str], width: int, comma: str) -> list[str]:
    """Texts, or the words of a single one, in lines of this width."""
    words = texts[0].split(" ") if len(texts) == 1 else [*(text + comma for text in texts[:-1]), *texts[-1:]]
    lines = [""]
    for word in words:
        if lines[-1] and cell_len(lines[-1]) + 1 + cell_len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return [line for line in lines if line]
