"""Reads JSON values by type hints.

The type hint of a field goes in, what reads its JSON values comes out. What the hints mean is said in
`splitjax.codec`.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import math
import numbers
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NoReturn, Protocol

from splitjax.codec.wording import similar


@dataclasses.dataclass(frozen=True)
class Where:
    """Narrows a type down to the values for which `holds` is true; `message` says so, and `remedy` what to give (empty:
    to make the document anew)."""

    holds: Callable[[Any], bool]
    message: str
    remedy: str = ""


@dataclasses.dataclass(frozen=True)
class OneOf:
    """Narrows a string down to `options`, where the type of the field is to stay `str`."""

    options: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Called:
    """Gives the `words` by which errors name a type, such as `"a name and a size"`."""

    words: str


@dataclasses.dataclass(frozen=True)
class ReadAs:
    """Gives the `hint` by which JSON is read, where the type of the field says less."""

    hint: Any


Count: typing.TypeAlias = Annotated[int, Where(lambda number: number >= 0, "sizes are not negative", "give 0 or more")]


class Reading(Protocol):
    """Describes who reads, a `Codec`: it makes dataclasses of objects, and raises the errors of its documents."""

    @property
    def finite(self) -> bool:
        """Tells whether infinities and NaN are refused."""
        ...

    def instance(self, kind: type, values: Any, place: str) -> Any:
        """Returns the dataclass `kind` that the JSON object `values` at the key path `place` stands for."""
        ...

    def object(self, kind: type, values: Any, place: str) -> dict[str, Any]:
        """Returns a copy of `values`, which stand at the key path `place`, if they are the JSON object of a `kind`."""
        ...

    def fail(self, message: str, value: Any, place: str, remedy: str = "") -> NoReturn:
        """Raises the documents' error with a `message` about the `value` at the key path `place`, and a `remedy`."""
        ...

    def wrong(self, words: str, value: Any, place: str, remedy: str = "") -> NoReturn:
        """Raises the documents' error for a `value` at the key path `place` that is not what `words` say, with a
        `remedy`."""
        ...


_Read = Callable[[Reading, Any, str], Any]  # (codec, JSON value, place) -> value


@dataclasses.dataclass(frozen=True)
class TypeReader:
    """Reads values of a type: `words` are what errors call it, `takes` the types that its JSON values have."""

    words: str
    takes: frozenset[type]
    read: _Read


@dataclasses.dataclass(frozen=True)
class FieldReader:
    """Reads the values of a field, which may be left out if it `has_default`."""

    type: TypeReader
    has_default: bool


@functools.cache
def fields_by_name(kind: type) -> Mapping[str, FieldReader]:
    """Returns what reads the fields of the dataclass `kind`, by their names."""
    hints = typing.get_type_hints(kind, include_extras=True)
    missing = dataclasses.MISSING
    return {
        field.name: FieldReader(
            reader_of(hints[field.name]), field.default is not missing or field.default_factory is not missing
        )
        for field in dataclasses.fields(kind)
        if field.init
    }


