"""Changes inputs at random, with and without knowledge of their format.

Bytes, a longest size and a `random.Random` go in, other bytes come out; the same ones for the same state of the random
numbers. Used by atheris as a custom mutator, beside libFuzzer's own, and alone where atheris is not installed.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any

Strategy = Callable[[bytes, random.Random], bytes]

_NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    255,
    256,
    4096,
    65535,
    2**31 - 1,
    2**31,
    -(2**31),
    2**32 - 1,
    2**53,
    2**63 - 1,
    2**63,
    -(2**63),
    2**64,
    10**30,
    10**400,
)
_TEXTS = (
    "",
    "x",
    "a.b",
    "../x",
    "/etc/passwd",
    "*",
    "?",
    "nan",
    "inf",
    "1e999",
    "-0",
    "null",
    "\x00",
    "\ud800",
    "\u0660",
    "\u00b2",
    "\u202e",
    "9" * 5000,
    "A" * 3000,
    "float32",
    "data",
    "model",
    "(a|a)*b",
    "[",
    "{",
    "a{65536}",
)
_VALUES: tuple[Any, ...] = (
    *_NUMBERS,
    *_TEXTS,
    None,
    True,
    False,
    0.5,
    -0.0,
    1e308,
    5e-324,
    float("nan"),
    float("inf"),
    [],
    {},
    [[]],
    [None],
    ["?"],
    {"a": 1},
    [1, 2],
    ["data", 2],
    [["data", 2]],
)
TOKENS = tuple(
    token.encode("utf-8", "surrogatepass")
    for token in (
        "\n",
        "\r\n",
        "\t",
        ",",
        '"',
        "'",
        "\\",
        "[",
        "]",
        "{",
        "}",
        "[[rule]]",
        "=",
        ".",
        "#",
        "/",
        "0x",
        "NaN",
        "Infinity",
        *_TEXTS,
    )
) + (b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x1f\x8b", b"PK\x03\x04")
_BEFORE_VALUES = re.compile(rb"(?<=[:=\[,\n{ ])")
_TOML_VALUES = re.compile(rb"=[ ]*([^\n]*)")
_MOST_BYTES = 1 << 15  # of what is repeated in a document
_MOST_PLACES = 1000  # of a document that are drawn from; to list all of a large one takes longer than to read it


def bytes_changed(data: bytes, draw: random.Random) -> bytes:
    """Changes a few bytes: flips, other values, numbers of 1 to 8 bytes, parts taken out, repeated, moved."""
    made = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 8))):
        at = draw.randrange(len(made) + 1)
        kind = draw.randrange(9)
        if kind == 0 and at < len(made):
            made[at] ^= 1 << draw.randrange(8)
        elif kind == 1 and at < len(made):
            made[at] = draw.choice((0, 1, 9, 10, 32, 44, 48, 127, 128, 255, draw.randrange(256)))
        elif kind == 2:
            width = draw.choice((1, 2, 4, 8))
            number = draw.choice(_NUMBERS) % (1 << 8 * width)
            made[at : at + width] = number.to_bytes(width, draw.choice(("little", "big")))
        elif kind == 3:
            del made[at : at + draw.choice((1, 2, 4, 16, 64, 512, len(made)))]
        elif kind == 4:
            end = min(len(made), at + draw.choice((1, 2, 4, 16, 64, 512)))
            made[at:at] = made[at:end] * draw.choice((1, 1, 2, 16, 256))
        elif kind == 5:
            made[at:at] = draw.choice(TOKENS)
        elif kind == 6:
            made[at:at] = draw.randbytes(draw.choice((1, 2, 4, 16)))
        elif kind == 7:
            end = min(len(made), at + draw.choice((4, 16, 64)))
            part, to = made[at:end], draw.randrange(len(made) + 1)
            made[to : to + len(part)] = part
        else:
            made[at : at + 1] = str(draw.choice(_NUMBERS)).encode()
    return bytes(made)


def _place(pattern: re.Pattern[bytes], data: bytes, draw: random.Random) -> re.Match[bytes] | None:
    """Returns the first match of `pattern` behind a random place of `data`, or in all of it. To list all matches of a
    large input would take longer than the parser does."""
    return pattern.search(data, draw.randrange(len(data) + 1)) or pattern.search(data)


def deep(data: bytes, draw: random.Random) -> bytes:
    """Puts a deep nest into a text: brackets, braces with keys, or dotted names, for readers that call themselves."""
    opening, closing = draw.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"a.", b"a = 1"), (b"{a=", b"}"), (b"(", b")")))
    depth = draw.choice((10, 100, 300, 900, 3000, 12000))
    place = _place(_BEFORE_VALUES, data, draw)
    at = place.start() if place else 0
    end = at + draw.choice((0, 0, 1, 4))
    middle = draw.choice((b"", b"1", b'"x"'))
    if closing == b"a = 1":
        return data[:at] + b"\n" + opening * depth + closing + b"\n" + data[end:]
    return data[:at] + opening * depth + middle + closing * draw.choice((depth, depth, 0)) + data[end:]


def json_changed(data: bytes, draw: random.Random) -> bytes:
    """Changes values of a JSON document; some keys then stand twice. Other bytes come back changed as bytes."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return bytes_changed(data, draw)
    for _ in range(draw.choice((1, 1, 2, 3))):
        document = _json_edit(document, draw)
    try:
        text = json.dumps(document, ensure_ascii=draw.random() < 0.8)
    except (ValueError, RecursionError):
        return data
    if draw.random() < 0.05:
        keys = [match.end() for match in re.finditer(r"\{", text)]
        names = re.findall(r'"[^"\\]{1,40}":', text)
        if keys and names:
            at = draw.choice(keys)
            text = f"{text[:at]}{draw.choice(names)} 1, {text[at:]}"
    return text.encode("utf-8", "surrogatepass")


