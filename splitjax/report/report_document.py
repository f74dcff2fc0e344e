"""Makes the document of a report: memory, sums by operation and by layer, then every collective, planned beside
compiled."""

from __future__ import annotations

from collections.abc import Sequence

from splitjax.display.document import Column, Document, Kind, Section, Table
from splitjax.display.figures import bytes_text
from splitjax.report.blame.rows import COLUMNS, rematerialised_rows
from splitjax.report.rows import (
    DEPTH_COLUMNS,
    CollectiveRow,
    compute_rows,
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

_KINDS: dict[str, Kind] = {
    "layer": "code",
    "collective": "code",
    "predicted": "number",
    "compiled": "number",
    "line": "code",
}
_SUMS = ("predicted number", "predicted bytes", "compiled number", "compiled bytes")


def report_document(report: Report) -> Document:
    """Makes the document of `report`: one section for each table that has rows."""
    memory = Table.of(("predicted", "bytes", "compiled", "bytes"), memory_rows(report), (1, 3))
    compute = Table.of(("predicted", "flops", "compiled", "flops"), compute_rows(report), (1, 3))
    totals = Table.of(("collective", *_SUMS), total_rows(report), range(1, 5))
    layers = Table.of(("layer", *_SUMS), layer_rows(report), range(1, 5), code=(0,))
    depths = Table.of(DEPTH_COLUMNS, depth_rows(report), (0, 2, 3), code=(1,))
    planned = _collectives(
        planned_rows(report), ("layer", "collective", "predicted", "compiled", "why", "rule", "line")
    )
    unplanned = _collectives(unplanned_rows(report), ("layer", "collective", "compiled", "why", "rule", "line"))
    missing = _collectives(missing_rows(report), ("layer", "collective", "predicted", "why"))
    whole = Table.of(COLUMNS, rematerialised_rows(report), (), code=(0, 1, 3, 4))
    sections = (
        ("memory per device", memory),
        ("computed per device and step", compute),
        ("sent per device and step", totals),
        ("by layer", layers),
        ("depths in the first step", depths),
        ("as planned", planned),
        ("unplanned", unplanned),
        ("planned, but not in the compiled step", missing),
        ("gathered whole to keep a part (involuntary full rematerialization)", whole),
    )
    return Document(
        headline(report), tuple(Section(title, (table,)) for title, table in sections), verdict=verdict(report)
    )


def _collectives(rows: Sequence[CollectiveRow], titles: Sequence[str]) -> Table:
    """Makes a table of collectives with the named columns; those that say nothing of any row are left out."""
    texts = [_cells(row) for row in rows]
    kept = [title for title in titles if any(text[title] for text in texts)]
    return Table(
        tuple(Column(title, _KINDS.get(title, "text")) for title in kept),
        tuple(tuple(text[title] for title in kept) for text in texts),
    )


def _cells(row: CollectiveRow) -> dict[str, str]:
    """Returns a row's texts by column."""
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
