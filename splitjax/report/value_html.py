"""A report as HTML for notebooks: self-contained, every name escaped, in the style of a plan (`report.html`)."""

from __future__ import annotations

from collections.abc import Sequence

from splitjax.report.html import STYLE, html_table, safe
from splitjax.report.rows import (
    DEPTH_COLUMNS,
    CollectiveRow,
    depth_rows,
    headline,
    layer_rows,
    memory_rows,
    missing_rows,
    planned_rows,
    total_rows,
    unplanned_rows,
    verdict,
)
from splitjax.report.value import Report
from splitjax.report.value_text import cells

_NUMBERS = ("predicted", "compiled")


def render_report_html(report: Report) -> str:
    """The same content as `report.value_text.render_report_text`; long tables fold away."""
    return "".join(
        (
            (
                "<div"
                f' class="splitjax-plan"><style>{STYLE}</style><p>{safe(headline(report))}<br>{safe(verdict(report))}</p>'  # noqa: E501
            ),
            html_table("memory per device", ("predicted", "", "compiled", ""), memory_rows(report), numbers=(1, 3)),
            html_table(
                "sent per device and step",
                ("", "", "predicted", "", "compiled"),
                total_rows(report),
                numbers=(1, 2, 3, 4),
            ),
            html_table(
                "by layer", ("layer", "", "predicted", "", "compiled"), layer_rows(report), numbers=(1, 2, 3, 4)
            ),
            html_table("depths in the first step", DEPTH_COLUMNS, depth_rows(report), numbers=(2, 3)),
            _collectives(
                "as planned",
                planned_rows(report),
                ("layer", "collective", "predicted", "compiled", "why", "rule", "line"),
            ),
            _collectives(
                "unplanned", unplanned_rows(report), ("layer", "collective", "compiled", "why", "rule", "line")
            ),
            _collectives(
                "planned, but not in the compiled step",
                missing_rows(report),
                ("layer", "collective", "predicted", "why"),
            ),
            "</div>",
        )
    )


def _collectives(title: str, rows: Sequence[CollectiveRow], columns: Sequence[str]) -> str:
    texts = [tuple(cells(row)[name] for name in columns) for row in rows]
    return html_table(title, columns, texts, numbers=tuple(i for i, name in enumerate(columns) if name in _NUMBERS))