def _json_edit(document: Any, draw: random.Random) -> Any:
    places: list[tuple[Any, Any]] = []
    stack = [document]
    while stack and len(places) < _MOST_PLACES:
        value = stack.pop()
        if isinstance(value, dict):
            items: Sequence[tuple[Any, Any]] = list(value.items())
        elif isinstance(value, list):
            items = list(enumerate(value))
        else:
            continue
        places += [(value, key) for key, _ in items]
        stack += [inner for _, inner in items]
    if not places:
        return draw.choice(_VALUES)
    holder, key = draw.choice(places)
    kind, other = draw.randrange(7), draw.choice(places)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        # What is large already is not made larger than any input may be: the rest of it would be cut off.
        most = max(1, _MOST_BYTES // _num_bytes(holder[key]))
        holder[key:key] = holder[key : key + 1] * min(draw.choice((1, 2, 64, 1000)), most)
    elif kind == 1:
        holder[draw.choice(_TEXTS)] = holder[key]
    elif kind == 2:
        try:
            holder[key] = json.loads(json.dumps(other[0][other[1]]))  # a copy from elsewhere in the document
        except (KeyError, IndexError, ValueError, RecursionError):
            pass
    elif kind == 3 and isinstance(holder[key], (int, float)):
        holder[key] = draw.choice(_NUMBERS)
    elif kind == 4 and isinstance(holder[key], str):
        holder[key] += draw.choice(_TEXTS)
    else:
        holder[key] = json.loads(json.dumps(draw.choice(_VALUES)))
    return document


def _num_bytes(value: Any) -> int:
    """Returns the length of a value of a document as text, at least 1; that of one nested too deeply is as good as
    endless."""
    try:
        return len(json.dumps(value))
    except (ValueError, RecursionError):
        return _MOST_BYTES


def lines_changed(data: bytes, draw: random.Random) -> bytes:
    """Changes a text by lines and cells: left out, repeated, exchanged, cells replaced."""
    lines = data.split(b"\n")
    at, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    kind = draw.randrange(6)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines[at:at] = [lines[at]] * draw.choice((1, 2, 50, 500))
    elif kind == 2:
        lines[at], lines[other] = lines[other], lines[at]
    else:
        separator = draw.choice((b",", b"\t", b" ", b"="))
        cells = lines[at].split(separator)
        cell = draw.randrange(len(cells))
        if kind == 3:
            cells[cell] = draw.choice((*TOKENS, *(str(number).encode() for number in _NUMBERS)))
        elif kind == 4:
            cells[cell:cell] = [cells[cell]] * draw.choice((1, 3, 300))
        else:
            del cells[cell]
        lines[at] = separator.join(cells)
    return b"\n".join(lines)


def toml_changed(data: bytes, draw: random.Random) -> bytes:
    """Puts other values behind the `=` of a TOML text."""
    place = _place(_TOML_VALUES, data, draw)
    if place is None:
        return lines_changed(data, draw)
    value = draw.choice(_VALUES)
    shown = json.dumps(value) if not isinstance(value, dict) else "{a = 1}"
    if value is None or draw.random() < 0.2:
        shown = draw.choice(
            ("1979-05-27", "0xffff", "1_000", "nan", "-inf", "'x'", '"""x\n"""', "[1, 'a']", "{a.b = 1, a.c = 2}")
        )
    return data[: place.start(1)] + shown.encode("utf-8", "surrogatepass") + data[place.end(1) :]


def packed(inner: Strategy) -> Strategy:
    """Returns the strategy that changes what gzip packed, by `inner`, and packs it again."""

    def changed(data: bytes, draw: random.Random) -> bytes:
        if data[:2] != b"\x1f\x8b":
            made = inner(data, draw)
            return gzip.compress(made, 6, mtime=0) if draw.random() < 0.1 else made
        if draw.random() < 0.2:
            return bytes_changed(data, draw)
        try:
            contents = zlib.decompressobj(31).decompress(data, 1 << 16)
        except zlib.error:
            return bytes_changed(data, draw)
        made = inner(contents, draw)
        if draw.random() < 0.003:
            # A bomb, behind what is changed: to repeat a line of such a length takes gigabytes.
            made += draw.choice((b"\0", b"\n", b"x", b"x\n", b"[")) * (5 << 20)
        return gzip.compress(made, 6, mtime=0)

    return changed
