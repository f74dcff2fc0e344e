"""Shares options among commands: how a mesh is written, which models and optimizers can be named, what is checked."""

from __future__ import annotations

import abc
import ast
import dataclasses
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from rich.console import Console

from splitjax._registry import is_reference
from splitjax.auto_mesh import AUTO, AutoWord
from splitjax.cli.line.fields import Shown
from splitjax.display.figures import bytes_of
from splitjax.errors import MeshError, SplitjaxError
from splitjax.mesh import MeshShape
from splitjax.roles import Role, read_roles

ModelName = Annotated[str, Shown(metavar="NAME|MODULE:FACTORY")]
ModelOption = Annotated[tuple[str, ...], Shown(metavar="KEY=VALUE", adds_up=True)]
Library = Literal["linen", "nnx"]
GroupComm = Literal["auto", "gather", "turns", "modulo"]
RematText = Literal["auto", "dots_saveable", "nothing_saveable"]
OptimizerName = Literal["adam", "momentum", "adafactor", "adagrad"]
DEFAULT_MODEL = "vgg11"
DEFAULT_MESH = "data=2,model=4"
SizeText = Annotated[str, Shown(metavar="SIZE")]
MeshText = Annotated[str, Shown(metavar="AXIS=SIZE,...")]
MicrobatchText = Annotated[str, Shown(metavar="NUMBER|auto")]
TargetTexts = Annotated[tuple[str, ...], Shown(metavar="TARGET", adds_up=True)]
RoleTexts = Annotated[tuple[str, ...], Shown(metavar="AXIS=ROLE", adds_up=True)]


class OptionValueError(SplitjaxError, ValueError):
    """Says that an option of a command has a value that it cannot have."""


def check_positive(**options: float | None) -> None:
    """Raises `OptionValueError` for the first of the numbers `options`, by name, that is not above 0; None is no number
    and passes."""
    for name, value in options.items():
        if value is not None and not value > 0:
            flag = f"--{name.replace('_', '-')}"
            raise OptionValueError(f"{flag} must be above 0", value=value, place=flag, remedy="give a larger number")


def parse_bytes(text: str | None, flag: str) -> int | None:
    """Returns the bytes that `text`, the value of the option `flag`, writes; None for None. Raises `OptionValueError`
    for what is no number of bytes."""
    if text is None:
        return None
    try:
        return bytes_of(text)
    except ValueError:
        raise OptionValueError(
            "this is no number of bytes", value=text, place=flag, remedy="write it as 14GiB, 2GB or 4096"
        ) from None


def parse_microbatches(text: str | None) -> int | AutoWord | None:
    """Returns the number of microbatches that `text` writes, or `auto`; None for None. Raises `OptionValueError` for
    anything else."""
    if text is None:
        return None
    if text == AUTO:
        return AUTO
    if not text.isdecimal() or int(text) < 1:
        raise OptionValueError(
            "this is no number of microbatches", value=text, place="--microbatches", remedy="write 4, say, or auto"
        )
    return int(text)


def parse_model_options(texts: Sequence[str]) -> dict[str, Any]:
    """Returns the options that `texts`, each KEY=VALUE, write: numbers, tuples, None, True and False as in Python, and
    anything else as text. Raises `OptionValueError` for what is not so written, or given twice."""
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier() or key in options:
            raise OptionValueError(
                "an option of a model is written as its name and its value, once",
                value=text,
                place="--model-option",
                remedy="write it as KEY=VALUE, such as width=64",
            )
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    return options


def import_from_here(*texts: str | None) -> None:
    """Lets modules of the current folder be imported, as `python -m` does, where one of `texts` is a reference written
    `package.module:name`."""
    folder = os.getcwd()
    if any(is_reference(text) for text in texts) and not {"", folder} & set(sys.path):
        sys.path.insert(0, folder)


def parse_mesh(text: str, roles: Sequence[str] = ()) -> MeshShape:
    """Returns the shape of the mesh that `text`, such as `data=2,model=4`, writes, with the `roles` of its axes, each
    such as `x=tensor`. Raises `MeshError` for anything else."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, size = part.strip().partition("=")
        if not equals or not axis or not size.strip().isdecimal():
            raise MeshError(
                "a mesh is written as its axes with their sizes",
                value=text,
                place="--mesh",
                remedy="write it as data=2,model=4",
            )
        if axis.strip() in axes:
            raise MeshError(
                f"the mesh names its axis {axis.strip()!r} twice",
                value=text,
                place="--mesh",
                remedy="name every axis once",
            )
        axes[axis.strip()] = int(size)
    return MeshShape.of(axes).with_roles(parse_roles(roles))


def parse_roles(texts: Sequence[str]) -> dict[str, Role]:
    """Returns the roles of axes that `texts`, each such as `x=tensor`, write. Raises `MeshError` for anything else."""
    roles: dict[str, str] = {}
    for text in texts:
        axis, equals, role = text.partition("=")
        if not equals or not axis or axis in roles:
            raise MeshError(
                "a role is written as an axis and what it is for, once",
                value=text,
                place="--role",
                remedy="write it as AXIS=ROLE, such as x=tensor",
            )
        roles[axis] = role
    return read_roles(roles, "--role")


@dataclasses.dataclass(frozen=True)
class CommandOptions(abc.ABC):
    """The options that every command has."""

    json: pathlib.Path | None = dataclasses.field(default=None, kw_only=True)
    """Write it to this file too; - writes it to the standard output, and all else to the standard error."""
    traceback: bool = dataclasses.field(default=False, kw_only=True)
    """Show the Python traceback of an error too."""

    @abc.abstractmethod
    def run(self, console: Console) -> int:
        """Runs the command, printing on the `console`, and returns the exit status."""
