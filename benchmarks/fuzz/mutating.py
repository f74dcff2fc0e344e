"""Changes inputs at random, with and without knowledge of their format.

Bytes, a longest size and a `random.Random` go in, other bytes come out; the same ones for the same state of the random
numbers. Used by atheris as a custom mutator, beside libFuzzer's own, and alone where atheris is not installed.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Strategy = Callable[[bytes, random.Random], bytes]

_NUMBERS = (0, 1, -1, 2, 3, 7, 255, 256, 4096, 65535, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**53, 2**63 - 1, 2**63,
            -(2**63), 2**64, 10**30, 10**400)  # fmt: skip
_TEXTS = ("", "x", "a.b", "../x", "/etc/passwd", "*", "?", "nan", "inf", "1e999", "-0", "null", "\x00", "\ud800", "\u0660",
          "\u00b2", "\u202e", "9" * 5000, "A" * 3000, "float32", "data", "model", "(a|a)*b", "[", "{", "a{65536}")  # fmt: skip
_VALUES: tuple[Any, ...] = (
    *_NUMBERS, *_TEXTS, None, True, False, 0.5, -0.0, 1e308, 5e-324, float("nan"), float("inf"), [], {}, [[]], [None],
    ["?"], {"a": 1}, [1, 2], ["data", 2], [["data", 2]],
)  # fmt: skip
_TOKENS = tuple(
    token.encode("utf-8", "surrogatepass")
    for token in ("\n", "\r\n", "\t", ",", '"', "'", "\\", "[", "]", "{", "}", "[[rule]]", "=", ".", "#", "/", "0x", "NaN", "Infinity", *_TEXTS)
) + (b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x1f\x8b", b"PK\x03\x04")  # fmt: skip


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
            made[at:at] = draw.choice(_TOKENS)
        elif kind == 6:
            made[at:at] = draw.randbytes(draw.choice((1, 2, 4, 16)))
        elif kind == 7:
            end = min(len(made), at + draw.choice((4, 16, 64)))
            part, to = made[at:end], draw.randrange(len(made) + 1)
            made[to : to + len(part)] = part
        else:
            made[at : at + 1] = str(draw.choice(_NUMBERS)).encode()
    return bytes(made)


def deep(data: bytes, draw: random.Random) -> bytes:
    """Puts a deep nest into a text: brackets, braces with keys, or dotted names, for readers that call themselves."""
    opening, closing = draw.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"a.", b"a = 1"), (b"{a=", b"}"), (b"(", b")")))
    depth = draw.choice((10, 100, 300, 900, 3000, 12000))
    places = [match.start() for match in re.finditer(rb"(?<=[:=\[,\n{ ])", data)] or [0]
    at = draw.choice(places)
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
    while stack and len(places) < 5000:
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
        holder[key:key] = holder[key : key + 1] * draw.choice((1, 2, 64, 1000))
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
            cells[cell] = draw.choice((*_TOKENS, *(str(number).encode() for number in _NUMBERS)))
        elif kind == 4:
            cells[cell:cell] = [cells[cell]] * draw.choice((1, 3, 300))
        else:
            del cells[cell]
        lines[at] = separator.join(cells)
    return b"\n".join(lines)


def toml_changed(data: bytes, draw: random.Random) -> bytes:
    """Puts other values behind the `=` of a TOML text."""
    places = list(re.finditer(rb"=[ ]*([^\n]*)", data))
    if not places:
        return lines_changed(data, draw)
    place = draw.choice(places)
    value = draw.choice(_VALUES)
    shown = json.dumps(value) if not isinstance(value, dict) else "{a = 1}"
    if value is None or draw.random() < 0.2:
        shown = draw.choice(("1979-05-27", "0xffff", "1_000", "nan", "-inf", "'x'", '"""x\n"""', "[1, 'a']", "{a.b = 1, a.c = 2}"))
    return data[: place.start(1)] + shown.encode("utf-8", "surrogatepass") + data[place.end(1) :]  # fmt: skip


def packed(inner: Strategy) -> Strategy:
    """Returns the strategy that changes what gzip packed, by `inner`, and packs it again."""

    def changed(data: bytes, draw: random.Random) -> bytes:
        if data[:2] != b"\x1f\x8b":
            made = inner(data, draw)
            return gzip.compress(made, 6, mtime=0) if draw.random() < 0.1 else made
        if draw.random() < 0.2:
            return bytes_changed(data, draw)
        try:
            contents = zlib.decompressobj(31).decompress(data, 1 << 20)
        except zlib.error:
            return bytes_changed(data, draw)
        if draw.random() < 0.003:
            contents += draw.choice((b"\0", b"\n", b"x", b"x\n", b"[")) * (5 << 20)  # a bomb
        return gzip.compress(inner(contents, draw), 6, mtime=0)

    return changed


def sealed_changed(data: bytes, draw: random.Random) -> bytes:
    """Changes a manifest and seals it again, so that what reads it takes it for whole."""
    try:
        content = json.loads(json_changed(data, draw))
        if not isinstance(content, dict):
            return data
        content.pop("sha256", None)
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return (json.dumps({**content, "sha256": digest}, indent=1, sort_keys=True) + "\n").encode()
    except (ValueError, RecursionError):
        return data


def tar_changed(data: bytes, draw: random.Random) -> bytes:
    """Changes a header of a tar archive and corrects its checksum, or puts a header of another kind before it."""
    made = bytearray(data)
    headers = [at for at in range(0, len(made) - 511, 512) if made[at + 257 : at + 262] == b"ustar"]
    if not headers or draw.random() < 0.1:
        return bytes_changed(data, draw)
    at = draw.choice(headers)
    if draw.random() < 0.3:
        info = tarfile.TarInfo(draw.choice(("x", "../x", "/x", "a" * 120, "cifar-10-batches-bin/test_batch.bin")))
        kind = draw.choice(b"01234567LKxgXSDVNMA")
        text = draw.choice((b"", b"12 path=/x\n", b"99999 size=1\n", b"20 size=-9999999999\n", b"27 GNU.sparse.map=1,x,3,4\n",
                            b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n", b"30 GNU.sparse.size=" + b"9" * 40 + b"\n",
                            b"17 size=\xff\xfe\xfd\n", b"x" * 512, b"16 mtime=nan\n\n", b"16 uid=" + b"9" * 5000))  # fmt: skip
        info.type, info.size = bytes([kind]), draw.choice((len(text), len(text), 0, 2**33, 2**62))
        info.linkname = draw.choice(("", "x", "/etc/passwd", "../../x"))
        try:
            header = info.tobuf(tarfile.GNU_FORMAT)
        except ValueError:
            return data
        block = header + text + bytes(-len(text) % 512)
        made[at:at] = block * draw.choice((1, 1, 2, 20))
        return bytes(made)
    start, width = draw.choice(((0, 100), (100, 8), (108, 8), (116, 8), (124, 12), (136, 12), (156, 1), (157, 100), (257, 8), (345, 155), (386, 96), (482, 1)))  # fmt: skip
    value = draw.choice((draw.randbytes(width), b"7" * width, b"\x80" + b"\xff" * (width - 1), b"\xff" * width,
                         bytes(width), b"-1", b"\x80" + bytes(max(0, width - 2)) + b"\x01", draw.choice(_TOKENS)))  # fmt: skip
    made[at + start : at + start + width] = value[:width].ljust(width, b"\0")
    made[at + 148 : at + 156] = b" " * 8
    made[at + 148 : at + 156] = b"%06o\0 " % sum(made[at : at + 512])
    return bytes(made)


def arrays_changed(data: bytes, draw: random.Random) -> bytes:
    """Changes the members of a `.npz`: headers, contents, names, how they are packed; checksums are right again."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {info.filename: archive.read(info) for info in archive.infolist() if info.file_size < 1 << 20}
    except Exception:  # whatever an archive that was changed before may raise
        return bytes_changed(data, draw)
    if not members or draw.random() < 0.2:
        return bytes_changed(data, draw)
    name = draw.choice(sorted(members))
    kind = draw.randrange(6)
    if kind == 0:
        members[name] = bytes_changed(members[name], draw)
    elif kind == 1:
        shape = draw.choice(((), (0,), (2**62,), (2**40,), (10**9,), (3, 26), (3, 13), (0, 2**62), (-1,), (2**70,)))
        descr = draw.choice(("<i4", "<f4", "|O", "|V0", "|S0", "<f2", ">i8", "<U9", [("a", "<i4")], "x", "|i1", "<c16", "<M8[s]"))
        header = str({"descr": descr, "fortran_order": draw.random() < 0.5, "shape": shape}).encode()  # fmt: skip
        if draw.random() < 0.2:
            header = draw.choice((b"(" * 900, b"{" + b"'a':{" * 300, b"[" * 9000, b"1" * 9000, b"lambda: 0", b"'" * 7))
        members[name] = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header + b"\n" + members[name][-64:]
    elif kind == 2:
        members[draw.choice(("ids.npy", "values.npy", "clicked.npy", "../x.npy", "x"))] = members.pop(name)
    elif kind == 3:
        members[name] += bytes(draw.choice((1, 1000, 1000, 100_000, 5 << 20)))
    elif kind == 4:
        width = draw.choice((np.int8, np.float64, np.uint64, np.complex64, np.bool_))
        made = io.BytesIO()
        np.save(made, np.full(draw.choice(((3, 26), (3, 13), (3,), (0, 26), ())), draw.choice((0, 1, 99)), width))
        members[name] = made.getvalue()
    else:
        del members[name]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))) as archive:
        for member, contents in members.items():  # fmt: skip
            archive.writestr(zipfile.ZipInfo(member), contents)
    made_bytes = out.getvalue()
    return bytes_changed(made_bytes, draw) if draw.random() < 0.1 else made_bytes


