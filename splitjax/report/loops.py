"""Counts how often a loop runs whose number of trips XLA does not write down, as a TPU's compiler does not.

A `while` instruction and the computations around and inside it go in; the number comes out. It is read off a counter
that the loop's condition compares with a constant, which is how JAX's `scan` and `fori_loop` are compiled. The loops
that XLA makes of a product whose operands or partial sums are handed round (windowed einsums) count in twos where it
unrolls them.
"""

from __future__ import annotations

from splitjax.report.wire import Computation, Instruction, Module

_HANDS_ON = frozenset({"copy", "bitcast", "convert", "reshape"})


def num_trips(module: Module, around: Computation, loop: Instruction) -> int | None:
    """Returns how often a `while` instruction runs.

    **Arguments:**

    - `module`: the module that holds the loop's condition and body.
    - `around`: the computation in which the loop stands; it gives the counter's first value.
    - `loop`: the `while` instruction.

    None where the condition is not of that form, such as that of a `while_loop` that runs until something converges.
    """
    if loop.trip_count is not None:
        return loop.trip_count
    for number in loop.called:
        condition = module.computations.get(number)
        root = condition.instructions.get(condition.root) if condition is not None else None
        if (
            condition is None
            or root is None
            or root.opcode != "compare"
            or root.direction != "LT"
            or len(root.operands) != 2
        ):
            continue
        counter, limit = (_behind(condition, operand) for operand in root.operands)
        if counter is None or limit is None or counter.opcode != "get-tuple-element" or limit.literal is None:
            return None
        start = _start(around, loop, counter.tuple_index)
        bodies = (module.computations[body] for body in loop.called if body in module.computations)
        step = next((step for body in bodies if (step := _step(body, counter.tuple_index)) is not None), None)
        return max(-(-(limit.literal - start) // step), 0) if step is not None and start is not None else None
    return None


def _step(body: Computation, index: int) -> int | None:
    """Returns the positive number that a loop's body adds to member `index` of the tuple that it carries; None where it
    does something else with it."""
    values = _behind(body, body.root)
    if values is None or values.opcode != "tuple" or index >= len(values.operands):
        return None
    new = _behind(body, values.operands[index])
    if new is None or new.opcode != "add":
        return None
    parts = [_behind(body, operand) for operand in new.operands]
    if not any(part is not None and part.tuple_index == index for part in parts):
        return None
    return next((part.literal for part in parts if part is not None and part.literal and part.literal > 0), None)


def _start(around: Computation, loop: Instruction, index: int) -> int | None:
    """Returns the number with which a loop's counter, member `index` of its tuple, begins; None where it is no
    constant."""
    values = _behind(around, loop.operands[0]) if loop.operands else None
    if values is None or values.opcode != "tuple" or index >= len(values.operands):
        return None
    first = _behind(around, values.operands[index])
    return None if first is None else first.literal


def _behind(computation: Computation, number: int) -> Instruction | None:
    """Returns the instruction that makes the value `number`, behind those that only hand it on."""
    instruction = computation.instructions.get(number)
    while instruction is not None and instruction.opcode in _HANDS_ON and instruction.operands:
        instruction = computation.instructions.get(instruction.operands[0])
    return instruction
