"""What a plan says to people: as text for terminals, as HTML for notebooks."""

from splitjax.report.html import render_html
from splitjax.report.text import render_text

__all__ = ["render_html", "render_text"]
