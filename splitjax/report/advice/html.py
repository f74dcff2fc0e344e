"""An advice as HTML for notebooks: self-contained, every name escaped, in the style of a plan (`report.html`)."""

from __future__ import annotations

from splitjax.partial.advice import Advice
from splitjax.report.advice.rows import COLUMNS, LAYER_COLUMNS, LEGEND, headline, layer_rows, remarks, rows
from splitjax.report.html import STYLE, html_table, safe


def render_advice_html(advice: Advice) -> str:
    """The same content as `report.advice.text.render_advice_text`."""
    lines = "".join(
        f"<tr><th>{safe(title)}</th><td>{safe(text)}</td></tr>" for title, text in (*remarks(advice), *LEGEND)
    )
    return "".join(
        (
            f'<div class="splitjax-plan"><style>{STYLE}</style><p>{safe(headline(advice))}</p>',
            html_table("ways to train", COLUMNS, rows(advice), numbers=range(1, len(COLUMNS))),
            html_table(
                "layers, input side first", LAYER_COLUMNS, layer_rows(advice), numbers=range(1, len(LAYER_COLUMNS))
            ),
            f'<table class="summary"><tbody>{lines}</tbody></table></div>',
        )
    )
