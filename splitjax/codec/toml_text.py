"""Reads TOML without trust in its size or depth.

Text goes in, its tables come out. Python's `tomllib` follows nests as deep as they go, and takes memory by the square
of the number of parts that a dotted key has: a few kilobytes would end the process.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any

MAX_DEPTH: int = 64
# A search begins at no letter within a word: it would read the rest of a long one anew from each.
_PART = r"""(?:(?<![A-Za-z0-9_-])[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_LONG_KEY = re.compile(rf"{_PART}(?:[ \t]*\.[ \t]*{_PART}){{{MAX_DEPTH}}}")


def parse_toml(text: str) -> dict[str, Any]:
    """Returns the tables of a TOML `text`.

    Raises `tomllib.TOMLDecodeError` for what is no TOML, for tables or arrays in each other, or a dotted key, deeper
    than `MAX_DEPTH`, and for a whole number of more than 64 bits, which TOML does not have.
    """
    for line in text.splitlines():
        if line.count(".") >= MAX_DEPTH and _LONG_KEY.search(line):
            raise tomllib.TOMLDecodeError(f"a key has more than {MAX_DEPTH} parts")
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError("it is nested too deeply") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:  # a number of thousands of digits, or a date that is none
        raise tomllib.TOMLDecodeError(str(error)) from error
    _check_values(tables)
    return tables


def _check_values(tables: dict[str, Any]) -> None:
    level: list[Any] = [tables]
    for _ in range(MAX_DEPTH):
        inner = [item for value in level for item in (value.values() if isinstance(value, dict) else value)]
        if any(isinstance(item, int) and item.bit_length() > 64 for item in inner):  # in hexadecimal, of any length
            raise tomllib.TOMLDecodeError("a whole number has more than 64 bits")
        level = [item for item in inner if isinstance(item, (dict, list))]
        if not level:
            return
    raise tomllib.TOMLDecodeError("it is nested too deeply")
