"""An advice as plain text, as `report.text` writes a plan: no colour codes, so that it can be logged, compared and
piped."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table
from rich.text import Text

from splitjax.partial.advice import Advice
from splitjax.report.advice.rows import COLUMNS, LAYER_COLUMNS, LEGEND, headline, layer_rows, remarks, rows
from splitjax.report.table import clean
from splitjax.report.text import section, text_width

# The table is wider than a plan's.
_WIDTH = 140


def render_advice_text(advice: Advice, width: int | None = None) -> str:
    """The advice as tables: the ways to train, the layers, and what to do. `width`: columns, as for
    `report.text.render_text`."""
    console = Console(
        file=io.StringIO(),
        width=max(text_width(), _WIDTH) if width is None else width,
        color_system=None,
        force_terminal=False,
        legacy_windows=False,
    )
    section(console, clean(headline(advice)), COLUMNS, rows(advice), numbers=range(1, len(COLUMNS)))
    section(
        console, "layers, input side first", LAYER_COLUMNS, layer_rows(advice), numbers=range(1, len(LAYER_COLUMNS))
    )
    footer = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    footer.add_column(no_wrap=True)
    footer.add_column(overflow="fold")
    for title, text in (*remarks(advice), *LEGEND):
        footer.add_row(Text(title), Text(clean(text)))
    console.print(footer)
    file = console.file
    assert isinstance(file, io.StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())
