"""A plan as plain text, laid out by rich: no colour codes, so that it can be logged, compared and piped."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from splitjax.plan import Plan
from splitjax.report.table import Row, bytes_text, clean, summary, table

MAX_WIDTH, PIPED_WIDTH, MIN_WIDTH = 160, 120, 60


def render_text(plan: Plan, width: int | None = None) -> str:
    """The plan as a table of parameters and a summary. `width`: columns; None for the terminal's, at most 160, and for
    120 where the output is no terminal. Long names are folded onto further lines, never cut."""
    console = Console(
        file=io.StringIO(),
        width=text_width() if width is None else width,
        color_system=None,
        force_terminal=False,
        legacy_windows=False,
    )
    groups = table(plan)
    if groups:
        console.print(_parameters(groups))
        console.print()
    footer = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    footer.add_column(no_wrap=True)
    footer.add_column(overflow="fold")
    for title, lines in summary(plan):
        for i, line in enumerate(lines):
            footer.add_row(Text("" if i else title), Text(clean(line)))
    console.print(footer)
    file = console.file
    assert isinstance(file, io.StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def text_width() -> int:
    """Columns of the terminal within bounds, or of a page where the output is no terminal."""
    try:
        terminal = sys.stdout.isatty()
    except (AttributeError, ValueError):  # replaced or closed
        terminal = False
    if not terminal:
        return PIPED_WIDTH
    return max(MIN_WIDTH, min(MAX_WIDTH, shutil.get_terminal_size((PIPED_WIDTH, 24)).columns))


def _parameters(groups: tuple[tuple[Row, ...], ...]) -> Table:
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False, collapse_padding=True)
    for title in ("layer", "parameter", "kind", "shape", "spec", "rule"):
        grid.add_column(title, overflow="fold")
    grid.add_column("per device", justify="right", no_wrap=True)
    for group in groups:
        for i, row in enumerate(group):
            # Text objects: brackets and colons in names are no markup and no emoji.
            cells = (
                "" if i else row.layer,
                row.param,
                "" if i else row.kind,
                str(row.shape),
                row.spec,
                row.rule,
                row_bytes(row),
            )
            grid.add_row(*(Text(clean(cell)) for cell in cells))
    return grid


def row_bytes(row: Row) -> str:
    return bytes_text(row.device_bytes) if row.repeat == 1 else f"{row.repeat} x {bytes_text(row.device_bytes)}"


def section(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int]
) -> None:
    """Prints a titled table, and nothing where it has no rows. `numbers`: the columns that are aligned on the right."""
    if not rows:
        return
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False, collapse_padding=True)
    for position, name in enumerate(columns):
        if position in numbers:
            grid.add_column(name, justify="right", no_wrap=True)
        else:
            grid.add_column(name, overflow="fold")
    for row in rows:
        # Text objects: brackets and colons in names are no markup and no emoji.
        grid.add_row(*(Text(clean(cell)) for cell in row))
    console.print(Text(title))
    console.print(grid)
    console.print()
