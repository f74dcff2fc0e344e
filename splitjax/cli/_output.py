"""Prints values, and writes the files that options such as `--json` and `--html` ask for."""

from __future__ import annotations

import pathlib

from rich.console import Console
from rich.text import Text

from splitjax import display
from splitjax._files import write_atomically
from splitjax.display.text_layout import text_width
from splitjax.errors import PlanError


def print_value(value: object, console: Console) -> None:
    """Prints a `value` that `splitjax.display` knows, or a document, on a `console`, in its width. It is printed as it
    is laid out: a name that looks like markup or like an emoji stays the name."""
    console.print(Text(display.show(value, text_width(console.file))), soft_wrap=True)


def write_page(path: pathlib.Path, body: str, title: str) -> None:
    """Writes an HTML page called `title` around `body` to `path`. Raises `PlanError` if it cannot be written."""
    write_file(path, display.page(body, title), "--html")


def write_file(path: pathlib.Path, text: str, option: str) -> None:
    """Writes to `path` the `text` that an `option` asked for; an interrupted command leaves what was there. Raises
    `PlanError` when the file cannot be written."""
    try:
        write_atomically(path, text)
    except OSError as error:
        raise PlanError(
            f"the file cannot be written: {error.strerror or error}",
            value=str(path),
            place=option,
            remedy="give a path in a folder that exists and may be written to",
        ) from error
