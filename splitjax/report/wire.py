"""Reads the part of a serialised HLO module that a report needs: bytes go in, a `Module` of typed values comes out.

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
from typing import TypeVar

Groups = tuple[tuple[int, ...], ...]
# The values of a message by field number, in order: whole numbers, or bytes (texts, messages and packed numbers).
_Message = Mapping[int, Sequence[int | bytes]]
_Value = TypeVar("_Value")
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class WireError(ValueError):
    """Says that bytes are no protocol buffer message."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Describes an array, or a tuple of them.

    **Attributes:**

    - `element_type`: the number of `xla.PrimitiveType`.
    - `dims`: the sizes of the array's dims.
    - `members`: of a tuple, the shapes in it; empty for an array.
    """

    element_type: int
    dims: tuple[int, ...]
    members: tuple[Shape, ...] = ()


@dataclasses.dataclass(frozen=True)
class GroupList:
    """Lists groups of devices in one of three forms; without any of them all devices are one group.

    **Attributes:**

    - `listed`: the groups as lists of device numbers.
    - `iota`: (number of groups, devices per group, reshape, transpose): the devices in order, as an array of the sizes
      `reshape`, its dims permuted by `transpose`, and cut into groups.
    - `mesh`: the groups as axes of a mesh.
    """

    listed: Groups = ()
    iota: tuple[int, int, tuple[int, ...], tuple[int, ...]] | None = None
    mesh: MeshGroups | None = None


@dataclasses.dataclass(frozen=True)
class MeshGroups:
    """Describes groups as axes of a mesh that XLA names: devices that differ in these axes only are a group.

    **Attributes:**

    - `sizes`: of the mesh's axes.
    - `device_ids`: the device at each place of the mesh, row-major; empty for devices in order.
    - `iota`: (reshape, transpose) instead of the ids, as in `GroupList`; None for devices in order.
    - `axes`: (index, before, size) of each axis in use. An axis may be split: this takes the middle of the factors
      (before, size, rest) of axis `index`; a size of 0 takes the whole axis.
    """

    sizes: tuple[int, ...]
    device_ids: tuple[int, ...]
    iota: tuple[tuple[int, ...], tuple[int, ...]] | None
    axes: tuple[tuple[int, int, int], ...]


@dataclasses.dataclass(frozen=True)
class Instruction:
    """Describes one instruction: what it computes, from what, and where it was written.

    **Attributes:**

    - `id`, `name`: the number by which other instructions name it, and its name.
    - `opcode`: XLA's name of the operation, such as `all-reduce-start`.
    - `shape`: of its result.
    - `op_name`: the path of scopes and transformations that JAX gave it; of an argument of the step, JAX's name of it.
    - `stack_frame`: its place in `Module.frames`, counted from 1; 0 for none.
    - `source`: file and line, where its metadata has them directly.
    - `operands`: the ids of the instructions that it reads.
    - `called`: the ids of the computations that it calls.
    - `tuple_index`: of a `get-tuple-element`, which member it takes.
    - `parameter`: of a parameter, its position.
    - `chain`: of a collective that the TPU's compiler spreads over several fusions, the name that each of its copies
      has.
    - `groups`: of a collective, the devices that take part together.
    - `pairs`: of a collective-permute, (from, to) as device numbers.
    - `trip_count`: of a while loop, how often it runs; None where XLA does not write it down.
    - `literal`: of a constant that is a single integer, its value; else None.
    - `direction`: of a comparison: `LT`, `EQ`, ...
    """

    id: int
    name: str
    opcode: str
    shape: Shape
    op_name: str
    stack_frame: int
    source: tuple[str, int]
    operands: tuple[int, ...]
    called: tuple[int, ...]
    tuple_index: int
    parameter: int
    chain: str
    groups: GroupList
    pairs: tuple[tuple[int, int], ...]
    trip_count: int | None
    literal: int | None
    direction: str


@dataclasses.dataclass(frozen=True)
class Computation:
    """Holds the instructions of one function of a module.

    **Attributes:**

    - `id`: the number by which instructions call it.
    - `root`: the id of the instruction whose result it returns.
    - `instructions`: by id, in order.
    """

    id: int
    root: int
    instructions: Mapping[int, Instruction]


@dataclasses.dataclass(frozen=True)
class Frame:
    """Describes one line of a stack.

    **Attributes:**

    - `file`, `line`, `function`: where it stands.
    - `parent`: the place of its caller in `Module.frames`, counted from 1; 0 for none.
    """

    file: str
    line: int
    function: str
    parent: int


@dataclasses.dataclass(frozen=True)
class Module:
    """Holds a compiled program.

    **Attributes:**

    - `entry`: the id of the computation that runs first.
    - `computations`: by id.
    - `frames`: the lines of all stacks.
    """

    entry: int
    computations: Mapping[int, Computation]
    frames: tuple[Frame, ...]


def read_module(data: bytes) -> Module:
    """Reads a serialised `HloModuleProto`, `data`. Raises `WireError` for bytes that are not one."""
    fields = _fields(data)
    payloads = _parts(fields, 22)
    computations = [_computation(part, payloads) for part in _parts(fields, 3)]
    index = _parts(fields, 17)
    frames = _frames(index[-1]) if index else ()
    return Module(_number(fields, 6), {computation.id: computation for computation in computations}, frames)


def _computation(data: bytes, payloads: Sequence[bytes]) -> Computation:
    fields = _fields(data)
    instructions = [_instruction(part, payloads) for part in _parts(fields, 2)]
    return Computation(
        _number(fields, 5), _number(fields, 6), {instruction.id: instruction for instruction in instructions}
    )


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
        pairs=tuple((_number(pair, 1), _number(pair, 2)) for pair in _messages(fields, 52)),
        trip_count=_trip_count(_config(fields, payloads)) if opcode == "while" else None,
        literal=_integer(_message(fields, 8)) if opcode == "constant" else None,
        direction=_text(fields, 63),
    )


def _integer(literal: _Message) -> int | None:
    """Returns the value of a literal that is a single number of 32 or 64 bits, signed or not; else None."""
    values = [value for number in (4, 5, 6, 7) for value in _numbers(literal, number)]
    return values[0] if len(values) == 1 else None


def _attribute(fields: _Message, name: str) -> str:
    """Returns the frontend attribute of that name, or an empty text."""
    entries = ((_text(entry, 1), _text(entry, 2)) for entry in _messages(fields, 1))
    return next((value for key, value in entries if key == name), "")


def _shape(fields: _Message) -> Shape:
    return Shape(_number(fields, 2), _numbers(fields, 3), tuple(map(_shape, _messages(fields, 4))))


def _groups(fields: _Message) -> GroupList:
    """Reads `collective_device_list` (87), `iota_collective_device_list` (92), `mesh_axes_replica_group_list` (93), or
    the older `replica_groups` (49)."""
    listed = _messages(_message(fields, 87), 1) or _messages(fields, 49)
    if 92 in fields:
        iota = _message(fields, 92)
        return GroupList((), (_number(iota, 1), _number(iota, 2), _numbers(iota, 3), _numbers(iota, 4)))
    if 93 in fields:
        outer = _message(fields, 93)
        mesh = _message(outer, 1)
        transform = _message(mesh, 3)
        axes = []
        for ref in _messages(outer, 2):
            part = _message(ref, 2)
            axes.append((_number(ref, 1), _number(part, 1), _number(part, 2)))
        sizes = tuple(_number(axis, 2) for axis in _messages(mesh, 1))
        iota_form = (_numbers(transform, 1), _numbers(transform, 2)) if transform else None
        return GroupList((), None, MeshGroups(sizes, _numbers(mesh, 2), iota_form, tuple(axes)))
    return GroupList(tuple(_numbers(group, 1) for group in listed))


def _config(fields: _Message, payloads: Sequence[bytes]) -> bytes:
    """Returns `backend_config` (43), or `backend_config_payload` (99): the bytes themselves, or those of the module's
    payloads at the position that it names."""
    if configs := _parts(fields, 43):
        return configs[-1]
    payload = _message(fields, 99)
    if own := _parts(payload, 1):
        return own[-1]
    position = _number(payload, 2)
    return payloads[position] if 2 in payload and position < len(payloads) else b""


def _trip_count(config: bytes) -> int | None:
    """Reads `known_trip_count` of a `WhileLoopBackendConfig`, which XLA writes as JSON (its numbers as strings)."""
    if b"known_trip_count" not in config:
        return None
    try:
        return int(json.loads(config)["known_trip_count"]["n"])
    except (ValueError, KeyError, TypeError):
        match = re.search(rb'known_trip_count[^0-9]*?"?n"?[^0-9]*?(\d+)', config)
        return int(match.group(1)) if match else None


def _frames(data: bytes) -> tuple[Frame, ...]:
    fields = _fields(data)
    files, functions = ([name.decode("utf-8", "replace") for name in _parts(fields, number)] for number in (1, 2))
    places = _messages(fields, 3)
    frames = []
    for frame in _messages(fields, 4):
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


def _at(values: Sequence[_Value], position: int, default: _Value) -> _Value:
    """Returns the value at a position counted from 1; `default` at 0 and beyond the end."""
    return values[position - 1] if 0 < position <= len(values) else default


# The wire format. A message is a list of (number, type, value); a later field of the same number wins or is one more
# entry.


def _fields(data: bytes) -> _Message:
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
            return value, position
        shift += 7


def _signed(value: int) -> int:
    """Reads an int64, which the wire has as two's complement."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _number(fields: _Message, number: int) -> int:
    """Returns a whole number, the last of field `number`; 0 where there is none."""
    values = fields.get(number)
    value = values[-1] if values else 0
    if isinstance(value, bytes):
        raise WireError(f"field {number} holds bytes instead of a number")
    return _signed(value)


def _numbers(fields: _Message, number: int) -> tuple[int, ...]:
    """Returns a repeated whole number: packed into bytes, or a field each."""
    out: list[int] = []
    for value in fields.get(number, ()):
        if isinstance(value, int):
            out.append(value)
            continue
        position = 0
        while position < len(value):
            packed, position = _varint(value, position)
            out.append(packed)
    return tuple(map(_signed, out))


def _parts(fields: _Message, number: int) -> tuple[bytes, ...]:
    """Returns the bytes of every entry of field `number`. Raises `WireError` where it holds numbers."""
    parts = []
    for value in fields.get(number, ()):
        if isinstance(value, int):
            raise WireError(f"field {number} holds a number instead of bytes")
        parts.append(value)
    return tuple(parts)


def _text(fields: _Message, number: int) -> str:
    parts = _parts(fields, number)
    return parts[-1].decode("utf-8", "replace") if parts else ""


def _messages(fields: _Message, number: int) -> tuple[_Message, ...]:
    return tuple(map(_fields, _parts(fields, number)))


def _message(fields: _Message, number: int) -> _Message:
    """Returns the last message of field `number`; without fields where there is none."""
    parts = _parts(fields, number)
    return _fields(parts[-1]) if parts else {}
