"""A profile as HTML for notebooks: self-contained, every name escaped, in the style of a plan (`report.html`)."""

from __future__ import annotations

from collections.abc import Sequence

from splitjax.report.html import STYLE, html_table, safe
from splitjax.report.profile.rows import (
    LEGEND,
    STEP_COLUMNS,
    columns,
    headline,
    ratio_text,
    remarks,
    step_rows,
    tensor_rows,
)
from splitjax.sync.analysis import Profile, TensorProfile

# Overlaps of more workers than this are not shown as a matrix: nobody reads 4096 cells.
_MAX_MATRIX = 32
_STYLE = """
div.splitjax-plan.splitjax-plan .matrix td { width: 14px; height: 14px; padding: 0; border: 1px solid rgba(128, 128, 128, 0.15); }
div.splitjax-plan.splitjax-plan .matrix th { padding: 0 4px 0 0; font-weight: 400; font-size: 11px; text-align: right; opacity: 0.7; }
"""  # noqa: E501


def render_profile_html(profile: Profile) -> str:
    """The same content as `report.profile.text.render_profile_text`, and the overlap of every two workers for the
    tables."""
    names = columns(profile)
    return "".join(
        (
            f'<div class="splitjax-plan"><style>{STYLE}{_STYLE}</style><p>{safe(headline(profile))}</p>',
            html_table("tensors, mean over steps", names, tensor_rows(profile), numbers=range(2, len(names))),
            html_table("tables, step by step", STEP_COLUMNS, step_rows(profile), numbers=range(1, len(STEP_COLUMNS))),
            *(_matrix(table) for table in profile.tables if 1 < table.num_workers <= _MAX_MATRIX),
            _legend((*remarks(profile), *LEGEND)),
            "</div>",
        )
    )


def _matrix(table: TensorProfile) -> str:
    """Two workers' overlap as the strength of a cell's fill; the figure is its tooltip."""
    body = "".join(
        f"<tr><th>{i}</th>{''.join(_cell(i, j, value) for j, value in enumerate(row))}</tr>"
        for i, row in enumerate(table.overlaps)
    )
    title = f"overlap of workers: {table.path}, mean {ratio_text(table.overlap)}"
    return f'<details><summary>{safe(title)}</summary><table class="matrix"><tbody>{body}</tbody></table></details>'


def _cell(i: int, j: int, value: float) -> str:
    return (
        f'<td style="background: rgba(66, 133, 214, {value:.3f})" title="workers {i} and {j}:'
        f' {ratio_text(value)}"></td>'
    )


def _legend(lines: Sequence[tuple[str, str]]) -> str:
    rows = "".join(f"<tr><th>{safe(title)}</th><td>{safe(text)}</td></tr>" for title, text in lines)
    return f'<table class="summary"><tbody>{rows}</tbody></table>'
