"""A plan as HTML for notebooks: self-contained, every name escaped, colours taken from the page, so that it reads light
or dark."""

from __future__ import annotations

import html
from collections.abc import Sequence

from splitjax.plan import Plan
from splitjax.report.table import Row, bytes_text, clean, percent_saved, summary, table
from splitjax.report.text import row_bytes

# Only currentColor and translucent fills: a notebook's theme decides what they look like. The class is named twice
# because Jupyter aligns all cells on the right, by a selector of two classes and an element,
# `:not(.jp-RenderedMarkdown).jp-RenderedHTMLCommon td`: this one has to weigh more.
STYLE = """
.splitjax-plan { font-size: 13px; line-height: 1.45; color: inherit; overflow-x: auto; }
div.splitjax-plan.splitjax-plan table { border-collapse: collapse; margin: 0 0 10px 0; background: transparent; }
div.splitjax-plan.splitjax-plan th, div.splitjax-plan.splitjax-plan td { padding: 2px 12px 2px 0; text-align: left; vertical-align: top; border: 0;
  background: transparent; white-space: nowrap; color: inherit; font-size: 13px; }
div.splitjax-plan.splitjax-plan thead th { border-bottom: 1px solid currentColor; font-weight: 600; }
div.splitjax-plan.splitjax-plan tr.first td { border-top: 1px solid rgba(128, 128, 128, 0.3); }
div.splitjax-plan.splitjax-plan td.number, div.splitjax-plan.splitjax-plan th.number { text-align: right; font-variant-numeric: tabular-nums; }
div.splitjax-plan.splitjax-plan code { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 12px; background: transparent; color: inherit; }
div.splitjax-plan.splitjax-plan .bar { display: inline-block; height: 9px; background: rgba(128, 128, 128, 0.3); vertical-align: middle; }
div.splitjax-plan.splitjax-plan .bar span { display: block; height: 9px; background: rgb(66, 133, 214); }
div.splitjax-plan.splitjax-plan .summary th { font-weight: 600; }
div.splitjax-plan.splitjax-plan .summary td { white-space: normal; }
"""  # noqa: E501
_COLUMNS = ("layer", "parameter", "kind", "shape", "spec", "rule")
_BAR_PIXELS = 160


def render_html(plan: Plan) -> str:
    """The same content as `report.text.render_text`, with a bar per layer: what one device holds, within what the whole
    layer takes, relative to the largest layer."""
    groups = table(plan)
    largest = max((sum(row.whole_bytes * row.repeat for row in group) for group in groups), default=0)
    parts = [f'<div class="splitjax-plan"><style>{STYLE}</style>']
    if groups:
        heads = "".join(f"<th>{title}</th>" for title in _COLUMNS)
        parts.append(
            f'<table><thead><tr>{heads}<th class="number">per device</th><th>of the whole'
            " layer</th></tr></thead><tbody>"
        )
        for group in groups:
            for i, row in enumerate(group):
                parts.append(_row(row, group if i == 0 else None, largest))
        parts.append("</tbody></table>")
    parts.append('<table class="summary"><tbody>')
    for title, lines in summary(plan):
        parts.append(f"<tr><th>{safe(title)}</th><td>{'<br>'.join(map(safe, lines))}</td></tr>")
    parts.append("</tbody></table></div>")
    return "".join(parts)


def _row(row: Row, group: tuple[Row, ...] | None, largest: int) -> str:
    """One parameter's table row; the first of its layer (`group` given) names the layer and draws its bar."""
    layer, kind, bar = (row.layer, row.kind, _bar(group, largest)) if group else ("", "", "")
    cells = (
        f"<code>{safe(layer)}</code>",
        f"<code>{safe(row.param)}</code>",
        safe(kind),
        f"<code>{safe(str(row.shape))}</code>",
        f"<code>{safe(row.spec)}</code>",
        safe(row.rule),
    )
    texts = "".join(f"<td>{cell}</td>" for cell in cells)
    opening = '<tr class="first">' if group else "<tr>"
    return f'{opening}{texts}<td class="number">{safe(row_bytes(row))}</td><td>{bar}</td></tr>'


def _bar(group: tuple[Row, ...], largest: int) -> str:
    held = sum(row.device_bytes * row.repeat for row in group)
    whole = sum(row.whole_bytes * row.repeat for row in group)
    if not whole:
        return ""
    outer = max(2, round(_BAR_PIXELS * whole / largest))
    title = safe(f"{bytes_text(held)} per device of {bytes_text(whole)}: {percent_saved(held, whole)} saved")
    inner = f'<span style="width: {100 * held / whole:.1f}%"></span>'
    return f'<span class="bar" style="width: {outer}px" title="{title}">{inner}</span>'


def safe(text: str) -> str:
    return html.escape(clean(text), quote=True)


def html_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> str:
    """A titled table that folds away; nothing where it has no rows. `numbers`: the columns that are aligned on the
    right."""
    if not rows:
        return ""
    marks = ['class="number"' if position in numbers else "" for position in range(len(columns))]
    head = "".join(f"<th {mark}>{safe(name)}</th>" for name, mark in zip(columns, marks, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td {mark}>{safe(cell)}</td>" for cell, mark in zip(row, marks, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        "<details"
        f" open><summary>{safe(title)}</summary><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></details>"  # noqa: E501
    )
