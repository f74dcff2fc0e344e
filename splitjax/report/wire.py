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
from collections.abc import Mapping, Sequence
from typing import TypeVar

from splitjax.report.protobuf import (
    Message,
    WireError,
    fields_of,
    message_at,
    messages_at,
    number_at,
    numbers_at,
    parts_at,
    text_at,
)

Groups = tuple[tuple[int, ...], ...]
_Value = TypeVar("_Value")
_MAX_DEPTH = 64  # of tuples in tuples
# Of a configuration that is no JSON: the number may stand behind a few other characters. Bounded, so that no bytes make
# the search long.
_TRIP_COUNT = re.compile(rb"known_trip_count[^0-9]{0,40}?n[^0-9]{0,40}?([0-9]{1,18})")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Describes an array, or a tuple of them.

    **Attributes:**

    - `element_type`: the number of `xla.PrimitiveType`.
    - `dims`: the sizes of the array's dims.
    - `members`: of a tuple, the shapes in it; empty for an array.
    - `minor_to_major`: the array's dims in the order in which they lie in memory, the innermost first; empty where
      that is not said.
    - `tile`: what the innermost dims are filled up to multiples of, the innermost last; empty where they are not.
    - `memory_space`: the memory that it lies in; 0 for the main one.
    """

    element_type: int
    dims: tuple[int, ...]
    members: tuple[Shape, ...] = ()
    minor_to_major: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    memory_space: int = 0


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
    - `contracted`: of a product, the dims of its first operand that are summed over.
    - `features`: of a convolution, the dim of its weight that its result keeps.
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
    contracted: tuple[int, ...] = ()
    features: int = 0


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
    - `order`: by computation, the ids of its instructions in the order in which they run, where XLA decided it.
    """

    entry: int
    computations: Mapping[int, Computation]
    frames: tuple[Frame, ...]
    order: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)


def read_module(data: bytes) -> Module:
    """Reads a serialised `HloModuleProto`, `data`. Raises `WireError` for bytes that are not one."""
    fields = fields_of(data)
    payloads = parts_at(fields, 22)
    computations = [_computation(part, payloads) for part in parts_at(fields, 3)]
    index = parts_at(fields, 17)
    frames = _frames(index[-1]) if index else ()
    order = {
        number_at(entry, 1): numbers_at(message_at(entry, 2), 1) for entry in messages_at(message_at(fields, 7), 1)
    }
    return Module(number_at(fields, 6), {computation.id: computation for computation in computations}, frames, order)


def _computation(data: bytes, payloads: Sequence[bytes]) -> Computation:
    fields = fields_of(data)
    instructions = [_instruction(part, payloads) for part in parts_at(fields, 2)]
    return Computation(
        number_at(fields, 5), number_at(fields, 6), {instruction.id: instruction for instruction in instructions}
    )


def _instruction(data: bytes, payloads: Sequence[bytes]) -> Instruction:
    fields = fields_of(data)
    opcode = text_at(fields, 2)
    metadata = message_at(fields, 7)
    return Instruction(
        id=number_at(fields, 35),
        name=text_at(fields, 1),
        opcode=opcode,
        shape=shape_of(message_at(fields, 3)),
        op_name=text_at(metadata, 2),
        stack_frame=number_at(metadata, 15),
        source=(text_at(metadata, 3), number_at(metadata, 4)),
        operands=numbers_at(fields, 36),
        called=numbers_at(fields, 38),
        tuple_index=number_at(fields, 13),
        parameter=number_at(fields, 9),
        chain=_attribute(message_at(fields, 68), "chain_id"),
        groups=_groups(fields),
        pairs=tuple((number_at(pair, 1), number_at(pair, 2)) for pair in messages_at(fields, 52)),
        trip_count=_trip_count(_config(fields, payloads)) if opcode == "while" else None,
        literal=_integer(message_at(fields, 8)) if opcode == "constant" else None,
        direction=text_at(fields, 63),
        contracted=numbers_at(message_at(fields, 30), 1) if opcode == "dot" else (),
        features=number_at(message_at(fields, 16), 4) if opcode == "convolution" else 0,
    )


