"""The pages of `--help`: names on the left, what they are for beside them, in the columns of the terminal and in at
most 100; in 80 where they go through a pipe."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from splitjax.cli.line.fields import Option, Place, groups_of
from splitjax.display.text_layout import wrap

MIN_COLUMNS, MAX_COLUMNS, PIPED_COLUMNS = 40, 100, 80
_INDENT, _GAP, _TEXT_AT = 2, 2, 22


def columns(console: Console) -> int:
    """Returns the width of a page of help on a `console`."""
    wanted = console.width if console.is_terminal or "COLUMNS" in os.environ else PIPED_COLUMNS
    return max(MIN_COLUMNS, min(MAX_COLUMNS, wanted))


def print_overview(console: Console, description: str, commands: Mapping[str, type]) -> None:
    """Prints on a `console` what `splitjax --help` shows: a `description`, and a line or two for each of the
    `commands`."""
    page = _Page(columns(console))
    page.paragraph("usage: splitjax COMMAND [OPTION ...]")
    page.paragraph(description)
    page.heading("commands")
    for name, command in commands.items():
        page.entry(name, summary(command))
    page.heading("options")
    page.entry("--help, -h", "This page; behind a command, its options.")
    page.entry("--version", "Version of splitjax, JAX and Python.")
    page.print(console)


def print_help(console: Console, name: str, command: type) -> None:
    """Prints on a `console` the options of the `command` called `name`, in their groups."""
    page = _Page(columns(console))
    own, *nested = groups_of(command)
    free = [option for option in own.options if option.shown.place is not Place.NAMED]
    words = "".join(f" {option.flag}" for option in free)
    page.paragraph(f"usage: splitjax {name} [OPTION ...]{words}")
    for paragraph in _paragraphs(command):
        page.paragraph(paragraph)
    for option in free:
        page.heading("words" if option.shown.place is Place.REST else "word")
        page.entry(option.flag, option.text)
    page.heading("options")
    for option in own.options:
        if option.shown.place is Place.NAMED:
            page.option(option)
    page.entry("--help, -h", "Show this page.")
    for group in nested:
        page.heading(f"{group.name} options", inspect.getdoc(group.type) or "")
        for option in group.options:
            page.option(option)
    page.print(console)


def summary(command: type) -> str:
    """Returns the first sentence of what a `command` says of itself."""
    return re.split(r"(?<=[.]) (?=[A-Z])", _paragraphs(command)[0])[0]


def _paragraphs(command: type) -> list[str]:
    return [" ".join(part.split()) for part in (inspect.getdoc(command) or "").split("\n\n")]


class _Page:
    """A page of help while it is put together."""

    def __init__(self, width: int):
        self._width = width
        self._blocks: list[list[tuple[str, str]]] = []  # lines with their style

    def paragraph(self, text: str) -> None:
        self._blocks.append([(line, "") for line in wrap(text, self._width)])

    def heading(self, title: str, text: str = "") -> None:
        lines = [(f"{title}:", "bold")]
        lines += [(" " * _INDENT + line, "") for line in wrap(" ".join(text.split()), self._width - _INDENT) if line]
        self._blocks.append(lines)

    def option(self, option: Option) -> None:
        names = ", ".join(name for name in (option.flag, option.shown.short) if name)
        left = f"{names} {option.metavar}".rstrip()
        self.entry(left, f"{option.text}{_default(option)}")

    def entry(self, left: str, text: str) -> None:
        """Adds a name and what it is for; a long name has a line of its own, broken where a list has its commas."""
        lines = [(" " * _INDENT + line, "cyan") for line in _broken(left, self._width - _INDENT)]
        indent = " " * _TEXT_AT
        for number, line in enumerate(wrap(text, self._width - _TEXT_AT)):
            if number == 0 and len(lines) == 1 and len(lines[0][0]) + _GAP <= _TEXT_AT:
                lines[0] = (lines[0][0].ljust(_TEXT_AT) + line, "entry")
            else:
                lines.append((indent + line, ""))
        self._blocks[-1] += lines

    def print(self, console: Console) -> None:
        for number, block in enumerate(self._blocks):
            if number:
                console.print()
            for line, style in block:
                text = Text(line)
                if style == "entry":
                    text.stylize("cyan", 0, _TEXT_AT)
                elif style:
                    text.stylize(style)
                console.print(text, soft_wrap=True)


def _broken(name: str, width: int) -> list[str]:
    """Breaks a name with a long list of choices behind a comma."""
    if len(name) <= width:
        return [name]
    lines = [""]
    for part in re.findall(r"[^,]+,?", name):
        if len(lines[-1]) + len(part) > width:
            lines.append(" " * 6)
        lines[-1] += part
    return lines


def _default(option: Option) -> str:
    """Says what an option is if it is not given, where that is a value that one would write."""
    default: Any = option.default
    if option.type is bool or default is None or default == () or option.shown.place is not Place.NAMED:
        return ""
    shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
    return f" (default: {shown})"
