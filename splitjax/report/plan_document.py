"""Makes the document of a plan: a table of parameters with a bar per layer, and titled lines below it."""

from __future__ import annotations

from splitjax.display.document import Bar, Cell, Column, Document, Pairs, Section, Table
from splitjax.display.figures import bytes_text, percent_saved
from splitjax.plan import Plan
from splitjax.report.table import Row, collective_rows, memory_rows, summary, table


def plan_document(plan: Plan) -> Document:
    """Makes the document of `plan`. The bar of a layer is as long as the layer takes bytes, relative to the largest
    layer, and filled for what one device holds of it."""
    memory = Table.of(("", "per device", "on one device", "saved"), memory_rows(plan), (1, 2, 3))
    sent = Table.of(("collective", "number", "bytes"), collective_rows(plan), (1, 2))
    return Document(
        "",
        (
            _parameters(table(plan)),
            Section("memory", (memory,)),
            Section("sent per device and step", (sent,)),
            Pairs(summary(plan)),
        ),
    )


def _parameters(groups: tuple[tuple[Row, ...], ...]) -> Table:
    """Makes the table of parameters; where equal layers are folded, with a column that says how many a row stands
    for."""
    is_folded = any(row.repeat > 1 for group in groups for row in group)
    rows: list[tuple[Cell, ...]] = []
    firsts = []
    for group in groups:
        firsts.append(len(rows))
        for number, row in enumerate(group):
            layer, kind, bar = ("", "", "") if number else (row.layer, row.kind, _bar(group))
            count = ("" if row.repeat == 1 else str(row.repeat),) if is_folded else ()
            names = (layer, row.param, kind, str(row.shape), row.spec, row.rule)
            rows.append((*names, *count, bytes_text(row.device_bytes), bar))
    columns = (
        Column("layer", "code"),
        Column("parameter", "code"),
        Column("kind"),
        Column("shape", "code"),
        Column("spec", "code"),
        Column("rule"),
        *((Column("layers", "number"),) if is_folded else ()),
        Column("each, per device" if is_folded else "per device", "number"),
        Column("filled: held of the layer", "bar"),
    )
    return Table(columns, tuple(rows), frozenset(firsts))


def _bar(group: tuple[Row, ...]) -> Bar:
    held = sum(row.device_bytes * row.repeat for row in group)
    whole = sum(row.whole_bytes * row.repeat for row in group)
    note = f"{bytes_text(held)} per device of {bytes_text(whole)}: {percent_saved(held, whole)} saved"
    return Bar(held, whole, note)
