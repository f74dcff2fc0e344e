"""Knows which function makes the document of a value, by the value's type.

A value's `__str__` calls `show(self)` and its `_repr_html_` calls `html(self)`, and neither imports anything that knows
how it looks. A room above the value registers a function for its type; `import splitjax` registers those of splitjax's
own values. A type may be registered by its dotted name, so that registering does not import it. A value of a type that
nobody registered prints its `repr`.
"""

from __future__ import annotations

import dataclasses
import html as html_escapes
import os
from collections.abc import Callable
from typing import Any

from splitjax.display.document import Document
from splitjax.errors import SplitjaxError

MakeDocument = Callable[[Any], Document]
# (value, the file to write the picture to, if any) -> the picture
Draw = Callable[[Any, str | os.PathLike[str] | None], Any]


@dataclasses.dataclass(frozen=True)
class Registered:
    """Holds what is registered for a type: `make_document`, and `draw` where there is a picture of its values."""

    make_document: MakeDocument
    draw: Draw | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class Shown:
    """Holds a `document` that shows itself: as text when it is printed, as HTML in a notebook.

    Functions return it whose document says more than a single value does, such as a profile for a number of workers.
    """

    document: Document

    def __repr__(self) -> str:
        return f"<{self.document.title or 'Tables'}; print it for the tables>"

    def __str__(self) -> str:
        return show(self.document)

    def _repr_html_(self) -> str:
        return html(self.document)


_ENTRIES: dict[str, Registered] = {}


def register(kind: type | str, make_document: MakeDocument, *, draw: Draw | None = None) -> None:
    """Registers how values of a type look. The last registration of a type counts.

    **Arguments:**

    - `kind`: the type, or its dotted name (`"package.module.Class"`) where it need not be imported for this.
    - `make_document`: a function that makes the `Document` of a value. It is called when a value is shown, so it may
      import what it needs then.
    - `draw`: a function of a value and a path (or None) that draws a picture, writes it to the path, and returns it.
    """
    _ENTRIES[kind if isinstance(kind, str) else _name(kind)] = Registered(make_document, draw)


def document(value: object) -> Document | None:
    """Returns the document of `value`, by the nearest registered class among its type's bases; `value` itself if it is
    a document, and what it holds if it is `Shown`; None where there is none."""
    if isinstance(value, Document):
        return value
    if isinstance(value, Shown):
        return value.document
    entry = _entry(value)
    return None if entry is None else entry.make_document(value)


def show(value: object, width: int | None = None) -> str:
    """Returns `value` as plain text. `width`: in columns; None for the terminal's (see `text_layout.text_width`)."""
    made = document(value)
    if made is None:
        return repr(value)
    from splitjax.display import text_layout  # loaded when something is shown

    return text_layout.render(made, width)


def html(value: object) -> str:
    """Returns `value` as a self-contained piece of HTML, such as `_repr_html_` gives to a notebook."""
    made = document(value)
    if made is None:
        return f"<pre>{html_escapes.escape(repr(value))}</pre>"
    from splitjax.display import html_layout

    return html_layout.render(made)


def page(body: str, title: str) -> str:
    """Returns a whole HTML page called `title` around `body`, such as `html` returns; light or dark as the reader's
    system is."""
    from splitjax.display import html_layout

    return html_layout.page(body, title)


def draw(value: object, path: str | os.PathLike[str] | None) -> Any:
    """Draws a picture of `value`, writes it to `path` if one is given, and returns it. Raises `SplitjaxError` where no
    picture is registered for its type, and what the registered function raises."""
    entry = _entry(value)
    if entry is None or entry.draw is None:
        raise SplitjaxError(
            f"nothing draws a {type(value).__name__}",
            place="splitjax.display.draw",
            remedy="register it: splitjax.display.register(type, make_document, draw=...)",
        )
    return entry.draw(value, path)


def _entry(value: object) -> Registered | None:
    return next((_ENTRIES[name] for name in map(_name, type(value).__mro__) if name in _ENTRIES), None)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
