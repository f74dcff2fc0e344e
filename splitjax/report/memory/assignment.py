"""Reads where XLA put the values of a compiled program: bytes go in, a `BufferAssignment` of typed values comes out.

XLA serialises its buffer assignment as a `BufferAssignmentProto`, which jax hands out with a program's memory analysis
(`serialized_buffer_assignment_proto`; the compiler for TPUs leaves it empty, and that for GPUs ahead of time). The
field numbers are those of `xla/service/hlo.proto` (https://github.com/openxla/xla); fields not named here are skipped
unread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from splitjax.report.protobuf import Message, fields_of, message_at, messages_at, number_at, numbers_at

# An instruction, by its number, and which part of the tuple that it gives.
Location = tuple[int, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Value:
    """Describes an array that the program computes.

    **Attributes:**

    - `num_bytes`: its size, padding included. `made`: where it is computed.
    - `locations`: where it is handed on to unchanged, through tuples and loops.
    """

    num_bytes: int
    made: Location
    locations: tuple[Location, ...] = ()


@dataclasses.dataclass(frozen=True)
class Allocation:
    """Describes a stretch of a device's memory.

    **Attributes:**

    - `num_bytes`: how long it is. `values`: (value, offset) of what is put there, at different times or side by side.
    - `is_argument`: whether an argument comes in there. `is_result`: whether a result may lie there when the step ends.
    - `is_constant`: whether it belongs to the program itself. `is_local`: whether it lies on a thread's stack.
    """

    num_bytes: int
    values: tuple[tuple[int, int], ...]
    is_argument: bool = False
    is_result: bool = False
    is_constant: bool = False
    is_local: bool = False


@dataclasses.dataclass(frozen=True)
class BufferAssignment:
    """Holds the values of a program by their numbers, and the allocations that they lie in."""

    values: Mapping[int, Value]
    allocations: tuple[Allocation, ...]


def read_assignment(data: bytes) -> BufferAssignment:
    """Reads a serialised `BufferAssignmentProto`, `data`. Raises `WireError` for bytes that are not one."""
    fields = fields_of(data)
    aliases: dict[int, list[Location]] = {}
    for alias in messages_at(fields, 2):
        aliases.setdefault(number_at(alias, 1), []).append(_location(message_at(alias, 2)))
    values = {}
    for buffer in messages_at(fields, 1):
        number = number_at(buffer, 1)
        made = _location(message_at(buffer, 3))
        values[number] = Value(number_at(buffer, 2), made, tuple(aliases.get(number, ())))
    return BufferAssignment(values, tuple(map(_allocation, messages_at(fields, 3))))


def _location(fields: Message) -> Location:
    return number_at(fields, 4), numbers_at(fields, 3)


def _allocation(fields: Message) -> Allocation:
    return Allocation(
        number_at(fields, 2),
        tuple((number_at(each, 1), number_at(each, 2)) for each in messages_at(fields, 9)),
        is_argument=bool(number_at(fields, 5)),
        is_result=bool(number_at(fields, 7)),
        is_constant=bool(number_at(fields, 12)),
        is_local=bool(number_at(fields, 3)),
    )
