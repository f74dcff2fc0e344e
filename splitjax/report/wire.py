"""The part of a serialised HLO module that a report reads, as typed values.

jaxlib's Python objects (`hlo_modules()`) show names, opcodes and operands, but in jax 0.10.2 neither shapes nor groups
nor metadata; HLO's text is made for eyes and changes between versions. Both serialise: `HloModuleProto` is a protocol
buffer, whose field numbers never change their meaning, and its wire format takes a page to read
(https://protobuf.dev/programming-guides/encoding).

The numbers in this file are those of `xla/service/hlo.proto` and `xla/xla_data.proto` (https://github.com/openxla/xla)
and agree with the descriptors inside the jaxlib of jax 0.10.2 and of jax 0.12.0.1. Fields not named here are skipped
unread.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Groups = tuple[tuple[int, ...], ...]
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class WireError(ValueError):
    """Bytes that are no protocol buffer message."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array's element type (`xla.PrimitiveType`) and dims, or a tuple of shapes."""

    element_type: int
    dims: tuple[int, ...]
    members: tuple[Shape, ...] = ()


@dataclasses.dataclass(frozen=True)
class GroupList:
    """Groups of devices in one of their three forms, or none of them (which means all devices together)."""

    listed: Groups = ()
    # groups, devices per group, reshape, transpose
    iota: tuple[int, int, tuple[int, ...], tuple[int, ...]] | None = None
    mesh: MeshGroups | None = None


@dataclasses.dataclass(frozen=True)
class MeshGroups:
    """Groups as axes of a mesh that XLA names: the devices that differ in these axes only are a group.

    An axis may be split: (index, before, size) takes the middle of the factors (before, size, rest) of axis `index`."""

    sizes: tuple[int, ...]
    device_ids: tuple[int, ...]  # empty: in order
    iota: tuple[tuple[int, ...], tuple[int, ...]] | None  # reshape, transpose; instead of the ids
    axes: tuple[tuple[int, int, int], ...]


@dataclasses.dataclass(frozen=True)
class Instruction:
    id: int
    name: str
    opcode: str
    shape: Shape
    op_name: str
    stack_frame: int  # 1-based; 0 for none
    source: tuple[str, int]  # file and line, where metadata has them directly
    operands: tuple[int, ...]
    called: tuple[int, ...]
    tuple_index: int
    parameter: int  # of a parameter: its position
    # of a collective that the TPU's compiler spreads over several fusions: which, as each of its copies says
    chain: str
    groups: GroupList
    pairs: tuple[tuple[int, int], ...]  # of a collective-permute: (from, to)
    trip_count: int | None  # of a while loop, where XLA writes it down
    literal: int | None  # of a constant that is one integer
    direction: str  # of a comparison: LT, EQ, ...


@dataclasses.dataclass(frozen=True)
class Computation:
    id: int
    root: int
    instructions: Mapping[int, Instruction]  # by id, in order


@dataclasses.dataclass(frozen=True)
class Frame:
    """One line of a stack, and the position of its caller's (1-based, 0 for none)."""

    file: str
    line: int
    function: str
    parent: int


@dataclasses.dataclass(frozen=True)
class Module:
    entry: int
    computations: Mapping[int, Computation]
    frames: tuple[Frame, ...]


def read_module(data: bytes) -> Module:
    """Reads a serialised `HloModuleProto`. Raises `WireError` for bytes that are not one."""
    fields = _fields(data)
    payloads = tuple(fields.get(22, ()))
    computations = [_computation(one, payloads) for one in fields.get(3, ())]
    index = fields.get(17, ())
    return Module(_number(fields, 6), {one.id: one for one in computations}, _frames(index[-1]) if index else ())


def _computation(data: bytes, payloads: Sequence[bytes]) -> Computation:
    fields = _fields(data)
    instructions = [_instruction(one, payloads) for one in fields.get(2, ())]
    return Computation(_number(fields, 5), _number(fields, 6), {one.id: one for one in instructions})


def _instruction(data: bytes, payloads: Sequence[bytes]) -> Instruction:
    fields = _fields(data)
    opcode = _text(fields, 2)
    metadata = _message(fields, 7)
    return Instruction(
        id=_number(fields, 35),
        name=_text(fields, 1),
        opcode=opcode,
        shape=_shape(_message(fields, 3)),
        op_name=_text(metadata, 2),
        stack_frame=_number(metadata, 15),
        source=(_text(metadata, 3), _number(metadata, 4)),
        operands=_numbers(fields, 36),
        called=_numbers(fields, 38),
        tuple_index=_number(fields, 13),
        parameter=_number(fields, 9),
        chain=_attribute(_message(fields, 68), "chain_id"),
        groups=_groups(fields),
        pairs=tuple((_number(pair, 1), _number(pair, 2)) for pair in map(_fields, fields.get(52, ()))),
        trip_count=_trip_count(_config(fields, payloads)) if opcode == "while" else None,
        literal=_integer(_message(fields, 8)) if opcode == "constant" else None,
        direction=_text(fields, 63),
    )


