"""The document of a verification: for each kind of sizes what was compared, what is wrong where, and the sizes used.

What goes in is a `Verification`; `splitjax.display` lays the document out as text or HTML. `splitjax.verify` registers
it.
"""

from __future__ import annotations

from collections.abc import Iterator

from splitjax.display.document import Column, Document, Pairs, Paragraph, Part, Section, Table
from splitjax.display.figures import seconds_text
from splitjax.verify.result import ComparedValue, DimSize, Verification, VerifiedRun

# Tables of wrong values and of dims are cut behind so many rows; `Verification.runs` has all.
_MOST_ROWS = 12


def verification_document(verification: Verification) -> Document:
    """Makes the document of `verification`."""
    return Document(
        f"{verification.step} on {verification.mesh}, rules {verification.rules}",
        tuple(
            Section(f"{run.sizes} sizes, float64, {seconds_text(run.seconds)}", tuple(_parts(run)))
            for run in verification.runs
        ),
        verdict="the same numbers as on one device" if verification.ok else "OTHER NUMBERS THAN ON ONE DEVICE",
    )


def _parts(run: VerifiedRun) -> Iterator[Part]:
    yield Pairs(tuple(("found", (finding.text,)) for finding in run.findings))
    yield _kinds(run)
    yield from _cut(_wrong(run.wrong), "wrong values")
    changed = tuple(dim for dim in run.dims if dim.used != dim.given)
    kept = tuple(dim for dim in run.dims if dim.why)
    if run.sizes != "given":
        yield Section("dims that were shrunken", tuple(_cut(_shrunken(changed), "dims")), is_open=False)
        yield Section("dims that keep their size", tuple(_cut(_kept(kept), "dims")), is_open=False)
    yield Pairs(tuple(("note", (note,)) for note in run.notes))


def _kinds(run: VerifiedRun) -> Table:
    """A row for each kind of values: how many there are, how many are wrong, and the largest relative differences."""
    has_own = any(value.own_relative is not None for value in run.values)
    rows = []
    for kind in dict.fromkeys(value.kind for value in run.values):
        values = [value for value in run.values if value.kind == kind]
        own = [value.own_relative for value in values if value.own_relative is not None]
        rows.append(
            (
                kind,
                str(len(values)),
                str(sum(not value.ok for value in values)),
                f"{max(value.relative for value in values):.2e}",
                *((f"{max(own):.2e}" if own else "",) if has_own else ()),
            )
        )
    titles = ("kind", "values", "wrong", "largest relative difference", *(("in own precision",) if has_own else ()))
    return Table.of(titles, tuple(rows), range(1, 5))


def _wrong(values: tuple[ComparedValue, ...]) -> Table:
    """A row for each wrong value, with a column of notes where there are any."""
    has_notes = any(value.note for value in values[:_MOST_ROWS])
    columns = (
        Column("wrong value", "code"),
        Column("kind"),
        Column("relative difference", "number"),
        Column("times one device's", "number"),
        *((Column("note"),) if has_notes else ()),
    )
    rows = tuple(
        (
            value.name,
            value.kind,
            f"{value.relative:.2e}",
            "" if value.ratio is None else f"{value.ratio:.6g}",
            *((value.note,) if has_notes else ()),
        )
        for value in values
    )
    return Table(columns, rows)


def _shrunken(dims: tuple[DimSize, ...]) -> Table:
    rows = tuple((dim.name, str(dim.given), str(dim.used)) for dim in dims)
    return Table((Column("dim", "code"), Column("in the step", "number"), Column("compared at", "number")), rows)


def _kept(dims: tuple[DimSize, ...]) -> Table:
    rows = tuple((dim.name, str(dim.given), dim.why) for dim in dims)
    return Table((Column("dim", "code"), Column("size", "number"), Column("why")), rows)


def _cut(table: Table, what: str) -> Iterator[Part]:
    """The first rows of a table, and how many more there are of `what`."""
    yield Table(table.columns, table.rows[:_MOST_ROWS])
    num_hidden = len(table.rows) - _MOST_ROWS
    yield Paragraph(f"{num_hidden} more {what} are not shown" if num_hidden > 0 else "")
