"""Checks JSON values as the fields of a dataclass, with errors that say where they do not fit.

Parsed JSON comes in; a dictionary of the fields comes out, for the dataclass to be made of. It is there so that a
profile written by hand fails at the entry that is wrong.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import Any

from splitjax.errors import ScheduleError

_WORDS = {"float": "a number", "int": "a whole number", "str": "a text"}


def checked_fields(kind: Any, values: Any, place: str) -> dict[str, Any]:
    """Gives the entries of the JSON object `values` as fields of the dataclass `kind`: numbers and texts checked,
    everything else as it is.

    Raises `ScheduleError` for another value, a field that is missing or not known, a number that is none; its place is
    `place` and the field.
    """
    if not isinstance(values, dict):
        raise ScheduleError(
            f"{kind.__name__} is a JSON object",
            value=values,
            place=place or "the whole",
            remedy=f"give its fields: {', '.join(_names(kind))}",
        )
    at = lambda name: f"{place}.{name}" if place else name
    for name in values:
        if name not in _names(kind):
            close = difflib.get_close_matches(name, _names(kind), n=1)
            raise ScheduleError(
                f"{kind.__name__} has no such field" + (f"; did you mean {close[0]!r}?" if close else ""),
                value=name,
                place=at(name),
                remedy=f"its fields are {', '.join(_names(kind))}",
            )
    for field in dataclasses.fields(kind):
        if field.name not in values:
            if field.default is dataclasses.MISSING:
                raise ScheduleError(
                    "a field is missing",
                    value=sorted(values),
                    place=at(field.name),
                    remedy=f"give {_WORDS.get(str(field.type), 'it')}",
                )
            continue
        value = values[field.name]
        if not _fits(str(field.type), value):
            raise ScheduleError(
                f"{field.name} is {_WORDS[str(field.type)]}",
                value=value,
                place=at(field.name),
                remedy="mend the file, or make it anew",
            )
    return dict(values)


def _names(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _fits(kind: str, value: Any) -> bool:
    if kind not in _WORDS:
        return True
    if kind == "str":
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return False
    return kind == "float" or isinstance(value, int)