_OPCODES = (b"0", b"1", b"2", b"(", b"]", b"}", b")", b"\x8f", b"\x90", b"\x91", b"e", b"a", b"u", b"s", b"t", b"\x85",
            b"\x86", b"\x87", b"R", b"b", b"\x81", b"q\x05", b"h\x05", b"\x94", b"N", b"\x88", b"K\x01", b"M\xff\xff",
            b"cos\nsystem\n", b"c_codecs\nencode\n", b"cnumpy\ndtype\n", b"cnumpy\nndarray\n", b"X\x01\x00\x00\x00a",
            b"\x8d\xff\xff\xff\xff\xff\xff\xff\x00", b"\x8a\x02\x01\x02", b"\x8b\xff\xff\xff\x7f", b"L99L\n", b"I1\n",
            b"F1e999\n", b"S'a'\n", b"P1\n", b"Q", b"\x95\xff\x00\x00\x00\x00\x00\x00\x00", b"\x82\x01", b"\x92",
            b"(h\x05h\x05tq\x05", b"h\x05h\x05\x86q\x05" * 40, b".")  # fmt: skip


def pickle_changed(data: bytes, draw: random.Random) -> bytes:
    """Puts opcodes of pickles in, early, where they are no pixels."""
    made = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = min(len(made), draw.randrange(250))
        made[at : at + draw.choice((0, 0, 1, 2))] = draw.choice(_OPCODES)
    return bytes(made)


