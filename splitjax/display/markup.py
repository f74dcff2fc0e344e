"""Pieces of HTML that several layouts write: text without markup of its own, and lines of pictures."""

from __future__ import annotations

import html

from splitjax.display.figures import clean


def safe(text: str) -> str:
    """Returns `text` with its control characters made visible and everything that HTML would read as markup escaped."""
    return html.escape(clean(text), quote=True)


def line(start: tuple[float, float], end: tuple[float, float], look: str) -> str:
    """Returns a line of an SVG picture between two places, as wide however the picture is stretched. `look`: further
    attributes, such as `stroke-dasharray`."""
    return (
        f'<line x1="{start[0]:.2f}" y1="{start[1]:.2f}" x2="{end[0]:.2f}" y2="{end[1]:.2f}" stroke="currentColor"'
        f' vector-effect="non-scaling-stroke" {look}/>'
    )