def _integer(literal: Message) -> int | None:
    """Returns the value of a literal that is a single number of 32 or 64 bits, signed or not; else None."""
    values = [value for number in (4, 5, 6, 7) for value in numbers_at(literal, number)]
    return values[0] if len(values) == 1 else None


def _attribute(fields: Message, name: str) -> str:
    """Returns the frontend attribute of that name, or an empty text."""
    entries = ((text_at(entry, 1), text_at(entry, 2)) for entry in messages_at(fields, 1))
    return next((value for key, value in entries if key == name), "")


def shape_of(fields: Message, depth: int = 0) -> Shape:
    """Reads an `xla.ShapeProto` that stands in so many (`depth`) other shapes. Raises `WireError` where shapes are
    nested deeper than any compiler nests them."""
    if depth > _MAX_DEPTH:
        raise WireError(f"shapes are nested deeper than {_MAX_DEPTH}")
    members = tuple(shape_of(member, depth + 1) for member in messages_at(fields, 4))
    layout = message_at(fields, 5)
    tiles = messages_at(layout, 6)
    return Shape(
        number_at(fields, 2),
        numbers_at(fields, 3),
        members,
        numbers_at(layout, 1),
        numbers_at(tiles[0], 1) if tiles else (),
        number_at(layout, 8),
    )


def _groups(fields: Message) -> GroupList:
    """Reads `collective_device_list` (87), `iota_collective_device_list` (92), `mesh_axes_replica_group_list` (93), or
    the older `replica_groups` (49)."""
    listed = messages_at(message_at(fields, 87), 1) or messages_at(fields, 49)
    if 92 in fields:
        iota = message_at(fields, 92)
        return GroupList((), (number_at(iota, 1), number_at(iota, 2), numbers_at(iota, 3), numbers_at(iota, 4)))
    if 93 in fields:
        outer = message_at(fields, 93)
        mesh = message_at(outer, 1)
        transform = message_at(mesh, 3)
        axes = []
        for ref in messages_at(outer, 2):
            part = message_at(ref, 2)
            axes.append((number_at(ref, 1), number_at(part, 1), number_at(part, 2)))
        sizes = tuple(number_at(axis, 2) for axis in messages_at(mesh, 1))
        iota_form = (numbers_at(transform, 1), numbers_at(transform, 2)) if transform else None
        return GroupList((), None, MeshGroups(sizes, numbers_at(mesh, 2), iota_form, tuple(axes)))
    return GroupList(tuple(numbers_at(group, 1) for group in listed))


def _config(fields: Message, payloads: Sequence[bytes]) -> bytes:
    """Returns `backend_config` (43), or `backend_config_payload` (99): the bytes themselves, or those of the module's
    payloads at the position that it names."""
    if configs := parts_at(fields, 43):
        return configs[-1]
    payload = message_at(fields, 99)
    if own := parts_at(payload, 1):
        return own[-1]
    position = number_at(payload, 2)
    return payloads[position] if 2 in payload and 0 <= position < len(payloads) else b""


def _trip_count(config: bytes) -> int | None:
    """Reads `known_trip_count` of a `WhileLoopBackendConfig`, which XLA writes as JSON (its numbers as strings)."""
    if b"known_trip_count" not in config:
        return None
    try:
        return int(json.loads(config)["known_trip_count"]["n"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        match = _TRIP_COUNT.search(config)
        return int(match.group(1)) if match else None


def _frames(data: bytes) -> tuple[Frame, ...]:
    fields = fields_of(data)
    files, functions = ([name.decode("utf-8", "replace") for name in parts_at(fields, number)] for number in (1, 2))
    places = messages_at(fields, 3)
    frames = []
    for frame in messages_at(fields, 4):
        place = _at(places, number_at(frame, 1), {})
        frames.append(
            Frame(
                _at(files, number_at(place, 1), ""),
                number_at(place, 3),
                _at(functions, number_at(place, 2), ""),
                number_at(frame, 2),
            )
        )
    return tuple(frames)


def _at(values: Sequence[_Value], position: int, default: _Value) -> _Value:
    """Returns the value at a position counted from 1; `default` at 0 and beyond the end."""
    return values[position - 1] if 0 < position <= len(values) else default
