"""Says in which order the operations of a compiled program run, and how long what they give is read.

A module with its schedule comes in. The bodies of loops and branches are laid out where they are called, so that every
operation has its moment; parameters, constants, tuples and other looks at the same bytes take none.
"""

from __future__ import annotations

from collections.abc import Iterator

from splitjax.report.memory.assignment import Location
from splitjax.report.wire import Computation, Instruction, Module

# They hand on what is stored, or the part of it that is asked for.
LOOKS: frozenset[str] = frozenset("get-tuple-element tuple bitcast opt-barrier optimization-barrier".split())
_NO_MOMENT = LOOKS | frozenset("parameter constant after-all partition-id replica-id".split())
_RUNS = frozenset("while conditional call".split())


class Moments:
    """Lays out the operations of a `module`.

    **Attributes:**

    - `operations`: the instruction of each moment.
    - `instructions`: by id, every instruction that is laid out.
    """

    def __init__(self, module: Module) -> None:
        self.module: Module = module
        self.operations: list[Instruction] = []
        self.instructions: dict[int, Instruction] = {}
        self._at: dict[int, tuple[int, int]] = {}  # instruction -> its first moment, and the one behind its last
        self._users: dict[int, list[Instruction]] = {}
        self._root_ends: dict[int, int] = {}  # root of a computation -> where that ends
        if module.entry in module.order and module.entry in module.computations:
            self._lay_out(module.computations[module.entry])

    def _lay_out(self, computation: Computation) -> None:
        for number in self.module.order[computation.id]:
            instruction = computation.instructions.get(number)
            if instruction is None:
                continue
            start = len(self.operations)
            if instruction.opcode in _RUNS:
                # A loop names its body before its condition, which runs first.
                for called in reversed(instruction.called):
                    if called in self.module.order and called in self.module.computations:
                        self._lay_out(self.module.computations[called])
            if instruction.opcode not in _NO_MOMENT and len(self.operations) == start:
                self.operations.append(instruction)
            self.instructions[number] = instruction
            self._at[number] = start, len(self.operations)
            for operand in dict.fromkeys(instruction.operands):
                self._users.setdefault(operand, []).append(instruction)
        self._root_ends[computation.root] = len(self.operations)

    def last_of(self, number: int) -> int:
        """Returns the moment behind the last one of an instruction that is laid out; of a loop, where it ends."""
        return self._at[number][1]

    def span(self, location: Location) -> tuple[int, int] | None:
        """Returns the moment at which what an instruction gives is made, and the one behind that at which it is read
        last; None for an instruction that has no place in the order, such as one within a fusion."""
        if location[0] not in self._at:
            return None
        start, end = self._at[location[0]]
        end = max(end, start + 1)
        for number, _ in self._looks(location):
            end = max(end, self._root_ends.get(number, 0))
            for user in self._users.get(number, ()):
                if user.opcode not in LOOKS:
                    end = max(end, self._at[user.id][1])
        return start, min(end, len(self.operations))

    def _looks(self, location: Location) -> Iterator[Location]:
        """Yields where the bytes at a location can be seen: there, and in the tuples and views that are made of it."""
        waiting, seen = [location], {location}
        while waiting:
            number, index = here = waiting.pop()
            yield here
            for user in self._users.get(number, ()):
                if user.opcode not in LOOKS:
                    continue
                if user.opcode == "tuple":
                    onward = [(user.id, (k, *index)) for k, operand in enumerate(user.operands) if operand == number]
                elif user.opcode == "get-tuple-element":
                    onward = [(user.id, index[1:])] if index[:1] == (user.tuple_index,) else []
                else:
                    onward = [(user.id, index)]
                new = [each for each in onward if each not in seen]
                seen.update(new)
                waiting += new
