"""Draws a plan as an SVG: a bar for each layer, as long as the layer takes bytes, filled for what a device holds of it.

The file is scaled to any width and has colours for light and for dark pages, between which the reader's browser
chooses: one file serves a README, a page and a slide.
"""

from __future__ import annotations

from html import escape

from splitjax.display.figures import bytes_text, percent_saved
from splitjax.plan import Plan
from splitjax.report.plan.table import Row, table

_WIDTH, _LEFT, _BAR, _ROW = 860, 210, 400, 22
_TEXT = _LEFT + _BAR + 14
# Colours of light and of dark pages: text, softer text, what is not held, a whole layer, a split layer, the page. The
# last because a package index stays white for readers whose system is dark: pale words would not be seen there.
_LIGHT = ("#1f2328", "#59636e", "#d8dee4", "#57606a", "#e8590c", "#ffffff")
_DARK = ("#e6edf3", "#9198a1", "#30363d", "#8b949e", "#ff922b", "#0d1117")
_NAMES = ("text", "soft", "away", "whole", "split", "page")
# A character of the monospaced names, in units of the picture; longer names are cut.
_MOST_CHARACTERS = 24


def plan_svg(plan: Plan) -> str:
    """Returns the picture of `plan` as the text of an SVG file.

    One row a layer, equal layers folded into one. A bar is as long as the layer's parameters take bytes, relative to
    the largest layer; the filled part is what one device holds: all of a layer that stays whole, a part of a split one.
    The last rows compare the state of a device with that of one device that holds everything.
    """
    groups = table(plan)
    most = max((_whole(group) for group in groups), default=1) or 1
    rows: list[str] = []
    y = 58
    for group in groups:
        rows += _layer(group, most, y)
        y += _ROW
    rows += _state(plan, y + 14)
    height = y + 14 + 2 * _ROW + 26
    mesh = " x ".join(f"{name}={size}" for name, size in plan.mesh.axes)
    title = f"What each of {plan.mesh.num_devices} devices holds: {mesh}, rules {plan.rules}"
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img"'
        f' aria-label="{escape(title, quote=True)}">',
        f"<style>text{{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}}.title{{font-weight:bold}}"
        f"{_style(_LIGHT)}@media(prefers-color-scheme:dark){{{_style(_DARK)}}}</style>",
        f'<path d="M0 0H{_WIDTH}V{height}H0Z" class="page"/>',
        _text(10, 20, title, "text title"),
        *_legend(10, 42),
    ]
    return "\n".join((*head, *rows, "</svg>")) + "\n"


def _style(colours: tuple[str, ...]) -> str:
    return "".join(f".{name}{{fill:{colour}}}" for name, colour in zip(_NAMES, colours, strict=True))


def _legend(x: int, y: int) -> list[str]:
    parts = []
    for name, words in (
        ("whole", "whole on every device"),
        ("split", "the part of a device"),
        ("away", "on other devices"),
    ):
        parts += [_rectangle(x, y - 10, 12, name), _text(x + 18, y, words, "soft")]
        x += 34 + 8 * len(words)
    return parts


def _layer(group: tuple[Row, ...], most: int, y: int) -> list[str]:
    whole, held = _whole(group), sum(row.device_bytes * row.repeat for row in group)
    length = max(2.0, _BAR * whole / most)
    is_split = held < whole
    name = group[0].layer or "(no layer)"
    repeat = group[0].repeat
    if repeat > 1:
        name = f"{name} ({repeat})"
    amount = f"{bytes_text(held)} of {bytes_text(whole)}" if is_split else bytes_text(whole)
    filled = max(2.0, length * held / whole) if whole else 2.0
    return [
        _text(10, y + 15, _cut(name), "text"),
        _rectangle(_LEFT, y + 4, length, "away"),
        _rectangle(_LEFT, y + 4, filled, "split" if is_split else "whole"),
        _text(_TEXT, y + 15, amount, "soft"),
    ]


def _state(plan: Plan, y: int) -> list[str]:
    whole = sum(leaf.whole_bytes(plan.mesh) for leaf in plan.leaves if leaf.is_state)
    held = plan.memory.state_bytes
    share = held / whole if whole else 1.0
    saved = f", {percent_saved(held, whole)} saved" if held < whole else ""
    return [
        f'<line x1="10" y1="{y - 6}" x2="{_WIDTH - 10}" y2="{y - 6}" stroke-width="1" class="rule"'
        ' style="stroke:currentColor;opacity:0.2"/>',
        _text(10, y + 15, "state on one device", "text"),
        _rectangle(_LEFT, y + 4, _BAR, "whole"),
        _text(_TEXT, y + 15, bytes_text(whole), "soft"),
        _text(10, y + 15 + _ROW, "state of each device", "text"),
        _rectangle(_LEFT, y + 4 + _ROW, _BAR, "away"),
        _rectangle(_LEFT, y + 4 + _ROW, max(2.0, _BAR * share), "split" if held < whole else "whole"),
        _text(_TEXT, y + 15 + _ROW, bytes_text(held) + saved, "soft"),
    ]


def _whole(group: tuple[Row, ...]) -> int:
    return sum(row.whole_bytes * row.repeat for row in group)


def _cut(name: str) -> str:
    return name if len(name) <= _MOST_CHARACTERS else "…" + name[1 - _MOST_CHARACTERS :]


def _text(x: int, y: int, words: str, kind: str) -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(words)}</text>'


def _rectangle(x: int, y: int, width: float, kind: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width:.1f}" height="13" rx="2" class="{kind}"/>'
