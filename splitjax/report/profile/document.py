"""Makes the document of a profile: every tensor averaged over the steps, the tables step by step, the overlap of every
two workers, and what the columns mean."""

from __future__ import annotations

from splitjax.display.document import Document, Matrix, Pairs, Section, Table
from splitjax.display.figures import ratio_text
from splitjax.report.profile.rows import LEGEND, STEP_COLUMNS, columns, headline, remarks, step_rows, tensor_rows
from splitjax.sync.analysis import Profile, TensorProfile

# Overlaps of more workers than this are not shown as a matrix: nobody reads 4096 cells.
_MAX_MATRIX = 32


def profile_document(profile: Profile) -> Document:
    """Makes the document of `profile`."""
    names = columns(profile)
    tensors = Table.of(names, tensor_rows(profile), range(2, len(names)), code=(0, 1))
    steps = Table.of(STEP_COLUMNS, step_rows(profile), range(1, len(STEP_COLUMNS)), code=(0,))
    overlaps = [
        Section(f"overlap of workers: {table.path}, mean {ratio_text(table.overlap)}", (_matrix(table),), is_open=False)
        for table in profile.tables
        if 1 < table.num_workers <= _MAX_MATRIX
    ]
    told = Pairs(tuple((title, (text,)) for title, text in remarks(profile)))
    legend = Section("what the columns say", (Pairs(tuple((title, (text,)) for title, text in LEGEND)),))
    sections = (Section("tensors, mean over steps", (tensors,)), Section("tables, step by step", (steps,)), *overlaps)
    return Document(headline(profile), (*sections, told, legend))


def _matrix(table: TensorProfile) -> Matrix:
    """Returns the overlap of every two workers, with a note for each cell."""
    notes = tuple(
        tuple(f"workers {i} and {j}: {ratio_text(value)}" for j, value in enumerate(row))
        for i, row in enumerate(table.overlaps)
    )
    return Matrix(table.overlaps, notes)
