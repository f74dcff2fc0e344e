"""A profile as plain text, as `report.text` writes a plan: no colour codes, so that it can be logged, compared and
piped."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table
from rich.text import Text

from splitjax.report.profile.rows import LEGEND, STEP_COLUMNS, columns, headline, remarks, step_rows, tensor_rows
from splitjax.report.table import clean
from splitjax.report.text import section, text_width
from splitjax.sync.analysis import Profile


def render_profile_text(profile: Profile, width: int | None = None) -> str:
    """The profile as tables: every tensor averaged over the steps, the tables step by step, and what the columns mean.
    `width`: columns, as for `report.text.render_text`."""
    console = Console(
        file=io.StringIO(),
        width=text_width() if width is None else width,
        color_system=None,
        force_terminal=False,
        legacy_windows=False,
    )
    names = columns(profile)
    section(console, clean(headline(profile)), names, tensor_rows(profile), numbers=range(2, len(names)))
    section(console, "tables, step by step", STEP_COLUMNS, step_rows(profile), numbers=range(1, len(STEP_COLUMNS)))
    footer = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    footer.add_column(no_wrap=True)
    footer.add_column(overflow="fold")
    for title, text in (*remarks(profile), *LEGEND):
        footer.add_row(Text(title), Text(clean(text)))
    console.print(footer)
    file = console.file
    assert isinstance(file, io.StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())
