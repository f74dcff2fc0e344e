"""Makes the memory timeline of a compiled program: which of its arrays lie in a device's memory, from when to when.

The buffer assignment says which values share their bytes, the schedule from which operation to which these are read,
and the names of operations to which layer they belong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from splitjax.cost.memory.moments import MemoryTimeline, StoredSpan, passes_of
from splitjax.plan import StoredArray
from splitjax.report.known_step import Step
from splitjax.report.memory.assignment import BufferAssignment, Location
from splitjax.report.memory.moments import Moments
from splitjax.report.op_names import primitive
from splitjax.report.wire import Instruction, Module

# So many operations are looked at on the way back from an array to a layer.
_FAR = 200


@dataclasses.dataclass
class _Buffer:
    """Is a stretch of an allocation from one moment to another: `offset` and `size` in bytes, and the places where what
    lies there is computed."""

    offset: int
    size: int
    start: int
    end: int
    made: list[tuple[int, Location]]  # (moment, where)


def compiled_timeline(module: Module, assignment: BufferAssignment, step: Step) -> MemoryTimeline | None:
    """Returns what a device stores at each moment of a compiled program; None where XLA does not say in which order
    its operations run.

    **Arguments:** `module`: the program. `assignment`: where its values lie. `step`: knows the layers."""
    moments = Moments(module)
    if not moments.operations:
        return None
    names = _Names(moments, step)
    spans: list[StoredSpan] = []
    held = set_aside = 0
    for allocation in assignment.allocations:
        if allocation.is_argument:
            held += allocation.num_bytes
        elif not allocation.is_constant and not allocation.is_local:
            set_aside += allocation.num_bytes
            for buffer in _in_turn(_buffers(assignment, allocation.values, moments)):
                spans.append(StoredSpan(names.array(buffer), buffer.start, buffer.end))
    operations = moments.operations
    return MemoryTimeline(
        held,
        tuple(names.operation(instruction) for instruction in operations),
        passes_of(names.scope(instruction) for instruction in operations),
        tuple(spans),
        set_aside,
    )


def _buffers(assignment: BufferAssignment, placed: Sequence[tuple[int, int]], moments: Moments) -> list[_Buffer]:
    """Returns what lies in an allocation: values that are one another's continuation, such as what a loop hands on,
    are one."""
    found: dict[tuple[int, frozenset[Location]], _Buffer] = {}
    for number, offset in placed:
        value = assignment.values.get(number)
        span = None if value is None else moments.span(value.made)
        if value is None or span is None:
            continue
        key = offset, frozenset((value.made, *value.locations))
        known = found.get(key)
        if known is None:
            found[key] = _Buffer(offset, value.num_bytes, *span, [(span[0], value.made)])
        else:
            known.size = max(known.size, value.num_bytes)
            known.start, known.end = min(known.start, span[0]), max(known.end, span[1])
            known.made.append((span[0], value.made))
    return list(found.values())


def _in_turn(buffers: Sequence[_Buffer]) -> list[_Buffer]:
    """Ends every buffer where another one begins to lie in its bytes: an operation may write over what it reads."""
    kept: list[_Buffer] = []
    active: list[_Buffer] = []
    for buffer in sorted(buffers, key=lambda each: each.start):
        active = [each for each in active if each.end > buffer.start]
        for each in active:
            if each.offset < buffer.offset + buffer.size and buffer.offset < each.offset + each.size:
                each.end = buffer.start
        active.append(buffer)
        kept.append(buffer)
    return [buffer for buffer in kept if buffer.end > buffer.start and buffer.size]


class _Names:
    """Says what the operations and arrays of a program are called, and whose they are."""

    def __init__(self, moments: Moments, step: Step) -> None:
        self._moments, self._step = moments, step

    def scope(self, instruction: Instruction) -> str:
        """Returns the name that JAX gave an operation; of a fusion without one, that of what it gives."""
        if instruction.op_name or instruction.opcode != "fusion":
            return instruction.op_name
        bodies = [self._moments.module.computations.get(called) for called in instruction.called]
        inside = [each.instructions.get(each.root) for each in bodies if each is not None]
        return next((each.op_name for each in inside if each is not None and each.op_name), "")

    def operation(self, instruction: Instruction) -> str:
        """Returns what an operation does, as JAX calls it where that is known: `dot_general`, `all-reduce`."""
        scope = self.scope(instruction)
        # Collectives and copies are the compiler's own, and have the name of what they were made for.
        if not scope or "/" not in scope or instruction.opcode != "fusion":
            return instruction.opcode
        return primitive(scope)

    def layer(self, instruction: Instruction) -> str:
        """Returns the layer of an operation, or of the nearest before it; an argument's is its own, or its path."""
        waiting, seen = [instruction], {instruction.id}
        for _ in range(_FAR):
            if not waiting:
                break
            here = waiting.pop(0)
            scope = self.scope(here)
            leaf = self._step.leaf(scope)
            name = (self._step.layer_of(leaf) or leaf) if leaf is not None else self._step.named(scope)[0]
            if name:
                return name
            before = [self._moments.instructions.get(operand) for operand in here.operands]
            new = [each for each in before if each is not None and each.id not in seen]
            seen.update(each.id for each in new)
            waiting += new
        return ""

    def array(self, buffer: _Buffer) -> StoredArray:
        """Describes what lies in a buffer: by the first operation that is somebody's, or the first."""
        made = [self._moments.instructions[location[0]] for _, location in sorted(buffer.made)]
        named = next((each for each in made if each.opcode not in ("parameter", "while")), made[0])
        index = next(location[1] for _, location in sorted(buffer.made) if location[0] == named.id)
        shape = named.shape
        for position in index:
            if position < len(shape.members):
                shape = shape.members[position]
        layer = next((name for each in made if (name := self.layer(each))), "")
        return StoredArray(shape.dims, buffer.size, self.operation(named), layer)
