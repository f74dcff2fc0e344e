"""Documents as HTML for notebooks and pages: self-contained, every name escaped, light or dark as what is around them.

The style sheet has a font stack and an alignment of its own. Jupyter's style sheets set both for all tables, by
selectors of up to three classes and three elements (`.jp-RenderedHTMLCommon:not(.jp-RenderedMarkdown) tbody
tr:nth-child(odd)`), so every selector here names its class three times, which weighs more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from splitjax.display import areas, scatter
from splitjax.display.areas import areas_html
from splitjax.display.document import (
    Areas,
    Bar,
    Column,
    Document,
    Matrix,
    Pairs,
    Paragraph,
    Part,
    Scatter,
    Section,
    Stretch,
    Table,
    Timeline,
    is_empty,
)
from splitjax.display.markup import safe
from splitjax.display.scatter import scatter_html

_ROOT = "div.splitjax.splitjax.splitjax"
_BAR_PIXELS = 100
_WORDS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", Arial, sans-serif'
_NAMES = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", "DejaVu Sans Mono", monospace'
# A table that is wider than its page scrolls, and fades out at the right as long as there is more.
# Colours are the page's (`inherit`, `currentColor`) and translucent fills, so a dark theme needs no rules of its own: a
# notebook's theme need not be the system's, which is all that a media query could ask for.
_RULES = f"""
ROOT {{ font: 13px/1.5 {_WORDS}; color: inherit; max-width: 100%; text-align: left; }}
ROOT p {{ margin: 0 0 8px 0; font: 13px/1.5 {_WORDS}; color: inherit; }}
ROOT p.title {{ font-weight: 600; }}
ROOT details {{ margin: 0 0 10px 0; }}
ROOT summary {{ display: list-item; cursor: pointer; padding: 2px 0; font: 600 13px/1.5 {_WORDS}; color: inherit; }}
ROOT .scroll {{ overflow-x: auto; margin: 0 0 10px 0; }}
ROOT table {{ border-collapse: collapse; border: 0; margin: 0; width: auto; table-layout: auto;
  background: transparent; color: inherit; }}
ROOT thead, ROOT tbody, ROOT thead tr, ROOT tbody tr {{ background: transparent; border: 0; }}
ROOT th, ROOT td {{ padding: 2px 14px 2px 0; border: 0; background: transparent; color: inherit;
  font: 13px/1.5 {_WORDS}; text-align: left; vertical-align: baseline; white-space: nowrap; max-width: none; }}
ROOT th:last-child, ROOT td:last-child {{ padding-right: 0; }}
ROOT thead th {{ font-weight: 600; vertical-align: bottom; white-space: normal;
  border-bottom: 1px solid currentColor; }}
ROOT tbody tr.first td {{ border-top: 1px solid rgba(128, 128, 128, 0.3); }}
ROOT tbody tr.first:first-child td {{ border-top: 0; }}
ROOT td.number, ROOT th.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
ROOT td.words {{ white-space: normal; min-width: 9em; }}
ROOT td.long {{ min-width: 16em; max-width: 46em; overflow-wrap: anywhere; }}
ROOT code {{ padding: 0; border: 0; background: transparent; color: inherit; white-space: inherit;
  font: 12px/1.5 {_NAMES}; }}