def wire_changed(data: bytes, draw: random.Random) -> bytes:
    """Puts a field of a protocol buffer in: numbers of any length, and messages in messages."""
    number, kind = draw.choice((1, 2, 3, 4, 7, 8, 9, 13, 17, 22, 35, 36, 43, 68, 87, 92, 93, 99)), draw.randrange(4)
    if kind == 0:
        field = _tag(number, 0) + draw.choice((b"\x01", b"\xff" * 9 + b"\x01", b"\xff" * 3000 + b"\x01", b"\xff" * 11))
    elif kind == 1:
        text = draw.choice((*_TOKENS, b"known_trip_count" + b"n" * 3000, b'{"known_trip_count": {"n": "1e999"}}',
                            b'{"known_trip_count": {"n": 1e999}}', b"known_trip_count" + b"9" * 5000, b"while", b"constant"))  # fmt: skip
        field = _tag(number, 2) + _length(len(text)) + text
    elif kind == 2:
        field = b""
        for _ in range(draw.choice((2, 20, 500, 1200))):
            field = _tag(number, 2) + _length(len(field)) + field
    else:
        at = draw.randrange(len(data) + 1)
        part = data[at : at + draw.choice((2, 20, 200))]
        field = _tag(number, 2) + _length(len(part)) + part
    if draw.random() < 0.5:
        for outer in ((3,), (2, 3), (17,), (3, 2, 3))[draw.randrange(4)]:
            field = _tag(outer, 2) + _length(len(field)) + field
        return data + field
    at = draw.randrange(len(data) + 1)
    return data[:at] + field + data[at:]


def _length(value: int) -> bytes:
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    return bytes((*made, value))


def _tag(number: int, kind: int) -> bytes:
    return _length(number << 3 | kind)


STRATEGIES: Mapping[str, Strategy] = {
    "bytes": bytes_changed,
    "deep": deep,
    "json": json_changed,
    "lines": lines_changed,
    "toml": toml_changed,
    "packed json": packed(json_changed),
    "packed lines": packed(lines_changed),
    "packed bytes": packed(bytes_changed),
    "packed deep": packed(deep),
    "sealed": sealed_changed,
    "tar": packed(tar_changed),
    "arrays": arrays_changed,
    "pickle": pickle_changed,
    "wire": wire_changed,
}


def changed(data: bytes, names: Sequence[str], max_bytes: int, draw: random.Random) -> bytes:
    """Returns `data` changed by one of the strategies `names`, or as bytes, at most `max_bytes` of it."""
    return STRATEGIES[draw.choice(names)](data, draw)[:max_bytes]
