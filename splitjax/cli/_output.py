"""Prints values, and writes the files that options such as `--json` and `--html` ask for."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from splitjax import display
from splitjax._files import write_atomically
from splitjax.display.text_layout import text_width
from splitjax.errors import PlanError

STANDARD_OUTPUT = pathlib.Path("-")


def print_value(value: object, console: Console) -> None:
    """Prints a `value` that `splitjax.display` knows, or a document, on a `console`, in its width. It is printed as it
    is laid out: a name that looks like markup or like an emoji stays the name."""
    console.print(Text(display.show(value, text_width(console.file))), soft_wrap=True)


def write_page(path: pathlib.Path, body: str, title: str) -> None:
    """Writes an HTML page called `title` around `body` to `path`. Raises `PlanError` if it cannot be written."""
    write_file(path, display.page(body, title), "--html")


def write_json(path: pathlib.Path | None, text: str | dict[str, Any], console: Console, what: str = "figures") -> None:
    """Writes what `--json` asks for, if it asks, and says so on the `console`.

    **Arguments:** `path`: of the file; None where nothing is asked for, `-` for the standard output. `text`: the JSON,
    or an object that becomes it. `what`: what it holds.

    Raises `PlanError` if it cannot be written.
    """
    if path is None:
        return
    if not isinstance(text, str):
        text = json.dumps(text, indent=1) + "\n"
    write_file(path, text, "--json")
    if path != STANDARD_OUTPUT:
        console.print(f"{what}: {path}", highlight=False, markup=False, soft_wrap=True)


def write_picture(path: pathlib.Path | None, text: str, console: Console) -> None:
    """Writes what `--svg` asks for, if it asks, and says so on the `console`.

    **Arguments:** `path`: of the file; None where nothing is asked for, `-` for the standard output. `text`: the
    picture.

    Raises `PlanError` if it cannot be written."""
    if path is None:
        return
    write_file(path, text, "--svg")
    if path != STANDARD_OUTPUT:
        console.print(f"picture: {path}", highlight=False, markup=False, soft_wrap=True)


def write_file(path: pathlib.Path, text: str, option: str) -> None:
    """Writes to `path` the `text` that an `option` asked for, or to the standard output for `-`; an interrupted command
    leaves what was there. Raises `PlanError` when the file cannot be written."""
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        return
    try:
        write_atomically(path, text)
    except OSError as error:
        raise PlanError(
            f"the file cannot be written: {error.strerror or error}",
            value=str(path),
            place=option,
            remedy="give a path in a folder that exists and may be written to",
        ) from error
