"""Shows values to people: documents as values, one layout as text and one as HTML, a registry by type.

What goes in is a value (a plan, a report, a profile) for whose type somebody registered a function that makes a
`Document` of it; what comes out is text for terminals and logs, or HTML for notebooks and pages. It exists so that
values need not import what shows them: a value asks the registry, and a room above the value fills it.
"""

from splitjax.display.document import (
    Areas,
    Band,
    Bar,
    Column,
    Document,
    Matrix,
    Pairs,
    Panel,
    Paragraph,
    Section,
    Stretch,
    Table,
    Timeline,
)
from splitjax.display.registry import Shown, document, draw, html, page, register, show

__all__ = [
    "Areas",
    "Band",
    "Bar",
    "Column",
    "Document",
    "Matrix",
    "Pairs",
    "Panel",
    "Paragraph",
    "Section",
    "Shown",
    "Stretch",
    "Table",
    "Timeline",
    "document",
    "draw",
    "html",
    "page",
    "register",
    "show",
]
