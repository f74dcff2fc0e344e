"""The words of a command line, read into the dataclass of a command. What cannot be read is a `UsageError`: what is
wrong, where, and which word was probably meant."""

from __future__ import annotations

import dataclasses
import difflib
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from splitjax.cli.line.fields import Group, Option, Place, groups_of, options_of
from splitjax.errors import SplitjaxError

Command = TypeVar("Command")
_NUMBER = re.compile(r"-\.?\d")


class UsageError(SplitjaxError, ValueError):
    """Says that a command line names what there is not, or gives an option what it does not take."""


def near(word: str, known: Iterable[str]) -> str:
    """Returns which of the `known` words a misspelt `word` probably was, as the end of a sentence; empty where none is
    like it."""
    # Without the signs in front, which all options have in common.
    by_bare = {name.lstrip("-").replace("_", "-"): name for name in known}
    close = difflib.get_close_matches(word.lstrip("-").lower().replace("_", "-"), by_bare, n=1)
    return f"; did you mean {by_bare[close[0]]!r}?" if close else ""


def command_named(words: Sequence[str], commands: Mapping[str, type]) -> str:
    """Returns the name of the command that `words` begin with, among `commands`. Raises `UsageError` for another
    word."""
    word = words[0]
    if word in commands:
        return word
    what = f"there is no option {word} in front of a command" if word.startswith("-") else "there is no such command"
    known = ["--help", "--version"] if word.startswith("-") else list(commands)
    raise UsageError(
        what + near(word, known),
        value=None if word.startswith("-") else word,
        place="splitjax",
        remedy=f"use one of {', '.join(commands)}; splitjax --help says what they do",
    )


def read(words: Sequence[str], command: type[Command], name: str) -> Command:
    """Returns the `command` that `words` ask for.

    **Arguments:** `words`: what stands behind the command's name. `command`: a dataclass. `name`: what the user calls
    it, for errors.

    Raises `UsageError` for an unknown option, a value that it cannot have, and a word that is missing or too much.
    """
    options = options_of(command)
    by_flag = {flag: option for option in options for flag in (option.flag, option.shown.short) if flag}
    given: dict[tuple[str, ...], Any] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--" or not _is_option(word):
            if word == "--" and not left:
                continue
            _take_positional(left if word == "--" else [word, *left], left, options, given, name)
            continue
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        option = by_flag.get(flag)
        if option is None or option.shown.place is not Place.NAMED:
            flags = [flag for flag, known in by_flag.items() if known.shown.place is Place.NAMED]
            raise UsageError(
                f"splitjax {name} has no option {flag}" + near(flag, [*flags, "--help"]),
                place=f"splitjax {name}",
                remedy=f"splitjax {name} --help lists its options",
            )
        if option.type is bool:
            if equals:
                raise UsageError(
                    f"{flag} takes no value",
                    value=value,
                    place=flag,
                    remedy=f"write {flag} alone, or leave it out",
                )
            given[option.path] = option.default is not True
            continue
        texts = [value] if equals else _values(left, option.many)
        if not texts:
            raise UsageError(
                f"{flag} lacks its value", place=f"splitjax {name}", remedy=f"write {flag} {option.metavar}"
            )
        values = tuple(_value(option, text) for text in texts)
        before = given.get(option.path, ()) if option.shown.adds_up else ()
        given[option.path] = (*before, *values) if option.many else values[0]
    for option in options:
        if option.default is dataclasses.MISSING and option.path not in given:
            raise UsageError(
                f"splitjax {name} lacks {option.flag}",
                place=f"splitjax {name}",
                remedy=f"give it: {option.text[:1].lower()}{option.text[1:].rstrip('.')}",
            )
    return _made(groups_of(command), given)


def _is_option(word: str) -> bool:
    return word.startswith("-") and word != "-" and not _NUMBER.match(word)


def _values(left: list[str], many: bool) -> list[str]:
    """Takes the values of an option from the words that are `left`: all up to the next option, or the next alone."""
    texts = []
    while left and not _is_option(left[0]) and (many or not texts):
        texts.append(left.pop(0))
    return texts


def _take_positional(
    words: list[str], left: list[str], options: Sequence[Option], given: dict[tuple[str, ...], Any], name: str
) -> None:
    """Gives the first of `words` to the option that stands by itself, or all of them to the one that takes the rest,
    and leaves the others in `left`."""
    free = next((option for option in options if option.shown.place is not Place.NAMED), None)
    if free is None or free.path in given:
        names = [option.flag for option in options if option.shown.place is Place.NAMED]
        same = f"--{words[0]}"
        close = near(words[0], names)
        raise UsageError(
            f"splitjax {name} takes no word by itself here" + close,
            value=words[0],
            place=f"splitjax {name}",
            remedy=f"write {same} VALUE" if same in names else f"name its option; splitjax {name} --help lists them",
        )
    if free.shown.place is Place.REST:
        given[free.path] = tuple(words)
        left.clear()
    else:
        given[free.path] = _value(free, words[0])
        left[:] = words[1:]


def _value(option: Option, text: str) -> Any:
    if option.choices and text not in option.choices:
        raise UsageError(
            f"{option.flag} cannot be this" + near(text, option.choices),
            value=text,
            place=option.flag,
            remedy=f"use one of {', '.join(option.choices)}",
        )
    try:
        return option.type(text)
    except ValueError as error:
        kind = "a whole number" if option.type is int else "a number"
        raise UsageError(
            f"{option.flag} takes {kind}",
            value=text,
            place=option.flag,
            remedy=f"write {option.flag} {_example(option)}",
        ) from error


def _example(option: Option) -> str:
    default = option.default
    if isinstance(default, (int, float)) and not isinstance(default, bool):
        return f"{default:g}" if isinstance(default, float) else str(default)
    return "64" if option.type is int else "0.5"


def _made(groups: Sequence[Group], given: Mapping[tuple[str, ...], Any]) -> Any:
    own, *nested = groups
    values = {path[0]: value for path, value in given.items() if len(path) == 1}
    for group in nested:
        values[group.name] = group.type(
            **{path[1]: value for path, value in given.items() if path[0] == group.name and len(path) > 1}
        )
    return own.type(**values)


def config_file(words: Sequence[str]) -> tuple[pathlib.Path | None, list[str]]:
    """Returns the file that `words` name behind `--config`, if any, and the other words."""
    rest = list(words)
    for number, word in enumerate(rest):
        if word == "--config" and number + 1 < len(rest):
            return pathlib.Path(rest[number + 1]), rest[:number] + rest[number + 2 :]
        if word.startswith("--config="):
            return pathlib.Path(word.removeprefix("--config=")), rest[:number] + rest[number + 1 :]
    return None, rest