def _integer(literal: Mapping[int, list[Any]]) -> int | None:
    """The value of a literal that is one number of 32 or 64 bits, signed or not."""
    found = [value for number in (4, 5, 6, 7) for value in _numbers(literal, number)]
    return found[0] if len(found) == 1 else None


def _attribute(fields: Mapping[int, list[Any]], name: str) -> str:
    """A frontend attribute, or empty."""
    entries = ({k: _text(entry, k) for k in (1, 2)} for entry in map(_fields, fields.get(1, ())))
    return next((entry[2] for entry in entries if entry[1] == name), "")


def _shape(fields: Mapping[int, list[Any]]) -> Shape:
    return Shape(_number(fields, 2), _numbers(fields, 3), tuple(_shape(_fields(one)) for one in fields.get(4, ())))


def _groups(fields: Mapping[int, list[Any]]) -> GroupList:
    """`collective_device_list` (87), `iota_collective_device_list` (92), `mesh_axes_replica_group_list` (93), or the
    older `replica_groups` (49)."""
    listed = tuple(_numbers(_fields(one), 1) for one in (_message(fields, 87).get(1, ()) or fields.get(49, ())))
    if 92 in fields:
        iota = _message(fields, 92)
        return GroupList((), (_number(iota, 1), _number(iota, 2), _numbers(iota, 3), _numbers(iota, 4)))
    if 93 in fields:
        outer = _message(fields, 93)
        mesh = _message(outer, 1)
        transform = _message(mesh, 3)
        axes = []
        for ref in map(_fields, outer.get(2, ())):
            part = _message(ref, 2)
            axes.append((_number(ref, 1), _number(part, 1), _number(part, 2)))
        sizes = tuple(_number(_fields(axis), 2) for axis in mesh.get(1, ()))
        iota_form = (_numbers(transform, 1), _numbers(transform, 2)) if transform else None
        return GroupList((), None, MeshGroups(sizes, _numbers(mesh, 2), iota_form, tuple(axes)))
    return GroupList(listed)


def _config(fields: Mapping[int, list[Any]], payloads: Sequence[bytes]) -> bytes:
    """`backend_config` (43), or `backend_config_payload` (99): the bytes themselves or their place in the module's
    payloads."""
    if fields.get(43):
        return fields[43][-1]
    payload = _message(fields, 99)
    if payload.get(1):
        return payload[1][-1]
    place = _number(payload, 2)
    return payloads[place] if 2 in payload and place < len(payloads) else b""


def _trip_count(config: bytes) -> int | None:
    """`known_trip_count` of a `WhileLoopBackendConfig`, which XLA writes as JSON (its numbers as strings)."""
    if b"known_trip_count" not in config:
        return None
    try:
        return int(json.loads(config)["known_trip_count"]["n"])
    except (ValueError, KeyError, TypeError):
        found = re.search(rb'known_trip_count[^0-9]*?"?n"?[^0-9]*?(\d+)', config)
        return int(found.group(1)) if found else None


def _frames(data: bytes) -> tuple[Frame, ...]:
    fields = _fields(data)
    files, functions = ([name.decode("utf-8", "replace") for name in fields.get(number, ())] for number in (1, 2))
    places = [_fields(one) for one in fields.get(3, ())]
    frames = []
    for frame in map(_fields, fields.get(4, ())):
        place = _at(places, _number(frame, 1), {})
        frames.append(
            Frame(
                _at(files, _number(place, 1), ""),
                _number(place, 3),
                _at(functions, _number(place, 2), ""),
                _number(frame, 2),
            )
        )
    return tuple(frames)


def _at(values: Sequence[Any], position: int, default: Any) -> Any:
    """The value at a 1-based position, 0 for none."""
    return values[position - 1] if 0 < position <= len(values) else default


# The wire format. A message is a list of (number, type, value); a later field of the same number wins or is one more
# entry.


def _fields(data: bytes) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for number, value in _entries(data):
        found.setdefault(number, []).append(value)
    return found


def _entries(data: bytes) -> Iterator[tuple[int, Any]]:
    position, end = 0, len(data)
    try:
        while position < end:
            tag, position = _varint(data, position)
            kind = tag & 7
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
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7


def _number(fields: Mapping[int, list[Any]], number: int) -> int:
    values = fields.get(number)
    value = values[-1] if values else 0
    return value - (1 << 64) if value >= 1 << 63 else value  # int64 as two's complement


def _numbers(fields: Mapping[int, list[Any]], number: int) -> tuple[int, ...]:
    """A repeated whole number: packed into bytes, or one field each."""
    out: list[int] = []
    for value in fields.get(number, ()):
        if isinstance(value, int):
            out.append(value)
            continue
        position = 0
        while position < len(value):
            one, position = _varint(value, position)
            out.append(one)
    return tuple(one - (1 << 64) if one >= 1 << 63 else one for one in out)


def _text(fields: Mapping[int, list[Any]], number: int) -> str:
    values = fields.get(number)
    return values[-1].decode("utf-8", "replace") if values else ""


def _message(fields: Mapping[int, list[Any]], number: int) -> dict[int, list[Any]]:
    values = fields.get(number)
    return _fields(values[-1]) if values else {}