ROOT .bar {{ display: inline-block; height: 9px; background: rgba(128, 128, 128, 0.3); }}
ROOT .bar span {{ display: block; height: 9px; background: rgb(66, 133, 214); }}
ROOT table.pairs {{ margin: 0 0 10px 0; }}
ROOT .pairs th {{ font-weight: 600; vertical-align: top; }}
ROOT .pairs td {{ white-space: normal; overflow-wrap: anywhere; max-width: 70em; }}
ROOT .matrix td {{ width: 14px; height: 14px; padding: 0; border: 1px solid rgba(128, 128, 128, 0.15); }}
ROOT .matrix th {{ padding: 0 4px 0 0; font-weight: 400; font-size: 11px; text-align: right; opacity: 0.7; }}
ROOT .timeline {{ width: 100%; }}
ROOT .timeline th {{ font-weight: 400; padding: 0 8px 0 0; }}
ROOT .timeline td {{ width: 100%; min-width: 200px; padding: 1px 0; vertical-align: middle; }}
ROOT .lane {{ position: relative; height: 18px; background: rgba(128, 128, 128, 0.12); }}
ROOT .lane span {{ position: absolute; top: 0; bottom: 0; }}
ROOT .axis {{ display: flex; justify-content: space-between; border-top: 1px solid currentColor; }}
ROOT .key {{ display: inline-block; margin: 0 14px 0 0; }}
ROOT .key span {{ display: inline-block; width: 10px; height: 10px; margin: 0 5px 0 0; }}
@supports (animation-timeline: scroll()) {{
ROOT .scroll {{ animation: splitjax-more linear; animation-timeline: scroll(self inline); }}
@keyframes splitjax-more {{
0%, 99% {{ mask-image: linear-gradient(to right, black calc(100% - 40px), transparent); }}
100% {{ mask-image: none; }}
}}
}}
@media (max-width: 600px) {{
ROOT th, ROOT td {{ padding: 2px 10px 2px 0; }}
ROOT td.words {{ min-width: 6em; }}
ROOT td.long {{ min-width: 10em; }}
ROOT .pairs th, ROOT .pairs td {{ display: block; padding: 0; }}
ROOT .pairs td {{ margin: 0 0 6px 0; }}
}}
"""
STYLE: str = (_RULES + areas.RULES + scatter.RULES).replace("ROOT", _ROOT)
# A lane is divided among so many that share it; where there are more, it is grey.
_MOST_SHARED = 9
_CROWDED = "rgb(128, 128, 128)"
# More colours than this are not explained below a timeline: what a stretch is shows under the pointer.
_MOST_KEYS = 48
_PAGE_STYLE = (
    f"body {{ margin: 20px; }} h1 {{ font: 600 18px/1.5 {_WORDS}; margin: 0 0 10px 0; }}"
    " @media (max-width: 600px) { body { margin: 10px; } }"
)
# A column of words with no text longer than this is never broken into lines; with one longer than the second number, it
# is kept wide enough for sentences.
_SHORT_CHARACTERS, _LONG_CHARACTERS = 16, 40


def render(document: Document) -> str:
    """Lays `document` out as one `<div>` with its style sheet."""
    lead = (("title", document.title), ("verdict", document.verdict))
    lines = "".join(f'<p class="{name}">{safe(text)}</p>' for name, text in lead if text)
    return f'<div class="splitjax"><style>{STYLE}</style>{lines}{_parts(document.parts)}</div>'


def page(body: str, title: str) -> str:
    """Returns a whole page called `title` around `body`, HTML such as `render` returns; light or dark as the reader's
    system is, and as wide as the window."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{safe(title)}</title><style>{_PAGE_STYLE}</style></head>\n"
        f"<body><h1>{safe(title)}</h1>{body}</body></html>\n"
    )


def _parts(parts: Sequence[Part]) -> str:
    return "".join(_part(part) for part in parts if not is_empty(part))


def _part(part: Part) -> str:
    if isinstance(part, Section):
        opening = "<details open>" if part.is_open else "<details>"
        return f"{opening}<summary>{safe(part.title)}</summary>{_parts(part.parts)}</details>"
    if isinstance(part, Paragraph):
        return f"<p>{safe(part.text)}</p>"
    if isinstance(part, Pairs):
        rows = "".join(
            f'<tr><th scope="row">{safe(title)}</th><td>{"<br>".join(map(safe, lines))}</td></tr>'
            for title, lines in part.entries
        )
        return f'<table class="pairs"><tbody>{rows}</tbody></table>'
    if isinstance(part, Timeline):
        return _timeline(part)
    if isinstance(part, Areas):
        return areas_html(part)
    if isinstance(part, Scatter):
        return scatter_html(part)
    return _table(part) if isinstance(part, Table) else _matrix(part)


