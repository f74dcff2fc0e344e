"""Writes and reads a kind of document: its errors, its format number, the layout of its text, special types."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import numbers
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from splitjax._files import write_atomically
from splitjax.codec.hints import fields_by_name, reader_of
from splitjax.codec.nesting import MAX_DEPTH, is_shallow
from splitjax.codec.wording import Wording, similar
from splitjax.errors import SplitjaxError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Form(Generic[T]):
    """Says how a type stands in JSON where that is no plain object of its fields.

    - `write`: gives what is written in a value's place: a dict, a tuple, other dataclasses.
    - `read`: makes the value again of (codec, JSON value, place); None: by its fields.
    - `unread`: keys that are only written, for whoever reads the text.
    """

    write: Callable[[T], Any]
    read: Callable[[Codec[Any], Any, str], T] | None = None
    unread: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Codec(Generic[T]):
    """Writes and reads a kind of document.

    - `kind`: the dataclass. `error`: what is raised; it is a `SplitjaxError`. `wording`: its words.
    - `format`: the number under the key `format`, which comes first; None: documents have no such key.
    - `forms`: types that are not written by their fields.
    - `entries`: keys whose lists stand with an entry a line; every other key then has a line of its own. Empty: the
      text is indented by `indent` columns at every level.
    - `unless_empty`: keys of the document that later versions brought, left out where they hold nothing: a document
      without them is written as it was before.
    - `end`: what the text ends with.
    - `finite`: whether NaN and the infinities are refused.
    - `check`: raises `error` for what the types do not say.
    """

    kind: type[T]
    error: type[SplitjaxError]
    wording: Wording
    format: int | None = None
    forms: Mapping[type, Form[Any]] = dataclasses.field(default_factory=dict)
    entries: tuple[str, ...] = ()
    unless_empty: tuple[str, ...] = ()
    indent: int = 1
    end: str = "\n"
    finite: bool = False
    check: Callable[[T], None] | None = None

    def values(self, document: T) -> Any:
        """Returns `document` as JSON values (dict, list, str, int, float, bool, None), without the format number."""
        values = self._plain(document, "")
        if self.unless_empty:
            values = {key: value for key, value in values.items() if key not in self.unless_empty or _holds(value)}
        return values

    def text(self, document: T) -> str:
        """Returns `document` as JSON text (ASCII), keys in the order of the fields. Raises `error` for a value that
        JSON cannot hold."""
        values = self.values(document)
        if self.format is not None:
            values = {"format": self.format, **values}
        if not self.entries:
            return json.dumps(values, indent=self.indent) + self.end
        lines = []
        for name, value in values.items():
            if name in self.entries and value:
                listed = ",\n".join(f"    {json.dumps(entry)}" for entry in value)
                lines.append(f"  {json.dumps(name)}: [\n{listed}\n  ]")
            else:
                lines.append(f"  {json.dumps(name)}: {json.dumps(value)}")
        return "{\n" + ",\n".join(lines) + "\n}" + self.end

    def loads(self, text: str, origin: str = "") -> Any:
        """Returns the JSON values of a `text`. Raises `error`, whose place is the line after `origin`, for what is no
        JSON, and for an object with a key twice."""
        if not isinstance(text, str):
            self.fail(f"{self.wording.what}'s JSON is a string", text, origin, self.wording.source)
        try:
            values = json.loads(text, object_pairs_hook=self._unique)
            if not is_shallow(values):
                raise RecursionError(f"more than {MAX_DEPTH} lists and objects in each other")
            return values
        except self.error as error:
            raise self._behind(origin, error) from error.__cause__
        except (ValueError, RecursionError) as error:
            # not only JSONDecodeError: a number of thousands of digits is a ValueError
            place = origin
            if isinstance(error, json.JSONDecodeError):
                place = f"{origin}:{error.lineno}" if origin else f"line {error.lineno}, column {error.colno}"
            message = self.wording.lead + self.wording.not_json(getattr(error, "msg", str(error)))
            raise self.error(
                message, value=text[:80], place=place or self._whole, remedy=self.wording.source
            ) from error

    def parse(self, text: str, origin: str = "") -> T:
        """Returns the document of a `text` that this method's inverse, `text`, wrote, possibly edited by hand.

        Raises `error` at the first problem; its place is the key path, after `origin`, such as a file."""
        values = self.loads(text, origin)
        try:
            if self.format is not None:
                values = self._of_format(values)
            document = self.read(values)
        except self.error as error:
            raise self._behind(origin, error) from error.__cause__
        return document

    def read(self, values: Any, place: str = "") -> T:
        """Returns the document of JSON `values`, such as `values` gave, where they stand at the key path `place` of a
        larger document. Raises `error` at the first problem."""
        try:
            document = reader_of(self.kind).read(self, values, place)
        except RecursionError as error:
            raise self.error(
                f"{self.wording.lead}{self.wording.subject} is nested too deeply",
                place=place or self._whole,
                remedy=self.wording.source,
            ) from error
        if self.check is not None:
            self.check(document)
        return document

    def save(self, document: T, path: str | os.PathLike[str]) -> None:
        """Writes `document` to the file `path`, whole or not at all. Raises `error` when it cannot be written."""
        try:
            write_atomically(Path(path), self.text(document), encoding="ascii")
        except OSError as error:
            raise self.error(
                f"the {self.wording.bare} cannot be written: {error.strerror or error}",
                place=str(path),
                remedy="give a file name in an existing, writable folder",
            ) from error

    def load(self, path: str | os.PathLike[str]) -> T:
        """Returns the document in the file `path`. Raises `error`, with the file in its place, as `parse` does, and
        when it cannot be read."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise self.error(
                f"the {self.wording.bare} cannot be read: {getattr(error, 'strerror', None) or error}",
                place=str(path),
                remedy=f"give the file that `{self.wording.bare}.save` wrote",
            ) from error
        return self.parse(text, str(path))

    # For forms, and for reading by hints.

    def instance(self, kind: type, values: Any, place: str) -> Any:
        """Returns the `kind` of the JSON `values` at `place`: by its form, or by the fields of a dataclass."""
        form = self.forms.get(kind)
        if form is not None and isinstance(values, dict):
            values = {name: value for name, value in values.items() if name not in form.unread}
        if form is not None and form.read is not None:
            return form.read(self, values, place)
        arguments = self.arguments(kind, values, place)
        try:
            return kind(**arguments)
        except self.error:
            raise
        except SplitjaxError as error:  # what a dataclass refuses by an error of its own is wrong with this document
            raise self.error(error.message, value=error.value, place=place, remedy=error.remedy) from error

    def arguments(self, kind: type, values: Any, place: str, without: Collection[str] = ()) -> dict[str, Any]:
        """Returns the fields of the dataclass `kind`, those in `without` left out, as read from the JSON object
        `values` at `place`."""
        fields = {name: field for name, field in fields_by_name(kind).items() if name not in without}
        values, dot = self.object(kind, values, place), f"{place}." if place else ""
        for name in values:
            if name not in fields:
                self.fail(self.wording.unknown(kind), name, f"{dot}{name}", similar(name, fields))
        for name, field in fields.items():
            if name not in values and not field.has_default:
                remedy = f"add {name!r}, or {self._remake}"
                self.fail(self.wording.missing(kind), name, f"{dot}{name}", remedy)
        return {name: fields[name].type.read(self, value, f"{dot}{name}") for name, value in values.items()}

    def object(self, kind: type, values: Any, place: str) -> dict[str, Any]:
        """Returns a copy of `values`, which stand at the key path `place`, if they are the JSON object of a `kind`.
        Raises `error` otherwise."""
        if not isinstance(values, dict):
            names = ", ".join(fields_by_name(kind)) if dataclasses.is_dataclass(kind) else ""
            self.fail(self.wording.needs_object(kind), values, place, f"give its keys: {names}" if names else "give {}")
        return dict(values)

    def hinted(self, hint: Any, value: Any, place: str) -> Any:
        """Returns what the JSON `value` at `place` is by a type `hint`."""
        return reader_of(hint).read(self, value, place)

    def fail(self, message: str, value: Any, place: str, remedy: str = "") -> NoReturn:
        """Raises `error` with a `message` about the `value` at the key path `place`, and a `remedy`: by default to make
        the document anew."""
        raise self.error(
            self.wording.lead + message, value=value, place=place or self._whole, remedy=remedy or self._remake
        )

    def wrong(self, words: str, value: Any, place: str, remedy: str = "") -> NoReturn:
        """Raises `error` for a `value` at the key path `place` that is not what `words` say, with a `remedy`: by
        default to give that."""
        name = place.rpartition(".")[2] or self._whole
        self.fail(self.wording.wrong(name, words), value, place, remedy or f"give {words}, or {self._remake}")

    @property
    def _remake(self) -> str:
        return self.wording.remake or self.wording.source

    @property
    def _whole(self) -> str:
        return self.wording.whole or self.wording.bare

    def _behind(self, origin: str, error: SplitjaxError) -> SplitjaxError:
        """Returns `error` with its key path behind `origin`."""
        inner = "" if error.place == self._whole else error.place
        place = f"{origin}: {inner}" if origin and inner else origin or inner or self._whole
        return type(error)(error.message, value=error.value, place=place, remedy=error.remedy)

    def _of_format(self, values: Any) -> dict[str, Any]:
        if not isinstance(values, dict) or "format" not in values:
            self.fail(self.wording.not_a_document(), values, "format", self.wording.source)
        number = values["format"]
        if type(number) is not int or number != self.format:
            message = f"this version of splitjax reads documents of format {self.format}"
            self.fail(message, number, "format")
        return {name: value for name, value in values.items() if name != "format"}

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            seen: set[str] = set()
            repeated = next(name for name, _ in pairs if name in seen or seen.add(name))
            message = f"a key stands twice in one object of {self.wording.subject}"
            self.fail(message, repeated, repeated, "keep one of the two")
        return result

    def _plain(self, value: Any, place: str) -> Any:
        if isinstance(value, enum.Enum):
            value = value.value
        if value is None or isinstance(value, (str, bool, int)):
            return value
        if isinstance(value, float):
            if self.finite and not math.isfinite(value):
                self.fail(f"{self.wording.subject} cannot hold this number", value, place)
            return value
        form = self.forms.get(type(value))
        if form is not None:
            return self._plain(form.write(value), place)
        if dataclasses.is_dataclass(value):
            value = fields_of(value)
        if isinstance(value, Mapping):
            dot = f"{place}." if place else ""
            for name in value:
                if not isinstance(name, str):
                    self.fail("keys of JSON objects are strings", name, place, "give a string")
            return {name: self._plain(item, f"{dot}{name}") for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._plain(item, f"{place}[{number}]") for number, item in enumerate(value)]
        if isinstance(value, numbers.Integral):  # sizes computed with numpy
            return int(value)
        self.fail(f"{self.wording.subject} cannot hold this value", value, place, "give JSON values")


def fields_of(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass `value` by their names, in order, as they are."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def without_nones(*names: str) -> Form[Any]:
    """Returns the form of a dataclass whose fields `names` are left out where they are None."""
    return Form(lambda value: {key: x for key, x in fields_of(value).items() if x is not None or key not in names})


def _holds(value: Any) -> bool:
    """Tells whether a JSON value holds something: an object, whether one of its keys does."""
    return any(map(_holds, value.values())) if isinstance(value, dict) else bool(value)
