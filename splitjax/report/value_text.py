"""A report as plain text, as `report.text` writes a plan: no colour codes, so that it can be logged, compared and
piped."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

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
from splitjax.report.table import bytes_text, clean
from splitjax.report.text import section, text_width
from splitjax.report.value import Report


def render_report_text(report: Report, width: int | None = None) -> str:
    """The report as tables: memory, sums by operation and by layer, then every collective. `width`: columns, as for
    `report.text.render_text`."""
    console = Console(
        file=io.StringIO(),
        width=text_width() if width is None else width,
        color_system=None,
        force_terminal=False,
        legacy_windows=False,
    )
    console.print(Text(clean(headline(report))))
    console.print()
    section(console, "memory per device", ("predicted", "", "compiled", ""), memory_rows(report), numbers=(1, 3))
    section(
        console,
        "sent per device and step",
        ("", "", "predicted", "", "compiled"),
        total_rows(report),
        numbers=(1, 2, 3, 4),
    )
    section(console, "by layer", ("layer", "", "predicted", "", "compiled"), layer_rows(report), numbers=(1, 2, 3, 4))
    section(console, "depths in the first step", DEPTH_COLUMNS, depth_rows(report), numbers=(2, 3))
    _collectives(
        console,
        "as planned",
        planned_rows(report),
        ("layer", "collective", "predicted", "compiled", "why", "rule", "line"),
    )
    _collectives(console, "unplanned", unplanned_rows(report), ("layer", "collective", "compiled", "why", "line"))
    _collectives(
        console,
        "planned, but not in the compiled step",
        missing_rows(report),
        ("layer", "collective", "predicted", "why"),
    )
    console.print(Text(verdict(report)))
    file = console.file
    assert isinstance(file, io.StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def cells(row: CollectiveRow) -> dict[str, str]:
    """A row's texts by column."""
    times = f"{row.count} x " if row.count > 1 else ""
    return {
        "layer": row.layer,
        "collective": f"{times}{row.op} over {row.axis}",
        "predicted": bytes_text(row.predicted_bytes),
        "compiled": bytes_text(row.compiled_bytes),
        "why": row.why,
        "rule": row.rule,
        "line": row.source,
    }


def _collectives(console: Console, title: str, rows: Sequence[CollectiveRow], columns: Sequence[str]) -> None:
    texts = [tuple(cells(row)[name] for name in columns) for row in rows]
    section(
        console,
        title,
        columns,
        texts,
        numbers=tuple(i for i, name in enumerate(columns) if name in ("predicted", "compiled")),
    )