def _table(table: Table) -> str:
    classes = [_classes(column, [row[i] for row in table.rows]) for i, column in enumerate(table.columns)]
    number = ' class="number"'
    head = "".join(
        f'<th scope="col"{number if column.kind == "number" else ""}>{safe(column.title)}</th>'
        for column in table.columns
    )
    longest = [
        max((cell.whole for row in table.rows if isinstance(cell := row[i], Bar)), default=0.0)
        for i in range(len(table.columns))
    ]
    body = []
    for position, row in enumerate(table.rows):
        cells = "".join(
            f"<td{mark}>{_cell(cell, column, most)}</td>"
            for cell, column, mark, most in zip(row, table.columns, classes, longest, strict=True)
        )
        body.append(f'<tr class="first">{cells}</tr>' if position in table.first_of_group else f"<tr>{cells}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _classes(column: Column, cells: Sequence[str | Bar]) -> str:
    """The class attribute of a column's cells: figures, words that are broken into lines where the table is wider than
    the page, sentences, or none for short words, names and bars."""
    if column.kind == "number":
        return ' class="number"'
    longest = max(len(cell) for cell in cells if isinstance(cell, str)) if column.kind == "text" else 0
    if longest <= _SHORT_CHARACTERS:
        return ""
    return ' class="words long"' if longest > _LONG_CHARACTERS else ' class="words"'


def _cell(cell: str | Bar, column: Column, longest: float) -> str:
    if isinstance(cell, Bar):
        return _bar(cell, longest)
    return f"<code>{safe(cell)}</code>" if column.kind == "code" and cell else safe(cell)


def _bar(bar: Bar, longest: float) -> str:
    if not bar.whole or not longest:
        return ""
    pixels = max(2, round(_BAR_PIXELS * bar.whole / longest))
    filled = f'<span style="width: {100 * bar.part / bar.whole:.1f}%"></span>'
    return f'<span class="bar" style="width: {pixels}px" title="{safe(bar.note)}">{filled}</span>'


def _timeline(timeline: Timeline) -> str:
    """A row for each lane, with a fill for each of its stretches, then the axis and which colour is whose."""
    # Hues a golden angle apart differ however many there are; those that come near each other again (8, 13, 21 further
    # on) differ in lightness, most of them.
    colours = {
        key: f"hsl({137.508 * number % 360:.0f}, 60%, {48 + 6 * (number % 4)}%)"
        for number, key in enumerate(timeline.keys)
    }
    rows = []
    for title, lane in timeline.lanes:
        spans = "".join(_stretch(stretch, timeline.end, colours) for stretch in lane)
        rows.append(f'<tr><th scope="row">{safe(title)}</th><td><div class="lane">{spans}</div></td></tr>')
    axis = f"<span>0</span><span>{safe(f'{timeline.end:.3g} {timeline.unit}')}</span>"
    rows.append(f'<tr><th></th><td><div class="axis">{axis}</div></td></tr>')
    keys = ""
    if len(colours) <= _MOST_KEYS:
        keys = "".join(
            f'<span class="key"><span style="background: {colour}"></span>{safe(key)}</span>'
            for key, colour in colours.items()
        )
    table = f'<table class="timeline"><tbody>{"".join(rows)}</tbody></table>'
    return f'<div class="scroll">{table}</div>' + (f"<p>{keys}</p>" if keys else "")


def _stretch(stretch: Stretch, end: float, colours: Mapping[str, str]) -> str:
    """The fill of a stretch, in equal bands where several share it."""
    # Neighbours are rounded alike: no gap and no overlap shows between them.
    left, right = (round(100 * moment / end, 3) for moment in (stretch.start, stretch.end))
    bands = [colours[key] for key in stretch.keys] if len(stretch.keys) <= _MOST_SHARED else [_CROWDED]
    fill = bands[0] if bands else "none"
    if len(bands) > 1:
        edges = [f"{100 * number / len(bands):.4g}%" for number in range(len(bands) + 1)]
        fill = f"linear-gradient({', '.join(f'{c} {a} {b}' for c, a, b in zip(bands, edges, edges[1:]))})"
    note = safe(stretch.note or ", ".join(stretch.keys))
    return f'<span style="left: {left:g}%; width: {right - left:.3f}%; background: {fill}" title="{note}"></span>'


def _matrix(matrix: Matrix) -> str:
    """The value as the strength of a cell's fill; its note shows under the pointer."""
    body = "".join(
        f'<tr><th scope="row">{number}</th>'
        + "".join(
            f'<td style="background: rgba(66, 133, 214, {value:.3f})" title="{safe(note)}"></td>'
            for value, note in zip(values, notes, strict=True)
        )
        + "</tr>"
        for number, (values, notes) in enumerate(zip(matrix.values, matrix.notes, strict=True))
    )
    return f'<div class="scroll"><table class="matrix"><tbody>{body}</tbody></table></div>'