@functools.cache
def reader_of(hint: Any, words: str = "") -> TypeReader:
    """Returns what reads JSON values by a type `hint`, which errors call `words` (empty: by what JSON it is).

    Raises `TypeError` for a type that JSON is not known for."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _SCALARS:
        return _SCALARS[hint]
    if origin is Annotated:
        words = next((how.words for how in arguments[1:] if isinstance(how, Called)), "")
        return functools.reduce(_narrowed, arguments[1:], reader_of(arguments[0], words))
    if origin in (typing.Union, types.UnionType):
        return _union([reader_of(member) for member in arguments], words)
    if origin is Literal:
        return _one_of(arguments)
    if origin in (tuple, list):
        return _list_of(origin, arguments, words)
    if origin in (dict, collections.abc.Mapping):
        return _object_of(arguments[1])
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _member_of(hint)
    if isinstance(hint, type):
        return _instance_of(hint)
    raise TypeError(f"no JSON is known for the type {hint!r}")


def _exactly(kind: type, words: str) -> TypeReader:
    def read(codec: Reading, value: Any, place: str) -> Any:
        if type(value) is not kind:  # exactly: JSON's true is a Python int
            codec.wrong(words, value, place)
        return value

    return TypeReader(words, frozenset({kind}), read)


# Whole numbers of documents are counts, of bytes and flops, say. What is made of a few of these is a float still.
_LARGEST = 10**30


def _whole_number(codec: Reading, value: Any, place: str) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        codec.wrong("a whole number", value, place)
    whole = int(value)
    if not -_LARGEST <= whole <= _LARGEST:
        codec.wrong("a whole number of at most 30 digits", value, place)
    return whole


def _number(codec: Reading, value: Any, place: str) -> float:
    if type(value) not in (int, float):
        codec.wrong("a number", value, place)
    try:
        if not math.isfinite(value) and codec.finite:
            codec.wrong("a number", value, place)
    except OverflowError:  # a whole number that is no float
        codec.wrong("a number", value, place)
    return value


_SCALARS: Mapping[Any, TypeReader] = {
    Any: TypeReader("any value", frozenset(), lambda codec, value, place: value),
    types.NoneType: _exactly(types.NoneType, "null"),
    bool: _exactly(bool, "true or false"),
    int: TypeReader("a whole number", frozenset({int}), _whole_number),
    float: TypeReader("a number", frozenset({int, float}), _number),
    str: _exactly(str, "a string"),
}


def _narrowed(base: TypeReader, how: Any) -> TypeReader:
    if isinstance(how, ReadAs):
        return reader_of(how.hint)
    if isinstance(how, OneOf):
        return _one_of(how.options)
    if not isinstance(how, Where):
        return base

    def read(codec: Reading, value: Any, place: str) -> Any:
        made = base.read(codec, value, place)
        if not how.holds(made):
            codec.fail(how.message, value, place, how.remedy)
        return made

    return dataclasses.replace(base, read=read)


def _union(members: list[TypeReader], words: str) -> TypeReader:
    words = words or ", ".join(member.words for member in members[:-1]) + f" or {members[-1].words}"
    others = [member for member in members if member is not _SCALARS[types.NoneType]]

    def read(codec: Reading, value: Any, place: str) -> Any:
        for member in members:
            if type(value) in member.takes:
                return member.read(codec, value, place)
        if len(others) == 1 and value is not None:  # which says what is wrong with it
            return others[0].read(codec, value, place)
        codec.wrong(words, value, place)

    return TypeReader(words, frozenset().union(*(member.takes for member in members)), read)


def _one_of(options: tuple[Any, ...]) -> TypeReader:
    words = f"one of {', '.join(map(str, options))}"

    def read(codec: Reading, value: Any, place: str) -> Any:
        if not isinstance(value, str) or value not in options:
            codec.wrong(words, value, place, similar(str(value), map(str, options)))
        return value

    return TypeReader(words, frozenset({str}), read)


def _member_of(kind: type[enum.Enum]) -> TypeReader:
    named = _one_of(tuple(member.value for member in kind))
    return dataclasses.replace(named, read=lambda codec, value, place: kind(named.read(codec, value, place)))


def _list_of(kind: type, arguments: tuple[Any, ...], words: str) -> TypeReader:
    is_long = kind is list or arguments[1:] == (...,)
    members = [reader_of(argument) for argument in arguments[: 1 if is_long else None]]

    def read(codec: Reading, value: Any, place: str) -> Any:
        if not isinstance(value, (list, tuple)):
            codec.wrong(words or "a list", value, place)
        if not is_long and len(value) != len(members):
            codec.wrong(words or f"a list of {len(members)} values", value, place)
        types_of = members * len(value) if is_long else members
        return kind(each.read(codec, item, f"{place}[{i}]") for i, (each, item) in enumerate(zip(types_of, value)))

    return TypeReader(words or "a list", frozenset({list, tuple}), read)


def _object_of(hint: Any) -> TypeReader:
    member = reader_of(hint)

    def read(codec: Reading, value: Any, place: str) -> dict[str, Any]:
        entries = codec.object(dict, value, place).items()
        return {name: member.read(codec, item, f"{place}.{name}") for name, item in entries}

    return TypeReader("an object", frozenset({dict}), read)


def _instance_of(kind: type) -> TypeReader:
    return TypeReader("an object", frozenset({dict}), lambda codec, value, place: codec.instance(kind, value, place))
