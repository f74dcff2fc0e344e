"""Reads the wire format of protocol buffers (https://protobuf.dev/programming-guides/encoding): the fields of a message
by number, and the kinds of values that a field may hold.

A message is a list of (number, type, value); a later field of the same number wins, or is a further entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

# The values of a message by field number, in order: whole numbers, or bytes (texts, messages and packed numbers).
Message = Mapping[int, Sequence[int | bytes]]
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WORD = (1 << 64) - 1


class WireError(ValueError):
    """Says that bytes are no protocol buffer message."""


def fields_of(data: bytes) -> Message:
    """Returns the fields of the message that `data` encodes. Raises `WireError` where it is not one."""
    fields: dict[int, list[int | bytes]] = {}
    for number, value in _entries(data):
        fields.setdefault(number, []).append(value)
    return fields


def _entries(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    position, end = 0, len(data)
    try:
        while position < end:
            tag, position = _varint(data, position)
            kind = tag & 7
            value: int | bytes
            if kind == _VARINT:
                value, position = _varint(data, position)
            elif kind == _BYTES:
                length, position = _varint(data, position)
                value = data[position : position + length]
                position += length
            elif kind in (_FIXED64, _FIXED32):
                size = 8 if kind == _FIXED64 else 4
                value = data[position : position + size]
                position += size
            else:
                raise WireError(f"wire type {kind} at byte {position}")
            if position > end:
                raise WireError(f"a field ends at byte {position} of {end}")
            yield tag >> 3, value
    except IndexError:
        raise WireError(f"a number goes beyond the end at byte {end}") from None


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Returns the number that begins at `position`, seven bits a byte, and the position behind it."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & _WORD, position
        shift += 7
        if shift > 63:  # ten bytes hold 64 bits
            raise WireError(f"a number is longer than 64 bits before byte {position}")


def _signed(value: int) -> int:
    """Reads an int64, which the wire has as two's complement."""
    return value - (1 << 64) if value >= 1 << 63 else value


def number_at(fields: Message, number: int) -> int:
    """Returns a whole number, the last of field `number`; 0 where there is none."""
    values = fields.get(number)
    value = values[-1] if values else 0
    if isinstance(value, bytes):
        raise WireError(f"field {number} holds bytes instead of a number")
    return _signed(value)


def numbers_at(fields: Message, number: int) -> tuple[int, ...]:
    """Returns a repeated whole number: packed into bytes, or a field each."""
    out: list[int] = []
    for value in fields.get(number, ()):
        if isinstance(value, int):
            out.append(value)
            continue
        position = 0
        try:
            while position < len(value):
                packed, position = _varint(value, position)
                out.append(packed)
        except IndexError:
            raise WireError(f"a number goes beyond the end of field {number}") from None
    return tuple(map(_signed, out))


def parts_at(fields: Message, number: int) -> tuple[bytes, ...]:
    """Returns the bytes of every entry of field `number`. Raises `WireError` where it holds numbers."""
    parts = []
    for value in fields.get(number, ()):
        if isinstance(value, int):
            raise WireError(f"field {number} holds a number instead of bytes")
        parts.append(value)
    return tuple(parts)


def text_at(fields: Message, number: int) -> str:
    """Returns the last text of field `number`; an empty one where there is none."""
    parts = parts_at(fields, number)
    return parts[-1].decode("utf-8", "replace") if parts else ""


def messages_at(fields: Message, number: int) -> tuple[Message, ...]:
    """Returns every message of field `number`."""
    return tuple(map(fields_of, parts_at(fields, number)))


def message_at(fields: Message, number: int) -> Message:
    """Returns the last message of field `number`; without fields where there is none."""
    parts = parts_at(fields, number)
    return fields_of(parts[-1]) if parts else {}
