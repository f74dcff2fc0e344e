"""Changes inputs in binary formats, so that what checks them (sums, lengths, digests) is right again.

Bytes and a `random.Random` go in, other bytes come out, as of `mutating`.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import struct
import tarfile
import zipfile

import numpy as np

from benchmarks.fuzz.mutating import TOKENS, bytes_changed, json_changed


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
        text = draw.choice(
            (
                b"",
                b"12 path=/x\n",
                b"99999 size=1\n",
                b"20 size=-9999999999\n",
                b"27 GNU.sparse.map=1,x,3,4\n",
                b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n",
                b"30 GNU.sparse.size=" + b"9" * 40 + b"\n",
                b"17 size=\xff\xfe\xfd\n",
                b"x" * 512,
                b"16 mtime=nan\n\n",
                b"16 uid=" + b"9" * 5000,
            )
        )
        info.type, info.size = bytes([kind]), draw.choice((len(text), len(text), 0, 2**33, 2**62))
        info.linkname = draw.choice(("", "x", "/etc/passwd", "../../x"))
        try:
            header = info.tobuf(tarfile.GNU_FORMAT)
        except ValueError:
            return data
        block = header + text + bytes(-len(text) % 512)
        made[at:at] = block * draw.choice((1, 1, 2, 20))
        return bytes(made)
    start, width = draw.choice(
        (
            (0, 100),
            (100, 8),
            (108, 8),
            (116, 8),
            (124, 12),
            (136, 12),
            (156, 1),
            (157, 100),
            (257, 8),
            (345, 155),
            (386, 96),
            (482, 1),
        )
    )
    value = draw.choice(
        (
            draw.randbytes(width),
            b"7" * width,
            b"\x80" + b"\xff" * (width - 1),
            b"\xff" * width,
            bytes(width),
            b"-1",
            b"\x80" + bytes(max(0, width - 2)) + b"\x01",
            draw.choice(TOKENS),
        )
    )
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
        descr = draw.choice(
            ("<i4", "<f4", "|O", "|V0", "|S0", "<f2", ">i8", "<U9", [("a", "<i4")], "x", "|i1", "<c16", "<M8[s]")
        )
        header = str({"descr": descr, "fortran_order": draw.random() < 0.5, "shape": shape}).encode()
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
    with zipfile.ZipFile(
        out, "w", draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    ) as archive:
        for member, contents in members.items():
            archive.writestr(zipfile.ZipInfo(member), contents)
    made_bytes = out.getvalue()
    return bytes_changed(made_bytes, draw) if draw.random() < 0.1 else made_bytes


_OPCODES = (
    b"0",
    b"1",
    b"2",
    b"(",
    b"]",
    b"}",
    b")",
    b"\x8f",
    b"\x90",
    b"\x91",
    b"e",
    b"a",
    b"u",
    b"s",
    b"t",
    b"\x85",
    b"\x86",
    b"\x87",
    b"R",
    b"b",
    b"\x81",
    b"q\x05",
    b"h\x05",
    b"\x94",
    b"N",
    b"\x88",
    b"K\x01",
    b"M\xff\xff",
    b"cos\nsystem\n",
    b"c_codecs\nencode\n",
    b"cnumpy\ndtype\n",
    b"cnumpy\nndarray\n",
    b"X\x01\x00\x00\x00a",
    b"\x8d\xff\xff\xff\xff\xff\xff\xff\x00",
    b"\x8a\x02\x01\x02",
    b"\x8b\xff\xff\xff\x7f",
    b"L99L\n",
    b"I1\n",
    b"F1e999\n",
    b"S'a'\n",
    b"P1\n",
    b"Q",
    b"\x95\xff\x00\x00\x00\x00\x00\x00\x00",
    b"\x82\x01",
    b"\x92",
    b"(h\x05h\x05tq\x05",
    b"h\x05h\x05\x86q\x05" * 40,
    b".",
)


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
        field = tag_of(number, 0) + draw.choice(
            (b"\x01", b"\xff" * 9 + b"\x01", b"\xff" * 3000 + b"\x01", b"\xff" * 11)
        )
    elif kind == 1:
        text = draw.choice(
            (
                *TOKENS,
                b"known_trip_count" + b"n" * 3000,
                b'{"known_trip_count": {"n": "1e999"}}',
                b'{"known_trip_count": {"n": 1e999}}',
                b"known_trip_count" + b"9" * 5000,
                b"while",
                b"constant",
            )
        )
        field = tag_of(number, 2) + length_of(len(text)) + text
    elif kind == 2:
        field = b""
        for _ in range(draw.choice((2, 20, 500, 1200))):
            field = tag_of(number, 2) + length_of(len(field)) + field
    else:
        at = draw.randrange(len(data) + 1)
        part = data[at : at + draw.choice((2, 20, 200))]
        field = tag_of(number, 2) + length_of(len(part)) + part
    if draw.random() < 0.5:
        for outer in ((3,), (2, 3), (17,), (3, 2, 3))[draw.randrange(4)]:
            field = tag_of(outer, 2) + length_of(len(field)) + field
        return data + field
    at = draw.randrange(len(data) + 1)
    return data[:at] + field + data[at:]


def length_of(value: int) -> bytes:
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    return bytes((*made, value))


def tag_of(number: int, kind: int) -> bytes:
    return length_of(number << 3 | kind)
