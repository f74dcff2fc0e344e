"""The options of a command, read off the dataclass whose fields they are.

A field's type says what the option takes: `bool` nothing, `int`, `float`, `str` and `pathlib.Path` a value, a `Literal`
a value among some, a tuple several; `None` beside them is for an option that may be absent. A field that holds another
dataclass is a group of options under its own heading. The text behind a field is its help.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import pathlib
import sys
import textwrap
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


class Place(enum.Enum):
    """Says where on the line an option stands."""

    NAMED = "behind its name"
    POSITIONAL = "by itself"
    REST = "the whole rest of the line, from the first word on that is no option"


@dataclasses.dataclass(frozen=True)
class Shown:
    """Says in a field's type, as `Annotated[str, Shown(metavar="RATE")]`, what the type does not.

    - `metavar`: what help calls the value; by the type if empty.
    - `short`: a second name, such as `-n`.
    - `place`: where it stands.
    - `adds_up`: whether several mentions on a line come together; the last has its way if not.
    """

    metavar: str = ""
    short: str = ""
    place: Place = Place.NAMED
    adds_up: bool = False


@dataclasses.dataclass(frozen=True)
class Option:
    """Holds what is known of an option.

    - `path`: names of the fields that lead to it: `("data", "batch_size")`.
    - `type`: bool, int, float, str or `pathlib.Path`.
    - `choices`: the words it may be; empty for any.
    - `many`: whether it takes several values, which make a tuple.
    - `default`: its value if it is not given; `dataclasses.MISSING` where it has to be.
    - `shown`: what its type says of the line and of the help.
    - `text`: what it is for.
    """

    path: tuple[str, ...]
    type: type
    choices: tuple[str, ...]
    many: bool
    default: Any
    shown: Shown
    text: str

    @property
    def flag(self) -> str:
        """Returns its name on the line, `--batch-size` (`--no-standby` for what is so unless it is said not to be), or
        what help calls it where it stands by itself."""
        if self.shown.place is Place.NAMED:
            return ("--no-" if self.default is True else "--") + self.path[-1].replace("_", "-")
        return self.shown.metavar or self.path[-1].upper()

    @property
    def metavar(self) -> str:
        """Returns what help calls its value; empty for an option that takes none."""
        if self.type is bool or self.shown.place is not Place.NAMED:
            return ""
        word = self.shown.metavar or ("{" + ",".join(self.choices) + "}" if self.choices else _WORDS[self.type])
        return f"{word} ..." if self.many else word


@dataclasses.dataclass(frozen=True)
class Group:
    """Holds options that stand together under a heading.

    - `name`: of the field that holds them; empty for the command's own.
    - `type`: the dataclass.
    - `options`: in the order of its fields.
    """

    name: str
    type: type
    options: tuple[Option, ...]


_WORDS = {int: "INT", float: "NUMBER", str: "TEXT", pathlib.Path: "PATH"}


@functools.cache
def groups_of(command: type) -> tuple[Group, ...]:
    """Returns the options of a `command`, a dataclass: its own first, then those of each field that is a dataclass."""
    own, nested = [], []
    texts, hints = texts_of(command), get_type_hints(command, include_extras=True)
    # What all commands have (by keyword alone) comes last.
    for field in sorted(dataclasses.fields(command), key=lambda field: field.kw_only is True):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            inner = tuple(
                dataclasses.replace(option, path=(field.name, *option.path))
                for group in groups_of(hint)
                for option in group.options
            )
            nested.append(Group(field.name, hint, inner))
        else:
            own.append(_option(field, hint, texts.get(field.name, "")))
    return (Group("", command, tuple(own)), *nested)


def options_of(command: type) -> list[Option]:
    """Returns all options of a `command`."""
    return [option for group in groups_of(command) for option in group.options]


def _option(field: dataclasses.Field[Any], hint: Any, text: str) -> Option:
    shown = Shown()
    if get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        shown = next((extra for extra in extras if isinstance(extra, Shown)), shown)
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (arm for arm in get_args(hint) if arm is not type(None))
        if get_origin(hint) is Annotated:
            return _option(field, hint, text)
    many = get_origin(hint) is tuple
    if many:
        hint = get_args(hint)[0]
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return Option((field.name,), str if choices else hint, choices, many, default, shown, text)


@functools.cache
def texts_of(command: type) -> dict[str, str]:
    """Returns the text behind each field of a dataclass `command`, its bases' fields included, as a line each."""
    texts: dict[str, str] = {}
    for base in reversed(command.__mro__):
        if not dataclasses.is_dataclass(base) or base.__module__ not in sys.modules:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if (
                isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ):
                texts[field.target.id] = " ".join(text.value.value.split())
    return texts
